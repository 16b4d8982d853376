"""Tokens of one optimizer update, collected from its records, free of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.dump.coordinates import Place
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, from_record
from regress.errors import CompareError
from regress.explain.update_sources import UpdateSource, chosen
from regress.layout import SampleKey, TokenFrame, TokenLayout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAME_TEMPERATURE = 1e-3
"""Relative difference up to which two temperatures count as one."""
SAME = 1e-6
"""Relative difference up to which two ranks agree on the value of a token."""
TEMPERATURE_ERROR = "token_gradient/temperature_error"
"""Relative error of the temperature that each token's derivatives were solved with, by its microbatch."""
_READ: Mapping[str, tuple[str, ...]] = {
    "token_gradient": ("token_gradient", "entropy_gradient", "token_residual", "recoverable"),
    "forward_data": ("log_probs", "entropy", "response_mask", "input_ids"),
    "is_loss_debug": (
        *("old_log_probs", "ref_log_probs", "advantages", "effective_valid", "kl", "weights"),
        "sampler_weights",
    ),
    "batch_inputs": ("input_ids", "response_mask"),
    "old_log_probs": ("old_log_probs",),
    "ref_log_probs": ("ref_log_probs",),
}
_ALONE = ("old_log_probs", "ref_log_probs")
"""Types of passes without gradients, which are recorded as the forward pass is."""


@dataclass
class UpdateTokens:
    """One update: flat arrays over all recorded tokens of its samples, ``[frame.size]``.

    Attributes:
        frame: the samples, and as many tokens of each as were recorded.
        values: ``record type/tensor`` -> values; NaN where none was recorded.
        block: index of the microbatch (of one data-parallel rank) of each token; -1 where no gradient was recorded.
        blocks: ``(rank, microbatch)`` of each block; ranks that share samples count as their first.
        meta: metadata of the token gradients' records, in order.
        losses: tensors of the loss records, summed over blocks.
        recorded_at: record type -> temperatures that its log-probs and entropies are of, where recorded.
        trajectories: those of the step, in recorded order, matched to the samples; empty if there are none.
        rollout: index of each sample among them, -1 without.
        config: configuration of the run, as the manifest tells it.
    """

    place: Place
    frame: TokenFrame
    values: dict[str, Floats]
    block: Ints
    blocks: tuple[tuple[int, int], ...]
    meta: list[Mapping[str, Any]]
    losses: dict[str, float]
    recorded_at: Mapping[str, set[float]]
    trajectories: list[Trajectory]
    rollout: Ints
    config: Mapping[str, Any]
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def sample(self) -> Ints:
        """Index of the sample of each token."""
        return np.repeat(np.arange(len(self.frame.samples)), self.frame.lengths)

    @property
    def position(self) -> Ints:
        """Position of each token in its sample."""
        return np.arange(self.frame.size) - np.repeat(self.frame.offsets[:-1], self.frame.lengths)

    @property
    def temperatures(self) -> list[float]:
        """Temperatures that the token gradients were solved at, as recorded."""
        found: list[float] = []
        for meta in self.meta:
            several: Any = meta.get("temperatures") or []
            found += [float(value) for value in (meta.get("temperature"), *several) if value is not None]
        return found

    @property
    def temperature(self) -> float | None:
        """Temperature that logits are divided by, found or given; None where microbatches differ, or nothing tells."""
        temperatures = self.temperatures
        if not temperatures or max(temperatures) - min(temperatures) > self.nearby(min(temperatures)):
            return None
        return float(np.median(temperatures))

    @property
    def temperature_errors(self) -> list[float]:
        """Bounds of the errors of temperatures that were found."""
        return [float(e) for meta in self.meta if (e := meta.get("temperature_error")) is not None]

    def nearby(self, temperature: float) -> float:
        """Return the largest distance at which another temperature counts as this one."""
        return SAME_TEMPERATURE * temperature + 2 * max(self.temperature_errors, default=0.0)

    @property
    def fine(self) -> bool:
        """True if the recording says that everything was computed in float32 or better."""
        model, capture = (self.config.get(name) for name in ("model", "capture"))
        if not isinstance(model, dict) or not isinstance(capture, dict):
            return False
        coarse = capture.get("autocast") or capture.get("tf32")
        return model.get("dtype") in ("float32", "float64") and not coarse

    def get(self, *names: str) -> Floats | None:
        """Return the first of some values that were recorded for any token, or None."""
        for name in names:
            values = self.values.get(name)
            if values is not None and not np.isnan(values).all():
                return values
        return None

    def elsewhere(self, type: str) -> float | None:
        """Return a temperature that log-probs of a record type are of, and that is not that of the loss."""
        recorded = self.recorded_at.get(type) or (
            self.recorded_at.get("forward_data") if type in _ALONE else None
        )
        pairs = [(one, used) for one in recorded or () for used in self.temperatures]
        return next((one for one, used in pairs if abs(one - used) > self.nearby(used)), None)

    def of_loss(self, *names: str) -> Floats | None:
        """Return the first of some values that were recorded for any token, at the temperature of the loss."""
        return self.get(*(name for name in names if self.elsewhere(name.partition("/")[0]) is None))


