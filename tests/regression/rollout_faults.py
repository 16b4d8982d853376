"""Bugs of the sampler, in the manner of `metric_faults`; a module of its own, because ranks import it."""

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


def _params(patch: Any, **values: Any) -> None:
    right = sampling._warpers
    patch.setattr(sampling, "_warpers", lambda params: right(replace(params, **values)))


def temperature_ignored(patch: Any) -> None:
    """Draw at temperature 1."""
    _params(patch, temperature=1.0)


def no_top_p(patch: Any) -> None:
    """Draw from all tokens, however improbable."""
    _params(patch, top_p=1.0)


def no_top_k(patch: Any) -> None:
    """Draw from more than the most probable tokens."""
    _params(patch, top_k=0)


def same_stream_in_every_turn(patch: Any) -> None:
    """Leave the turn out of the stream's key."""
    patch.setattr(rollout, "generator", lambda *key: generator(*key[:-1]))


def same_stream_for_a_group(patch: Any) -> None:
    """Leave the run out of the stream's key."""
    patch.setattr(rollout, "generator", lambda *key: generator(*key[:5], *key[6:]))


def same_stream_in_every_step(patch: Any) -> None:
    """Leave the step out of the stream's key."""
    patch.setattr(rollout, "generator", lambda *key: generator(*key[:2], 0, *key[3:]))


def stream_of_the_batch(patch: Any) -> None:
    """Draw the numbers of all rows from the generator of the first."""
    right = OwnDraws.__init__

    def init(self: OwnDraws, generators: Sequence[Random]) -> None:
        right(self, [generators[0]] * len(generators))

    patch.setattr(OwnDraws, "__init__", init)


def stop_token_dropped(patch: Any) -> None:
    """Leave the end token out of completions."""
    right = sampling._completion

    def completion(tokens: list[int], log_probs: Tensor, params: SamplingParams) -> Completion:
        found = right(tokens, log_probs, params)
        if found.finish_reason == "length" or len(found.tokens) < 2:
            return found
        return Completion(found.tokens[:-1], found.log_probs[:-1], "stop")

    patch.setattr(sampling, "_completion", completion)


def one_token_short(patch: Any) -> None:
    """End a conversation one token before its limit."""
    patch.setattr(Conversation, "room", property(lambda self: self.limit - len(self.after) - 1))


def one_token_long(patch: Any) -> None:
    """End a conversation one token after its limit."""
    patch.setattr(Conversation, "room", property(lambda self: self.limit - len(self.after) + 1))


def reply_in_the_loss(patch: Any) -> None:
    """Train on the tokens of the environment."""
    right = Conversation.answer

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


def log_probs_before_the_temperature(patch: Any) -> None:
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


def log_probs_of_the_next_token(patch: Any) -> None:
    """Record the log-prob of the most probable token."""

    def settle(self: LogProbRecorder, drawn: Tensor) -> None:
        if self._last is not None:
            self._columns.append(self._last.double().log_softmax(-1).max(1).values)
            self._last = None

    patch.setattr(LogProbRecorder, "_settle", settle)


def cache_one_position_off(patch: Any) -> None:
    """Continue after the prompt at one position too far."""
    right = GenerationMixin.prepare_inputs_for_generation

    def prepared(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = right(self, *args, **kwargs)
        ids, positions = found.get("input_ids"), found.get("position_ids")
        assert ids is not None
        assert positions is not None
        return {**found, "position_ids": positions + 1} if ids.shape[1] == 1 else found

    patch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepared)


def padding_visible(patch: Any) -> None:
    """Let prompts see the padding before them."""
    right = GenerationMixin.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        return right(self, *args, **{**kwargs, "attention_mask": torch.ones_like(mask)})

    patch.setattr(GenerationMixin, "generate", generate)


def greedy_is_drawn(patch: Any) -> None:
    """Draw the completions of evaluations."""
    right = SampledRollouts.rollout

    def drawn(self: SampledRollouts, step: int, prompts: Any, split: str) -> Any:
        params, seed = self._of_split[VAL]
        self._of_split[VAL] = (replace(params, greedy=False), seed)
        return right(self, step, prompts, split)

    patch.setattr(SampledRollouts, "rollout", drawn)


# of ranks


def stream_of_the_rank(patch: Any) -> None:
    """Let the rank decide what is drawn."""
    patch.setattr(rollout, "generator", lambda *key: generator(dist.get_rank(), *key))


def stream_by_own_number(patch: Any) -> None:
    """Count the groups of each rank from 0, so that ranks share streams."""
    seen: dict[object, int] = {}

    def own(*key: object) -> Random:
        number = seen.setdefault(key[4], len(seen))
        return generator(*key[:4], number, *key[5:])

    patch.setattr(rollout, "generator", own)


def weights_of_the_first_step(patch: Any) -> None:
    """Put the whole model together only once."""
    right = ParallelPolicy.whole_model
    done: list[Any] = []

    def whole(self: ParallelPolicy) -> Any:
        if not done:
            done.append(right(self))
        return done[0]

    patch.setattr(ParallelPolicy, "whole_model", whole)
