"""The conformance table as a page of the documentation, generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from regress.systems.conformance_row import ConformanceRow, Error, Result
from regress.systems.conformance_table import kind_of
from regress.systems.known_findings import DOCUMENT, finding_named
from regress.systems.protocol import SystemUnderTest


def page_of(rows: Sequence[ConformanceRow], systems: Iterable[SystemUnderTest], shared: int = 0) -> str:
    """Return the table in Markdown: the sum, the known findings, then each system with its cells, shims and claims.

    Args:
        rows: of any number of systems.
        systems: what is known of them, for their shims.
        shared: bytes of the packages that all environments share; 0 leaves that out.
    """
    known = {system.name: system for system in systems}
    lines = ["# Conformance", "", *_lead(rows), "", *_disk(rows, shared), *_findings(rows)]
    for name in dict.fromkeys(row.system for row in rows):
        own = [row for row in rows if row.system == name]
        lines += [*_system(own), ""]
        if name in known:
            lines += [*_shims(known[name]), ""]
        lines += [*_claims(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def _lead(rows: Sequence[ConformanceRow]) -> Iterator[str]:
    yield (
        "Released trainers, unmodified, on recorded batches, judged by the truth that our engine computes for their "
        "configuration in float64: forward quantities for each rank and microbatch, gradients and parameters for each "
        "rank and update. This page is written by `regress systems run --report` and `regress systems table`."
    )
    yield ""
    yield "| system | version | cells | exact | declared | red as known | wrong | not judged | finding gone |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    names = [*dict.fromkeys(row.system for row in rows)]
    for name in names:
        own = [row for row in rows if row.system == name]
        versions = ", ".join(dict.fromkeys(row.version for row in own if row.version))
        yield f"| {name} | {versions} | {' | '.join(map(str, _counts(own)))} |"
    if len(names) > 1:
        yield f"| all | | {' | '.join(map(str, _counts(rows)))} |"


def _counts(rows: Sequence[ConformanceRow]) -> list[int]:
    rest = [row for row in rows if not row.known and not row.fixed]
    kinds = [
        (Result.EXACT,),
        (Result.DECLARED,),
        (),
        (Result.WRONG, Result.UNDECLARED),
        (Result.ERROR,),
    ]
    found = [sum(row.result in kind for row in rest) for kind in kinds]
    found[2] = sum(row.known for row in rows)
    return [len(rows), *found, sum(row.fixed for row in rows)]


def _disk(rows: Sequence[ConformanceRow], shared: int) -> Iterator[str]:
    """Yield the sizes of the environments."""
    sizes = {row.system: row.disk for row in rows if row.disk}
    if not sizes:
        return
    each = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
    beside = f"; the packages that they share, torch among them, take {shared / 1e9:.1f} GB" if shared else ""
    whole = (sum(sizes.values()) + shared) / 1e9
    yield f"Disk of the environments: {each}{beside}: {whole:.1f} GB in all."
    yield ""


def _findings(rows: Sequence[ConformanceRow]) -> Iterator[str]:
    """Yield the known findings that cells show, or do not show any more."""
    names = dict.fromkeys(row.finding for row in rows if row.finding)
    if not names:
        return
    yield (
        "A red cell of a known finding is expected, and a run fails as soon as it is not red any more, as it fails by "
        "any other red cell:"
    )
    yield ""
    yield "| finding | system | what is wrong | cells |"
    yield "|---|---|---|---|"
    for name in names:
        finding = finding_named(name)
        own = [row for row in rows if row.finding == name]
        cells = ", ".join(f"`{row.cell.name}`{' (gone)' if row.fixed else ''}" for row in own)
        title = finding.title if finding else ""
        yield f"| {_linked(name)} | {own[0].system} | {_escaped(title)} | {_escaped(cells)} |"
    yield ""


def _linked(name: str) -> str:
    finding = finding_named(name)
    return f"[{name}]({DOCUMENT}#{finding.anchor})" if finding else name


def _system(rows: Sequence[ConformanceRow]) -> Iterator[str]:
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
            f"**{row.result}** {_linked(row.finding)}" if row.known else f"**{kind_of(row)}**",
        ]
        yield f"| {' | '.join(map(str, [*values, *numbers, what]))} |"


def _number(error: Error | None) -> str:
    if error is None or error.relative is None:
        return ""
    if not error.failed and error.relative >= 1:
        return "~0"  # the truth is zero but for rounding, and so is the value
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


def _claims(rows: Sequence[ConformanceRow]) -> Iterator[str]:
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
