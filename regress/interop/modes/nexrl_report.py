"""Report of NexRL's own comparison script, section by section under its keys, with additions.

Values are those of the same tokens on both sides, loss tokens only, whatever the layouts; each section has
the verdicts of this package beside the script's fixed thresholds. Source of the keys: NexRL v1.4.0
`nexrl/utils/compare_debug_dumps.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.aligned_tensor import TokenRows
from regress.compare.dumps.comparison_options import Options, Planned
from regress.compare.dumps.comparison_plan import plan_units, steps_of
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.loss_shares import ShareUnit
from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.rollout_comparison import RolloutUnit
from regress.compare.dumps.token_columns import aligned
from regress.compare.dumps.wire_view import original
from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import from_record
from regress.errors import RegressError
from regress.interop.modes.nexrl_report_text import with_statistics
from regress.layout import SampleKey
from regress.report.mode_comparison import Directories

ATOL, RTOL, SCALAR = 1e-5, 1e-4, 1e-5
"""Thresholds of the script."""

FORWARD = ("log_probs", "entropy", "response_mask")
LOSS = ("loss", "pg_loss", "entropy_loss")
DEBUG = ("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss", "effective_valid")
MASKS = ("response_mask", "effective_valid")


def sections(dirs: Directories, options: Options) -> dict[str, Any]:
    """Return the keys of the script's report."""
    steps = steps_in(dirs, options)
    found: list[dict[str, Any]] = []
    for step in steps:
        asked = Options((step, step), options.ranks, options.micros, options.bounds, options.only)
        remote = _planned(dirs.self_hosted, dirs.remote_api, asked)
        weaver = _planned(dirs.self_hosted, dirs.weaver, asked)
        found += [
            _trajectories(dirs, step, remote),
            _forward(dirs, step, weaver, options),
            _losses(dirs, step, weaver),
            _debug(dirs, step, weaver, options),
            _datums(dirs.remote_api, step),
        ]
    return {
        "step": steps[0] if steps else None,
        "self_hosted_dir": original(dirs.self_hosted),
        "remote_api_dir": dirs.remote_api,
        "weaver_dir": None if dirs.weaver is None else original(dirs.weaver),
        "num_ranks": options.ranks,
        "num_micros": options.micros,
        "sections": [with_statistics(section) for section in found],
    }


def steps_in(dirs: Directories, options: Options) -> list[int]:
    """Return the steps that all dumps have, of those that are asked for."""
    known = steps_of(open_side(dirs.self_hosted))
    for other in (dirs.remote_api, dirs.weaver):
        known &= steps_of(open_side(other)) if other is not None else known
    if options.steps is not None:
        known = {step for step in known if options.steps[0] <= step <= options.steps[1]}
    return sorted(known)


def _planned(golden: str, actual: str | None, options: Options) -> Planned | None:
    if actual is None:
        return None
    try:
        return plan_units(golden, actual, options)
    except RegressError:
        return None  # the comparison itself says why


def _trajectories(dirs: Directories, step: int, planned: Planned | None) -> dict[str, Any]:
    """Compare rollouts sample by sample: all of them, in any order."""
    head = {"section": "trajectories", "step": step}
    counts = [_rollouts(path, step) for path in (dirs.self_hosted, dirs.remote_api)]
    ours, theirs = counts
    numbers = {"sh_num_trajectories": len(ours or ()), "ra_num_trajectories": len(theirs or ())}
    if ours is None or theirs is None:
        status = "self_hosted_not_found" if ours is None else "remote_api_not_found"
        return {**head, "status": status, **numbers, "trajectory_comparisons": []}
    units = [unit for unit in (planned.units if planned else ()) if isinstance(unit, RolloutUnit)]
    golden_of: Mapping[SampleKey, SampleKey] = units[0].golden_of if units else {}
    actual_of = {to: key for key, to in golden_of.items() if key in theirs}
    rows = []
    for index, (key, golden) in enumerate(ours.items()):
        actual = theirs.get(actual_of[key]) if key in actual_of else None
        if actual is not None:
            rows.append(
                {
                    "index": index,
                    "sample": f"{key[0]}/{key[1]}",
                    "tokens_match": golden.tokens == actual.tokens,
                    "sh_tokens_len": len(golden.tokens),
                    "ra_tokens_len": len(actual.tokens),
                    "loss_mask_match": golden.loss_mask == actual.loss_mask,
                    "sh_reward": golden.reward,
                    "ra_reward": actual.reward,
                }
            )
    status = "compared" if len(ours) == len(theirs) else "count_mismatch"
    return {**head, "status": status, **numbers, "trajectory_comparisons": rows}


