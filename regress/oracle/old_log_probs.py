"""Log-probs before the first update of a rollout: computed where the weights are known, and never just believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.dump.taps import tap
from regress.engine.causal_lm_policy import LocalPolicy
from regress.errors import OracleError
from regress.layout import SampleKey, Segment, TokenLayout
from regress.oracle.observed_updates import OLD, Observed, Recorded
from regress.oracle.recorded_inputs import Known

PASSES = ("old_log_probs", "ref_log_probs")
"""Record types of passes without gradients."""


@dataclass
class OldPolicy:
    """Denominators of the ratios of each update.

    Attributes:
        given: the dump of the trainer.
        rule: ``algorithm.old_log_probs``.
        rounding: tolerance of a log-prob, relative to the largest.
        earlier: returns the policy as it was before an earlier update; None where nothing tells its weights.
        notes: what was taken from the dump itself, or follows from it; a sentence each.
        computed: place of the first update on a rollout -> log-probs of the loss tokens of each of its samples.
        later: updates on a rollout that an earlier one trained on.
        alone: updates on a rollout of their own, as far as anything tells it.
    """

    given: Recorded
    rule: str
    rounding: float
    earlier: Callable[[Place], LocalPolicy | None]
    notes: dict[str, None]
    computed: dict[Place, list[Array]] = field(default_factory=dict)
    later: list[Observed] = field(default_factory=list)
    alone: list[Observed] = field(default_factory=list)

    def log_probs(self, known: Known) -> Tensor | None:
        """Return the denominators of the ratios, ``[K]``; None where every ratio is 1.

        Raises:
            OracleError: if nothing tells them.
        """
        update = known.update
        tapped = update.at_loss(*OLD, mask=known.mask)
        if self.rule == "current":
            return None
        if self.rule == "sampler":
            return self._sampled(known, tapped)
        if update.began == update.at:
            self.computed[update.at] = known.computed()
        else:
            self.later.append(update)
        if update.began not in self.computed:
            return self._believed(known, tapped)
        true = known.chosen(self.computed[update.began])
        if tapped is None and update.began == update.at != self.given.places[0]:
            self.alone.append(update)
        if tapped is None or self._alike(known, tapped, true):
            return true
        return self._of_earlier(known, tapped) if update.began == update.at else true

    def _sampled(self, known: Known, tapped: Array | None) -> Tensor:
        if tapped is None or all(sample.log_probs is not None for sample in known.update.samples):
            return known.sampler_log_probs()
        self.notes["old log-probs, those of the sampler, were taken as they were tapped"] = None
        return torch.from_numpy(tapped)

    def _believed(self, known: Known, tapped: Array | None) -> Tensor:
        """Return tapped values of a policy whose weights are unknown."""
        update = known.update
        if tapped is None:
            raise OracleError(f"""{update.at.words} trains on the rollout of {update.began.words}, whose log-probs
            before that update are unknown; record them with classify=, or tap old_log_probs""")
        self.notes[
            f"old log-probs of {update.at.words} were taken as they were recorded: the weights before "
            f"{update.began.words}, the first update on its rollout, are unknown"
        ] = None
        return torch.from_numpy(tapped)

    def _of_earlier(self, known: Known, tapped: Array) -> Tensor:
        """Return log-probs of the earlier weights that tapped ones are those of, else of the weights as they are.

        A part of a rollout that is tapped with the update on it looks like a rollout of its own.
        """
        update = known.update
        places = self.given.places
        for place in reversed(places[: places.index(update.at)]):
            policy = self.earlier(place)
            found = None if policy is None else replace(known, policy=policy).computed()
            if found is not None and self._alike(known, tapped, known.chosen(found)):
                self.computed[update.at] = found
                self.notes[
                    f"{update.at.words} trains on samples of the rollout of {place.words}: the tapped old log-probs "
                    "are those of the weights before that update"
                ] = None
                return known.chosen(found)
        self.notes[
            f"the tapped old log-probs of {update.at.words} are those of no recorded weights, and were judged by the "
            "weights before it; give --set algorithm.old_log_probs=sampler for a trainer that takes the sampler's"
        ] = None
        return known.chosen(self.computed[update.at])

    def _alike(self, known: Known, tapped: Array, true: Tensor) -> bool:
        error = np.abs(tapped - true.numpy()).max(initial=0.0)
        return bool(error <= 2 * self.rounding * float(true.abs().max()) if len(tapped) else True)

    def taken(self) -> Iterator[str]:
        """Yield what was taken for the rollout of an update, a sentence each."""
        if self.later:
            yield (
                f"{_listed(self.later)} on the rollout of an earlier one, {self.later[0].began.words}, whose "
                "trajectories are the same: old log-probs are those before that; give --set "
                "algorithm.old_log_probs=current for a trainer whose ratio is always 1"
            )
        if self.alone:
            yield (
                f"{_listed(self.alone)} on a rollout of its own, as no other update has its trajectories and no old "
                "log-probs were recorded: those are of the weights before it; if an earlier update trains on the same "
                "rollout, tap all its trajectories at each of its updates, or tap old_log_probs"
            )

    def tap_passes(self, known: Known) -> None:
        """Record what the trainer's passes without gradients should hold at the loss tokens of the rollout.

        Other tokens, and a reference, have the recorded values: they are judged where the loss takes them.
        """
        for kind in PASSES:
            runs = [run for part in self.given.passes(kind, known.update.at) for run in part]
            runs = [*{(key, at.start): (key, at, values) for key, at, values in runs}.values()]
            if not runs:
                continue
            rows = np.zeros((len(runs), max(values.size for _, _, values in runs)))
            for row, (key, at, values) in enumerate(runs):
                true = self._true(known, key) if kind == "old_log_probs" else None
                own = values if true is None else np.where(np.isnan(true[at]), values, true[at])
                rows[row, : values.size] = own
            keys = [key for key, _, _ in runs]
            tap(kind, {kind: rows}, layout=_layout(runs, rows.shape[1]), meta={"samples": keys})

    def _true(self, known: Known, key: SampleKey) -> Array | None:
        """Return true log-probs of a sample of the rollout, ``[S]``, NaN but at loss tokens; None for any other."""
        computed = self.computed.get(known.update.began)
        tokens = self.given.contents.get(key)
        for sample, values in zip(known.rollout, computed or (), strict=False):
            if tuple(sample.tokens) == tokens:
                out = np.full(len(sample.tokens), np.nan)
                out[np.asarray(known.mask(sample), bool)] = values
                return out
        return None


def _listed(updates: Sequence[Observed]) -> str:
    more = f" (and each of {len(updates) - 1} others)" if len(updates) > 1 else ""
    return f"{updates[0].at.words}{more} was taken to train"


def _layout(runs: Sequence[tuple[SampleKey, slice, Array]], width: int) -> TokenLayout:
    """Return the layout of one run of tokens in each row."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(key for key, _, _ in runs))}
    segments = [Segment(numbers[key], at.start, at.stop, row, 0) for row, (key, at, _) in enumerate(runs)]
    return TokenLayout((len(runs), width), tuple(segments))
