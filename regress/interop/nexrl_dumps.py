"""Dump directories of NexRL: self-hosted, remote API and weaver, of both generations of their format.

Facts that the files lack are inferred from their content: samples of the rows, starts of their tokens, rows that only
fill a batch up. Unknown facts become notes. Source of the tables: NexRL v1.4.0, `nexrl/utils/data_dumper.py`,
`nexrl/utils/compare_debug_dumps.py`; before commit 5bd3f78 prompts were padded on the left, and the tensors of tokens
are as wide as the responses; since then all rows are padded on the right, and they are one narrower than the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from regress.dump.chunk_checksums import Span
from regress.dump.coordinates import Coordinates, parse_stem
from regress.dump.dump_location import Location, children
from regress.dump.file_damage import CUT_OFF, Damage
from regress.dump.nexrl_trajectories import foreign_trajectories
from regress.dump.numpy_arrays import dtype_name
from regress.dump.record import Record
from regress.dump.request_index import INDEX
from regress.dump.source_readers import Reader, Source
from regress.errors import DumpError
from regress.interop.foreign_payloads import SUFFIXES, Payload, is_own, read_payload, tensor
from regress.interop.nexrl_batches import Batches
from regress.interop.nexrl_row import Batch

BEFORE = -1
"""Step number of files that a worker writes before it knows the step."""


class NexrlDump(Source):
    """A dump directory of NexRL.

    Attributes:
        folder: the directory.
        modes: writers of its sub-folders; several may share one.

    Raises `DumpError` for a folder without records, or with those of two formats.
    """

    system = "NexRL"
    unsealed = True

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        found = dict(_files(folder))
        self._files = {name: entry for name, entry in found.items() if entry[0] in FOLDERS}
        self._raw = {name: entry for name, entry in found.items() if entry[0] in RAW}
        if not self._files:
            raise DumpError(
                f"{folder} has the folders of a NexRL dump but no step_* file in them; enable dump_options"
            )
        kinds = {type for type, _ in found.values()}
        self.modes = tuple(mode for mode, types in MODES.items() if kinds & types) or (Mode.SELF_HOSTED,)
        self._notes: dict[str, None] = {}
        self._batches: dict[int, Batches] = {}

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """All records, in the order of steps; a file may come to several, one of them derived."""
        found = {}
        recorded = {type for type, _ in self._files.values()}
        for name, (type, where) in self._files.items():
            record_types = DERIVED.get(type, {type: ""})
            if type == "forward_data" and (recorded & {"is_loss_debug", "datums"} or where.step < 0):
                record_types = {type: ""}
            for record_type, suffix in record_types.items():
                found[name + suffix] = (record_type, where)
        return dict(sorted(found.items(), key=lambda item: (item[1][1].step, item[0])))

    @cached_property
    def precision(self) -> str | None:
        """Dtype of a parameter, else that of an entropy, which is computed from the logits as they are."""
        for type, key in (("param", "param"), ("gradient", "gradient"), ("forward_data", "entropy")):
            for name, (found, _) in self._files.items():
                if found == type:
                    payload = self._payload(name)
                    return dtype_name(tensor(payload[key], key).dtype) if key in payload else None
        return None

    @property
    def notes(self) -> Sequence[str]:
        """Notes on unknown facts of the records read so far."""
        notes = (note for _, batches in sorted(self._batches.items()) for note in batches.notes)
        return list(dict.fromkeys([*self._notes, *notes]))

    def raw(self, type: str, step: int) -> Payload | None:
        """Return the content of the first file of a type and step as it is; None if there is none."""
        return self._first(type, step)

    def verify(self, name: str, span: Span | None = None) -> None:
        """Read a file again: there is no hash that it could be compared with."""
        self._payload(name.partition("#")[0])

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True if the writer of this dump could have recorded a type, or a tensor of it."""
        if tensor is None:
            return any(WRITES[mode].get(record_type) for mode in self.modes)
        return any(tensor in WRITES[mode].get(record_type, ()) for mode in self.modes)

    def read(self, name: str) -> Record:
        """Read one record.

        Raises:
            DumpError: if its file is missing, damaged, holds code, or is not what its folder says.
        """
        record_type, where = self.entries[name]
        file = name.partition("#")[0]
        type = self._files[file][0]
        try:
            record = self._record(type, record_type, where, self._payload(file))
        except Damage as damage:
            raise DumpError(
                f"{self.folder / file} is not a record of NexRL: {damage}; {damage.remedy}"
            ) from None
        except DumpError as error:
            raise DumpError(f"{self.folder / file} is not a record of NexRL ({error})") from None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise DumpError(
                f"{self.folder / file} is not a record of NexRL ({type} with {error}); {CUT_OFF}"
            ) from None
        return replace(record, step=where.step, rank=where.rank, micro=where.micro)

    def _record(self, type: str, record_type: str, where: Coordinates, payload: Payload) -> Record:
        if record_type == "trajectory":
            return _trajectories(payload, where.step)
        if type in ("param", "gradient"):
            return self._parameter(type, where, payload)
        return self.batches(where.step).record(type, record_type, where, payload)

    def batches(self, step: int) -> Batches:
        """Return the batches of a step, placed by their rows."""
        if step not in self._batches:
            found = Batches(
                step,
                tuple(self._rollouts(step)),
                {
                    (where.rank or 0, where.micro or 0): Batch.of(
                        self._payload(name), name, self._inputs(where)
                    )
                    for name, (type, where) in self._files.items()
                    if type == "forward_data" and where.step == step
                },
                self._first("old_log_probs", step),
            )
            self._batches[step] = found
        return self._batches[step]

    def _inputs(self, at: Coordinates) -> Payload | None:
        """Return what the model read at a place, if that was recorded."""
        names = (name for name, (type, where) in self._raw.items() if (type, where) == ("batch_inputs", at))
        name = next(names, None)
        return None if name is None else self._payload(name)

    def _rollouts(self, step: int) -> Iterator[Record]:
        """Yield the rollouts of a step; those written before the step is known belong to any step."""
        for name, (type, where) in self._files.items():
            if type in ("trajectory", "prepared_trajectories") and (step == BEFORE or where.step == step):
                yield _trajectories(self._payload(name), where.step)
                if step != BEFORE:
                    return

    def _first(self, type: str, step: int) -> Payload | None:
        known = {**self._files, **self._raw}
        names = (name for name, (found, where) in known.items() if found == type and where.step == step)
        name = next(names, None)
        return None if name is None else self._payload(name)

    def _parameter(self, type: str, where: Coordinates, payload: Payload) -> Record:
        """Return the one parameter that a file holds."""
        ranks = {
            place.rank for found, place in self._files.values() if found == type and place.step == where.step
        }
        self._notes[f"{type} holds the first parameter only that matched target_param_pattern"] = None
        meta: dict[str, Any] = {}
        if type == "gradient":
            meta["rank_local"] = (
                "NexRL records the part of the gradient that lies on a rank, after the first microbatch of a step, so "
                "it is not the gradient of the step"
            )
        elif len(ranks) > 1:
            meta["rank_local"] = "NexRL does not say which part of a parameter lies on a rank"
        name = str(payload["param_name"])
        return Record.of(type, where, {name: tensor(payload[type], name)}, meta)

    def _payload(self, name: str) -> Payload:
        return read_payload(self.folder / name)


