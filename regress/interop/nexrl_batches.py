"""Batches of one step of NexRL: rows without ids, mapped to the places of their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regress.dump.coordinates import Coordinates
from regress.dump.file_damage import Damage
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, from_record
from regress.interop.foreign_payloads import Payload, narrowed, tensor
from regress.interop.nexrl_row import MASKS, TOKENS, Batch, mask_of
from regress.interop.row_matching import PaddedRow, Rollouts, place_rows
from regress.layout import SampleKey, Segment, TokenLayout

Place = tuple[int, int]
"""Rank and microbatch."""


@dataclass
class Batches:
    """The batches of a step.

    Args:
        rollouts: records of trajectories.
        forward: the rows of each rank and microbatch.
        old: content of the file of old log-probs, which has no ids.

    Attributes:
        notes: unknown facts, a sentence each.
    """

    step: int
    rollouts: Sequence[Record]
    forward: Mapping[Place, Batch]
    old: Payload | None
    notes: list[str] = field(default_factory=list)
    _rows: dict[Place, list[PaddedRow]] = field(init=False)

    def __post_init__(self) -> None:
        self._samples = [t for record in self.rollouts for t in from_record(record)]
        self._samples.sort(key=_order)
        with_ids = {
            str(place): (batch.ids, batch.wide_mask)
            for place, batch in sorted(self.forward.items())
            if batch.ids is not None
        }
        positions = {str(place): b.positions for place, b in self.forward.items() if b.positions is not None}
        placed = place_rows(with_ids, self._known, positions)
        self._rows = {
            place: [_named(row, batch.name) for row in placed[str(place)]]
            if batch.ids is not None
            else batch.open_rows
            for place, batch in sorted(self.forward.items())
        }
        self._note()

    @property
    def _known(self) -> Rollouts | None:
        """The rollouts by their tokens; None where they were not recorded."""
        return Rollouts({t.key: tuple(t.tokens) for t in self._samples}) if self._samples else None

    def record(self, type: str, record_type: str, where: Coordinates, payload: Payload) -> Record:
        """Return the record of a file."""
        if type == "datums":
            return self._datums(record_type, where, payload)
        if type == "old_log_probs":
            return self._old_log_probs(where, payload)
        place = (where.rank or 0, where.micro or 0)
        batch = self.forward.get(place)
        if type == "loss":
            return self._loss(where, payload, place)
        if type == "forward_data" and record_type == "is_loss_debug":
            return self._derived(where, payload, place)
        if batch is None:
            batch = Batch(where.stem, None, mask_of(payload))
            rows = batch.open_rows
        else:
            rows = self._rows[place]
        tensors = {name: tensor(payload[name], name) for name in TOKENS if name in payload}
        if type == "forward_data" and batch.ids is not None:
            tensors["input_ids"] = batch.ids
        if "loss" in payload:
            tensors["loss"] = _scalar(payload["loss"], "loss")
        return Record.of(
            type, where, _widened(tensors, batch.width), {**_meta(rows, batch.width), "own_mean": True}
        )

    def _derived(self, where: Coordinates, payload: Payload, place: Place) -> Record:
        """Return the values that the loss must have used: those of the forward pass, and the ratio that they give."""
        rows, width = self._rows[place], self.forward[place].width
        tensors = {"log_probs": tensor(payload["log_probs"], "log_probs")}
        tensors["effective_valid"] = tensor(payload["response_mask"], "response_mask")
        tensors = _widened(tensors, width)
        old = self._old_rows()
        found = [old.get(row.key) for row in rows]
        if old and all(values is not None for values in found):
            log_probs = np.zeros(tensors["log_probs"].shape, next(iter(old.values())).dtype)
            for index, (row, values) in enumerate(zip(rows, found, strict=True)):
                assert values is not None
                log_probs[_line(row, index), row.start : row.stop] = values[: row.stop - row.start]
            tensors["old_log_probs"] = log_probs
            with np.errstate(all="ignore"):
                ratio = np.exp(tensors["log_probs"].astype(np.float64) - log_probs.astype(np.float64))
            valid = tensors["effective_valid"].astype(bool)
            tensors["prob_ratio"] = np.where(valid, ratio, 0.0).astype(tensors["log_probs"].dtype)
        return Record.of("is_loss_debug", where, tensors, {**_meta(rows, width), "derived": True})

    def _old_rows(self) -> dict[SampleKey, Array]:
        """Return the old log-probs of each sample, from its first token on."""
        if self.old is None:
            return {}
        record = self._old_log_probs(Coordinates(self.step), self.old)
        layout, keys = record.meta.get("layout"), record.meta.get("samples")
        if not isinstance(layout, dict) or not isinstance(keys, list):
            return {}
        values = record.tensors["old_log_probs"]
        segments: Any = layout["segments"]
        names: Any = keys
        return {
            (group, run): values[row, col : col + stop - start]
            for (group, run), (_, start, stop, row, col) in zip(names, segments, strict=True)
        }

    def _loss(self, where: Coordinates, payload: Payload, place: Place) -> Record:
        names = ("loss", "pg_loss", "entropy_loss")
        tensors = {name: _scalar(payload[name], name) for name in names if name in payload}
        meta: dict[str, Any] = {"own_mean": True, "unplaced": True}
        if place in self.forward:
            meta = {"own_mean": True, **_meta(self._rows[place], self.forward[place].width)}
        metrics = payload.get("metrics")
        if isinstance(metrics, Mapping):
            meta["metrics"] = {
                str(k): v for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)
            }
        return Record.of("loss", where, tensors, meta)

    def _datums(self, record_type: str, where: Coordinates, payload: Payload) -> Record:
        """Return the rows sent to a remote trainer, padded on the right, with each value at its own token."""
        items = payload["datums"]
        keys = self._keys_of(
            [[*item["input_tokens"], item["loss_fn_inputs"]["target_tokens"][-1]] for item in items]
        )
        width = max(len(item["input_tokens"]) for item in items) + 1
        rows, tensors = [], {}
        names = {"loss_mask": "effective_valid", "advantages": "advantages", "logprobs": "old_log_probs"}
        if record_type == "batch_inputs":
            names = {"loss_mask": "response_mask"}
            tensors["input_ids"] = np.zeros((len(items), width), np.int64)
        for source, name in names.items():
            if all(source in item["loss_fn_inputs"] for item in items):
                dtype = np.int64 if name in MASKS else np.float64
                tensors[name] = np.zeros((len(items), width), dtype)
        for index, (item, row) in enumerate(zip(items, keys, strict=True)):
            length = len(item["input_tokens"]) + 1
            rows.append(PaddedRow(row.key, 0, length, row.copy_of, row.sure, row.known))
            if record_type == "batch_inputs":
                tensors["input_ids"][index, : length - 1] = item["input_tokens"]
                tensors["input_ids"][index, length - 1] = item["loss_fn_inputs"]["target_tokens"][-1]
            for source, name in names.items():
                if name in tensors:
                    tensors[name][index, 1:length] = item["loss_fn_inputs"][source]
        if len(items) < len(self._samples):
            self.notes.append(
                f"step {self.step}: {len(items)} of {len(self._samples)} rollouts became datums; those whose "
                "advantages are all 0 are dropped"
            )
        tensors |= {name: narrowed(array) for name, array in tensors.items()}
        return Record.of(record_type, where, tensors, {**_meta(rows, width), "sampler": True})

    def _keys_of(self, tokens: Sequence[Sequence[int]]) -> list[PaddedRow]:
        """Return the keys of the samples that these sequences belong to."""
        width = max(map(len, tokens))
        ids = np.full((len(tokens), width), -1, np.int64)
        for row, values in zip(ids, tokens, strict=True):
            row[: len(values)] = values
        (rows,) = place_rows({"datum": (ids, np.zeros(ids.shape, bool))}, self._known).values()
        return rows

    def _old_log_probs(self, where: Coordinates, payload: Payload) -> Record:
        """Return the old log-probs of the whole batch, in the order in which ranks and microbatches got its rows."""
        values = tensor(payload["old_log_probs"], "old_log_probs")
        if values.ndim != 2:
            raise Damage(f"its old log-probs have the shape {list(values.shape)}, but are a batch of rows")
        rows, width = self._global_rows(values.shape, payload)
        meta = {"unplaced": True} if rows is None else _meta(rows, width)
        tensors = {"old_log_probs": values} if rows is None else _widened({"old_log_probs": values}, width)
        return Record.of("old_log_probs", where, tensors, meta)

    def _global_rows(self, shape: tuple[int, ...], payload: Payload) -> tuple[list[PaddedRow] | None, int]:
        """Return the rows of the whole batch and their width; None where nothing tells them."""
        count, columns = shape
        found: list[PaddedRow] = []
        lines = 0
        for place in sorted(self._rows):
            own = [
                replace(row, line=lines + _line(row, index)) for index, row in enumerate(self._rows[place])
            ]
            found, lines = [*found, *own], lines + len(self.forward[place].mask)
        widths = {batch.width for batch in self.forward.values()}
        if lines == count and len(widths) == 1:
            return found, widths.pop()
        info = payload.get("batch_info") or {}
        width = int((info.get("input_ids_shape") or (count, columns + 1))[1])
        rows = self._sorted_rows(count, columns, width)
        if rows is None:
            self.notes.append(
                f"step {self.step}: nothing tells whose rows the old log-probs are, so they were not compared"
            )
        return rows, width

    def _sorted_rows(self, count: int, columns: int, width: int) -> list[PaddedRow] | None:
        """Return the rollouts as NexRL sorts them, the first ones repeated until all ranks have equally many."""
        if not self._samples or count < len(self._samples):
            return None
        arrival = [t for record in self.rollouts for t in from_record(record)]
        again = [arrival[i % len(arrival)].key for i in range(count - len(arrival))]
        rows = []
        for t in self._samples:
            start = 0 if columns == width - 1 else width - columns - t.prompt_length
            if start < 0 or start + len(t.tokens) > width:
                return None
            rows.append(PaddedRow(t.key, start, start + len(t.tokens)))
            for number in range(again.count(t.key)):
                group = f"{t.group_id} (copy {number + 1})"
                rows.append(PaddedRow((group, t.run_id), start, start + len(t.tokens), copy_of=t.key))
        self.notes.append(
            f"step {self.step}: the old log-probs have no ids; their rows were taken in the order in which NexRL sorts "
            "rollouts"
        )
        return rows

    def _note(self) -> None:
        where = f"step {self.step}"
        rows = [row for found in self._rows.values() for row in found]
        own = {row.key for row in rows if row.copy_of is None}
        copies = sum(row.copy_of is not None for row in rows)
        if self.step < 0 and self.forward:
            self.notes.append(
                f"{where} is the forward pass of the old log-probs, written before the step was known: every "
                "microbatch overwrote it, so the last one of each rank is left"
            )
        elif self._samples and rows and len(own) < len(self._samples):
            self.notes.append(
                f"{where}: forward_data holds {len(own)} of {len(self._samples)} rollouts: NexRL writes every "
                "mini-batch and epoch into the same files, so the earlier ones were overwritten"
            )
        if copies:
            self.notes.append(f"{where}: {copies} rows repeat others to fill the batch up")
        if any(not row.sure for row in rows):
            self.notes.append(
                f"{where}: rollouts with the same tokens cannot be told apart in forward_data, which has no ids"
            )
        if self._samples and any(not row.known for row in rows):
            self.notes.append(f"{where}: rows of forward_data have tokens that no rollout of the step has")
        if any(batch.ids is None for batch in self.forward.values()):
            self.notes.append(
                f"{where}: forward_data has no token ids, so its rows can be found by rank, microbatch and row only, "
                "and are taken to begin with the first token"
            )


def _order(t: Trajectory) -> tuple[str, str, int]:
    """Return the key by which NexRL sorts rollouts into a batch."""
    task = t.group_id if t.task_id is None else t.task_id
    return _sortable(task), _sortable(t.extra.get("uid") or t.group_id), t.run_id


def _sortable(value: Any) -> str:
    text = str(value)
    return text.rjust(20, "0") if text.isdigit() else text


def _named(row: PaddedRow, name: str) -> PaddedRow:
    if row.known:
        return row
    several = row.key[0].rpartition(" row ")[2] if " row " in row.key[0] else ""
    return replace(row, key=(f"{name} row {several}".rstrip(), row.key[1]))


def _scalar(value: Any, name: str) -> Array:
    array = tensor(value, name)
    if array.size != 1:
        raise Damage(f"its {name} has the shape {list(array.shape)}, but is one number")
    return array.reshape(())


def _widened(tensors: Mapping[str, Array], width: int) -> dict[str, Array]:
    """Return values at their own tokens: a narrower tensor holds the last columns of the rows."""
    found = {}
    for name, array in tensors.items():
        if array.ndim == 2 and array.shape[1] < width:
            wide = np.zeros((array.shape[0], width), array.dtype)
            wide[:, width - array.shape[1] :] = array
            found[name] = wide
        else:
            found[name] = array
    return found


def _meta(rows: Sequence[PaddedRow], width: int) -> dict[str, Any]:
    lines = 1 + max((_line(row, index) for index, row in enumerate(rows)), default=-1)
    packed = any(row.line is not None for row in rows)
    numbers = [index for index, row in enumerate(rows) if row.stop > row.start]
    kept = [rows[index] for index in numbers]
    segments = tuple(
        Segment(number if packed else index, 0, row.stop - row.start, _line(row, index), row.start)
        for number, (index, row) in enumerate(zip(numbers, kept, strict=True))
    )
    return {
        "layout": TokenLayout((lines, width), segments).to_json(),
        "samples": [list(row.key) for row in kept],
        "copies": [[list(row.key), list(row.copy_of)] for row in kept if row.copy_of is not None],
        "unnamed": [list(row.key) for row in kept if not (row.known and row.sure)],
        "open": any(row.open for row in kept),
    }


def _line(row: PaddedRow, index: int) -> int:
    """Return the row of a batch that a sample lies in, the ``index``-th of them."""
    return index if row.line is None else row.line
