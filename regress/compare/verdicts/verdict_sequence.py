"""Many verdicts as one sequence, and as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from regress.compare.quantities import order_of
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.canonical_json import dumps, plain
from regress.dump.coordinates import Place

if TYPE_CHECKING:
    import pandas as pd

_PLACE = tuple(spec.name for spec in fields(Place))
_WORST = tuple(f"worst_{spec.name}" for spec in fields(Worst))
_SPLIT = ("place", "worst")
_REST = tuple(spec for spec in fields(Verdict) if spec.name not in _SPLIT)
_INTEGERS = ("over", "count")


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return verdicts in the order of computation: quantity, then microbatch, rank, and order within the record."""

    def key(verdict: Verdict) -> tuple[int, ...]:
        place = verdict.place
        numbers = (place.step, place.update, order_of(verdict.quantity), place.micro, place.rank)
        return tuple(-1 if number is None else number for number in numbers)

    return sorted(verdicts, key=key)


class Verdicts(Sequence[Verdict]):
    """Verdicts in their order.

    >>> frame = Verdicts(judge_update(...)).to_frame()
    >>> frame[frame.status != "ok"].groupby("quantity", observed=True).multiple.max()
    """

    def __init__(self, verdicts: Iterable[Verdict] = ()) -> None:
        self._verdicts = tuple(verdicts)

    @overload
    def __getitem__(self, index: int) -> Verdict: ...
    @overload
    def __getitem__(self, index: slice) -> Verdicts: ...
    def __getitem__(self, index: int | slice) -> Verdict | Verdicts:
        """Return one verdict, or a slice of them."""
        if isinstance(index, slice):
            return Verdicts(self._verdicts[index])
        return self._verdicts[index]

    def __len__(self) -> int:
        return len(self._verdicts)

    def __repr__(self) -> str:
        return f"<{len(self)} verdicts, {sum(not verdict.ok for verdict in self)} not ok>"

    @property
    def failed(self) -> Verdicts:
        """Verdicts that are not ok."""
        return Verdicts(verdict for verdict in self if not verdict.ok)

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each verdict; columns and dtypes never depend on their number.

        ``status`` and ``quantity`` are ordered categories (gravest first, order of computation), ``step``, ``update``,
        ``rank`` and ``micro`` integers or missing, ``over`` and ``count`` integers, figures float64 (NaN where a
        verdict has none), all else texts; mappings such as ``basis`` are JSON.
        """
        import pandas as pd

        rows = [_cells(verdict) for verdict in self]
        names = ("status", "quantity", "name", *_PLACE)
        columns = list(dict.fromkeys([*names, *(spec.name for spec in _REST), *_WORST]))
        frame = pd.DataFrame(rows, columns=columns, dtype=object)
        return frame.astype({name: _dtype(name, frame) for name in columns})


def _cells(verdict: Verdict) -> dict[str, Any]:
    worst = {f"worst_{spec.name}": getattr(verdict.worst, spec.name, None) for spec in fields(Worst)}
    place = {name: getattr(verdict.place, name) for name in _PLACE}
    rest = {spec.name: getattr(verdict, spec.name) for spec in _REST}
    return {name: _cell(value) for name, value in (rest | place | worst).items()}


def _cell(value: object) -> object:
    if isinstance(value, Status):
        return str(value)
    if isinstance(value, Mapping | tuple):
        return dumps(plain(value, "verdict"))
    return dumps(plain(value.to_json(), "verdict")) if hasattr(value, "to_json") else value


def _dtype(name: str, frame: pd.DataFrame) -> Any:
    import pandas as pd

    if name == "status":
        return pd.CategoricalDtype([str(status) for status in Status], ordered=True)
    if name == "quantity":
        found = sorted(set(frame[name]), key=lambda quantity: (order_of(quantity), quantity))
        return pd.CategoricalDtype(found, ordered=True)
    if name in _PLACE:
        return "Int64"
    if name in _INTEGERS:
        return "int64"
    return "float64" if _is_figure(name) else "string"


def _is_figure(name: str) -> bool:
    """Return True if a column holds floats, by the annotation of its field."""
    if name.startswith("worst_"):
        return name in _FIGURES[Worst]
    return name in _FIGURES[Verdict]


_FIGURES: Mapping[type, frozenset[str]] = {
    Verdict: frozenset(spec.name for spec in fields(Verdict) if str(spec.type).startswith("float")),
    Worst: frozenset(f"worst_{spec.name}" for spec in fields(Worst) if str(spec.type).startswith("float")),
}
