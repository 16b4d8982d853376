"""Tables of the pages: capabilities are shown by commands that exist, rules of the judge held by tests that do."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from regress.cli import main
from tests.as_subtests import as_subtests

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = tomllib.loads((DOCS / "documents.toml").read_text())["document"]
ROWS = [(one["id"], *row) for one in DOCUMENTS for row in one["rows"]]
STATES = {"works", "replaced", "open"}


def test_rows_are_whole_and_told_once() -> None:
    for document, section, capability, state, shown in ROWS:
        assert all((section, capability, shown)), (document, section)
        assert state in STATES, (document, capability)
    assert len({row[:3] for row in ROWS}) == len(ROWS)


@as_subtests(
    "shown", sorted({row[4] for row in ROWS if row[4].startswith("regress ")}), ids=lambda shown: shown[:60]
)
def test_commands_have_their_options(shown: str) -> None:
    command = re.split(r"\s\(|[;,]\s|\s(?:compares|reads|names|is refused)\b", shown)[0]
    words, found = shlex.split(command)[1:], main
    context = click.Context(found, **main.context_settings)
    while isinstance(found, click.Group):
        name = words.pop(0)
        known = found.get_command(context, name)
        assert known is not None, f"there is no command {name!r}"
        found = known
        context = click.Context(found, parent=context)
    found.make_parser(context).parse_args(words)


def test_the_page_counts_every_row() -> None:
    sys.path.append(str(DOCS / "_ext"))
    pytest.importorskip("sphinx", reason="sphinx builds the pages")
    from from_code import documents

    lines = [*documents(DOCS / "documents.toml")]
    assert sum(line.startswith("| ") for line in lines) == len(ROWS) + 1 + 2 * len(
        [d for d in DOCUMENTS if d["rows"]]
    )


@as_subtests("part", tomllib.loads((DOCS / "judge.toml").read_text())["part"], ids=lambda part: part["title"])
def test_rules_of_the_judge_name_tests_that_exist(part: dict[str, Any]) -> None:
    for rule, tests in part["rules"]:
        assert tests, f"no test holds the rule: {rule}"
        for name in tests:
            path, _, test = name.partition("::")
            found = (DOCS.parent / "tests" / path).read_text()
            assert f"\ndef test_{test}(" in found or f"\n    def test_{test}(" in found, (rule, name)