def _rollouts(path: str | None, step: int) -> dict[SampleKey, Any] | None:
    if path is None:
        return None
    side = open_side(path)
    names = [
        name for name, (type, where) in side.entries.items() if (type, where.step) == ("trajectory", step)
    ]
    return {t.key: t for t in from_record(side.read(names[0]))} if names else None


def _forward(dirs: Directories, step: int, planned: Planned | None, options: Options) -> dict[str, Any]:
    rows = _records(dirs, step, planned, options, "forward_data", FORWARD, "weaver_not_found")
    return {"section": "forward_data_all", "step": step, "comparisons": rows}


def _debug(dirs: Directories, step: int, planned: Planned | None, options: Options) -> dict[str, Any]:
    rows = _records(dirs, step, planned, options, "is_loss_debug", DEBUG, "weaver_debug_not_found")
    for row in rows:
        if row["status"] == "compared" and _same_samples(dirs, step, row):
            ours = _scalar_of(dirs.self_hosted, step, row, "loss")
            row["comparisons"].append(
                scalar("loss", ours, _scalar_of(dirs.weaver, step, row, "is_loss_debug"))
            )
    return {"section": "is_loss_debug_all", "step": step, "comparisons": rows}


def _same_samples(dirs: Directories, step: int, row: Mapping[str, Any]) -> bool:
    """Return True if a place holds equally many samples on both sides, so that its losses may be of the same."""
    counts = []
    for path in (dirs.self_hosted, dirs.weaver):
        side = None if path is None else open_side(path)
        for name, (type, where) in side.entries.items() if side is not None else ():
            at = (type, where.step, where.rank or 0, where.micro or 0)
            if side is not None and at == ("is_loss_debug", step, row["rank"], row["micro"]):
                counts.append(len(side.read(name).meta.get("samples") or ()))  # type: ignore[arg-type]
    return len(set(counts)) < 2


def _records(
    dirs: Directories,
    step: int,
    planned: Planned | None,
    options: Options,
    record_type: str,
    names: Sequence[str],
    absent: str,
) -> list[dict[str, Any]]:
    """Return one entry for each rank and microbatch of the other side."""
    rows = []
    units = [
        u
        for u in (planned.units if planned else ())
        if isinstance(u, Unit) and u.record_type == record_type and not u.elementwise
    ]
    by_place = {(unit.place.rank or 0, unit.place.micro or 0): unit for unit in units}
    for place in sorted({*by_place, *_places(dirs, step, record_type, options)}):
        row: dict[str, Any] = {"section": record_type, "rank": place[0], "micro": place[1], "step": step}
        unit = by_place.get(place)
        if unit is None:
            lacking = absent if not _has(dirs.weaver, step, record_type, place) else "self_hosted_not_found"
            rows.append({**row, "status": lacking, "comparisons": []})
            continue
        found = aligned(unit)
        rows.append(
            {**row, "status": "compared", "comparisons": [tensor(name, found.get(name)) for name in names]}
        )
    return rows


def _places(dirs: Directories, step: int, record_type: str, options: Options) -> Iterator[tuple[int, int]]:
    """Yield the places that were asked for, or that any dump has."""
    if options.ranks is not None and options.micros is not None:
        yield from ((rank, micro) for rank in range(options.ranks) for micro in range(options.micros))
        return
    for path in (dirs.self_hosted, dirs.weaver):
        for type, where in open_side(path).entries.values() if path is not None else ():
            if (type, where.step) == (record_type, step):
                yield where.rank or 0, where.micro or 0


def _has(path: str | None, step: int, record_type: str, place: tuple[int, int]) -> bool:
    entries: Iterable[Any] = open_side(path).entries.values() if path is not None else ()
    return any(
        (type, where.step, where.rank or 0, where.micro or 0) == (record_type, step, *place)
        for type, where in entries
    )


