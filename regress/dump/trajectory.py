"""Trajectories: sampled completions with everything a replay needs, and their conversion to records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regress.dump.canonical_json import Json
from regress.dump.coordinates import Coordinates
from regress.dump.numpy_arrays import Array, is_float, to_numpy
from regress.dump.record import Record
from regress.dump.token_provenance import PROVENANCE, Version, runs, unrolled
from regress.errors import DumpError

_TEXTS = ("finish_reason", "task_id", "prompt", "response", "ground_truth", "temperature")


@dataclass(eq=False)
class Trajectory:
    """One sampled completion, keyed by `(group_id, run_id)`.

    Attributes:
        tokens: prompt and completion, unpadded, S token ids.
        loss_mask: S values, 1 where the policy sampled the token and is trained on it, else 0 (prompt, tool).
        reward: the scalar the advantages come from; `rewards` holds the value of each reward function.
        prompt_length: leading tokens that were given, not sampled.
        log_probs: S sampler log-probs in the dtype of the sampler, each at its token's own position and 0.0
            where nothing was sampled; None when the recording has none.
        weight_versions, route_versions: S versions of the weights, and of the routing of experts, that each token
            was sampled with, None where nothing was sampled; None when the recording has none.
        extra: fields of other systems that have no place above, as plain JSON.
    """

    group_id: str
    run_id: int
    tokens: list[int]
    loss_mask: list[int]
    reward: float
    prompt_length: int
    is_val: bool = False
    log_probs: Array | None = None
    finish_reason: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    task_id: str | int | None = None
    prompt: Json = None
    response: str | None = None
    ground_truth: Json = None
    temperature: float | None = None
    extra: dict[str, Json] = field(default_factory=dict)
    weight_versions: list[Version] | None = None
    route_versions: list[Version] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Key of the sample within its step."""
        return self.group_id, self.run_id

    def validate(self) -> None:
        """Raise `DumpError` naming the sample and the broken rule."""
        for rule in self._broken_rules():
            raise DumpError(f"trajectory (group_id {self.group_id!r}, run_id {self.run_id!r}) {rule}")

    def _broken_rules(self) -> Iterable[str]:
        size = len(self.tokens)
        if not isinstance(self.group_id, str) or type(self.run_id) is not int:
            yield "needs a string as group_id and an integer as run_id"
        if set(map(type, self.tokens)) != {int} or min(self.tokens) < 0:
            yield "needs tokens that are non-negative Python integers, and at least one of them"
        if len(self.loss_mask) != size:
            yield f"has {size} tokens but {len(self.loss_mask)} values in loss_mask: give each token one"
        if not set(self.loss_mask) <= {0, 1}:
            yield "has values other than 0 and 1 in loss_mask"
        if type(self.prompt_length) is not int or not 0 <= self.prompt_length <= size:
            yield f"has prompt_length {self.prompt_length!r}, which does not lie within its {size} tokens"
        if any(self.loss_mask[: max(self.prompt_length, 1)]):
            yield "has loss_mask 1 in its prompt or on its first token, which no policy sampled"
        for name, value in {"reward": self.reward, **self.rewards}.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                yield f"has {name} = {value!r}, but rewards are finite numbers: mend the reward function"
        for name in PROVENANCE:
            versions = getattr(self, name)
            if versions is not None and len(versions) != size:
                yield f"has {size} tokens but {len(versions)} {name}: give each token one, None where none was sampled"
        if self.log_probs is not None:
            yield from self._broken_log_probs()

    def _broken_log_probs(self) -> Iterable[str]:
        found = getattr(self.log_probs, "shape", None)
        if not isinstance(self.log_probs, np.ndarray) or not is_float(self.log_probs.dtype):
            yield "has log_probs that are not floating-point array"
        elif found != (len(self.tokens),):
            yield (
                f"has {len(self.tokens)} tokens but log_probs of shape {found}: "
                "there is one log-prob for every token, 0.0 where none was sampled"
            )


def to_record(
    trajectories: Sequence[Trajectory], step: int, meta: Mapping[str, Any] | None = None, **place: Any
) -> Record:
    """Return the record of one step's trajectories: flat arrays over all N samples, texts in `meta["samples"]`.

    `place` may hold the other coordinates. Raises `DumpError` if there is no trajectory, or an invalid one.
    """
    _check_batch(trajectories, step)
    with_log_probs = [t.log_probs for t in trajectories if t.log_probs is not None]
    tensors: dict[str, Array] = {
        "lengths": np.array([len(t.tokens) for t in trajectories], np.int64),
        "tokens": np.array([token for t in trajectories for token in t.tokens], np.int64),
        "loss_mask": np.array([value for t in trajectories for value in t.loss_mask], np.uint8),
        "reward": np.array([t.reward for t in trajectories], np.float64),
        "is_val": np.array([t.is_val for t in trajectories], np.bool_),
        "run_id": np.array([t.run_id for t in trajectories], np.int64),
        "prompt_length": np.array([t.prompt_length for t in trajectories], np.int64),
        "has_log_probs": np.array([t.log_probs is not None for t in trajectories], np.bool_),
    }
    if with_log_probs:
        tensors["log_probs"] = np.concatenate([to_numpy(values, "log_probs") for values in with_log_probs])
    samples = [_texts(trajectory) for trajectory in trajectories]
    return Record.of("trajectory", Coordinates(step, **place), tensors, {**(meta or {}), "samples": samples})


