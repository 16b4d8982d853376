"""Updates of another trainer's dump: the samples, weights and settings that each of them began with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from regress.capture.forward_pass import content_key
from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import key_of
from regress.compare.alignment.shard_overlap import assembled
from regress.compare.alignment.token_spans import Spans
from regress.dump.coordinates import Place
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, from_record
from regress.errors import OracleError
from regress.explain.update_tokens import Floats, UpdateTokens, read_update
from regress.layout import SampleKey
from regress.oracle.dump_rollouts import Rollout, Rollouts
from regress.oracle.recorded_routing import Experts, recorded_experts
from regress.oracle.update_samples import foreign, loss_mask, token_ids, untapped

ADAMW = ("torch.optim.adamw.AdamW",)
"""Optimizers whose update the engine makes, too."""
OLD = ("is_loss_debug/old_log_probs", "old_log_probs/old_log_probs")
"""Recorded log-probs in the denominators of the ratios, those that were tapped first."""


@dataclass(frozen=True)
class Observed:
    """One optimizer update of a dump.

    Attributes:
        tokens: values by token, free of any layout.
        samples: the samples, each once, by the keys that the records have for them; rewards are 0 where there are no
            rollouts.
        recorded: number in the frame of each sample, of a repeated one the first; None: the frame has other tokens.
        rollout: that which they are from, None where nothing tells it.
        own: index of each sample of the update in the rollout; empty without one.
        tapped: the trajectories of its step, with the first update of that.
        mask_from: source of the loss mask.
    """

    at: Place
    tokens: UpdateTokens
    samples: Sequence[Trajectory]
    rollout: Rollout | None
    own: Sequence[int]
    recorded: Sequence[int] | None
    tapped: Sequence[Trajectory]
    mask_from: str

    @property
    def began(self) -> Place:
        """Place of the first update that trained on these samples, as far as anything tells it."""
        return self.at if self.rollout is None or self.rollout.began is None else self.rollout.began

    @property
    def old(self) -> Floats | None:
        """Log-probs before the first update on these samples as the trainer has them: recorded, else of its forward
        pass.

        Flat over the frame; None where nothing tells them.
        """
        tapped = self.tokens.get(*OLD)
        if tapped is not None or self.rollout is None or self.recorded is None:
            return tapped
        out, bounds = np.full(self.tokens.frame.size, np.nan), self.tokens.frame.offsets
        for index, number in zip(self.own, self.recorded, strict=True):
            known = self.rollout.old.get(index)
            if known is not None:
                out[bounds[number] : bounds[number + 1]] = known
        return None if np.isnan(out).all() else out

    def at_loss(
        self, *names: str, mask: Callable[[Trajectory], Sequence[int]] = lambda sample: sample.loss_mask
    ) -> Floats | None:
        """Return recorded values of the loss tokens, ``[K]``; None unless all of them were recorded."""
        return self.chosen(self.tokens.get(*names), mask)

    def chosen(self, values: Floats | None, mask: Callable[[Trajectory], Sequence[int]]) -> Floats | None:
        """Return the values of the loss tokens, ``[K]``, of values over the frame; None unless all are there."""
        bounds = self.tokens.frame.offsets
        if values is None or self.recorded is None:
            return None
        parts = [
            values[bounds[number] : bounds[number + 1]][np.asarray(mask(sample), bool)]
            for number, sample in zip(self.recorded, self.samples, strict=True)
        ]
        found: Floats = np.concatenate(parts)
        return None if np.isnan(found).any() else found

    def blocks(self) -> list[int] | None:
        """Return the number of the microbatch of each sample; None if its tokens are not those that were recorded."""
        if self.recorded is None:
            return None
        starts = self.tokens.frame.offsets
        return [
            int(self.tokens.block[starts[number] + 1 : starts[number + 1]].max()) for number in self.recorded
        ]


@dataclass(frozen=True)
class Optimizer:
    """AdamW as it made an update: its settings by parameter, and the limit of the gradient's norm."""

    rates: Mapping[str, float]
    settings: Mapping[str, Any]
    max_grad_norm: float | None

    def of(self, key: str, name: str) -> Any:
        """Return a setting of one parameter."""
        value = self.settings.get(key)
        return value.get(name) if isinstance(value, Mapping) else value