def _losses(dirs: Directories, step: int, planned: Planned | None) -> dict[str, Any]:
    rows = []
    for unit in planned.units if planned else ():
        if not isinstance(unit, ShareUnit) or unit.record_type != "loss":
            continue
        ours, theirs = open_side(unit.golden), open_side(unit.actual)
        for group in unit.groups:
            values = [_summed(side, names) for side, names in ((ours, group.golden), (theirs, group.actual))]
            rows.append(
                {
                    "section": "loss_data",
                    "status": "compared",
                    "step": step,
                    "rank": group.place.rank,
                    "micro": group.place.micro,
                    "of": group.words,
                    "comparisons": [scalar(name, *(found.get(name) for found in values)) for name in LOSS],
                }
            )
    if not rows:
        status = "self_hosted_not_found" if not _any(dirs.self_hosted, step, "loss") else "weaver_not_found"
        rows = [{"section": "loss_data", "status": status, "step": step, "comparisons": []}]
    return {"section": "loss_data_all", "step": step, "comparisons": rows}


def _any(path: str, step: int, record_type: str) -> bool:
    return any((type, where.step) == (record_type, step) for type, where in open_side(path).entries.values())


def _summed(side: Side, names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in names:
        for key, value in side.read(name).tensors.items():
            if key in LOSS:
                found[key] = found.get(key, 0.0) + float(value)
    return found


def _scalar_of(path: str | None, step: int, row: Mapping[str, Any], record_type: str) -> float | None:
    side = None if path is None else open_side(path)
    for name, (type, where) in side.entries.items() if side is not None else ():
        if (type, where.step, where.rank or 0, where.micro or 0) == (
            record_type,
            step,
            row["rank"],
            row["micro"],
        ):
            assert side is not None
            value = side.read(name).tensors.get("loss")
            return None if value is None else float(value)
    return None


def _datums(path: str | None, step: int) -> dict[str, Any]:
    head = {"section": "datums_analysis", "step": step}
    payload = None if path is None else open_side(path).raw("datums", step)
    items = [] if payload is None else payload.get("datums") or []
    if not items:
        return {**head, "status": "not_found", "num_datums": 0}
    first = items[0]
    return {
        **head,
        "status": "analyzed",
        "num_datums": len(items),
        "first_datum_keys": sorted(first),
        "loss_fn_inputs_keys": sorted(first.get("loss_fn_inputs") or {}),
        "input_tokens_len": len(first.get("input_tokens") or ()),
    }


def tensor(name: str, found: TokenRows | str | None) -> dict[str, Any]:
    """Return the script's ``T``: two tensors at their common tokens; t1 is the self-hosted one."""
    if found is None:
        return {"name": name, "status": "first_none"}
    if isinstance(found, str):
        return {"name": name, "status": "shape_mismatch", "detail": found}
    golden, actual = found.values()
    row: dict[str, Any] = {"name": name, "status": "compared"}
    row |= {
        "t1_shape": list(found.golden[0].shape),
        "t2_shape": list(found.part.shape),
        "tokens": int(golden.size),
    }
    x, y = golden.astype(np.float64), actual.astype(np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    same = both | (np.isnan(x) & np.isnan(y)) | (x == y)
    if name in MASKS:
        close = bool(np.array_equal(x, y))
    else:
        close = bool(same.all()) and bool(np.allclose(x[both], y[both], atol=ATOL, rtol=RTOL))
    return row | {**_statistics(x[both], y[both]), "is_close": close and bool(golden.size)}


def _statistics(x: NDArray[np.float64], y: NDArray[np.float64]) -> dict[str, Any]:
    if not x.size:
        return {"max_diff": None, "mean_diff": None}
    off = np.abs(x - y)
    found: dict[str, Any] = {"max_diff": float(off.max()), "mean_diff": float(off.mean())}
    for key, values in (("t1", x), ("t2", y)):
        found |= {
            f"{key}_mean": float(values.mean()),
            f"{key}_std": float(values.std(ddof=1)) if values.size > 1 else 0.0,
            f"{key}_min": float(values.min()),
            f"{key}_max": float(values.max()),
        }
    if x.size > 1 and x.std() and y.std():
        found["correlation"] = float(np.corrcoef(x, y)[0, 1])
    return found


def scalar(name: str, first: float | None, second: float | None) -> dict[str, Any]:
    """Return the script's ``S``: two numbers."""
    if first is None or second is None:
        status = "both_none" if first is second else "first_none" if first is None else "second_none"
        return {"name": name, "status": status}
    diff = abs(first - second)
    known: Array = np.array([first, second])
    same = bool(diff < SCALAR) or bool(np.isnan(known).all())
    return {"name": name, "status": "compared", "s1": first, "s2": second, "diff": diff, "is_close": same}