def _check_batch(trajectories: Sequence[Trajectory], step: int) -> None:
    if not trajectories:
        raise DumpError(f"step {step} has no trajectories, but a training step needs some: check the rollout")
    seen = set()
    dtypes = set()
    for trajectory in trajectories:
        trajectory.validate()
        if trajectory.key in seen:
            raise _two_of_one(step, trajectory.group_id, trajectory.run_id)
        seen.add(trajectory.key)
        if trajectory.log_probs is not None:
            dtypes.add(trajectory.log_probs.dtype.name)
    if len(dtypes) > 1:
        raise DumpError(f"step {step} has log_probs of several types ({', '.join(sorted(dtypes))}): use one")


def _texts(trajectory: Trajectory) -> dict[str, Any]:
    texts = {name: getattr(trajectory, name) for name in _TEXTS}
    rewards = {name: float(value) for name, value in trajectory.rewards.items()}
    provenance = {name: runs(v) for name in PROVENANCE if (v := getattr(trajectory, name)) is not None}
    return {
        "group_id": trajectory.group_id,
        **texts,
        "rewards": rewards,
        "extra": trajectory.extra,
        **provenance,
    }


def from_record(record: Record) -> list[Trajectory]:
    """Return the trajectories of one step, in recorded order; raises `DumpError` when the record holds none."""
    try:
        trajectories = _unpack(record)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DumpError(
            f"the {record.type} record of step {record.step} holds no trajectories: {error}"
        ) from None
    _check_batch(trajectories, record.step)
    return trajectories


def _unpack(record: Record) -> list[Trajectory]:
    t = record.tensors
    samples: Any = record.meta["samples"]
    ends = np.cumsum(t["lengths"]).tolist()
    log_prob_ends = np.cumsum(np.where(t["has_log_probs"], t["lengths"], 0)).tolist()
    tokens, loss_mask = t["tokens"].tolist(), t["loss_mask"].tolist()
    trajectories = []
    for i, (sample, end, length) in enumerate(zip(samples, ends, t["lengths"].tolist(), strict=True)):
        fields = dict(sample)
        fields |= {name: unrolled(fields[name]) for name in PROVENANCE if name in fields}
        if t["has_log_probs"][i]:
            fields["log_probs"] = t["log_probs"][log_prob_ends[i] - length : log_prob_ends[i]].copy()
        trajectory = Trajectory(
            run_id=int(t["run_id"][i]),
            tokens=tokens[end - length : end],
            loss_mask=loss_mask[end - length : end],
            reward=float(t["reward"][i]),
            prompt_length=int(t["prompt_length"][i]),
            is_val=bool(t["is_val"][i]),
            **fields,
        )
        trajectories.append(trajectory)
    return trajectories


@dataclass(frozen=True, eq=False)
class Rollout:
    """Parts of a record's arrays for one sample: nothing is copied, and no token becomes an object."""

    key: tuple[str, int]
    tokens: Array
    loss_mask: Array
    reward: float
    is_val: bool
    log_probs: Array | None
    versions: Mapping[str, list[Version]] = field(default_factory=dict)


def rollouts_in(record: Record) -> list[Rollout]:
    """Return the samples of one step, in recorded order, as numbers only.

    Raises `DumpError` when the record holds none, or two of one key.
    """
    try:
        found = [*_parts(record)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DumpError(
            f"the {record.type} record of step {record.step} holds no trajectories: {error}"
        ) from None
    keys = [rollout.key for rollout in found]
    if len({*keys}) < len(keys):
        group, run = next(key for key in keys if keys.count(key) > 1)
        raise _two_of_one(record.step, group, run)
    return found


def joined(tokens: Sequence[int], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories whose tokens, one behind the other, are these; empty unless there are two or more."""
    ways: dict[int, list[Trajectory]] = {0: []}
    for start in range(len(tokens)):
        for one in trajectories if start in ways else ():
            stop = start + len(one.tokens)
            if stop not in ways and list(tokens[start:stop]) == one.tokens:
                ways[stop] = [*ways[start], one]
    found = ways.get(len(tokens), [])
    return found if len(found) > 1 else []


def _parts(record: Record) -> Iterable[Rollout]:
    t = record.tensors
    samples: Any = record.meta["samples"]
    sizes = np.where(t["has_log_probs"], t["lengths"], 0)
    for name, lengths in (("tokens", t["lengths"]), ("loss_mask", t["lengths"]), ("log_probs", sizes)):
        size = t[name].size if name in t else 0
        if size != int(lengths.sum()):
            raise ValueError(f"{name} has {size} values for {int(lengths.sum())} tokens")
    ends, log_prob_ends = np.cumsum(t["lengths"]).tolist(), np.cumsum(sizes).tolist()
    for i, (sample, end, length) in enumerate(zip(samples, ends, t["lengths"].tolist(), strict=True)):
        own = slice(end - length, end)
        log_probs = (
            t["log_probs"][log_prob_ends[i] - length : log_prob_ends[i]] if t["has_log_probs"][i] else None
        )
        yield Rollout(
            (str(sample["group_id"]), int(t["run_id"][i])),
            t["tokens"][own],
            t["loss_mask"][own],
            float(t["reward"][i]),
            bool(t["is_val"][i]),
            log_probs,
            {name: unrolled(sample[name]) for name in PROVENANCE if name in sample},
        )


def _two_of_one(step: int, group_id: str, run_id: int) -> DumpError:
    return DumpError(f"""step {step} has two trajectories with group_id {group_id!r} and run_id {run_id}, but these
    identify a sample: number the runs of a group""")