def is_nexrl(folder: Location) -> bool:
    """Return True if a folder has sub-folders of NexRL with records of its format."""
    if (folder / INDEX).is_file():  # of a service
        return False
    first = next(_files(folder), None)
    return first is not None and not is_own(folder / first[0])


READER = Reader(NexrlDump.system, is_nexrl, NexrlDump)


def _files(folder: Location) -> Iterator[tuple[str, tuple[str, Coordinates]]]:
    """Yield the relative name, type and place of each file."""
    for below in children(folder):
        if below.name not in FOLDERS | RAW:
            continue
        for path in children(below):
            where = parse_stem(path.stem) if path.suffix in SUFFIXES else None
            if where is not None:
                yield f"{below.name}/{path.name}", (below.name, where)


def _trajectories(payload: Payload, step: int) -> Record:
    """Return the rollouts of a file; a rollout without ids is identified by its number."""
    items = payload["trajectories"]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Damage("its trajectories are not a list of dicts")
    named = []
    for index, item in enumerate(items):
        fields = dict(item.get("extra_fields") or {})
        if fields.get("group_id") is None and fields.get("uid") is None:
            fields["group_id"] = f"rollout {index}"
        fields.setdefault("run_id", 0)
        kept = {key: item[key] for key in ("tokens", "loss_mask", "reward", "is_val") if key in item}
        named.append({**kept, "extra_fields": fields})
    return foreign_trajectories({"trajectories": named}, step)


class Mode(StrEnum):
    """Writer of a dump: the trainer itself, its client of a remote trainer, or that trainer."""

    SELF_HOSTED = "self-hosted"
    REMOTE_API = "remote API"
    WEAVER = "weaver"


MODES: Mapping[Mode, frozenset[str]] = {
    Mode.SELF_HOSTED: frozenset({"trajectory", "old_log_probs"}),
    Mode.REMOTE_API: frozenset({"prepared_trajectories", "datums", "training_metrics"}),
    Mode.WEAVER: frozenset({"is_loss_debug", "batch_inputs"}),
}
"""Folders that only this mode writes into; without any of them a dump is taken as self-hosted."""

FOLDERS = frozenset(
    {
        *("trajectory", "prepared_trajectories", "datums", "old_log_probs", "forward_data", "loss"),
        *("is_loss_debug", "param", "gradient"),
    }
)
"""Folders whose files can be compared."""

RAW = frozenset({"training_metrics", "batch_inputs"})
"""Folders of files without a comparable counterpart: metrics of a step, and inputs, which tell the tokens of rows."""

DERIVED: Mapping[str, Mapping[str, str]] = {
    "prepared_trajectories": {"trajectory": ""},
    "datums": {"batch_inputs": "", "is_loss_debug": "#is_loss_debug"},
    "forward_data": {"forward_data": "", "is_loss_debug": "#is_loss_debug"},
}
"""Type of a file -> the record types of its content, and the suffix of its name for each."""

_FORWARD = frozenset({"log_probs", "entropy", "response_mask", "input_ids"})
_LOSS = frozenset({"loss", "pg_loss", "entropy_loss"})
_ROLLOUTS = frozenset({"tokens", "loss_mask", "reward", "is_val", "log_probs"})

WRITES: Mapping[Mode, Mapping[str, frozenset[str]]] = {
    Mode.SELF_HOSTED: {
        "trajectory": _ROLLOUTS,
        "old_log_probs": frozenset({"old_log_probs"}),
        "forward_data": _FORWARD,
        "loss": _LOSS,
    },
    Mode.REMOTE_API: {
        "trajectory": _ROLLOUTS,
        "batch_inputs": frozenset({"input_ids", "response_mask"}),
        "is_loss_debug": frozenset({"old_log_probs", "advantages", "effective_valid"}),
    },
    Mode.WEAVER: {
        "forward_data": _FORWARD - {"input_ids"},
        "loss": _LOSS,
        "is_loss_debug": frozenset(
            {
                *("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss"),
                *("effective_valid", "loss"),
            }
        ),
    },
}
"""Record types and tensors that a mode can write; parameters are written on request."""
