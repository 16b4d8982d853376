"""The conformance table as a page of the documentation, generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from regress.systems.protocol import SystemUnderTest
from regress.systems.row import Error, Result, Row


def page_of(rows: Sequence[Row], systems: Iterable[SystemUnderTest]) -> str:
    """Return the table in Markdown: the sum, then each system with its cells, shims and claims."""
    known = {system.name: system for system in systems}
    lines = ["# Conformance", "", *_lead(rows), ""]
    for name in dict.fromkeys(row.system for row in rows):
        own = [row for row in rows if row.system == name]
        lines += [*_system(own), ""]
        if name in known:
            lines += [*_shims(known[name]), ""]
        lines += [*_claims(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def _lead(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "Released trainers, unmodified, on recorded batches, judged by the truth that our engine computes for their "
        "configuration in float64: forward quantities for each rank and microbatch, gradients and parameters for each "
        "rank and update. This page is written by `regress systems run --report` and `regress systems table`."
    )
    yield ""
    yield "| system | version | cells | exact | declared | wrong | not judged |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name in dict.fromkeys(row.system for row in rows):
        own = [row for row in rows if row.system == name]
        versions = ", ".join(dict.fromkeys(row.version for row in own if row.version))
        wrong = sum(row.result in (Result.WRONG, Result.UNDECLARED) for row in own)
        counts = [sum(row.result is kind for row in own) for kind in (Result.EXACT, Result.DECLARED)]
        failed = sum(row.result is Result.ERROR for row in own)
        yield f"| {name} | {versions} | {len(own)} | {counts[0]} | {counts[1]} | {wrong} | {failed} |"


def _system(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0]
    beside = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    yield f"## {first.system} {first.version}"
    yield ""
    if beside:
        yield f"Ran with {beside}."
        yield ""
    yield "| layout | ranks | objective | case | updates | result | log-probs | loss | gradient | param | what |"
    yield "|---|--:|---|---|--:|---|--:|--:|--:|--:|---|"
    for row in rows:
        cell = row.cell
        case = cell.case if cell.precision == "float32" else f"{cell.case}, {cell.precision}"
        numbers = [_number(row.errors.get(name)) for name in ("log_probs", "loss", "gradient", "param")]
        what = _escaped(f"{row.told} {f'(probably: {row.cause})' if row.cause else ''}".strip())
        values = [
            cell.layout.name,
            cell.layout.ranks,
            cell.objective,
            case,
            cell.updates,
            f"**{row.result}**",
        ]
        yield f"| {' | '.join(map(str, [*values, *numbers, what]))} |"


def _number(error: Error | None) -> str:
    if error is None or error.relative is None:
        return ""
    return f"{error.relative:.1e}" if error.relative else "0"


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _shims(system: SystemUnderTest) -> Iterator[str]:
    if not system.shims:
        yield "No shims: the packages run as they are."
        return
    yield "| shim | lines | reason | numbers under judgement pass through it | layouts |"
    yield "|---|--:|---|---|---|"
    for shim in system.shims:
        passes = "yes" if shim.touches_numerics else "no"
        layouts = ", ".join(f"`{one}`" for one in shim.layouts)
        yield f"| {_escaped(shim.title)} | {shim.lines} | {_escaped(shim.reason)} | {passes} | {layouts} |"


def _claims(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what configurations claim beside what the recorded step did, once for each pair of them."""
    seen: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        claimed = ", ".join(f"{key}={value}" for key, value in row.claimed.items())
        found = "; ".join(f"{subject}: {text}" for subject, text in row.explained.items())
        if found:
            seen.setdefault((claimed, found), []).append(row.cell.name)
    if not seen:
        return
    yield "What the configurations claim, and what `regress explain` reads from the recorded step:"
    yield ""
    yield "| cells | claimed | explained |"
    yield "|---|---|---|"
    for (claimed, found), names in seen.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"| {_escaped(', '.join(names[:3]))}{more} | {_escaped(claimed)} | {_escaped(found)} |"
