"""The judge's result for one tensor: a status, the worst element, and its error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from regress.compare.verdicts.affected_elements import Affected
from regress.dump.coordinates import Place
from regress.json_schema import conform


class Status(StrEnum):
    """Kinds of verdict, the graver before the milder where several apply."""

    MISSING = "missing"
    EXTRA = "extra"
    COVERAGE = "coverage"
    DTYPE = "dtype"
    SHAPE = "shape"
    MASK = "mask"
    NONFINITE = "nonfinite"
    DRIFT = "drift"
    OK = "ok"


@dataclass(frozen=True)
class Worst:
    """The element with the largest error.

    Attributes:
        index: in the local tensor.
        where: its canonical coordinates in words: ``sample 000001-0002/3, position 17, token 'a'``, or
            ``element [3, 5] of model.norm.weight``.
        golden, actual: the two values (``nan`` and ``inf`` included).
        error: ``|actual - golden|``.
        ulp: units in the last place of the actual dtype between them; ``None`` for other than floats.
    """

    index: tuple[int, ...]
    where: str
    golden: float
    actual: float
    error: float
    ulp: float | None = None


@dataclass(frozen=True)
class WorstRow:
    """The row (of the last dimension: a token's hidden values, a line of a matrix) whose error has the largest norm.

    Attributes:
        index: index of the row in the local tensor.
        where: canonical coordinates of its first element, in words.
        error_l2: Euclidean norm of its errors; ``relative_l2`` the same over that of its golden values.
    """

    index: tuple[int, ...]
    where: str
    error_l2: float
    relative_l2: float


_NESTED = ("place", "worst", "worst_row", "affected")


@dataclass(frozen=True)
class Verdict:
    """The judgement of one tensor at one place.

    Attributes:
        quantity: name as in test ids, such as ``log_probs``.
        name: the tensor, such as ``log_probs`` or ``model.norm.weight``.
        multiple: tolerance ratio, the error over the tolerance (1 is the limit; ``inf`` where nothing is tolerated);
            the headroom is ``1 / multiple``. 0 for equal values.
        max_error: largest ``|actual - golden|``; ``relative`` the same over ``scale``; ``relative_l2`` that of norms.
        mean_error: mean of ``actual - golden`` with its sign; ``rmse`` the root of its mean square.
        max_relative: largest ``|actual - golden| / |golden|`` of an element; infinite where only the latter is 0.
        max_ulp: largest distance in units in the last place of the actual dtype; None for other than floats.
        alpha: the factor by which the golden values come closest to the actual ones; ``residual`` is the norm of what
            it does not explain over that of the golden values. None for golden values that are zero.
        quantiles: ``p50``, ``p90``, ``p99``, ``p999`` of the error, by octave: true values lie at most a factor of two
            below.
        worst_row: row with the largest error, if the last dimension makes rows and something differs.
        distances: distances of the two policies, for log-probs only, see `regress.compare.metrics.policy_distances`.
        over, count: elements beyond the tolerance, and compared elements.
        tolerance: the bound that was applied, on ``max_error``.
        basis, reason: those of the tolerance.
        affected: affected tokens or part of a failing tensor, and the form of its values; None where unknown.
        detail: details of a status other than drift: ``golden float32, actual float64``.
    """

    status: Status
    quantity: str
    name: str
    place: Place
    detail: str = ""
    worst: Worst | None = None
    multiple: float = 0.0
    max_error: float = 0.0
    relative: float = 0.0
    relative_l2: float = 0.0
    scale: float = 0.0
    over: int = 0
    count: int = 0
    tolerance: float = 0.0
    basis: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    mean_error: float = 0.0
    rmse: float = 0.0
    max_relative: float = 0.0
    max_ulp: float | None = None
    alpha: float | None = None
    residual: float | None = None
    quantiles: Mapping[str, float] = field(default_factory=dict)
    worst_row: WorstRow | None = None
    distances: Mapping[str, float] | None = None
    affected: Affected | None = None

    @classmethod
    def fault(
        cls, status: Status, quantity: str, name: str, place: Place, detail: str, over: int = 0, **found: Any
    ) -> Verdict:
        """Return the verdict on what no tolerance allows, such as a missing tensor."""
        return cls(status, quantity, name, place, detail, multiple=math.inf, over=over, **found)

    @property
    def ok(self) -> bool:
        """True if the status is ok."""
        return self.status is Status.OK

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, the inverse of `from_json`."""
        nested = {name: asdict(value) for name in _NESTED if (value := getattr(self, name)) is not None}
        return {**vars(self), **nested, "status": str(self.status)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Rebuild a verdict written by `to_json`; raises `ValueError` for anything else."""
        conform(data, cls, "a verdict")
        known = {spec.name: data[spec.name] for spec in fields(cls)}
        worst, row = known["worst"], known["worst_row"]
        known["status"] = Status(known["status"])
        known["place"] = Place(**known["place"])
        affected = known["affected"]
        known["affected"] = None if affected is None else Affected.from_json(affected)
        known["worst"] = None if worst is None else Worst(**{**worst, "index": tuple(worst["index"])})
        known["worst_row"] = None if row is None else WorstRow(**{**row, "index": tuple(row["index"])})
        return cls(**known)
