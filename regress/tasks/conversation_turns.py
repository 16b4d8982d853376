"""Conversations as environments and rewards see them: the turns, and the marks that completions are written with.

| mark | meaning |
|---|---|
| ``<tool:NAME>input</tool:NAME>`` (or ``</tool>``) | call of a tool, one a completion, text around it allowed |
| ``<answer>text</answer>`` | final answer |
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TURNS = "turns"
"""Name of the parameter by which an environment or a reward asks for the turns of the conversation."""

_CALL = re.compile(r"<tool:(\w+)>(.*?)</tool(?::(\w+))?>", re.DOTALL)
_OPENED = re.compile(r"<tool:\w+>")
_ANSWER = re.compile(r"\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_MARK = re.compile(r"</?(?:answer|tool:\w+)>")


@dataclass(frozen=True)
class Turn:
    """A completion and the environment's reply to it: None if there is none, or nobody was asked."""

    completion: str
    reply: str | None = None


@dataclass(frozen=True)
class Call:
    """A tool's name and the text it is called with."""

    tool: str
    input: str


def parse_call(completion: str) -> Call | None:
    """Return the one tool call in a completion; None if there is none, more than one, or one that is not closed."""
    found = _CALL.findall(completion)
    if len(found) != 1 or len(_OPENED.findall(completion)) != 1:
        return None
    tool, text, closed = found[0]
    return Call(tool, text.strip()) if closed in ("", tool) else None


def parse_answer(completion: str) -> str | None:
    """Return the text between the answer marks if the completion is exactly that; None otherwise."""
    found = _ANSWER.fullmatch(completion)
    if found is None or _MARK.search(found[1]):
        return None
    return found[1].strip()


def call_text(tool: str, text: str) -> str:
    """Return the completion that calls a tool."""
    return f"<tool:{tool}>{text}</tool:{tool}>"


def answer_text(answer: str) -> str:
    """Return the completion that gives the final answer."""
    return f"<answer>{answer}</answer>"


def marks_in(text: str) -> set[str]:
    """Return the marks in a text, which a tokenizer may hold as one token each."""
    return set(_MARK.findall(text))


def without_marks(text: str) -> str:
    """Return the text with its marks taken out."""
    return _MARK.sub("", text)


def takes_turns(function: Callable[..., Any]) -> bool:
    """Return True if a function has a parameter named ``turns``."""
    try:
        return TURNS in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin does not tell
        return False
