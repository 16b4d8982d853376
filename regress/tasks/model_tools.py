"""Tools that a model may call in a conversation, and the environments that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regress.tasks import calculator, knowledge_base
from regress.tasks.calculator import ToolError
from regress.tasks.conversation_turns import Turn, parse_call
from regress.tasks.problem import Problem


@dataclass(frozen=True)
class Tool:
    """A tool under its names; ``alphabet`` holds every character that it may say."""

    names: tuple[str, ...]
    run: Callable[[str], str]
    alphabet: str


TOOLS = {
    "calculator": Tool(("calculator", "calc"), calculator.calculate, calculator.ALPHABET),
    "search": Tool(("search",), knowledge_base.search, knowledge_base.ALPHABET),
}


@dataclass(frozen=True)
class ToolFeedback:
    """Environment that runs one tool: it replies with the result of a completion's call.

    A completion without a call of this tool, or with one that fails, ends the conversation.
    """

    tool: Tool

    @property
    def alphabet(self) -> str:
        """Every character of its replies."""
        return self.tool.alphabet

    def __call__(self, problem: Problem, completion: str, turns: Sequence[Turn] = ()) -> str | None:
        """Return the result of the call in a completion; None ends the conversation."""
        call = parse_call(completion)
        if call is None or call.tool not in self.tool.names:
            return None
        try:
            return self.tool.run(call.input)
        except ToolError:
            return None
