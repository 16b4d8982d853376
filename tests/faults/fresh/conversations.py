"""Faults of the sampler in conversations: what it is told between turns, and what it holds against old tokens."""

from __future__ import annotations

from typing import Any

from transformers import RepetitionPenaltyLogitsProcessor

from regress.engine.dialogue import Conversation
from tests.faults.fault import fault
from tests.faults.fresh.sampling import warped
from tests.faults.patch import Patch

PENALTY = 1.2


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="generation_config.json: a repetition penalty that nobody asked for",
    rules=("sampler-distribution",),
)
def penalty_of_repetition_left_on(patch: Patch) -> None:
    """Tokens that were read or written before are less probable, as the checkpoint of a chat model asks for."""
    warped(patch, lambda _, found: [RepetitionPenaltyLogitsProcessor(PENALTY), *found])


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("rollout-dp2-batch5",),
    first="trajectory",
    steps=None,
    source="add_generation_prompt=False for the turn of a tool",
    rules=("rollouts-given",),  # names other answers of the environment to the same completions
)
def generation_prompt_missing_behind_a_reply(patch: Patch) -> None:
    """Behind the environment's reply the token is missing that asks the policy to go on."""
    right: Any = Conversation.answer
    patch.setattr(Conversation, "answer", lambda self, said, reply: right(self, said, reply[:-1]))
