"""Texts of files and programs as they may be printed: nothing in them acts on a terminal, or hides or reorders letters.

A name in a dump is written by anybody. Control characters move the cursor and change the title of a window,
directional ones show letters in another order than they stand in, invisible ones make two names look the same, and lone
surrogates cannot be encoded at all. All of them are shown as their escape sequences.
"""

from __future__ import annotations

import re
from typing import Any

_ACTING = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but for the tab and the end of a line
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # directions, invisible ones
    "\u2028\u2029"  # ends of lines that are none in a file
    "\ud800-\udfff"  # lone surrogates
    "\U000e0000-\U000e007f"  # tags
    "]"
)


def printable(text: str) -> str:
    """Return a text with what acts on a terminal, is invisible or cannot be encoded as escape sequences.

    Ends of lines and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return _ACTING.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def printable_tree(value: Any) -> Any:
    """Return a tree of dicts, lists and tuples whose texts, keys too, are `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(key): printable_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [printable_tree(item) for item in value]
    return value


def encodable(value: Any) -> Any:
    """Return a tree of dicts, lists and tuples whose texts, keys too, can be encoded: lone surrogates are escaped."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value))
    return value


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text that may hold anything, `printable`."""
    import click

    click.echo(printable(str(text)), err=err, nl=nl)


def hint_at(old: str, *new: str) -> None:
    """Print the new spelling of a command to stderr, where no program reads the output."""
    instead = " or ".join(f"'{command}'" for command in new)
    echo(f"hint: 'regress {old}' will go with the next release; say {instead}", err=True)
