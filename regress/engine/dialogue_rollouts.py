"""Conversations of several turns: an environment replies, and its tokens are read but never trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from regress.engine.sampling import Completion
from regress.engine.tokenizer import completion_ids, completion_text, turn_ids
from regress.errors import ConfigError, TaskError, reason
from regress.tasks.conversation_turns import Turn
from regress.tasks.dialogue_environments import Environment
from regress.tasks.problem import Problem

ROLES = ("tool", "user")


def environment_texts(environment: Environment, problems: Iterable[Problem]) -> list[str]:
    """Return texts with the characters of an environment's replies, which a tokenizer must know: the alphabet that it
    tells, and its replies to an empty answer, an unfinished one, and the completions of the solution.
    """
    said = [environment(p, text) for p in problems for text in ("", _unfinished(p), *p.solution[:1])]
    return [environment.alphabet, *(text for text in said if text is not None)]


def _unfinished(problem: Problem) -> str:
    return problem.answer[:-1]


class Dialogue:
    """Writer of an environment's turns in a conversation.

    Args:
        environment: function that answers a completion.
        tokenizer: writes its answer as the turn of a tool, or of the user where the chat template knows no tools.
        max_turns: completions in a conversation, at most.
        problem: one of the task's, to try the chat template out.

    Raises:
        ConfigError: if the chat template can write neither after a completion.
    """

    def __init__(
        self,
        environment: Environment,
        tokenizer: PreTrainedTokenizerBase,
        max_turns: int,
        problem: Problem,
    ) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        self.max_turns = max_turns
        self._role = _role(tokenizer, problem)

    def reply(self, problem: Problem, text: str, turns: Sequence[Turn] = ()) -> tuple[str | None, list[int]]:
        """Return the environment's reply to a completion, and the tokens between it and the next one.

        Args:
            turns: the turns before the completion.

        Returns:
            None and no tokens if the environment ends the conversation.

        Raises:
            TaskError: if the environment fails, or says what the tokenizer cannot write.
        """
        said = self._environment(problem, text, turns)
        if said is None:
            return None, []
        ids = turn_ids(self._tokenizer, problem, self._role, said)
        if self._tokenizer.unk_token_id in ids:
            raise TaskError(f"""task.environment: {self._environment.name!r} said {said!r}, which the tokenizer cannot
            write; keep to the characters of the task's prompts and answers, or give a tokenizer.path that knows
            more""")
        return said, ids

    def correction(self, problem: Problem) -> list[int]:
        """Return an unfinished answer and the environment's reply, after which the right answer is due; may
        be empty.
        """
        attempt = completion_ids(self._tokenizer, _unfinished(problem))
        said, reply = self.reply(problem, completion_text(self._tokenizer, attempt))
        return [] if said is None else attempt + reply

    def solution(self, problem: Problem) -> tuple[list[int], list[int]]:
        """Return the tokens after the prompt of a problem's solution, with the environment's replies, and their loss
        mask.

        Raises:
            TaskError: if the environment ends the conversation before the solution does.
        """
        turns: list[Turn] = []
        tokens: list[int] = []
        mask: list[int] = []
        for completion in problem.solution:
            own = completion_ids(self._tokenizer, completion)
            tokens, mask = tokens + own, mask + [1] * len(own)
            if len(turns) + 1 == len(problem.solution):
                break
            said, reply = self.reply(problem, completion, turns)
            if said is None:
                raise TaskError(f"""task.environment: {self._environment.name!r} does not reply to {completion!r}, with
                which the solution of {problem.prompt!r} (task {problem.task!r}) begins; set the environment of the
                task""")
            turns.append(Turn(completion, said))
            tokens, mask = tokens + reply, mask + [0] * len(reply)
        return tokens, mask


def _role(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> str:
    failures = []
    for role in ROLES:
        try:
            said = 2 * problem.answer  # unlike the turn before it
            ids = turn_ids(tokenizer, problem, role, said)
            if said not in tokenizer.decode(ids, clean_up_tokenization_spaces=False):
                raise ValueError("the turn is left out")  # a reason like the template's own
        except Exception as error:  # a chat template is a program and may raise anything
            failures.append(reason(error))
        else:
            return role
    raise ConfigError(f"""tokenizer.path: the chat template can write the turn of neither a tool ({failures[0]}) nor the
    user ({failures[1]}) after a completion, as task.max_turns asks; correct chat_template or set task.max_turns=1""")


@dataclass
class Conversation:
    """One run of a prompt during sampling: everything after the prompt, token by token.

    Attributes:
        prompt: tokens of the prompt.
        limit: maximum tokens after the prompt, of policy and environment together.
        turns: completions and replies so far; the last one is without its reply while `open` is True.
        finish_reason: reason the last completion ended, ``length`` also where the next turn found no room.
        open: True if another completion is due.
    """

    prompt: Sequence[int]
    limit: int
    after: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = "stop"
    open: bool = True

    @property
    def tokens(self) -> list[int]:
        """Prompt and everything after it."""
        return [*self.prompt, *self.after]

    @property
    def text(self) -> str:
        """The last completion."""
        return self.turns[-1].completion

    @property
    def room(self) -> int:
        """Number of tokens that may still follow."""
        return self.limit - len(self.after)

    def complete(self, completion: Completion, text: str) -> None:
        """Append a completion of the policy."""
        self.after += completion.tokens
        self.mask += [1] * len(completion.tokens)
        self.log_probs.append(completion.log_probs)
        self.turns.append(Turn(text))
        self.finish_reason, self.open = completion.finish_reason, False

    def answer(self, said: str | None, reply: list[int]) -> None:
        """Append the environment's reply: another completion follows, unless there is no reply or no room is left."""
        if said is None or self.finish_reason != "stop":
            return
        self.turns[-1] = Turn(self.text, said)
        if len(reply) >= self.room:
            self.finish_reason = "length"
            return
        self.after += reply
        self.mask += [0] * len(reply)
        self.log_probs.append(torch.zeros(len(reply), dtype=self.log_probs[0].dtype))
        self.open = True
