"""Rows of somebody's own data as problems, with errors that say where the row came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regress.errors import TaskError
from regress.tasks.difficulty_vocabulary import complexity_number, level_number
from regress.tasks.name_suggestions import nearest
from regress.tasks.problem import WHITESPACE, Problem


@dataclass(frozen=True)
class RowFields:
    """Names of the fields of a row; those of level and complexity may be absent from it."""

    prompt: str = "prompt"
    answer: str = "answer"
    level: str = "level"
    complexity: str = "complexity"


def problem_of(row: object, fields: RowFields, task: str, where: str, *, level: int | None = None) -> Problem:
    """Return the problem of a row: a mapping with the fields, a pair (prompt, answer), or a problem.

    Args:
        task: name of the task.
        where: place of the row, for errors.
        level: that of a row which does not tell.

    Raises:
        TaskError: if the row is none of these, or a value is not what its field asks for.
    """
    if isinstance(row, Problem):
        return row
    if isinstance(row, tuple) and len(row) == 2:
        row = {fields.prompt: row[0], fields.answer: row[1]}
    if not isinstance(row, Mapping):
        raise TaskError(
            f"{where} is {_shown(row)}, but a row is an object with the fields {fields.prompt!r} and {fields.answer!r}"
        )
    prompt, tokens = _prompt(_required(row, fields, "prompt", where), where, fields.prompt)
    found_level, complexity = row.get(fields.level), row.get(fields.complexity)
    return Problem(
        task,
        prompt,
        _answer(_required(row, fields, "answer", where), where, fields.answer),
        level if found_level is None else level_number(found_level, f"{where}: {fields.level}"),
        complexity=None
        if complexity is None
        else complexity_number(complexity, f"{where}: {fields.complexity}"),
        tokens=tokens,
    )


def _required(row: Mapping[object, object], fields: RowFields, kind: str, where: str) -> object:
    name = str(getattr(fields, kind))
    if row.get(name) is None:
        known = [" ".join(str(key).split()) for key, value in row.items() if value is not None]
        near = f"; {nearest(name, known)}" if known else ""
        raise TaskError(
            f"{where} has no {name!r}, which task.{kind}_field asks for{near} (set task.{kind}_field to the right name)"
        )
    return row[name]


def _prompt(value: object, where: str, name: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the text of a prompt, and its tokens if it is made of them."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        if all(type(token) is int and token >= 0 for token in value):
            return " ".join(map(str, value)), tuple(value)
        value = _of_chat(value)
    if not isinstance(value, str) or not value.strip(WHITESPACE):
        raise TaskError(
            f"{where}: {name!r} must be text, a list of token ids, or a chat with one message of the user and no other"
        )
    return _writable(value, where, name), None


def _of_chat(messages: Sequence[object]) -> object:
    """Return the text of a conversation of one message by the user; None for any other."""
    (first, *others) = messages
    if others or not isinstance(first, Mapping) or first.get("role") != "user":
        return None
    return first.get("content")


def _answer(value: object, where: str, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip(WHITESPACE):
        raise TaskError(
            f"{where}: {name!r} must be the right answer as text (or a whole number), not {_shown(value)}"
        )
    return _writable(value, where, name).strip(WHITESPACE)


def _writable(text: str, where: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TaskError(
            f"{where}: {name!r} holds half a character (a lone surrogate); correct the text"
        ) from None
    return text


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
