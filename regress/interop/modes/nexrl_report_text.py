"""Text of the sections of NexRL's comparison script: each rank and microbatch, and statistics of their differences.

Source of the form: NexRL's guide to debug dumps, sections 5.3 and 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from regress.report.number_format import plural, short

SHOWN = 32
"""Most lines of a section; those that are not close come first where there are more."""
_ABSENT = {
    "first_none": "not in the self-hosted dump",
    "second_none": "not in the other dump",
    "both_none": "in neither dump",
    "shape_mismatch": "shapes cannot be matched",
}


def with_statistics(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with ``statistics``: for each tensor the number, maximum, minimum and mean of its differences.

    The difference of a tensor at one rank and microbatch is that of its worst token, ``max_diff``.
    """
    found: dict[str, list[float]] = {}
    for row in section.get("comparisons", ()):
        for one in row.get("comparisons", ()):
            off = _difference(one)
            if off is not None and math.isfinite(off):
                found.setdefault(one["name"], []).append(off)
    statistics = {
        name: {"count": len(offs), "max": max(offs), "min": min(offs), "mean": sum(offs) / len(offs)}
        for name, offs in found.items()
    }
    return {**section, "statistics": statistics} if "comparisons" in section else {**section}


def section_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of a report as text, line by line; nothing for a report without sections."""
    sections: Sequence[Mapping[str, Any]] = report.get("sections") or ()
    steps = {section["step"] for section in sections}
    for section in sections:
        step = f" (step {section['step']})" if len(steps) > 1 else ""
        yield f"--- {str(section['section']).upper()}{step} ---"
        if section["section"] == "trajectories":
            yield from _trajectories(section)
        elif section["section"] == "datums_analysis":
            yield from _datums(section)
        else:
            yield from _comparisons(section)


def _trajectories(section: Mapping[str, Any]) -> Iterator[str]:
    rows = section["trajectory_comparisons"]
    if not rows:
        yield f"  not compared: {str(section['status']).replace('_', ' ')}"
        return
    yield f"  self-hosted {section['sh_num_trajectories']}, remote API {section['ra_num_trajectories']}"
    for words, same in (
        ("tokens", [row["tokens_match"] for row in rows]),
        ("loss masks", [row["loss_mask_match"] for row in rows]),
        ("rewards", [row["sh_reward"] == row["ra_reward"] for row in rows]),
    ):
        yield f"  {_sign(all(same))} {words}: {sum(same)} of {len(same)} equal"


def _datums(section: Mapping[str, Any]) -> Iterator[str]:
    if section["status"] != "analyzed":
        yield "  no datums: give --remote_api_dir with remote_api_dump_options.datums turned on there"
        return
    yield f"  number of datums: {section['num_datums']}"
    yield f"  keys of a datum: {', '.join(map(str, section['first_datum_keys']))}"
    yield f"  keys of loss_fn_inputs: {', '.join(map(str, section['loss_fn_inputs_keys']))}"
    yield f"  input tokens of the first: {section['input_tokens_len']}"


def _comparisons(section: Mapping[str, Any]) -> Iterator[str]:
    rows = [row for row in section["comparisons"] if row.get("status") == "compared"]
    yield f"  total comparisons: {len(rows)}"
    lacking = [row for row in section["comparisons"] if row.get("status") != "compared"]
    for status in dict.fromkeys(str(row.get("status")) for row in lacking):
        count = sum(row.get("status") == status for row in lacking)
        yield f"  not compared: {status.replace('_', ' ')} ({plural(count, 'place')})"
    lines = [
        (_close(one), f"  {_place(row)} {one['name']}: {_row_text(one)}")
        for row in rows
        for one in row["comparisons"]
    ]
    first = lines if len(lines) <= SHOWN else sorted(lines, key=lambda line: line[0])
    yield from (text for _, text in first[:SHOWN])
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN} more, which the JSON report has"
    for name, statistics in section.get("statistics", {}).items():
        figures = ", ".join(f"{key} {short(statistics[key])}" for key in ("max", "min", "mean"))
        yield f"  differences of {name} over {plural(statistics['count'], 'place')}: {figures}"


def _place(row: Mapping[str, Any]) -> str:
    rank, micro = row.get("rank"), row.get("micro")
    if rank is None and micro is None:
        return str(row.get("of") or "all")
    return f"rank{rank or 0}_micro{micro or 0}"


def _row_text(one: Mapping[str, Any]) -> str:
    off = _difference(one)
    if one["status"] != "compared" or off is None:
        return _ABSENT.get(one["status"], "no common tokens")
    if "s1" in one:
        return f"{_sign(one['is_close'])} diff={off:.6e}, {short(one['s1'])} against {short(one['s2'])}"
    both = [f"{key} {_pair(one, key)}" for key in ("max", "min", "mean") if f"t1_{key}" in one]
    return f"{_sign(one['is_close'])} max diff={off:.6e}" + (f", {', '.join(both)}" if both else "")


def _pair(one: Mapping[str, Any], key: str) -> str:
    ours, theirs = short(one[f"t1_{key}"]), short(one[f"t2_{key}"])
    return ours if ours == theirs else f"{ours} against {theirs}"


def _close(one: Mapping[str, Any]) -> bool:
    return bool(one.get("is_close", one["status"] != "compared"))


def _difference(one: Mapping[str, Any]) -> float | None:
    off = one.get("diff", one.get("max_diff"))
    return None if off is None else float(off)


def _sign(good: bool) -> str:
    return "✓" if good else "✗"


def lines_of(report: Mapping[str, Any]) -> Iterable[str]:
    """Return the text of all sections, with an empty line before each."""
    for line in section_lines(report):
        if line.startswith("---"):
            yield ""
        yield line
