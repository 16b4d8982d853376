"""Commands and snippets of the README and the documentation: they name what exists, and they run.

A fenced block of ``sh`` is run, command by command, in one directory for each page; one of ``python`` is compiled.
A block that begins with ``# name.py``, ``# name.yaml`` or ``# pyproject.toml`` lies there as a file. A command that is
to fail says ``# exits with 1``.
``<!-- not run: reason -->`` before a block keeps it from running, and from nothing else.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import click
import pytest

from regress.cli import main
from regress.plugin.pytest_options import add_options
from tests.as_subtests import as_subtests
from tests.docs.walking import Done, forked

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "skills/regress/SKILL.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GENERATED = ROOT / "docs" / "reference" / "generated"
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n\n?)?^```(?P<language>\w+)\n(?P<body>.*?)^```", re.M | re.S
)
NEEDED = ("golden", "tests", "examples", "conftest.py", "pyproject.toml", "regress")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and why it is not run, if so."""

    language: str
    body: str
    why: str | None

    @property
    def commands(self) -> list[str]:
        """Its commands, continued lines joined, comments left out."""
        return [command for command, _ in self.steps]

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Its commands, each with the exit code that it has to end with."""
        joined = self.body.replace("\\\n", " ")
        lines = [(re.sub(r"(^|\s+)#\s.*$", "", line).strip(), line) for line in joined.splitlines()]
        return [(command, int("# exits with 1" in line)) for command, line in lines if command]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found = FENCE.finditer(page.read_text())
    return [Block(one["language"], one["body"], one["why"]) for one in found]


def files(page: Path) -> Iterator[tuple[str, str]]:
    """Name and text of the files that a page shows."""
    for block in blocks(page):
        named = re.match(r"# (\w+\.(?:py|toml|yaml))\n", block.body)
        if named is not None:
            yield named[1], block.body


def pages() -> list[Path]:
    return [page for page in PAGES if GENERATED not in page.parents and "_build" not in page.parts]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def all_commands() -> Iterator[tuple[str, str]]:
    for page in pages():
        for block in blocks(page):
            if block.language == "sh":
                for line in block.commands:
                    for command in re.split(r"\s*&&\s*", line):
                        yield named(page), command


COMMANDS = sorted({*all_commands()})


@as_subtests("page", pages(), ids=named)
def test_pages_use_known_languages(page: Path) -> None:
    """An indented or unknown block would never be looked at."""
    assert {block.language for block in blocks(page)} <= {
        "sh",
        "python",
        "text",
        "toml",
        "yaml",
        "json",
        "eval",
    }


@as_subtests("page", pages(), ids=named)
def test_python_snippets_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.body, named(page), "exec")


@as_subtests("page, command", COMMANDS, ids=lambda found: found[1][:60])
def test_commands_name_what_exists(page: str, command: str) -> None:
    """Catches an option or a command that was renamed, and a page that still tells the old name."""
    words = shlex.split(re.sub(r"\$\w+|<\w+>|\[\w[\w.]*\]", "X", command))
    words = words[words.index("regress") :] if "regress" in words else words
    if words[0] == "regress":
        _parse(words[1:])
    elif words[0] == "pytest":
        parser = pytest.Parser(_ispytest=True)  # the options of the plugin, without those of pytest itself
        add_options(parser)
        known = {name for group in parser._groups for option in group.options for name in option.names()}
        asked = {
            word.partition("=")[0] for word in words if word.startswith(("--regress", "--update", "--golden"))
        }
        assert asked <= known
    elif words[:2] == ["tox", "run"] and "-e" in words:
        assert f"[testenv:{words[words.index('-e') + 1]}]" in (ROOT / "tox.ini").read_text()


def _parse(words: list[str]) -> None:
    command: click.Command = main
    context = click.Context(
        command, **main.context_settings
    )  # commands keep the help option they are first asked for
    while isinstance(command, click.Group):
        while words and words[0].startswith("-"):
            words = words[1:]
        if not words:
            return
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        assert not found.hidden, f"the command {words[0]!r} is gone, and says what to use in its place"
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    command.make_parser(context).parse_args(words)


SHARING = (
    (
        *("README.md", "docs/first-minute.md", "docs/howto/compare.md", "docs/howto/run-report.md"),
        "skills/regress/SKILL.md",
    ),
    ("docs/your-trainer.md", "docs/reference/recordings.md"),
)
"""Pages about the same recorded run: they share a directory, and a command that several of them show is run once.

