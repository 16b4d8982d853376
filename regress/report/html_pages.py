"""Pages of one file that needs no other one and no network: one model, one template that escapes everything."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

from regress.printable_text import printable
from regress.report.text_table import Table


class Card(NamedTuple):
    """A figure of the overview; ``bad`` if it is one to look at."""

    label: str
    value: str
    remark: str = ""
    bad: bool = False


class Line(NamedTuple):
    """A sentence: the name that it is about, and the anchor that it leads to, if there are any."""

    text: str
    name: str = ""
    anchor: str = ""


class Chart(NamedTuple):
    """A chart that the page's program draws into the element ``id``."""

    id: str
    title: str
    hint: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Panel:
    """A part of a page; those that have an anchor are named in its navigation.

    Attributes:
        texts: preformatted texts with their titles.
        charts: charts; they have panels of their own.
        controls: name of a template in ``templates/`` for what the page's program works with.
    """

    title: str
    anchor: str = ""
    hint: str = ""
    texts: Sequence[tuple[str, str]] = ()
    lines: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    controls: str = ""


@dataclass(frozen=True)
class Page:
    """Content of a page.

    Attributes:
        summary: result in one line; ``state`` is ``ok``, ``bad`` or ``unknown``, and ``sign`` stands for it.
        program: parts of its program in ``templates/js/``, in the order of their dependencies.
        data: JSON that is safe in a script element, see `script_json` and `packed_json`.
    """

    title: str
    summary: str = ""
    state: str = ""
    sign: str = ""
    cards: Sequence[Card] = ()
    panels: Sequence[Panel] = ()
    program: Sequence[str] = ()
    data: str = "{}"

    def html(self) -> str:
        """Return the page."""
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup

        environment = Environment(
            loader=PackageLoader("regress.report"),
            autoescape=True,
            finalize=lambda value: printable(value) if type(value) is str else value,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        parts = files("regress.report") / "templates"
        program = "\n".join((parts / "js" / name).read_text("utf-8") for name in self.program)
        style = (parts / "page.css").read_text("utf-8")
        return environment.get_template("page.html.j2").render(
            page=self, style=Markup(style), program=Markup(program), data=Markup(self.data)
        )


def script_json(tree: Any) -> str:
    """Return JSON that is safe in a script element."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def packed_json(text: str) -> str:
    """Return a text as JSON of a fifth of its size, which ``unpacked`` of ``plot.js`` reads."""
    return script_json(base64.b64encode(zlib.compress(text.encode())).decode())
