"""Faults of the sampler: what is drawn, where a completion ends, and the log-probs that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor

from regress.engine import dialogue, rollout, sampling
from regress.engine.dialogue import Conversation
from regress.engine.rollout import VAL, SampledRollouts
from regress.engine.sampling import Completion, LogProbRecorder, OwnDraws, SamplingParams
from regress.parallel.policy import ParallelPolicy
from regress.tasks.draws import generator
from tests.faults.fault import fault
from tests.faults.patch import Patch


def sampled_with(patch: Patch, **values: Any) -> None:
    """Draw with other parameters."""
    right: Any = sampling._warpers
    patch.setattr(sampling, "_warpers", lambda params: right(replace(params, **values)))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-distribution",),
    source="vllm#42259",
    variants=("base",),
)
def sampler_without_temperature(patch: Patch) -> None:
    """Draw at temperature 1."""
    sampled_with(patch, temperature=1.0)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-distribution", "sampler-stream"),
    source="TRL#6789",
    variants=("base",),
)
def sampler_without_top_p(patch: Patch) -> None:
    """Draw from all tokens, however improbable."""
    sampled_with(patch, top_p=1.0)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-distribution", "sampler-stream"),
    source="ms-swift PR#8442",
    variants=("base",),
)
def sampler_without_top_k(patch: Patch) -> None:
    """Draw from more than the most probable tokens."""
    sampled_with(patch, top_k=0)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-stream",),
    source="seeds that leave the turn out",
    variants=("base",),
)
def same_stream_in_every_turn(patch: Patch) -> None:
    """Leave the turn out of the stream's key."""
    patch.setattr(rollout, "generator", lambda *key: generator(*key[:-1]))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-stream",),
    source="verl PR#6857, verl-omni#561",
    variants=("base",),
)
def same_stream_for_a_group(patch: Patch) -> None:
    """Leave the run out of the stream's key."""
    patch.setattr(rollout, "generator", lambda *key: generator(*key[:5], *key[6:]))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-stream",),
    source="verl PR#6857",
    variants=("base",),
)
def same_stream_in_every_step(patch: Patch) -> None:
    """Leave the step out of the stream's key."""
    patch.setattr(rollout, "generator", lambda *key: generator(*key[:2], 0, *key[3:]))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-stream",),
    source="verl-omni#561",
    silent={"rollout/rollout-batch1": "each batch has one row"},
    variants=("base",),
)
def stream_of_the_batch(patch: Patch) -> None:
    """Draw the numbers of all rows from the generator of the first."""
    right: Any = OwnDraws.__init__

    def init(self: OwnDraws, generators: Sequence[Random]) -> None:
        right(self, [generators[0]] * len(generators))

    patch.setattr(OwnDraws, "__init__", init)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-end",),
    source="slime#1490",
    variants=("base",),
)
def stop_token_dropped(patch: Patch) -> None:
    """Leave the end token out of completions."""
    right: Any = sampling._completion

    def completion(tokens: list[int], log_probs: Tensor, params: SamplingParams) -> Completion:
        found = right(tokens, log_probs, params)
        if found.finish_reason == "length" or len(found.tokens) < 2:
            return found
        return Completion(found.tokens[:-1], found.log_probs[:-1], "stop")

    patch.setattr(sampling, "_completion", completion)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-end",),
    source="TRL#5144",
    variants=("base",),
)
def completion_one_token_short(patch: Patch) -> None:
    """End a conversation one token before its limit."""
    patch.setattr(Conversation, "room", property(lambda self: self.limit - len(self.after) - 1))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-end",),
    source="TRL#5144",
    variants=("base",),
)
def completion_one_token_long(patch: Patch) -> None:
    """End a conversation one token after its limit."""
    patch.setattr(Conversation, "room", property(lambda self: self.limit - len(self.after) + 1))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("rollout-mask",),
    source="UniRL PR#409, miles PR#1827",
    variants=("base",),
)
def replies_in_the_loss(patch: Patch) -> None:
    """Train on the tokens of the environment."""
    right: Any = Conversation.answer

    def answer(self: Conversation, said: str | None, reply: list[int]) -> None:
        before = len(self.mask)
        right(self, said, reply)
        self.mask[before:] = [1] * (len(self.mask) - before)

    patch.setattr(dialogue.Conversation, "answer", answer)


class _Before(LogitsProcessor):
    def __init__(self) -> None:
        self.scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores = scores
        return scores