@dataclass
class Recorded:
    """Dump of another trainer.

    Attributes:
        notes: what of it cannot be judged, and where a claim comes from, a sentence each.
    """

    dump: DumpReader
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        """Places of its updates, in order."""
        files = self.dump.manifest.files
        return sorted({files[name].where.of_update for name in self.dump.names("forward_data")})

    @property
    def capture(self) -> Mapping[str, Any]:
        """Facts that `regress.record` tells of the run; empty for a dump of another kind."""
        found = self.dump.manifest.provenance.config.get("capture")
        return found if isinstance(found, Mapping) else {}

    def updates(self) -> Iterator[Observed]:
        """Yield the updates in order."""
        rollouts = Rollouts()
        last: int | None = None
        for at in self.places:
            tokens = read_update(self.dump, at.step, at.update, samples_of="forward_data")
            tapped = [] if at.step == last else self._trajectories(at.step)
            rollouts.tap(tapped)
            last = at.step
            yield self._observed(at, tokens, rollouts, tapped)

    def _trajectories(self, step: int | None) -> list[Trajectory]:
        names = self.dump.names("trajectory", step)
        return [t for name in names for t in from_record(self.dump.read(name)) if not t.is_val]

    def _observed(
        self, at: Place, tokens: UpdateTokens, rollouts: Rollouts, tapped: Sequence[Trajectory]
    ) -> Observed:
        ids = token_ids(tokens, at)
        found = rollouts.of(tokens, ids)
        if found is not None:
            rollout, own, recorded = found
            rollout.began = rollout.began or at
            samples = [rollout.samples[index] for index in own]
            if recorded is not None:
                self._note_old(rollout, at, tokens, dict(zip(own, recorded, strict=True)))
                keys = [tokens.frame.samples[number] for number in recorded]
                samples = [
                    replace(one, group_id=key[0], run_id=key[1])
                    for one, key in zip(samples, keys, strict=True)
                ]
            return Observed(at, tokens, samples, rollout, own, recorded, tapped, "the trajectories")
        if rollouts.known:
            raise foreign(at, ids, rollouts)
        mask, source = loss_mask(tokens, at)
        samples = [untapped(tokens, number, own, mask) for number, own in enumerate(ids)]
        return Observed(at, tokens, samples, None, (), range(len(ids)), (), source)

    def _note_old(
        self, rollout: Rollout, at: Place, tokens: UpdateTokens, numbers: Mapping[int, int]
    ) -> None:
        """Keep log-probs from before the first update on a rollout, as its trainer has them."""
        if rollout.began != at:
            return
        own, bounds = tokens.get("forward_data/log_probs"), tokens.frame.offsets
        if own is not None:
            for index, number in numbers.items():
                rollout.old[index] = own[bounds[number] : bounds[number + 1]].copy()
        for key, places, values in (run for part in self.passes("old_log_probs", at) for run in part):
            for index in rollout.numbers(self.contents.get(key, ())):
                size = len(rollout.samples[index].tokens)
                rollout.old.setdefault(index, np.full(size, np.nan))[places] = values

    def passes(self, kind: str, at: Place) -> list[list[tuple[SampleKey, slice, Array]]]:
        """Return sample, positions and log-probs of each run of tokens of passes without gradients, by rank.

        They belong to the first update of their step.
        """
        first = next(place for place in self.places if place.step == at.step)
        records = [self.dump.read(name) for name in self.dump.names(kind, at.step)] if at == first else []
        return [[*Spans.of(one.meta, kind).runs(one.tensors.get(kind))] for one in records]

    @cached_property
    def contents(self) -> Mapping[SampleKey, tuple[int, ...]]:
        """Tokens of samples by their keys, of those that are trained on and of those that only rollouts hold."""
        found: dict[SampleKey, tuple[int, ...]] = {}
        for at in self.places:
            tapped = self._trajectories(at.step)
            found |= {(content_key(np.asarray(one.tokens)), 0): tuple(one.tokens) for one in tapped}
            found |= {one.key: tuple(one.tokens) for one in tapped}
            tokens = read_update(self.dump, at.step, at.update, samples_of="forward_data")
            found |= dict(zip(tokens.frame.samples, token_ids(tokens, at), strict=True))
        return found

    def whole(self, type: str, at: Place) -> dict[str, Array]:
        """Return the full tensors of a record type after an update, put together from all ranks; empty without any."""
        records = self._records(type, at)
        names = dict.fromkeys(name for record in records for name in record.tensors)
        return {
            name: assembled([local_shard(key_of(r), r, name) for r in records if name in r.tensors], name)
            for name in names
        }

    def optimizer(self, at: Place) -> Optimizer | None:
        """Return how the optimizer made an update; None if it is none that the engine has, or was not recorded."""
        metas = [record.meta for record in self._records("optimizer", at)]
        if not metas or any(str(meta.get("optimizer_type")) not in ADAMW for meta in metas):
            return None
        rates: dict[str, float] = {}
        settings: dict[str, Any] = {}
        for meta in metas:
            recorded: Any = meta.get("learning_rates")
            rates |= recorded
            for key in ("betas", "eps", "weight_decay", "amsgrad", "maximize"):
                settings.setdefault(key, meta.get(key))
        if settings["amsgrad"] or settings["maximize"]:
            return None
        limits = {meta.get("max_grad_norm") for meta in metas}
        limit: Any = limits.pop() if len(limits) == 1 else None
        return Optimizer(rates, settings, limit)

    def experts(self, update: Observed) -> Experts:
        """Return the experts that the routers chose for the tokens of an update; empty where none are recorded."""
        ids = token_ids(update.tokens, update.at)
        keys = dict(zip(update.tokens.frame.samples, ids, strict=True))
        return recorded_experts(self._records("activations", update.at), keys)

    def continued(self, at: Place) -> bool:
        """Return True if an optimizer had made updates before this one, as the step counts after it tell."""
        counts = [
            float(np.max(values))
            for record in self._records("optimizer", at)
            for name, values in record.tensors.items()
            if name.endswith("/step") and np.size(values)
        ]
        return max(counts, default=1.0) > 1.0

    def _records(self, type: str, at: Place) -> list[Record]:
        files = self.dump.manifest.files
        names = [n for n in self.dump.names(type, at.step) if files[n].where.update == at.update]
        return [self.dump.read(name) for name in names]


def require_complete(path: str) -> DumpReader:
    """Open a dump.

    Raises:
        DumpError: if it is missing, incomplete or damaged.
        OracleError: if it has no forward passes.
    """
    dump = DumpReader(path)
    if not dump.names("forward_data"):
        raise OracleError(
            f"{path} has no forward_data, so there is no training step to repeat; record one with regress.record"
        )
    return dump
