"""Facts beside the golden values of an update that hypotheses are made of, as far as a source knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import Floats, Truth
from regress.compare.dumps.adamw_settings import Adam
from regress.layout import SampleKey

OwnGradients = Callable[[str], Floats | None]
"""Function of a parameter's name that returns the gradient of each sample's share of the loss, ``[N, ...]``."""


@dataclass(frozen=True)
class OwnMicrobatch:
    """Samples of a microbatch of the actual run.

    Attributes:
        number: of the microbatch on its ranks.
        ranks: those that compute it, each of them a part or all of it.
        samples: their indices in the update.
    """

    number: int
    ranks: tuple[int, ...]
    samples: NDArray[np.int64]


@dataclass(frozen=True)
class RelatedValues:
    """Facts of an update besides its own values.

    Attributes:
        rewards: reward of each sample of the step, in canonical order.
        counts: loss tokens of each sample of the update.
        sampler: ``[frame.size]`` log-probs that the sampler reported, NaN where it reported none.
        gradients: the samples' own gradients, in float64.
        microbatches: microbatches of the actual run, by name.
        before, after: golden values of the update before it, and after it; empty for the first, and for the last.
        trusted: True for golden values that are right by definition, as those of a dump are not.
        sampled: asks for the tokens ``[frame.size]`` that the rollouts hold to be sampled; None where they do not tell.
        optimizer: asks for the settings that records of a parameter's state tell, and for its weight decay.
        first: asks whether the update is known to be the first on its rollouts, whose old log-probs are its own.
    """

    rewards: Mapping[SampleKey, float] = field(default_factory=dict)
    counts: Mapping[SampleKey, int] = field(default_factory=dict)
    sampler: Floats | None = None
    gradients: OwnGradients | None = None
    microbatches: Mapping[str, OwnMicrobatch] = field(default_factory=dict)
    before: Truth = field(default_factory=dict)
    after: Truth = field(default_factory=dict)
    trusted: bool = True
    sampled: Callable[[], NDArray[np.bool_] | None] = lambda: None
    first: Callable[[], bool] = lambda: False
    optimizer: Callable[[str], tuple[Adam | None, float | None]] = lambda _: (None, None)

    def of_tokens(self, tokens: NDArray[np.int64]) -> RelatedValues:
        """Return what is known of some tokens."""

        def sampled() -> NDArray[np.bool_] | None:
            every = self.sampled()
            return None if every is None else every[tokens]

        return replace(self, sampler=None if self.sampler is None else self.sampler[tokens], sampled=sampled)


NOTHING = RelatedValues()
