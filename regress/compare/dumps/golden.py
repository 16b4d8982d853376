"""A golden case as a source: its truth as if one rank had recorded every update in one packed row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from regress.compare.quantities import (
    MICRO_STAGES,
    STEP_STAGES,
    UPDATE_STAGES,
    Kind,
    Source,
    quantity_named,
    sources_in,
)
from regress.dump.arrays import Array
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, to_record
from regress.errors import ConfigError, GoldenError
from regress.golden.case import GoldenCase
from regress.golden.location import golden_directory
from regress.golden.names import parse_where
from regress.golden.pending import pending_of
from regress.golden.store import GoldenStore
from regress.interop import readers
from regress.layout import TokenFrame

PREFIX = "golden:"
_KEPT = 2  # updates whose values are kept


def is_golden(source: str) -> bool:
    """Tell a golden case from a folder or URL."""
    return source.startswith(PREFIX)


def located(source: str, folder: Path | None) -> str:
    """Name the golden directory in a source that does not; other sources stay as they are."""
    if folder is None or not is_golden(source) or "/" in source:
        return source
    return f"{PREFIX}{folder / source.removeprefix(PREFIX)}"


def golden_case(source: str) -> GoldenCase:
    """Open the case of ``golden:CASE``, ``golden:FOLDER/CASE`` or either with ``@pending``.

    Raises:
        ConfigError: if what follows the ``@`` is no state of a case.
        GoldenError: if there is no such case, or no pending update of it.
    """
    name, at, state = source.removeprefix(PREFIX).partition("@")
    if at and state != "pending":
        raise ConfigError(
            f"{source} asks for the state {state!r} of a case, which has two: write {PREFIX}{name} for what is "
            f"accepted, or {PREFIX}{name}@pending for what waits for review"
        )
    path = Path(name)
    store = GoldenStore(path.parent if "/" in name else golden_directory())
    case = store.case(path.name)
    if state:
        found = pending_of(store, path.name)
        return case.proposed(found.manifest, found.folder)
    return case


class GoldenSide(readers.Source):
    """The recorded updates of a case; see `regress.compare.dumps.sides.Side`.

    Attributes:
        system: ``golden``, unlike a dump's: values are of whole updates in float64, in no rank's layout.
    """

    system = "golden"

    def __init__(self, source: str) -> None:
        self.case = golden_case(source)
        self.folder = self.case.folder
        self.config = self.case.config
        self._values: dict[str, dict[str, dict[str, Array]]] = {}
        if not self.case.wheres():
            raise GoldenError(
                f"{self.folder} has no recorded updates to compare with: run regress golden record {self.case.name}"
            )

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Its records, in the order of computation."""
        found = {
            f"trajectory/{Coordinates(step).stem}": ("trajectory", Coordinates(step))
            for step in self._trajectories
        }
        for where, place in self.places.items():
            for stage in (*MICRO_STAGES, *UPDATE_STAGES):
                if self._sources(stage, where):
                    micro = None if stage in UPDATE_STAGES else 0
                    place = Coordinates(place.step, update=place.update, rank=0, micro=micro)
                    found[f"{stage}/{where}"] = (stage, place)
        return found

    @cached_property
    def places(self) -> dict[str, Coordinates]:
        """Step and number of each recorded update, by its name in the case."""
        return {where: place for where in self.case.wheres() if (place := parse_where(where)) is not None}

    def read(self, name: str) -> Record:
        """Read one record: token values ``[1, tokens]``, hidden states ``[1, tokens, ...]``, logits ``[1, K, V]``."""
        stage, where = name.split("/")
        place = self.entries[name][1]
        if stage == "trajectory":
            return to_record(self._trajectories[place.step], place.step)
        tensors = {source.tensor: self._local(source, where) for source in self._sources(stage, where)}
        meta: dict[str, Any] = {}
        if stage not in UPDATE_STAGES:
            meta = _placed(self.frame(where))
        elif stage == "gradient" and "grad_norm" in self._recorded[where]:
            meta = {"grad_norm": float(self.truth(where, "grad_norm")["grad_norm"])}
        return Record(
            stage, place.step, tensors, meta, update=place.update, rank=place.rank, micro=place.micro
        )

    def frame(self, where: str) -> TokenFrame:
        """Return the samples of an update.

        Raises:
            GoldenError: if rollouts and configuration do not come to the recorded update.
        """
        found = self._frames.get(where)
        if found is None:
            raise GoldenError(
                f"{self.folder}: the rollouts and trainer.epochs and trainer.mini_batch_size of case.yaml do not come "
                f"to the recorded update {where}; record the case again"
            )
        return found

    def truth(self, where: str, quantity: str) -> Mapping[str, Array]:
        """Return the canonical values of one quantity by tensor name, every byte verified."""
        if where not in self._values:
            while len(self._values) >= _KEPT:
                del self._values[next(iter(self._values))]
            self._values[where] = {}
        known = self._values[where]
        if quantity not in known:
            known[quantity] = self.case.truth_of(where, quantity)
        return known[quantity]

    def recorded(self, where: str) -> Mapping[str, Sequence[str]]:
        """Return the tensor names of each quantity of one update."""
        return self._recorded[where]

    @cached_property
    def text(self) -> Callable[[int], str] | None:
        """Text of a token id, if the case holds a tokenizer."""
        return token_text(self.case)

    def writes(self, stage: str, tensor: str | None = None) -> bool:
        """Return True if a stage was recorded; any tensor of a recorded stage counts as recorded."""
        return any(type == stage for type, _ in self.entries.values())

    @cached_property
    def _trajectories(self) -> dict[int, list[Trajectory]]:
        return self.case.trajectories()

    @cached_property
    def _recorded(self) -> dict[str, dict[str, list[str]]]:
        """Tensor names of each quantity of each update."""
        manifest = self.case.manifest
        assert manifest is not None
        return {
            where: {quantity: [*row[quantity].tensors] for quantity in sorted(row)}
            for where, row in manifest.truth.items()
        }

    @cached_property
    def _frames(self) -> dict[str, TokenFrame]:
        trainer: Any = self.case.config.get("trainer") or {}
        cuts = trainer.get("epochs", 1), trainer.get("mini_batch_size")
        found = {}
        for step, samples in self._trajectories.items():
            keys = tuple(sample.key for sample in samples)
            whole = TokenFrame(keys, tuple(len(sample.tokens) for sample in samples))
            for update, frame in whole.updates(*cuts):
                found[Coordinates(step, update=update).stem] = frame
        return found

    def _sources(self, stage: str, where: str) -> list[Source]:
        if stage in STEP_STAGES:
            return []
        recorded = self._recorded[where]
        return [
            source for quantity, names in recorded.items() for source in sources_in(stage, quantity, names)
        ]

    def _local(self, source: Source, where: str) -> Array:
        values = self.truth(where, source.quantity)[source.name]
        kind = quantity_named(source.quantity).kind
        whole = kind is Kind.SHARE or source.stage in UPDATE_STAGES
        size = self.frame(where).size
        if not whole and kind is not Kind.HIDDEN and values.shape != (size,):
            raise GoldenError(
                f"{self.folder}: {source.label} of {where} has the shape {list(values.shape)}, but its samples have "
                f"{size} tokens; record the case again"
            )
        return values if whole else values[None]


def text_of(*sides: object) -> Callable[[int], str] | None:
    """Return a function from token ids to text, from the first golden source with a tokenizer; None without one."""
    found = (side.text for side in sides if isinstance(side, GoldenSide))
    return next((text for text in found if text is not None), None)


def _placed(frame: TokenFrame) -> dict[str, Any]:
    """Return the metadata of token records: all samples end to end in one row."""
    offsets = frame.offsets.tolist()
    segments = [[i, 0, length, 0, offsets[i]] for i, length in enumerate(frame.lengths) if length]
    return {
        "layout": {"shape": [1, frame.size], "segments": segments},
        "samples": [[*frame.samples[segment[0]]] for segment in segments],
    }


def token_text(case: GoldenCase) -> Callable[[int], str] | None:
    """Return a function from token ids to text; None if the case holds no tokenizer."""
    path = Path(case.folder) / "model" / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: str(tokenizer.id_to_token(token))
