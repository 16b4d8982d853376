"""Results of a session for people and programs: the report, the properties of JUnit files, GitHub's summary."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from tests.plugin.conftest import judged

SOURCE = """
    import numpy as np
    import pytest

    @pytest.mark.parametrize("name", ["a<b", "c"])
    def test_it(regress, name):
        value = np.linspace(1, 2, 5)
        regress.check(name, {"ratio": value, "kl": 0.25}, rtol=1e-3, why="float64 sums")
"""
CHANGED = SOURCE.replace("(1, 2, 5)", '(1, 2.5 if name == "c" else 2, 5)')
FAULT = {"type": "is_loss_debug", "tensor": "advantages", "factor": 2}


@pytest.fixture
def failing(project: Any) -> Any:
    """A project of two tests, of which one fails."""
    project.records(SOURCE, count=2)
    project.write("test_it.py", CHANGED)
    return project


def properties(path: Path) -> list[dict[str, str]]:
    """Return, for every test of a JUnit file, the properties that docs/reference/report.md names."""
    cases = ElementTree.parse(path).getroot().iter("testcase")
    found = [{p.get("name", ""): p.get("value", "") for p in case.iter("property")} for case in cases]
    return [
        {name: text for name, text in one.items() if name not in ("regress_golden", "regress_call")}
        for one in found
    ]


def test_junit_files_hold_the_verdict_of_every_test(failing: Any) -> None:
    failing.run("--junitxml=junit.xml", "-o", "junit_family=xunit2").assert_outcomes(passed=1, failed=1)
    rows = sorted(properties(failing.folder / "junit.xml"), key=lambda row: row["regress_verdict"])
    assert rows[0] == {
        "regress_where": "test_it.py::test_it[c]",
        "regress_quantity": "c",
        "regress_tensor": "value['ratio']",
        "regress_verdict": "drift",
        "regress_multiple": "250.0",
        "regress_max_error": "0.5",
        "regress_tolerance": "0.002",
        "regress_elements": "5",
        "regress_beyond": "4",
        "regress_worst": "element [4]",
        "regress_reason": "float64 sums",
    }
    assert (rows[1]["regress_verdict"], rows[1]["regress_where"]) == ("ok", "test_it.py::test_it[a<b]")


def test_every_documented_property_is_written_and_no_other(stubbed: Any) -> None:
    stubbed.fault(base=FAULT)
    stubbed.run("--regress-tier=semantics", "--junitxml=junit.xml", "-k", "step0")
    text = (Path(__file__).parents[2] / "docs" / "reference" / "report.md").read_text()
    documented = set(re.findall(r"`(regress_\w+)`", text)) - {
        "regress_call",
        "regress_golden",
        "regress_update",
    }
    assert {name for row in properties(stubbed.folder / "junit.xml") for name in row} == documented


def test_a_failure_names_its_place_in_the_report(failing: Any) -> None:
    result = failing.run("--regress-report=out")
    (line,) = [line for line in result.outlines if line.startswith("report: file://")]
    address, _, name = line.removeprefix("report: ").partition("#")
    page = failing.folder / "out" / "index.html"
    assert address == page.as_uri()
    calls = json.loads((page.parent / "report.json").read_text())["calls"]
    (linked,) = [
        call for call in calls if call["anchor"] == unquote(name) and call["verdict"]["status"] == "drift"
    ]
    assert linked["test"] == "test_it.py::test_it[c]"
    assert "report:" not in failing.run().stdout.str()


def test_a_failing_replay_names_its_place_and_shows_its_tokens(stubbed: Any) -> None:
    stubbed.fault(base=FAULT)
    result = stubbed.run("--regress-tier=semantics", "--regress-report=out", "-k", "step0 and advantages")
    (line,) = [line for line in result.outlines if line.startswith("report: file://")]
    assert line.endswith("/out/index.html#dr_grpo/base/step0/rank0/micro0/advantages")
    tree = json.loads((stubbed.folder / "out" / "report.json").read_text())
    assert {call["anchor"] for call in tree["calls"]} >= {"dr_grpo/base/step0/rank0/micro0/advantages"}
    assert tree["divergences"]["dr_grpo/base"]["text"].startswith("advantages at step0/rank0/micro0")
    assert tree["diagnoses"]["dr_grpo/base"]
    result.stdout.fnmatch_lines(["✗ dr_grpo/base: first advantages at step0/rank0/micro0*"])
    table = next(table for table in tree["tokens"] if table["place"]["step"] == 0)
    assert (table["where"], table["left_out"]) == ("dr_grpo/base", 0)
    values = {row["quantity"]: row for row in table["values"]}
    told = [i for i, golden in enumerate(values["advantages"]["golden"]) if golden is not None]
    assert told == [i for i, entry in enumerate(table["mask"]) if entry]
    for quantity, factor in (("advantages", 2), ("old_log_probs", 1)):
        golden, actual = values[quantity]["golden"], values[quantity]["actual"]
        assert [actual[i] for i in told] == pytest.approx([factor * golden[i] for i in told], rel=1e-12)
    assert len(table["text"]) == sum(table["lengths"]) == len(table["ids"])
    assert tree["environment"]["command"].endswith(" --regress-report=out -k 'step0 and advantages'")
    assert "torch 2" in tree["environment"]["versions"]


def test_the_tokens_of_the_closest_replay_are_shown_where_all_passed(stubbed: Any) -> None:
    result = stubbed.run("--regress-tier=semantics", "--regress-report=out", "-k", "log_probs")
    assert judged(result) == "6 quantities judged in 1 test"
    (table,) = json.loads((stubbed.folder / "out" / "report.json").read_text())["tokens"]
    assert table["where"] == "dr_grpo/base"
    assert {"log_probs", "ratio"} <= {row["quantity"] for row in table["values"]}


def test_github_is_told_where_a_report_is_asked_for(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = failing.folder / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    failing.run()
    assert path.read_text() == "before\n"
    failing.run("--regress-report=out")
    assert path.read_text().startswith("before\n### ❌ pytest: 4 checks: 1 failed in ")


@pytest.mark.parametrize(
    ("variable", "colours"), [("GITHUB_ACTIONS", True), ("NO_COLOR", False), ("HOME", False)]
)
def test_colours_of_the_report(
    alone: Any, monkeypatch: pytest.MonkeyPatch, variable: str, colours: bool
) -> None:
    monkeypatch.setenv(variable, "true")
    alone.write("test_it.py", SOURCE)
    alone.passes("--update-golden", count=2)
    result = alone.passes("--regress-report=out", count=2)
    (line,) = [line for line in result.outlines if "✓ pytest: 4 checks: all within tolerance" in line]
    assert ("\x1b[" in line) is colours
