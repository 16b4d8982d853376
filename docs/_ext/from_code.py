"""Reference pages made from the code: configuration keys, quantities, record types, rules of judge and diagnosis.

They are written before the pages are read, into ``reference/generated``, so that they cannot say anything else than
the release that they are built from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import regress
from regress.compare.diagnosis.rules.rule_table import RULES
from regress.compare.quantities import QUANTITIES
from regress.dump.record_types import RECORD_TYPES
from regress.engine.config.config_option import Option
from regress.engine.config.config_schema import options
from regress.engine.metric_table import METRICS


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages when a build starts."""
    app.connect("builder-inited", write_pages)
    for part in ("description", "usage", "options", "arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", escape_asterisks)
    return {"parallel_read_safe": True}


def escape_asterisks(app: Sphinx, ctx: Any, lines: list[str]) -> None:
    """Keep the patterns of help texts (``gradient/*q_proj*``) from being read as emphasis."""
    lines[:] = [line.replace("*", r"\*") for line in lines]


def write_pages(app: Sphinx) -> None:
    """Write every generated page, and leave those alone that would not change."""
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(exist_ok=True)
    pages = {
        "api.md": api(),
        "configuration.md": configuration(),
        "metrics.md": metrics(),
        "documents.md": documents(Path(app.srcdir) / "documents.toml"),
        "judge.md": judge(Path(app.srcdir) / "judge.toml"),
        "quantities.md": quantities(),
        "record-types.md": record_types(),
        "rules.md": rules(),
    }
    for name, lines in pages.items():
        text = "\n".join(lines) + "\n"
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def api() -> Iterator[str]:
    """Return one autodoc directive for each public name."""
    yield "# Python API"
    yield ""
    yield "`import regress` gives these names. They load on first use: importing it starts neither torch nor numpy."
    for name in regress.__all__:
        if name == "__version__":
            continue
        found = getattr(regress, name)
        kind = "exception" if _is_error(found) else "class" if isinstance(found, type) else "function"
        home = f"{found.__module__}.{name}"
        yield from ("", f"## {name}", "", "```{eval-rst}", f".. auto{kind}:: {home}")
        if kind == "class":
            yield "   :members:"
        yield "```"


STATES = {
    "works": "works",
    "replaced": "replaced",
    "open": "open",
}
"""States of a documented capability, and their words."""


def documents(path: Path) -> Iterator[str]:
    """Return a table of counts, and one of capabilities for each document."""
    known = [one for one in tomllib.loads(path.read_text())["document"] if one["rows"]]
    yield f"| document | {' | '.join(STATES.values())} | capabilities |"
    yield f"|---|{'---|' * (len(STATES) + 1)}"
    for one in known:
        states = [state for _, _, state, _ in one["rows"]]
        counts = " | ".join(str(states.count(state)) for state in STATES)
        yield f"| {one['title']} | {counts} | {len(states)} |"
    for one in known:
        yield from (
            "",
            f"# {one['title']}",
            "",
            "| section | capability | state | shown by |",
            "|---|---|---|---|",
        )
        for section, capability, state, shown in one["rows"]:
            cells = (_cell(text) for text in (section, capability, STATES[state], shown))
            yield f"| {' | '.join(cells)} |"


def judge(path: Path) -> Iterator[str]:
    """Return the rules of the judge part by part, each with the tests that hold it."""
    yield "# Rules of the judge"
    yield ""
    yield "What a comparison of two dumps, or of a replay with its golden case, may and may not say."
    number = 0
    for part in tomllib.loads(path.read_text())["part"]:
        yield from ("", f"## {part['title']}", "", "| | rule | held by |", "|---|---|---|")
        for rule, tests in part["rules"]:
            number += 1
            held = ", ".join(f"`{test.replace('::', '::test_')}`" for test in tests)
            yield f"| {number} | {_cell(rule)} | {held} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


def _is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Exception)


def configuration() -> Iterator[str]:
    """Return a table of keys for each section."""
    yield "# Configuration keys"
    yield ""
    yield "`regress train --print-config` shows each with its value in a run and what decided it."
    sections: dict[str, list[Option]] = {}
    for option in options().values():
        sections.setdefault(".".join(option.path[:-1]), []).append(option)
    for name, found in sections.items():
        yield from ("", f"## {name or 'Top level'}", "")
        yield from _table(("key", "default", "what it does", "values"), map(_key, found))


def _key(option: Option) -> Sequence[str]:
    default = option.default
    text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    bounds = option.bounds
    limits = [f"{words} `{limit:.15g}`" for words, limit in bounds.limits.items()]
    limits += [f"length `{bounds.length}`"] * (bounds.length is not None)
    choices = [f"`{choice}`" for choice in bounds.choices] + [bounds.others] * bool(bounds.others)
    return f"`{option.key}`", f"`{text}`" if text else "", option.help, ", ".join(choices or limits)


def quantities() -> Iterator[str]:
    """Return the table of quantities, in the order of computation."""
    yield "# Quantities"
    yield ""
    yield "Test ids, tolerances and verdicts name these, in the order in which a training step computes them."
    yield ""
    rows = ((f"`{one.name}`", one.level, one.kind, one.help) for one in QUANTITIES)
    yield from _table(("quantity", "belongs to", "kind", "meaning"), rows)


def metrics() -> Iterator[str]:
    """Return the table of metrics, in the order of the program."""
    yield "# Metrics"
    yield ""
    yield "Every name that a run logs; `*` stands for a part that the definition explains. Each row of"
    yield "`metrics.jsonl` has the rollout step it was logged at, and the optimizer update if its values are of one."
    yield ""
    rows = ((f"`{one.name}`", one.unit, one.moment, one.needs or "all", one.definition) for one in METRICS)
    yield from _table(("metric", "unit", "logged at", "in runs with", "definition"), rows)


def record_types() -> Iterator[str]:
    """Return the table of record types."""
    yield "# Record types"
    yield ""
    yield "`debug.dump_options.<type>=true` records one; each has a folder of its name in the dump."
    yield ""
    rows = ((f"`{one.name}`", "update" if one.per_update else "step", one.help) for one in RECORD_TYPES)
    yield from _table(("type", "belongs to", "content"), rows)


def rules() -> Iterator[str]:
    """Return the table of diagnosis rules, in the order in which they are tried."""
    yield "# Diagnosis rules"
    yield ""
    yield "The most specific rule that matches a first divergence is told first. Without a match nothing is said."
    yield ""
    rows = ((f"`{one.id}`", ", ".join(f"`{at}`" for at in one.at), one.cause) for one in RULES)
    yield from _table(("rule", "first divergence in", "probable cause"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(' '.join(str(cell).replace('|', chr(92) + '|').split()) for cell in row)} |"
