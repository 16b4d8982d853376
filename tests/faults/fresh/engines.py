"""Faults of the engine that samples: its weights, its cuts, and how long its completions may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, MinPLogitsWarper

from regress.engine import rollout, sampling
from regress.engine.adapters.parameters import trained_parameters
from regress.engine.sampling import Completion, SamplingParams, sample
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.rounding import rounded

SHARE = 0.2
"""Least probability of a token, as a share of that of the most probable one."""


@fault(
    category="P",
    kind="precision",
    fresh=True,
    source="weights that are gathered for the engine in its own dtype",
    cases=("rollout",),
    variants=("rollout-fsdp2-packed",),
    precisions=("float64",),
    first="sampler_log_probs",  # few draws are near a border: the same tokens, with other log-probs
    rules=(
        "sampler-log-probs",  # names other weights
        "sampler-distribution",  # if a token is another one, too
        "sampler",
        "precision",
    ),
)
def weights_gathered_for_the_sampler_in_bfloat16(patch: Patch) -> None:
    """Shards are gathered for the sampler, and what it gets of them is rounded to half precision."""
    right: Any = ParallelPolicy._refresh

    @torch.no_grad()
    def wrong(self: Any) -> None:
        right(self)
        for _, values in trained_parameters(self._whole):
            values.copy_(rounded(values))

    patch.setattr(ParallelPolicy, "_refresh", wrong)


@fault(
    category="V",
    fresh=True,
    source="generation_config.json: min_p of the checkpoint",
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    rules=(
        "sampler-distribution",  # names what is left of the vocabulary
        "sampler-cache",  # names a cut that may leave the first token as it is
        "sampler",
    ),
)
def improbable_tokens_not_drawn(patch: Patch) -> None:
    """Tokens with less than a fifth of the probability of the most probable one are not drawn."""
    right: Any = sampling._warpers

    def wrong(params: SamplingParams) -> list[LogitsProcessor]:
        found: list[LogitsProcessor] = right(params)
        return found if params.greedy else [*found, MinPLogitsWarper(SHARE)]

    patch.setattr(sampling, "_warpers", wrong)


@fault(
    category="V",
    fresh=True,
    source="one max_new_tokens for a batch of conversations: the least that is left of any",
    cases=("rollout",),
    variants=("rollout-dp2-batch5",),
    first="trajectory",
    rules=("sampler-end", "sampler"),  # the first one names the limit of a turn
)
def shortest_room_of_a_batch_for_all(patch: Patch) -> None:
    """No completion of a batch may be longer than the one of its conversations that has least room allows."""

    def wrong(
        model: Any,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        generators: Any,
        limits: Sequence[int],
    ) -> list[Completion]:
        least = [min(limits)] * len(prompts)
        return sample(model, prompts, params, generators=generators, limits=least)

    patch.setattr(rollout, "sample", wrong)
