"""Write ``llms.txt`` (llmstxt.org) beside the pages: each page with its first paragraph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def write(app: Sphinx, failed: Exception | None) -> None:
    """Write the file after a build of HTML pages that went well."""
    if failed is not None or app.builder.format != "html":
        return
    lines = [f"# {app.config.project}", "", f"> {_opening(app, app.config.root_doc)}", ""]
    for name in sorted(app.env.found_docs - {app.config.root_doc}):
        title = app.env.titles[name].astext()
        lines.append(f"- [{title}]({app.builder.get_target_uri(name)}): {_opening(app, name)}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def _opening(app: Sphinx, name: str) -> str:
    found = next(iter(app.env.get_doctree(name).findall(nodes.paragraph)), None)
    return "" if found is None else " ".join(found.astext().split())


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
