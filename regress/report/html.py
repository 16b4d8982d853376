"""HTML pages of one file: templates that escape everything, with styles, plotly and a program of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from regress.printed import printable_tree


def rendered(template: str, scripts: Sequence[str], data: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: name in ``templates/``; ``scripts`` those of its program in ``templates/js/``.
        data: JSON that is safe in a script element, see `script_json`.
        values: what the template shows; texts are escaped.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("regress.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = files("regress.report") / "templates"
    own = "\n".join((parts / "js" / name).read_text("utf-8") for name in scripts)
    return environment.get_template(template).render(
        **{name: printable_tree(value) for name, value in values.items()},
        style=Markup((parts / "report.css").read_text("utf-8")),
        plotly=Markup(get_plotlyjs()),
        program=Markup(own),
        data=Markup(data),
    )


def script_json(tree: Any) -> str:
    """Return JSON that is safe in a script element."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
