"""The group of a command line whose commands load when they are asked for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from functools import wraps
from importlib.metadata import EntryPoint
from typing import Any

import click

from regress.credential_redaction import redacted_output
from regress.errors import ConfigError, RegressError
from regress.plugins import COMMANDS, HELP, load, registered
from regress.printable_text import echo, hint_at


class Commands(MutableMapping[str, click.Command]):
    """Commands by name, each loaded when it is asked for: registered ones, and those that are added.

    Args:
        old: hidden spelling of a command -> where it is (``module:attribute``), and how it is spelled now.
    """

    def __init__(self, old: Mapping[str, tuple[str, str]]) -> None:
        self._loaded: dict[str, click.Command] = {}
        self._old = old

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> click.Command:
        if name in self._old:
            place, new = self._old[name]
            return renamed(load(EntryPoint(name, place, COMMANDS)), name, new)
        found: click.Command = load(registered(COMMANDS)[name])
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**registered(COMMANDS), **self._old, **self._loaded})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def described(self) -> dict[str, click.Command]:
        """Return commands that only describe themselves; those of this package are not loaded for it."""
        return {name: self._described(name) for name in self if name not in self._old}

    def _described(self, name: str) -> click.Command:
        if name in HELP and name not in self._loaded:
            return click.Command(name, help=HELP[name])
        try:
            return self[name]
        except ConfigError as error:  # of somebody else's package: the others work
            return click.Command(name, help=str(error))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the command by an exception on SIGTERM, so that nothing it made for its time stays behind.

    A rank of a launcher ends at once as before: it may wait for others in a library, and its launcher cleans up.
    """
    here = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class FriendlyGroup(click.Group):
    """Prints the errors of users in one line, without a traceback, and exits with their code; prints no credential."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of the help."""
        if isinstance(self.commands, Commands):
            try:
                described = self.commands.described()
            except ConfigError as error:
                raise click.UsageError(str(error), ctx) from None
            click.Group(commands=described).format_commands(ctx, formatter)
        else:
            super().format_commands(ctx, formatter)

    def main(self, *arguments: Any, **options: Any) -> Any:
        with redacted_output():  # click's own errors, too
            return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _ended_by_sigterm():
                return super().invoke(ctx)
        except RegressError as error:
            if not error.on_all_ranks or os.environ.get("RANK", "0") == "0":
                sentences = " | ".join([str(error), *getattr(error, "__notes__", ())])
                echo(f"error: {' '.join(sentences.splitlines())}", err=True)
            ctx.exit(error.exit_code)


def renamed(command: click.Command, old: str, new: str) -> click.Command:
    """Return the old spelling of a command: it does the same, prints a hint at the new spelling, and is
    hidden in help.

    Args:
        old: words after ``regress``, the last of which is its name.
        new: the command that takes its place, as it is typed.
    """
    again = copy(command)
    again.name, again.hidden, again.deprecated = old.split()[-1], True, False
    run = command.callback
    assert run is not None

    @wraps(run)
    def hinted(*arguments: object, **options: object) -> object:
        hint_at(old, new)
        return run(*arguments, **options)

    again.callback = hinted
    return again
