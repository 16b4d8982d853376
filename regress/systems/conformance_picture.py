"""The conformance table as a picture: how far each cell's loss, gradient and parameters lie from the float64 truth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from regress.systems.conformance_row import ConformanceRow, Error, Result

PANELS = {"loss": "loss", "gradient": "gradient", "param": "parameters after the step"}
"""Quantity -> title of its panel."""
LOWEST, HIGHEST = -9.0, 1.0
"""Decades of the axis; errors beyond are drawn at its ends."""
NAME, PANEL, GAP, ROW, TOP = 150, 230, 20, 36, 58
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 10px; fill: #59636e }
.line { stroke: #d1d9e0; stroke-width: 1 }
path { fill: none; stroke-linecap: round }
.right { stroke: #1a7f37; stroke-width: 4; stroke-opacity: .5 }
.coarse { stroke: #0969da; stroke-width: 4; stroke-opacity: .5 }
.wrong { stroke: #cf222e; stroke-width: 7 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .line { stroke: #3d444d }
.right { stroke: #3fb950; stroke-opacity: .8 } .coarse { stroke: #4493f8; stroke-opacity: .8 }
.wrong { stroke: #f85149 }
}
"""


def picture_of(rows: Sequence[ConformanceRow]) -> str:
    """Return an SVG: a line for each system, a panel for each quantity, a dot for each cell on a logarithmic axis."""
    systems = list(dict.fromkeys(row.system for row in rows))
    width, height = NAME + len(PANELS) * (PANEL + GAP), TOP + len(systems) * ROW + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(_title(rows))}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="0" y="16">{escape(_title(rows))}</text>',
    ]
    for number, system in enumerate(systems):
        own, y = [row for row in rows if row.system == system], TOP + number * ROW
        lines += [
            f'<text x="0" y="{y + 16}">{escape(f"{system} {own[0].version}")}</text>',
            f'<text class="small" x="0" y="{y + 29}">{escape(_counts(own))}</text>',
        ]
    for place, (quantity, title) in enumerate(PANELS.items()):
        left = NAME + place * (PANEL + GAP)
        lines.append(f'<text x="{left}" y="40">{title}</text>')
        lines += _axis(left, height)
        for number, system in enumerate(systems):
            own = [row for row in rows if row.system == system]
            lines += _dots(own, quantity, left, TOP + number * ROW)
    lines += [_legend(height), "</svg>"]
    return "\n".join(lines) + "\n"


def _title(rows: Sequence[ConformanceRow]) -> str:
    systems = len({row.system for row in rows})
    trainers = f"{systems} released trainer{'s' * (systems != 1)}"
    return f"{len(rows)} recorded steps of {trainers}: relative error against the float64 truth"


def _counts(rows: Sequence[ConformanceRow]) -> str:
    kinds = [_kind(row) for row in rows]
    wrong, refused = kinds.count("wrong"), kinds.count("")
    right = f"{len(kinds) - wrong - refused} right"
    return ", ".join(
        [right, *([f"{wrong} wrong"] if wrong else []), *([f"{refused} refused"] if refused else [])]
    )


def _kind(row: ConformanceRow) -> str:
    """Return the class of a cell's dots; empty for one that could not be judged."""
    if row.known or row.result in (Result.WRONG, Result.UNDECLARED):
        return "wrong"
    if row.result is Result.ERROR:
        return ""
    return "right" if row.result is Result.EXACT and row.cell.precision == "float32" else "coarse"


def _axis(left: float, height: float) -> Iterator[str]:
    for decade in range(int(LOWEST) + 1, int(HIGHEST) + 1, 2):
        x = left + _along(10.0**decade)
        yield f'<line class="line" x1="{x:.0f}" x2="{x:.0f}" y1="{TOP - 8}" y2="{height - 34}"/>'
        label = "1" if decade == 0 else f"1e{decade}"
        yield f'<text class="small" x="{x - 9:.0f}" y="{height - 22}">{label}</text>'


def _along(error: float) -> float:
    """Return the place of an error on the axis of a panel."""
    decade = LOWEST if error <= 0 else min(max(math.log10(error), LOWEST), HIGHEST)
    return PANEL * (decade - LOWEST) / (HIGHEST - LOWEST)


def _dots(rows: Sequence[ConformanceRow], quantity: str, left: float, top: float) -> Iterator[str]:
    for kind in ("coarse", "right", "wrong"):
        places = []
        for number, row in enumerate(rows):
            error = row.errors.get(quantity)
            if _kind(row) == kind and error is not None and _shown(error):
                y = top + 4 + number * 7 % (ROW - 8)  # beside one another where the errors are alike
                places.append(f"M{left + _along(error.relative or 0.0):.1f} {y}h0")
        if places:
            yield f'<path class="{kind}" d="{"".join(places)}"/>'


def _shown(error: Error) -> bool:
    """Return True for an error that was measured, of a truth that is not zero but for rounding."""
    return error.relative is not None and bool(error.failed or error.relative < 1)


def _legend(height: float) -> str:
    y, parts, x = height - 6, [], NAME
    for kind, words in (("right", "right"), ("coarse", "in bfloat16, or as declared"), ("wrong", "wrong")):
        parts.append(
            f'<path class="{kind}" d="M{x} {y - 4}h0"/><text class="small" x="{x + 8}" y="{y}">{words}</text>'
        )
        x += 190
    return "".join(parts)