@fault(
    category="V",
    cases=("rollout",),
    first="sampler_log_probs",
    steps=None,
    rules=("sampler-log-probs",),
    source="TRL#4159",
    variants=("base",),
)
def sampler_log_probs_before_the_temperature(patch: Patch) -> None:
    """Record log-probs of the model's distribution, not of the one that is drawn from."""
    known: list[_Before] = []
    warpers, call = sampling._warpers, LogProbRecorder.__call__

    def changed(params: SamplingParams) -> list[LogitsProcessor]:
        known.append(_Before())
        return [known[-1], *warpers(params)]

    def recorded(self: LogProbRecorder, input_ids: Tensor, scores: Tensor) -> Tensor:
        before = known[-1].scores
        assert before is not None
        call(self, input_ids, before)
        return scores

    patch.setattr(sampling, "_warpers", changed)
    patch.setattr(LogProbRecorder, "__call__", recorded)


@fault(
    category="V",
    cases=("rollout",),
    first="sampler_log_probs",
    steps=None,
    rules=("sampler-log-probs",),
    source="rllm#816",
    variants=("base",),
)
def sampler_log_probs_of_the_likeliest(patch: Patch) -> None:
    """Record the log-prob of the most probable token."""

    def settle(self: LogProbRecorder, drawn: Tensor) -> None:
        if self._last is not None:
            self._columns.append(self._last.double().log_softmax(-1).max(1).values)
            self._last = None

    patch.setattr(LogProbRecorder, "_settle", settle)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-distribution", "sampler-cache"),
    source="a cache that begins one position late",
    variants=("base",),
)
def cache_one_position_off(patch: Patch) -> None:
    """Continue after the prompt at one position too far."""
    right: Any = GenerationMixin.prepare_inputs_for_generation

    def prepared(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = right(self, *args, **kwargs)
        ids, positions = found.get("input_ids"), found.get("position_ids")
        assert ids is not None
        assert positions is not None
        return {**found, "position_ids": positions + 1} if ids.shape[1] == 1 else found

    patch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepared)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-distribution",),
    source="OpenRLHF#217, TRL#6800",
    variants=("base",),
)
def sampler_sees_padding(patch: Patch) -> None:
    """Let prompts see the padding before them."""
    right: Any = GenerationMixin.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        return right(self, *args, **{**kwargs, "attention_mask": torch.ones_like(mask)})

    patch.setattr(GenerationMixin, "generate", generate)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-greedy", "sampler-distribution"),
    source="do_sample in evaluations",
    variants=("base",),
)
def evaluation_is_drawn(patch: Patch) -> None:
    """Draw the completions of evaluations."""
    right: Any = SampledRollouts.rollout

    def drawn(self: SampledRollouts, step: int, prompts: Any, split: str) -> Any:
        params, seed = self._of_split[VAL]
        self._of_split[VAL] = (replace(params, greedy=False), seed)
        return right(self, step, prompts, split)

    patch.setattr(SampledRollouts, "rollout", drawn)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-stream",),
    source="Megatron PR#5983",
    variants=("rollout-dp2-batch5",),
)
def stream_of_the_rank(patch: Patch) -> None:
    """Let the rank decide what is drawn."""
    patch.setattr(rollout, "generator", lambda *key: generator(dist.get_rank(), *key))


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-stream",),
    source="TRL PR#2824",
    variants=("rollout-dp2-batch5",),
)
def streams_that_ranks_share(patch: Patch) -> None:
    """Count the groups of each rank from 0, so that ranks share streams."""
    seen: dict[object, int] = {}

    def own(*key: object) -> Random:
        number = seen.setdefault(key[4], len(seen))
        return generator(*key[:4], number, *key[5:])

    patch.setattr(rollout, "generator", own)


@fault(
    category="V",
    cases=("rollout",),
    first="trajectory",
    steps=None,
    rules=("sampler-weights",),
    source="verl#7495, unsloth PR#8701, TRL#5312",
    variants=("rollout-tp2",),
)
def sampler_keeps_the_first_weights(patch: Patch) -> None:
    """Put the whole model together only once."""
    right: Any = ParallelPolicy.whole_model
    done: list[Any] = []

    def whole(self: ParallelPolicy) -> Any:
        if not done:
            done.append(right(self))
        return done[0]

    patch.setattr(ParallelPolicy, "whole_model", whole)
