"""Tests of golden cases: one for each rank and microbatch, quantities as subtests, and what a session judged."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.plugin.conftest import GoldenProject, failed_quantities, judged

CASE, TESTS, QUANTITIES = GoldenProject.CASE, GoldenProject.TESTS, GoldenProject.QUANTITIES
TIER = "--regress-tier=semantics"
WRONG = {"type": "is_loss_debug", "tensor": "advantages", "factor": 1.001}


def test_a_test_is_one_rank_and_microbatch(stubbed: Any) -> None:
    stubbed.suite('variants="base,dp2,packed-mbs3"')
    lines = stubbed.run(TIER, "--collect-only", "-q").outlines
    ids = [line.partition("[")[2].removesuffix("]") for line in lines if "::" in line]
    micros = [f"{CASE}/packed-mbs3/rank0/micro{number}" for number in range(4)]
    assert sorted(ids) == sorted([
        *(f"{CASE}/base", f"{CASE}/base/rank0", f"{CASE}/base/rank0/micro0"),
        *(f"{CASE}/dp2", f"{CASE}/dp2/rank0", f"{CASE}/dp2/rank0/micro0", f"{CASE}/dp2/rank1"),
        *(f"{CASE}/dp2/rank1/micro0", f"{CASE}/packed-mbs3", f"{CASE}/packed-mbs3/rank0", *micros),
    ])  # fmt: skip


@pytest.mark.parametrize(("option", "shown"), [("-q", 0), ("-v", QUANTITIES), ("--tb=short", 0)])
def test_passing_quantities_are_listed_by_verbose_runs_only(stubbed: Any, option: str, shown: int) -> None:
    result = stubbed.run(TIER, option)
    assert result.ret == 0
    assert sum("SUBPASSED" in line for line in result.outlines) == shown
    assert not any(re.match(r"(test_suite.py )?[.]*u", line) for line in result.outlines)
    assert judged(result) == f"{QUANTITIES} quantities judged in {TESTS} tests"


def test_a_session_whose_golden_tests_judge_nothing_fails(everywhere: Any) -> None:
    path = everywhere.folder / "test_suite.py"
    path.write_text(path.read_text().replace("regress_record.check()", "pass"))
    result = everywhere.run(TIER)
    result.assert_outcomes(passed=TESTS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert judged(result) == f"0 quantities judged in {TESTS} tests, so the session fails"
    assert everywhere.run(TIER, "--setup-only").ret == 0


def test_a_quantity_that_could_not_be_judged_fails(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: an outcome without it is not an outcome that holds."""
    from regress.replay.replay_cache import ReplayCache

    outcome = ReplayCache.outcome

    def without(self: Any, replay: Any) -> Any:
        found = outcome(self, replay)
        found.outcomes.pop(("step1/rank0/micro0", "advantages"), None)
        return found

    monkeypatch.setattr(ReplayCache, "outcome", without)
    result = stubbed.run(TIER)
    assert failed_quantities(result) == ["step1/rank0/micro0/advantages"]
    assert judged(result) == f"{QUANTITIES - 1} quantities judged in {TESTS} tests"
    assert (
        f"nothing was compared: the replay recorded no advantages at step1/rank0/micro0 of {CASE}/base"
        in str(result.stdout)
    )


def test_the_first_failing_quantity_ends_a_run_that_shall_end_there(everywhere: Any) -> None:
    everywhere.fault(base=WRONG)
    result = everywhere.run(TIER, "-x")
    assert failed_quantities(result)[0] == "step0/rank0/micro0/advantages"
    assert result.ret == (2 if everywhere.mode == "n2" else 1)
    assert any(line.startswith("1 failed quantity in 1 replay: ") for line in result.outlines)


def test_a_failure_of_the_test_itself_is_told_beside_its_quantities(stubbed: Any) -> None:
    stubbed.fault(base=WRONG)
    path = stubbed.folder / "test_suite.py"
    path.write_text(path.read_text() + "    assert 'micro' not in str(regress_record.part.id), 'mine'\n")
    result = stubbed.run(TIER)
    result.stdout.fnmatch_lines(["E * AssertionError: mine"])
    assert failed_quantities(result) == [f"step{step}/rank0/micro0/advantages" for step in range(3)]


@pytest.mark.parametrize("strict", [True, False])
def test_a_test_that_is_expected_to_fail_may(stubbed: Any, strict: bool) -> None:
    stubbed.fault(base=WRONG)
    path = stubbed.folder / "test_suite.py"
    path.write_text(path.read_text().replace("def test", f"@pytest.mark.xfail(strict={strict})\ndef test"))
    result = stubbed.run(TIER, "-k", "micro0")
    assert result.ret == 0
    assert result.parseoutcomes()["xfailed"] >= 1
    assert "golden replays" not in str(result.stdout)


@pytest.mark.one_in(3)
def test_junit_has_a_testcase_for_each_test_and_a_failure_for_each_quantity(everywhere: Any) -> None:
    everywhere.fault(base=WRONG)
    everywhere.run(TIER, "--junitxml=junit.xml")
    tests = {
        test.get("name", ""): test
        for test in ElementTree.parse(everywhere.folder / "junit.xml").getroot().iter("testcase")
    }
    assert len(tests) == TESTS
    failing = tests[f"test_golden[{CASE}/base/rank0/micro0]"]
    *quantities, count = [one.get("message", "") for one in failing.findall("failure")]
    assert [re.sub(r"(?<=drift): .*\(", " (", told) for told in quantities] == [
        f"Failed: drift ({CASE}/base/step{step}/rank0/micro0)" for step in range(3)
    ]
    assert count == "contains 3 failed subtests"
    told = {
        name: {one.get("name"): one.get("value") for one in test.iter("property")}
        for name, test in tests.items()
    }
    assert sum(int(one["regress_judged"] or 0) for one in told.values()) == QUANTITIES
