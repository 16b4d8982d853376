"""Record what public commands say of healthy and broken computations, and show how two recordings differ.

    python -m tests.shield record outputs/before            in the commit before a rebuilding
    python -m tests.shield record outputs/after             in the one after it
    python -m tests.shield diff outputs/before outputs/after

Sections are `help`, `replays` (every golden case under its default variants, in every precision), `dumps` (broken dumps
judged by a golden case, by the healthy dump, the other way round, and by their invariants) and `faults` (the whole
corpus; hours on a small machine). Paths, times and the environment are left out.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import click
from click.testing import CliRunner

from regress.cli import main as regress
from tests.broken_dumps import BREAKAGES, write_broken

CELLS = (("dense", "mbs4"), ("dense", "tp2-pp2"), ("moe", "dp2-packed"), ("tied", "fsdp2"))
"""Golden cases and variants whose dumps are broken."""

_LEFT_OUT = {"environment", "seconds", "elapsed", "created", "version", "versions"}


def _plain(value: Any, paths: dict[str, str]) -> Any:
    """Return a JSON value without what differs between two runs of one commit."""
    if isinstance(value, dict):
        return {key: _plain(held, paths) for key, held in value.items() if key not in _LEFT_OUT}
    if isinstance(value, list):
        return [_plain(held, paths) for held in value]
    if isinstance(value, str):
        for path, name in paths.items():
            value = value.replace(path, name)
        return re.sub(r"regress-work-\w+", "WORK", value)
    return value


def _run(*words: str) -> tuple[int, str]:
    """Return exit code and output of a command, run in this process."""
    result = CliRunner().invoke(regress, words, prog_name="regress")
    if result.exception and not isinstance(result.exception, SystemExit):
        return -1, f"{type(result.exception).__name__}: {result.exception}"
    return result.exit_code, result.output


def _run_apart(*words: str) -> int:
    """Return the exit code of a command that runs in a process of its own, and shows its output."""
    return subprocess.run([sys.executable, *words], check=False).returncode


def record_help(work: Path) -> Iterator[tuple[str, Any]]:
    """Yield the help of every command."""

    def walk(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        yield " ".join(("regress", *words)), _run(*words, "--help")[1].splitlines()
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(found, (*words, name))

    yield from walk(regress, ())


def record_replays(work: Path) -> Iterator[tuple[str, Any]]:
    """Yield the report of the default matrix in every precision."""
    code = _run_apart("-m", "regress", "replay", "--tier", "all", "--report", str(work / "replays"))
    report = json.loads((work / "replays/report.json").read_text())
    yield "exit code", code
    yield from report.items()


def record_dumps(work: Path) -> Iterator[tuple[str, Any]]:
    """Yield the judgements of broken dumps: by golden case, by dump, of the dump by them, and by invariants."""
    for case, variant in CELLS:
        kept = work / "kept"
        _run("replay", case, "--variants", variant, "--keep-dumps", str(kept))
        healthy = kept / case / variant / "dump"
        for name, breakage in BREAKAGES.items():
            broken = work / "broken" / case / variant / name
            write_broken(healthy, broken, breakage)
            ways = {
                "golden": ("compare", f"golden:{case}", str(broken)),
                "dump": ("compare", str(healthy), str(broken)),
                "reverse": ("compare", str(broken), str(healthy)),
                "check": ("dump", "check", str(broken)),
            }
            for way, words in ways.items():
                report = work / "report.json"
                report.unlink(missing_ok=True)
                code, output = _run(*words, "--json-calls", str(report))
                found = json.loads(report.read_text()) if report.exists() else output.splitlines()
                yield f"{case}/{variant}/{name}/{way}", {"exit code": code, "found": found}
            shutil.rmtree(broken)


def record_faults(work: Path) -> Iterator[tuple[str, Any]]:
    """Yield the outcomes of the whole corpus of faults."""
    yield "exit code", _run_apart("-m", "tests.faults", "run", "--report", str(work / "faults"))
    yield from json.loads((work / "faults/faults.json").read_text()).items()


SECTIONS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    "help": record_help,
    "replays": record_replays,
    "dumps": record_dumps,
    "faults": record_faults,
}


@click.group()
def main() -> None:
    """Record what public commands say, and show how two recordings differ."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--section", "sections", multiple=True, type=click.Choice(list(SECTIONS)), help="All by default."
)
def record(folder: Path, sections: tuple[str, ...]) -> None:
    """Write one JSON file for each section to FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections or SECTIONS:
        work = Path(mkdtemp(prefix="shield-"))
        paths = {str(work): "SHIELD", str(Path.cwd()): "TREE"}
        try:
            found = {name: _plain(value, paths) for name, value in SECTIONS[section](work)}
        finally:
            shutil.rmtree(work)
        (folder / f"{section}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        click.echo(f"{section}: {len(found)} entries")


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield one line for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after:
                held = before.get(key, after.get(key))
                yield f"{where}/{key}: {'gone' if key in before else 'new'}: {json.dumps(held)[:200]}"
            else:
                yield from differences(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {json.dumps(before)[:200]} -> {json.dumps(after)[:200]}"


@main.command()
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
def diff(before: Path, after: Path) -> None:
    """Print the differences of two recordings; exit code 1 if there are any, or a section is in one of them only."""
    lines = []
    names = {path.name for folder in (before, after) for path in folder.glob("*.json")}
    for name in sorted(names):
        sides = [folder / name for folder in (before, after)]
        missing = [str(side) for side in sides if not side.exists()]
        if missing:
            lines.append(f"{missing[0]} is missing: record that section, too")
            continue
        lines += [f"{name}{line}" for line in differences(*(json.loads(side.read_text()) for side in sides))]
    click.echo("\n".join(lines) or f"{len(names)} sections: no difference")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
