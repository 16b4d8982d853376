"""Write the outputs of commands: to files and folders of this machine or of a store, or to standard output.

A regular file is replaced as a whole. A device or a named pipe is written to, a link is followed, and none of them is
ever replaced.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from regress.dump.dump_files import unwritable, write_atomically
from regress.dump.dump_location import Location, local_folder, location
from regress.errors import RegressError
from regress.printable_text import echo

STANDARD = "-"
_LINKS = 40  # as many as Linux follows
_DESCRIPTORS = re.compile(r"/dev/fd|/proc/(\d+)(?:/task/\d+)?/fd")


class StandardOutput:
    """Standard output as a file: what it holds in the end is printed when the command ends.

    Everything else that the command says goes to standard error meanwhile, so that a program can read the output.
    """

    suffix = ""

    def __init__(self) -> None:
        self._text = ""

    def __str__(self) -> str:
        return "standard output"

    def exists(self) -> bool:
        """Return False: nothing can be read from it."""
        return False

    def write(self, text: str) -> None:
        """Take the place of what was written before."""
        self._text = text

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep standard output free until the end, and print the text then."""
        stream = getattr(sys.stdout, "unredacted", sys.stdout)  # as a file would hold it
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            stream.write(self._text)
            stream.flush()


Output: TypeAlias = "Location | StandardOutput"
F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # no generic in earlier releases


class OutputFile(_Type):
    """A file to write: a path, the URL of a place in a store, or ``-`` for standard output."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Output:
        if not isinstance(value, str):
            converted: Output = value  # a default, or the result of an earlier call
            return converted
        if value == STANDARD or _descriptor(Path(value)) == 1:
            output = StandardOutput()
            if ctx is not None:
                ctx.with_resource(output.alone())
            return output
        found = location(value)
        if isinstance(found, Path) and found.is_dir():
            self.fail(f"File {value!r} is a directory.", param, ctx)
        return found


class OutputFolder(_Type):
    """A folder to write files into: a path, or the URL of one in a store."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        if not isinstance(value, str):
            converted: Location = value
            return converted
        found = self._place(value)
        if isinstance(found, Path) and found.exists() and not found.is_dir():
            self.fail(f"Directory {value!r} is a file.", param, ctx)
        return found

    def _place(self, value: str) -> Location:
        return location(value)


class LocalFolder(OutputFolder):
    """A folder of this machine; the URL of a store is refused."""

    def _place(self, value: str) -> Path:
        return local_folder(value)


@contextmanager
def errors_written(text: Callable[[dict[str, str]], str], *places: Output | None) -> Iterator[None]:
    """Write the error that a command ends with to the JSON files that it was asked for, too.

    Args:
        text: the file that holds an error, as `RegressError.to_json` tells it.
    """
    try:
        yield
    except RegressError as error:
        for place in places:
            if place is not None:
                write_output(place, text(error.to_json()))
        raise


def json_option(command: F) -> F:
    """Add --json, with its other name, to a command whose output is also data: the argument `json_file`."""
    return click.option(
        "--json",
        "--output",
        "json_file",
        type=OutputFile(),
        metavar="FILE|URL|-",
        help="Write the same as JSON; - is standard output, and the rest then goes to standard error.",
    )(command)


def write_output(place: Output, text: str) -> None:
    """Write the text of a file that a command was asked for, and say where it is; raises as `save_output`."""
    save_output(place, text)
    if not isinstance(place, StandardOutput):
        echo(f"written: {place}")


def save_output(place: Output, text: str) -> None:
    """Write the text of a file that a command was asked for, in place of an earlier one.

    Raises:
        DumpError: if it cannot be written, or is a named pipe that nobody reads.
    """
    if isinstance(place, StandardOutput):
        place.write(text)
    else:
        _write(place, text.encode(errors="backslashreplace"))


def write_outputs(folder: Location, texts: Mapping[str, str]) -> list[Location]:
    """Write files, by name, into a folder that a command was asked for; return their places. Raises `DumpError`."""
    for name, text in texts.items():
        _write(folder / name, text.encode(errors="backslashreplace"))
    return [folder / name for name in texts]


def _write(place: Location, data: bytes) -> None:
    if not isinstance(place, Path):
        write_atomically(place, [data])
        return
    try:
        handle = _opened(place)
        if handle is not None:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            return
        target = place.resolve() if place.is_symlink() else place
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise unwritable(place, error, "file") from error
    write_atomically(target, [data], place="file")


def _opened(path: Path) -> int | None:
    """Return a descriptor of what is written to as it is, and None where a regular file is, or will be."""
    number = _descriptor(path)
    if number is not None:
        sys.stdout.flush()
        return os.dup(number)  # its offset and O_APPEND are kept; opened again, they would not be
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)  # waits for no reader of a named pipe
    os.set_blocking(handle, True)
    return handle


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path such as ``/dev/stdout`` names, if it names one."""
    for _ in range(_LINKS):
        found = _DESCRIPTORS.fullmatch(os.path.realpath(path.parent))
        if found is not None and path.name.isdecimal() and found[1] in (None, str(os.getpid())):
            return int(path.name)
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return None
