"""Commands that load when they are asked for, of this package and of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from regress import plugins
from regress.cli import main

Register = Callable[..., None]


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """``register("name", "module:attribute")``: the only entry point that is installed."""
    (tmp_path / "a_command.py").write_text(
        "import click\n@click.command(help='Say hello.')\ndef hello(): click.echo('hello')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, value: str) -> None:
        monkeypatch.setattr(plugins, "entry_points", lambda group: [EntryPoint(name, value, group)])
        plugins.registered.cache_clear()

    yield install
    plugins.registered.cache_clear()
    sys.modules.pop("a_command", None)
    with suppress(KeyError):
        del main.commands["hello"]


def lines(text: str) -> dict[str, str]:
    """Return the commands of a help with their lines."""
    return {
        line.split()[0]: " ".join(line.split()[1:])
        for line in text.partition("Commands:")[2].splitlines()
        if line.strip()
    }


def test_the_help_of_the_table_is_that_of_the_commands() -> None:
    assert plugins.HELP.keys() == plugins.OWN[plugins.COMMANDS].keys()
    for name, line in plugins.HELP.items():
        command = main.commands[name]
        assert click.Command(name, help=line).get_short_help_str(1000) == command.get_short_help_str(1000)
        assert click.Command(name, help=line).get_short_help_str(60) == command.get_short_help_str(60)


def test_the_help_loads_no_command() -> None:
    code = (
        "import sys\nfrom regress.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "commands = (name for name in sys.modules if name.startswith('regress.') and name.endswith('commands'))\n"
        "print(*commands, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_old_spellings_are_hidden_and_hint_at_the_new() -> None:
    assert not {"calibrate", "study"} & {*lines(CliRunner().invoke(main, ["--help"]).output)}
    found = CliRunner().invoke(main, ["study", "nosuch"])
    assert found.exit_code == 2
    assert (
        "hint: 'regress study' will go with the next release; say 'regress golden validate CASE'"
        in found.output
    )


def test_a_command_of_somebody_else(register: Register) -> None:
    register("hello", "a_command:hello")
    assert lines(CliRunner().invoke(main, ["--help"]).output)["hello"] == "Say hello."
    assert CliRunner().invoke(main, ["hello"]).output == "hello\n"


def test_a_broken_command_of_somebody_else_leaves_the_others(register: Register) -> None:
    register("gone", "a_package_that_is_gone:command")
    found = CliRunner().invoke(main, ["--help"])
    assert found.exit_code == 0
    assert lines(found.output)["gone"].startswith(
        "'gone' of regress.commands is a_package_that_is_gone:command"
    )
    found = CliRunner().invoke(main, ["gone"])
    assert found.exit_code == 2
    assert "which cannot be loaded" in found.output
    assert "Traceback" not in found.output


def test_a_name_that_is_taken_is_an_error(register: Register) -> None:
    register("compare", "a_command:hello")
    found = CliRunner().invoke(main, ["--help"])
    assert found.exit_code == 2
    assert (
        "'compare' of regress.commands is registered by regress.report.compare_commands:compare and by "
        "a_command:hello: uninstall one of them" in " ".join(found.output.split())
    )


def test_a_command_that_is_not_there_is_one_sentence() -> None:
    found = CliRunner().invoke(main, ["compar"])
    assert found.exit_code == 2
    assert "No such command 'compar'" in found.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("golden show dense log_prob", "did you mean log_probs or ref_log_probs?"),
        ("golden record dense --quantity log_prob", "did you mean log_probs or ref_log_probs?"),
        ("golden calibrate dense --quantity log_prob", "did you mean log_probs or ref_log_probs?"),
        ("replay dense --tier precison", "did you mean precision?"),
        ("replay dense --variants pakced", "did you mean packed"),
        ("compare golden:dense golden:dense --only log_prob", "did you mean log_probs"),
        ("report . --format jsn", "did you mean json?"),
        ("systems run trainer --cell paded/sft/dense", "did you mean padded/sft/dense"),
    ],
)
def test_a_misspelt_name_is_told_the_nearest(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    run = CliRunner().invoke(main, arguments.split())
    assert run.exit_code == 2, run.output
    assert words in run.output
