"""Faults of the sampler in one process and on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from regress.dump.trajectory import Trajectory
from regress.engine import sampling
from regress.engine.dialogue import Conversation
from regress.engine.rollout import SharedRollouts
from regress.engine.sampling import Completion, LogProbRecorder, SamplingParams
from tests.faults.fault import fault
from tests.faults.patch import Patch


def warped(patch: Patch, change: Any) -> None:
    """Change the list of processors that turn logits into the distribution that is drawn from."""
    right: Any = sampling._warpers
    patch.setattr(sampling, "_warpers", lambda params: change(params, right(params)))


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="vllm#42259: the order of temperature and nucleus",
    rules=("sampler-distribution",),  # names temperature and top-p
)
def nucleus_before_the_temperature(patch: Patch) -> None:
    """The nucleus is chosen of plain probabilities, and the temperature is applied after it."""
    warped(
        patch,
        lambda _, found: sorted(found, key=lambda one: type(one).__name__ == "TemperatureLogitsWarper"),
    )


class _Narrow(LogitsProcessor):
    """Keeps the tokens before the one that crosses the mass of the nucleus, and the most probable one."""

    def __init__(self, mass: float) -> None:
        self._mass = mass

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ordered, index = scores.sort(dim=-1, descending=True)
        outside = ordered.softmax(-1).cumsum(-1) > self._mass
        outside[:, 0] = False
        return scores.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), -torch.inf)


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="a nucleus without the token that completes it",
    rules=("sampler-distribution",),  # names top-p
)
def nucleus_without_its_last_token(patch: Patch) -> None:
    """The token that lifts the probability of the nucleus above its mass is left out."""

    def change(params: SamplingParams, found: list[Any]) -> list[Any]:
        return found if params.greedy or params.top_p >= 1.0 else [*found[:-1], _Narrow(params.top_p)]

    warped(patch, change)


class _Noted(LogitsProcessor):
    """Keeps the scores that pass."""

    def __init__(self) -> None:
        self.scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores = scores
        return scores


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="sampler_log_probs",
    steps=None,
    source="TRL#6789, vllm#42259",
    rules=("sampler-log-probs",),
)
def sampler_log_probs_before_the_nucleus(patch: Patch) -> None:
    """Log-probs are those of the tempered logits before tokens were excluded."""
    known: list[_Noted] = []
    call: Any = LogProbRecorder.__call__

    def change(_: SamplingParams, found: list[Any]) -> list[Any]:
        known.append(_Noted())
        after = next((n + 1 for n, one in enumerate(found) if "Temperature" in type(one).__name__), 0)
        return [*found[:after], known[-1], *found[after:]]

    def recorded(self: LogProbRecorder, input_ids: Tensor, scores: Tensor) -> Tensor:
        before = known[-1].scores
        assert before is not None
        call(self, input_ids, before)
        return scores

    warped(patch, change)
    patch.setattr(LogProbRecorder, "__call__", recorded)


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="TRL#5144: a limit of each turn",
    rules=("sampler-end",),  # names the limit of a turn and of a conversation
)
def limit_of_each_turn(patch: Patch) -> None:
    """Every turn of a conversation may be as long as the whole of it."""
    patch.setattr(Conversation, "room", property(lambda self: self.limit))


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="a reason of truncation that is not passed on",
    rules=("rollout-records",),  # names the reason of the end
)
def truncated_told_as_ended(patch: Patch) -> None:
    """Completions that were cut off are told to have ended by themselves."""
    right: Any = sampling._completion

    def wrong(*args: Any) -> Completion:
        found = right(*args)
        return Completion(found.tokens, found.log_probs, "stop")

    patch.setattr(sampling, "_completion", wrong)


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("rollout-dp2-batch5",),
    first="trajectory",
    steps=None,
    source="verl#2185: an order of ranks that is not undone",
    rules=("rollout-records",),  # names the order of trajectories
)
def prompts_in_the_order_of_ranks(patch: Patch) -> None:
    """Trajectories of all ranks are laid end to end, rank after rank, and prompts were dealt out in turn."""

    def wrong(self: Any, step: int, prompts: Sequence[Any], split: str) -> list[Trajectory]:
        self._policy.whole_model()
        own = prompts[self._world.rank :: self._world.plan.mesh.world_size]
        found = self._worker.rollout(step, own, split) if own else []
        return [one for part in self._world.gather(found) for one in part]

    patch.setattr(SharedRollouts, "rollout", wrong)


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="miles PR#1827: masks of replies that are one token short",
    rules=("rollout-mask",),  # names the mask that the sampler writes, and answers of the environment
)
def first_token_of_a_reply_trained(patch: Patch) -> None:
    """The first token that the environment writes is trained on."""
    right: Any = Conversation.answer

    def wrong(self: Conversation, said: str | None, reply: list[int]) -> None:
        before = len(self.mask)
        right(self, said, reply)
        if len(self.mask) > before:
            self.mask[before] = 1

    patch.setattr(Conversation, "answer", wrong)
