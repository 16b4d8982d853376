"""Environments: the replies to completions within a conversation.

An environment is a plain function of (problem, completion text), or of these and ``turns``, the turns before that
completion. Nothing that a model wrote is evaluated; calls of tools are parsed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regress.errors import TaskError
from regress.tasks import calculator, knowledge_base
from regress.tasks.calculator import ToolError
from regress.tasks.conversation_turns import Turn, parse_call, takes_turns
from regress.tasks.named_functions import named_function
from regress.tasks.problem import WHITESPACE, Problem, is_correct


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


Feedback = Callable[..., str | None]

WRONG = "?"


def checker(problem: Problem, completion: str) -> str | None:
    """Return the completion at the answer's length, with "?" for every wrong character; None if it is correct.

    For the answer "dcba", the reply to "dcx" is "dc??".
    """
    if is_correct(problem, completion):
        return None
    text = completion.strip(WHITESPACE).ljust(len(problem.answer), "\0")
    return "".join(a if a == b else WRONG for a, b in zip(problem.answer, text, strict=False))


_REGISTRY: dict[str, Feedback] = {
    "checker": checker,
    **{name: ToolFeedback(tool) for name, tool in TOOLS.items()},
}


@dataclass(frozen=True)
class Environment:
    """A feedback function under its name, callable like one."""

    name: str
    feedback: Feedback

    @property
    def alphabet(self) -> str:
        """Characters that its replies may hold, as far as it tells."""
        return str(getattr(self.feedback, "alphabet", ""))

    def __call__(self, problem: Problem, completion: str, turns: Sequence[Turn] = ()) -> str | None:
        """Return the reply to a completion, which the given turns precede; None ends the conversation.

        Raises TaskError if the function raises, or returns anything but text or None.
        """
        where = f"environment {self.name!r} on task {problem.task!r} (task_id {problem.task_id})"
        try:
            more = {"turns": tuple(turns)} if takes_turns(self.feedback) else {}
            said: object = self.feedback(problem, completion, **more)
        except (Exception, SystemExit) as error:
            raise TaskError(
                f"{where} raised {type(error).__name__}: {error}; an environment must answer every text, or return None"
            ) from error
        if said is not None and not isinstance(said, str):
            raise TaskError(f"{where} returned {said!r}; an environment must return text or None")
        return said


def make_environment(name: str) -> Environment:
    """Return the environment of `task.environment`: a registered one, or a path "package.module:function".

    Raises TaskError for an unknown name or a path that cannot be imported.
    """
    return Environment(name, named_function("task.environment", "environment", name, _REGISTRY))
