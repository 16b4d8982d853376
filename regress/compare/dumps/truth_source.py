"""Golden values of updates as a source: as if one rank had recorded each update in one packed row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from regress.compare.alignment.element_names import TokenText
from regress.compare.diagnosis.hypotheses import Truth
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.quantities import (
    MICRO_TYPES,
    STEP_TYPES,
    UPDATE_TYPES,
    Kind,
    QuantitySource,
    quantity_named,
    source_of,
    sources_in,
)
from regress.dump import source_readers
from regress.dump.coordinates import Coordinates, Place
from regress.dump.numpy_arrays import Array
from regress.dump.record import LOSS_ROWS, Record
from regress.errors import CompareError
from regress.layout import TokenFrame


class Tensors(Mapping[str, Array]):
    """Lazily read tensors of one quantity; those that cannot be put together are absent."""

    def __init__(self, names: Iterable[str], load: Callable[[str], Array | None]) -> None:
        self._names = [*names]
        self._load = load
        self._known: dict[str, Array | None] = {}

    def __getitem__(self, name: str) -> Array:
        """Raise `KeyError` for one that is unknown, or cannot be put together."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            self._known[name] = self._load(name)
        found = self._known[name]
        if found is None:
            self._names.remove(name)
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in [*self._names] if name in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __len__(self) -> int:
        return len([*iter(self)])


class TruthSide(source_readers.Source):
    """Canonical values of updates.

    Attributes:
        system: ``golden``, unlike a dump's: values are of whole updates, in no rank's layout.
    """

    system = "golden"
    record_types: tuple[str, ...] = (*MICRO_TYPES, *UPDATE_TYPES)
    """Record types that the values are given as."""

    @property
    def text(self) -> TokenText | None:
        """Text of a token id, if it is known."""
        return None

    @property
    @abstractmethod
    def places(self) -> Mapping[str, Coordinates]:
        """Step and number of each update, by name."""

    @abstractmethod
    def frame(self, where: str) -> TokenFrame:
        """Return the samples of an update."""

    @abstractmethod
    def truth(self, where: str, quantity: str) -> Mapping[str, Array]:
        """Return the canonical values of one quantity by tensor name."""

    @abstractmethod
    def recorded(self, where: str) -> Mapping[str, Sequence[str]]:
        """Return the tensor names of each quantity of one update."""

    def related(self, where: str) -> RelatedValues:
        """Return what else is known of an update, for hypotheses; nothing by default."""
        return NOTHING

    def values(self, where: str) -> Truth:
        """Return all canonical values of an update, each read when it is asked for."""

        def loader(quantity: str) -> Callable[[str], Array | None]:
            return lambda name: self.truth(where, quantity)[name]

        return {
            quantity: Tensors(names, loader(quantity)) for quantity, names in self.recorded(where).items()
        }

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Its records, in the order of computation."""
        found = {}
        for where, place in self.places.items():
            for record_type in self.record_types:
                if self._sources(record_type, where):
                    micro = None if record_type in UPDATE_TYPES else 0
                    at = Coordinates(place.step, update=place.update, rank=0, micro=micro)
                    found[f"{record_type}/{where}"] = record_type, at
        return found

    def read(self, name: str) -> Record:
        """Read one record: token values ``[1, tokens]``, hidden states ``[1, tokens, ...]``, logits ``[1, K, V]``."""
        record_type, where = name.split("/")
        place = self.entries[name][1]
        tensors = {source.tensor: self._local(source, where) for source in self._sources(record_type, where)}
        meta: dict[str, Any] = {}
        if record_type not in UPDATE_TYPES:
            size = self.frame(where).size
            rows = [name for name, array in tensors.items() if _by_loss(name, record_type, array, size)]
            meta = _placed(self.frame(where)) | dict.fromkeys(rows, LOSS_ROWS)
        elif record_type == "gradient" and "grad_norm" in self.recorded(where):
            meta = {"grad_norm": float(self.truth(where, "grad_norm")["grad_norm"])}
        return Record(
            record_type, place.step, tensors, meta, update=place.update, rank=place.rank, micro=place.micro
        )

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True if a type was recorded; any tensor of a recorded type counts as recorded."""
        return any(type == record_type for type, _ in self.entries.values())

    def _sources(self, record_type: str, where: str) -> list[QuantitySource]:
        rows = ((quantity, [*names]) for quantity, names in self.recorded(where).items())
        return [source for row in rows for source in sources_in(record_type, *row)]

    def _local(self, source: QuantitySource, where: str) -> Array:
        values = self.truth(where, source.quantity)[source.name]
        kind = quantity_named(source.quantity).kind
        whole = kind is Kind.SHARE or source.record_type in UPDATE_TYPES
        size = self.frame(where).size
        if not whole and kind is not Kind.HIDDEN and values.shape != (size,):
            raise CompareError(f"""{self.folder}: {source.label} of {where} has the shape {list(values.shape)}, but its
            samples have {size} tokens; record the case again""")
        return values if whole else values[None]


class InMemoryTruth(TruthSide):
    """Canonical values of one update in memory."""

    folder = Path("golden values")
    record_types = (*STEP_TYPES, *MICRO_TYPES, *UPDATE_TYPES)

    def __init__(
        self,
        truth: Truth,
        frame: TokenFrame,
        place: Place,
        text: TokenText | None = None,
        related: RelatedValues = NOTHING,
    ) -> None:
        self._truth, self._frame, self._text = truth, frame, text
        self._beside = related
        self._place = Coordinates(place.step or 0, place.update)
        self._records: dict[str, Record] = {}

    @property
    def places(self) -> Mapping[str, Coordinates]:
        """The one update."""
        return {self._place.stem: self._place}

    @property
    def text(self) -> TokenText | None:
        """Text of a token id, if it is known."""
        return self._text

    def frame(self, where: str) -> TokenFrame:
        """Return the samples of the update."""
        return self._frame

    def related(self, where: str) -> RelatedValues:
        """Return what else is known of the update."""
        return self._beside

    def truth(self, where: str, quantity: str) -> Mapping[str, Array]:
        """Return the values of one quantity."""
        return self._truth[quantity]

    def recorded(self, where: str) -> Mapping[str, Sequence[str]]:
        """Return the tensor names of each quantity."""
        return {quantity: [*tensors] for quantity, tensors in self._truth.items()}

    def values(self, where: str) -> Truth:
        """Return all values."""
        return self._truth

    def read(self, name: str) -> Record:
        """Return one record."""
        if name not in self._records:
            self._records[name] = super().read(name)
        return self._records[name]


def _by_loss(name: str, record_type: str, array: Array, size: int) -> bool:
    """Return True for hidden states of the loss tokens alone."""
    source = source_of(record_type, name)
    hidden = source is not None and quantity_named(source.quantity).kind is Kind.HIDDEN
    return hidden and array.shape[1:2] != (size,)


def _placed(frame: TokenFrame) -> dict[str, Any]:
    """Return the metadata of token records: all samples end to end in one row."""
    offsets = frame.offsets.tolist()
    segments = [[i, 0, length, 0, offsets[i]] for i, length in enumerate(frame.lengths) if length]
    return {
        "layout": {"shape": [1, frame.size], "segments": segments},
        "samples": [[*frame.samples[segment[0]]] for segment in segments],
    }