def read_update(
    dump: UpdateSource,
    step: int | None = None,
    update: int | None = None,
    rollouts: Sequence[Trajectory] = (),
    *,
    samples_of: str = "token_gradient",
) -> UpdateTokens:
    """Read one update of a dump; by default the first that has token gradients.

    Args:
        rollouts: those of the step, for a dump that has none.
        samples_of: record type whose samples are read, and which has to be there.

    Raises:
        CompareError: if it has no token gradients, they name no samples, or ranks contradict each other.
    """
    place = chosen(dump, step, update, samples_of)[0]
    types = [*(_READ), "loss"]
    records = [
        dump.read(name)
        for record_type in types
        for name, (type, where) in dump.entries.items()
        if type == record_type and where.step == place.step and where.update in (None, place.update)
    ]
    steps = {where.step for type, where in dump.entries.values() if type == "trajectory"}
    at = max((one for one in steps if one <= (place.step or 0)), default=place.step)
    records += [
        dump.read(name)
        for name, (type, where) in dump.entries.items()
        if type == "trajectory" and where.step == at
    ]
    return _gather(records, place, dump, rollouts, samples_of)


def _gather(
    records: Sequence[Record],
    place: Place,
    dump: UpdateSource,
    rollouts: Sequence[Trajectory],
    samples_of: str,
) -> UpdateTokens:
    gradients = [record for record in records if record.type == samples_of]
    frame = _frame([record for record in records if record.type in _READ], gradients)
    blocks, block_of = _blocks(gradients)
    block = np.full(frame.size, -1, np.int64)
    index = frame.index
    values: dict[str, Floats] = {}
    for record in records:
        if record.type not in _READ:
            continue
        flat, local = indices_of(record, frame, index)
        if record.type == samples_of:
            block[flat] = block_of[record.rank or 0, record.micro or 0]
            solved, error = (_number(record.meta.get(name)) for name in ("temperature", "temperature_error"))
            if solved and error is not None:
                values.setdefault(TEMPERATURE_ERROR, np.full(frame.size, np.nan))[flat] = error / solved
        for name in _READ[record.type]:
            tensor = record.tensors.get(name)
            if tensor is not None and flat.size and tensor.ndim >= 2:
                if int(local.max()) >= tensor.size:
                    raise CompareError(f"""{name} in {record.type} of {record.where.stem} has the shape {tensor.shape},
                    but its token layout names more tokens: record it again""")
                own = np.asarray(tensor).reshape(-1)[local].astype(np.float64)
                _put(
                    values.setdefault(f"{record.type}/{name}", np.full(frame.size, np.nan)), flat, own, record
                )
    if samples_of == "token_gradient":
        _refuse_shapeless(gradients, values)
    recorded = [t for r in records if r.type == "trajectory" for t in from_record(r) if not t.is_val]
    trajectories = recorded or [*rollouts]
    earlier = any(record.type == "trajectory" and record.step != place.step for record in records)
    rollout, note = _match(trajectories, frame, values, named=not earlier)
    return UpdateTokens(
        place,
        frame,
        values,
        block,
        blocks,
        [record.meta for record in records if record.type == "token_gradient"],
        _losses(records, block_of),
        _temperatures(records),
        trajectories if (rollout >= 0).all() and trajectories else [],
        rollout,
        dump.config,
        {"rewards": note} if note else {},
    )


def _temperatures(records: Sequence[Record]) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for record in records:
        temperature = _number(record.meta.get("temperature"))
        if temperature and record.type != "token_gradient":
            found.setdefault(record.type, set()).add(temperature)
    return found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _segments(record: Record) -> list[tuple[SampleKey, int]]:
    """Return the sample and last position of each segment of a record."""
    try:
        layout = TokenLayout.from_json(record.meta["layout"])  # type: ignore[arg-type]  # what is not, raises
        names: Any = record.meta["samples"]
        keys = [(str(group), int(run)) for group, run in names]
    except (KeyError, TypeError, ValueError):
        return []
    return list(zip(keys, (segment.stop for segment in layout.segments), strict=False))


def _refuse_shapeless(gradients: Sequence[Record], values: Mapping[str, Floats]) -> None:
    """Raise `CompareError` where no token gradient lies in a grid of tokens, so that none was read."""
    if "token_gradient/token_gradient" in values:
        return
    record = gradients[0]
    tensor = record.tensors.get("token_gradient")
    shape = "is missing" if tensor is None else f"has the shape {tensor.shape}, not [rows, columns] of tokens"
    raise CompareError(f"token_gradient in {record.type} of {record.where.stem} {shape}: record it again")


def _frame(records: Sequence[Record], gradients: Sequence[Record]) -> TokenFrame:
    """Return a frame of the token gradients' samples, each as long as any record tells."""
    for record in gradients:
        if not _segments(record):
            raise CompareError(f"""{_words(record)} of {record.where.stem} say of no token whose it is: record them with
            a token layout and the samples of its segments""")
    lengths: dict[SampleKey, int] = {}
    for record in gradients:
        lengths |= {key: max(lengths.get(key, 0), stop) for key, stop in _segments(record)}
    for record in records:
        for key, stop in _segments(record):
            if key in lengths:
                lengths[key] = max(lengths[key], stop)
    return TokenFrame(tuple(lengths), tuple(lengths.values()))


