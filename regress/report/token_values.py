"""Token values of a step, golden and actual side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import TokenText
from regress.compare.alignment.record_keys import canonical_layout
from regress.compare.quantities import QUANTITIES, Kind, QuantitySource, primary_source
from regress.compare.verdicts.tolerance import Tolerance
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame

Columns: TypeAlias = dict[str, tuple[NDArray[np.float64], NDArray[np.float64], Tolerance]]
"""Quantity -> golden and actual values at all tokens, and their tolerance."""

LIMIT = 2_000
"""Maximum tokens of one table; the others are left out, with a note."""


@dataclass(frozen=True)
class TokenValues:
    """One quantity at every token of a table.

    Attributes:
        quantity: such as ``log_probs``.
        golden, actual: ``[tokens]``; None at other than loss tokens, NaN where nothing was recorded.
        tolerance: the bound on ``|actual - golden|``.
    """

    quantity: str
    golden: Sequence[float | None]
    actual: Sequence[float | None]
    tolerance: float


@dataclass(frozen=True)
class TokenTable:
    """Samples of one optimizer update, laid end to end.

    Attributes:
        where: replay or comparison.
        place: step and update.
        samples: names, such as ``000001-0002/3``; ``lengths`` their tokens.
        ids: ``[tokens]`` token ids, -1 where they are unknown.
        text: ``[tokens]`` what each reads as; empty without a tokenizer.
        mask: ``[tokens]`` whether it enters the loss.
        values: values by quantity, in the order of computation.
        left_out: samples that there was no room for.
    """

    where: str
    place: Place
    samples: Sequence[str]
    lengths: Sequence[int]
    ids: Sequence[int]
    mask: Sequence[bool]
    values: Sequence[TokenValues]
    text: Sequence[str] = field(default_factory=tuple)
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` reads; floats need not be finite."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenTable:
        """Rebuild a table written by `to_json`."""
        values = [TokenValues(**row) for row in data["values"]]
        return cls(**{**data, "place": Place(**data["place"]), "values": values})


def token_table(
    where: str,
    place: Place,
    records: Iterable[Record],
    truth: Mapping[str, Mapping[str, Array]],
    frame: TokenFrame,
    tolerances: Callable[[str], Tolerance | None],
    text: TokenText | None = None,
) -> TokenTable:
    """Return the token values of one update's records, as far as their layouts locate them; nothing is refused.

    Of several values of a token the one furthest off is shown. If there are more tokens than `LIMIT`, the
    samples furthest off are kept.

    Args:
        truth: canonical golden values of the update, ``quantity -> tensor name -> array``.
        tolerances: tolerance of a quantity; None leaves it out.
        text: text of a token id.
    """
    inputs = truth.get("batch_inputs", {})
    mask = np.asarray(inputs.get("response_mask", np.ones(frame.size)), bool)
    known = [*records]
    columns: Columns = {}
    for source in _sources(truth):
        tolerance = tolerances(source.quantity)
        if tolerance is None:
            continue
        golden = np.where(mask, truth[source.quantity][source.name].astype(np.float64), np.nan)
        columns[source.quantity] = golden, _actual(known, source, golden, frame), tolerance
    return table_of(where, place, frame, inputs.get("input_ids"), mask, columns, text)


def table_of(
    where: str,
    place: Place,
    frame: TokenFrame,
    ids: Array | None,
    mask: NDArray[np.bool_],
    columns: Columns,
    text: TokenText | None = None,
) -> TokenTable:
    """Return a table of values that are known token by token.

    Args:
        ids: ``[frame.size]`` token ids; None where they are unknown.
        mask: ``[frame.size]`` loss tokens.
        columns: golden and actual values ``[frame.size]``, NaN where nothing was recorded, and how they are judged.
    """
    bounds = {name: _bound(golden[mask], tolerance) for name, (golden, _, tolerance) in columns.items()}
    samples = _furthest(frame, [(*columns[name][:2], bound) for name, bound in bounds.items()])
    chosen = np.concatenate([_tokens_of(frame, sample) for sample in samples] or [np.zeros(0, np.int64)])
    numbers = [int(token) for token in ids[chosen]] if ids is not None else [-1] * chosen.size
    return TokenTable(
        where,
        place,
        samples=[f"{frame.samples[s][0]}/{frame.samples[s][1]}" for s in samples],
        lengths=[frame.lengths[s] for s in samples],
        ids=numbers,
        mask=[bool(entry) for entry in mask[chosen]],
        values=[
            TokenValues(
                quantity,
                _listed(golden[chosen], mask[chosen]),
                _listed(actual[chosen], mask[chosen]),
                bounds[quantity],
            )
            for quantity, (golden, actual, _) in columns.items()
        ],
        text=[text(token) for token in numbers] if text is not None else (),
        left_out=len(frame.samples) - len(samples),
    )


def _bound(golden: NDArray[np.float64], tolerance: Tolerance) -> float:
    finite = np.abs(golden[np.isfinite(golden)])
    return tolerance.relative * float(np.max(finite, initial=0.0)) + tolerance.absolute


def _sources(truth: Mapping[str, Mapping[str, Array]]) -> Iterator[QuantitySource]:
    """Yield the sources of token values, in the order of computation."""
    for quantity in QUANTITIES:
        if quantity.kind is Kind.TOKEN:
            yield from (primary_source(quantity.name, name) for name in [*truth.get(quantity.name, {})][:1])


def _actual(
    records: Sequence[Record], source: QuantitySource, golden: NDArray[np.float64], frame: TokenFrame
) -> NDArray[np.float64]:
    """Return the recorded values ``[frame.size]``, NaN where nothing was recorded."""
    found, off = np.full(frame.size, np.nan), np.full(frame.size, -1.0)
    for record in records:
        if record.type != source.record_type or source.tensor not in record.tensors:
            continue
        try:
            layout = canonical_layout(record, frame)
        except CompareError:  # a verdict says so
            continue
        array = record.tensors[source.tensor]
        if array.shape != layout.shape:
            continue
        canonical, local = layout.indices(frame.offsets)
        values = array.reshape(-1)[local].astype(np.float64)
        error = np.nan_to_num(np.abs(values - golden[canonical]), nan=np.inf)
        worse = error > off[canonical]
        found[canonical[worse]], off[canonical[worse]] = values[worse], error[worse]
    return found


def _furthest(
    frame: TokenFrame, columns: Iterable[tuple[NDArray[np.float64], NDArray[np.float64], float]]
) -> list[int]:
    """Return the samples that fit, in canonical order, chosen by largest difference."""
    multiple = np.zeros(frame.size)
    for golden, actual, bound in columns:
        with np.errstate(divide="ignore", invalid="ignore"):
            multiple = np.fmax(multiple, np.abs(actual - golden) / bound)
    worst = [float(np.max(multiple[_tokens_of(frame, s)], initial=0.0)) for s in range(len(frame.samples))]
    chosen: list[int] = []
    room = LIMIT
    for sample in sorted(range(len(worst)), key=lambda s: (-worst[s], s)):
        if frame.lengths[sample] <= room:
            chosen.append(sample)
            room -= frame.lengths[sample]
    return sorted(chosen)


def _tokens_of(frame: TokenFrame, sample: int) -> NDArray[np.int64]:
    return np.arange(frame.offsets[sample], frame.offsets[sample + 1])


def _listed(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> list[float | None]:
    return [float(value) if chosen else None for value, chosen in zip(values, mask, strict=True)]
