"""Comparisons requested by name: two sources, and how strictly to compare them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regress.compare import single_dump_checks
from regress.compare.baseline_noise import judged_beside_noise
from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.golden_source import located
from regress.compare.dumps.rank_averaged_loss import averaged
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.verdicts.tolerance import BITWISE, Tolerance
from regress.compare.verdicts.tolerance_overrides import read_overrides
from regress.errors import ConfigError
from regress.golden.golden_directory import open_store, project_root

if TYPE_CHECKING:
    from regress.compare.verdicts.verdict import Verdict

PRECISIONS = ("float64", "float32", "bfloat16", "float16")
"""Dtypes that a trainer can be declared to compute in."""


def compare_sources(
    golden: str | Path,
    actual: str | Path,
    *,
    steps: tuple[int, int] | None = None,
    only: str | Sequence[str] = "",
    common: bool = False,
    ranks_average: bool = False,
    precision: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    bitwise: bool = False,
    tolerances: str | None = None,
    noise: str | Path | None = None,
    golden_dir: Path | None = None,
) -> Comparison:
    """Compare two sources; the second is judged by the first.

    A source is a dump directory, ``golden:CASE``, a file of tensors or a checkpoint folder.
    Tolerances are those measured for the golden case, else general bounds for the dtypes.

    Args:
        golden, actual: the sources; folders may be URLs.
        steps: the first and the last step; by default all that both have.
        only: a pattern of ``quantity/tensor``, such as ``gradient/*q_proj*``, or several of them.
        common: what only one side has is reported in the notes, and is not a difference.
        ranks_average: the actual losses and token gradients add up to the number of ranks times those of the
            mini-batch, since each rank reports its own mean: divide them by it.
        precision: dtype that the actual side is declared to compute in, whatever was recorded of it.
        rtol: bound as a fraction of the largest absolute golden value of each tensor.
        atol: absolute bound, added to that.
        bitwise: compare bytes.
        tolerances: golden case whose measured tolerances are used.
        noise: a second recording of the golden side; a difference that is no larger than that of these two, where they
            differ by more than the tolerance, is a problem: it cannot be judged.
        golden_dir: in place of the project's ``golden/``.

    Raises:
        DumpError: if a source is missing, incomplete or damaged.
        CompareError: if nothing can be compared.
        ConfigError: for options that exclude each other, or are not valid.
    """
    folder = None if golden_dir is None else Path(golden_dir)
    bounds = bounds_of(rtol, atol, bitwise, tolerances, folder, precision=precision)
    patterns: list[object] = [*only] if isinstance(only, list | tuple) else [only]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"only={pattern!r} is not a pattern: give a text such as 'gradient/*q_proj*'")
    options = Options(
        _known_steps(steps), bounds=bounds, only=Selection.of(*map(str, patterns)), common=common
    )
    theirs = located(str(actual), folder)
    if ranks_average:
        theirs = averaged(theirs)
    ours = located(str(golden), folder)
    found = compare_dumps(ours, theirs, options)
    if noise is None:
        return found
    return judged_beside_noise(found, compare_dumps(ours, located(str(noise), folder), options))


def _known_steps(steps: object) -> tuple[int, int] | None:
    match steps:
        case None:
            return None
        case (int(first), int(last)) if first <= last:
            return first, last
    raise ConfigError(
        f"steps={steps!r} is not a range: give the first and the last step, such as (3, 3) or (3, 5)"
    )


def check_dump(path: str | Path) -> list[Verdict]:
    """Check the invariants of every update of a dump, without any golden values.

    Raises:
        DumpError: if it is missing, incomplete or damaged.
        CompareError: if it has no records from which anything could be checked.
    """
    return single_dump_checks.check_dump(str(path)).verdicts


def bounds_of(
    rtol: float | None,
    atol: float | None,
    bitwise: bool,
    case: str | None,
    golden_dir: Path | None,
    *,
    precision: str | None = None,
) -> Bounds:
    """Return the bounds of a comparison: numbers, bytes, those of a golden case, or general ones.

    Raises:
        ConfigError: if more than one of these is asked for, or a number is not a bound.
        GoldenError: if there is no such case.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigError(f"{name}={value} is not a bound: give a finite number that is not negative")
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}: give one of them")
    if precision is not None and (rtol is not None or atol is not None or bitwise):
        raise ConfigError(
            "--precision chooses the bounds, as --rtol, --atol and --bitwise do: give one of them"
        )
    by_number = rtol is not None or atol is not None
    if sum([by_number, bitwise, case is not None]) > 1:
        raise ConfigError(
            "give one of --rtol and --atol, --bitwise, or --tolerances, since each replaces the others"
        )
    if bitwise:
        return Bounds(BITWISE)
    if by_number:
        reason = f"asked for: --rtol {rtol or 0.0:g} --atol {atol or 0.0:g}"
        return Bounds(Tolerance(rtol or 0.0, atol or 0.0, reason=reason))
    overrides = read_overrides(project_root())
    if case is None:
        return Bounds(overrides=overrides, precision=precision)
    return replace(Bounds.of_case(open_store(golden_dir).case(case), overrides), precision=precision)