def _words(record: Record) -> str:
    return "the token gradients" if record.type == "token_gradient" else f"the values of {record.type}"


def _blocks(
    gradients: Sequence[Record],
) -> tuple[tuple[tuple[int, int], ...], dict[tuple[int, int], int]]:
    """Return the microbatches; ranks that hold (parts of) the same samples count as one."""
    root: dict[int, int] = {}
    owner: dict[tuple[int, SampleKey], int] = {}
    for record in sorted(gradients, key=lambda r: (r.rank or 0, r.micro or 0)):
        rank, micro = record.rank or 0, record.micro or 0
        root.setdefault(rank, rank)
        for key, _ in _segments(record):
            first = owner.setdefault((micro, key), root[rank])
            root[rank] = min(root[rank], first)
    names = sorted({(root[r.rank or 0], r.micro or 0) for r in gradients})
    number = {name: i for i, name in enumerate(names)}
    places = {(r.rank or 0, r.micro or 0): number[root[r.rank or 0], r.micro or 0] for r in gradients}
    return tuple(names), places


def indices_of(record: Record, frame: TokenFrame, index: Mapping[SampleKey, int]) -> tuple[Ints, Ints]:
    """Return paired indices of the flat arrays and of a record's ``[B, T]`` tensors."""
    keys = _segments(record)
    if not keys:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    layout = TokenLayout.from_json(record.meta["layout"])  # type: ignore[arg-type]  # read before
    flat, local = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for (key, _), segment in zip(keys, layout.segments, strict=False):
        if key in index:
            width = np.arange(segment.stop - segment.start)
            flat.append(frame.offsets[index[key]] + segment.start + width)
            local.append(segment.row * layout.shape[1] + segment.col + width)
    return np.concatenate(flat), np.concatenate(local)


def _put(values: Floats, flat: Ints, own: Floats, record: Record) -> None:
    """Write values to their tokens; values that another rank wrote there must be equal."""
    known = values[flat]
    twice = ~np.isnan(known) & ~np.isnan(own)
    if twice.any() and record.type == "token_gradient":
        scale = np.nanmax(np.abs(known[twice]), initial=0.0)
        if np.abs(known[twice] - own[twice]).max() > SAME * scale:
            raise CompareError(f"""{record.type} of {record.where.stem} holds tokens that another record holds with
            other values, so it has no one value: give ranks that repeat each other's samples the same values, and
            samples of their own other keys""")
    values[flat] = np.where(np.isnan(own), known, own)


def _losses(records: Sequence[Record], block_of: Mapping[tuple[int, int], int]) -> dict[str, float]:
    """Add up the shares of the loss; ranks that repeat each other count once."""
    seen: set[int] = set()
    total: dict[str, float] = {}
    for record in records:
        number = block_of.get((record.rank or 0, record.micro or 0))
        if record.type != "loss" or number is None or number in seen:
            continue
        seen.add(number)
        for name, tensor in record.tensors.items():
            if np.asarray(tensor).size == 1:
                total[name] = total.get(name, 0.0) + float(np.asarray(tensor).reshape(()))
    return total


def _match(
    trajectories: Sequence[Trajectory], frame: TokenFrame, values: Mapping[str, Floats], *, named: bool
) -> tuple[Ints, str]:
    """Match trajectories to samples by key, else by tokens; return them, or why there is none.

    Args:
        named: False for trajectories of an earlier step, whose keys may name other samples in this one.
    """
    none = np.full(len(frame.samples), -1, np.int64)
    if not trajectories:
        return none, "the dump has no trajectories with rewards: tap them with tap_trajectories"
    keys = {t.key: i for i, t in enumerate(trajectories)}
    if named and all(key in keys for key in frame.samples):
        return np.array([keys[key] for key in frame.samples]), ""
    ids = values.get("batch_inputs/input_ids", values.get("forward_data/input_ids"))
    if ids is None:
        return (
            none,
            "the samples of trajectories and token gradients have other names: record batch_inputs, too",
        )
    found = none.copy()
    free: dict[tuple[int, ...], list[int]] = {}
    for i, t in enumerate(trajectories):
        free.setdefault(tuple(t.tokens), []).append(i)
    for number, own in _token_ids(frame, ids):
        same = free.get(own, [])
        if len({trajectories[i].reward for i in same}) != 1:
            return (
                none,
                "trajectories and token gradients do not name the same samples, nor hold the same tokens",
            )
        found[number] = same.pop(0) if len(same) > 1 else same[0]
    return found, ""


def _token_ids(frame: TokenFrame, ids: Floats) -> Iterator[tuple[int, tuple[int, ...]]]:
    for number in range(len(frame.samples)):
        own = ids[frame.offsets[number] : frame.offsets[number + 1]]
        yield number, tuple(int(value) for value in own if not np.isnan(value))