They are those that a newcomer follows. Only their commands run by default, those of the other pages are extended.
"""


def groups() -> Iterator[Any]:
    """Yield the pages with commands that run, those that share a directory together."""
    running = [page for page in pages() if any(True for _ in steps(page))]
    shared = {name for names in SHARING for name in names}
    for names in SHARING:
        yield pytest.param([ROOT / name for name in names], id="+".join(names))
    for page in running:
        if named(page) not in shared:
            yield pytest.param([page], id=named(page), marks=pytest.mark.extended)


def steps(page: Path) -> Iterator[tuple[str, int]]:
    """The commands of a page that run, each with its exit code."""
    for block in blocks(page):
        if block.language == "sh" and block.why is None:
            for command, expected in block.steps:
                *before, last = re.split(r"\s*&&\s*", command)
                yield from ((each, 0) for each in before)
                yield last, expected


def started(command: str, folder: Path, environ: dict[str, str]) -> Done:
    """Run a command: in copies of this process, which has loaded torch, whatever would only load it again."""
    words = shlex.split(Template(command).safe_substitute(environ))
    own = dict(environ)
    while words and (assigned := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])) is not None:
        own[assigned[1]] = assigned[2]
        del words[0]
    if not words:
        environ |= own
        return Done(0, "", "")
    environs = [own]
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        environs = [{**own, **rank} for rank in ranks(int(words[2]), folder)]
        words = words[4:] if words[3] == "-m" else ["python", *words[3:]]
    if words[0] == "regress":
        return forked(words, lambda: main(words[1:], prog_name="regress"), folder, *environs)
    if words[0] == "python":
        script = words[1:]

        def work() -> None:
            sys.path.insert(0, str((folder / script[0]).parent))
            runpy.run_path(script[0], run_name="__main__")

        return forked(script, work, folder, *environs)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=900
    )
    return Done(done.returncode, done.stdout, done.stderr)


def ranks(size: int, folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment that torchrun gives to each of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(size):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": folder.name,
        }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("together", [*groups()])
def test_commands_run(together: list[Path], tmp_path: Path) -> None:
    for name in NEEDED:
        if name == "golden":
            (tmp_path / name).mkdir()
            for case in (ROOT / name).iterdir():
                (tmp_path / name / case.name).symlink_to(case)
        elif name != "regress":
            (tmp_path / name).symlink_to(ROOT / name)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PATH": paths}
    environ = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, **environ}
    environ.pop("CI", None)  # where goldens are not written
    ran: set[str] = set()
    for page in together:
        for name, body in files(page):
            if name == "pyproject.toml":
                (tmp_path / name).unlink()
            if not (tmp_path / name).exists():
                (tmp_path / name).write_text(body)
        for command, expected in steps(page):
            if command in ran:
                continue
            done = started(command, tmp_path, environ)
            told = f"{named(page)}: {command}\n{done.output[-3000:]}\n{done.errors[-3000:]}"
            assert done.code == expected, told
            ran.add(command)


def test_the_readme_counts_the_cases() -> None:
    cases = [path for path in (ROOT / "golden").iterdir() if (path / "case.yaml").is_file()]
    assert re.findall(r"replays (\d+) cases", PAGES[0].read_text()) == [str(len(cases))]


def test_continuous_integration_runs_both_commands_of_the_readme() -> None:
    """The first one failed in a fresh clone for as long as nothing ran it."""
    wanted = [command for block in blocks(PAGES[0]) for command in block.commands if "tox run" in command]
    assert len(wanted) == 2
    ran = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ran if "tox run" in line] == wanted
