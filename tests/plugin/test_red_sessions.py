"""Check the end of a session in which golden replays fail: last screen, GitHub's annotations, JUnit's properties."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.plugin.conftest import GoldenProject, failed_quantities

SEMANTICS = "--regress-tier=semantics"
WRONG = {"type": "is_loss_debug", "tensor": "advantages", "factor": 1.001}


def last_screen(result: pytest.RunResult) -> list[str]:
    """Return the lines behind the title of our section, without the last line, which is pytest's."""
    (start,) = [n for n, line in enumerate(result.outlines) if re.fullmatch(r"=+ golden replays =+", line)]
    return [line for line in result.outlines[start + 1 : -1] if line]


def told_in_full(result: pytest.RunResult) -> list[str]:
    """Return the names of the tests that the section of failures shows."""
    start, end = (
        next(n for n, line in enumerate(result.outlines) if re.fullmatch(f"=+ {title} =+", line))
        for title in ("FAILURES", "short test summary info")
    )
    found = (re.fullmatch(r"_+ (test_.*?) _+", line) for line in result.outlines[start:end])
    return [one[1] for one in found if one is not None]


def test_a_red_session_ends_with_the_first_divergence_of_each_group(everywhere: Any) -> None:
    """Thousands of lines ended with names of tests, and no cause among them; JUnit has all of them."""
    everywhere.suite('variants="base,pad8,adamw-fused"')
    everywhere.fault(base=WRONG, pad8=WRONG, **{"adamw-fused": "refuse"})
    result = everywhere.run(SEMANTICS, "--junitxml=junit.xml")
    count, *lines = last_screen(result)
    failed = len(failed_quantities(result)) + GoldenProject.QUANTITIES
    assert count == f"{failed} failed quantities in 3 replays: 2 first divergences"
    refused, wrong = lines[:4], lines[4:]
    assert refused[0] == "dr_grpo/adamw-fused cannot be replayed"
    assert refused[2] == "  the policy is gone; bring it back"
    assert re.match(r"drift: advantages.* \(dr_grpo/(base|pad8)/step0", wrong[0])
    assert re.fullmatch(r"  \d+ failed quantities at it and after it in dr_grpo/\w+, dr_grpo/\w+", wrong[1])
    assert re.match(r"  probably: .* \(rule [\w-]+\)", wrong[2])
    more = r"  more: pytest .*--regress-tier=semantics '.*dr_grpo/\w+/rank0/micro0\]' -k '/step0/.*/advantages\]'"
    assert re.fullmatch(more, wrong[3])
    assert wrong[4:] == [f"{failed - 2} failed quantities repeat these; -vv prints each of them in full"]
    assert len(failed_quantities(result)) == 6
    refused, told = sorted(told_in_full(result))
    assert re.fullmatch(r"test_golden\[dr_grpo/adamw-fused\S*\]", refused)
    assert re.fullmatch(r"test_golden\[dr_grpo/\w+/rank0/micro0\] \[step0/rank0/micro0/advantages\]", told)
    assert sum(line.startswith("reproduce: ") for line in result.outlines) == 1
    tests = ElementTree.parse(everywhere.folder / "junit.xml").getroot().iter("testcase")
    failures = [count for test in tests if (count := len(test.findall("failure")))]
    assert sum(failures) == 6 + len(failures)  # one more of each test, which counts them, or was not replayed


def test_all_are_told_in_full_to_who_asks_for_it(stubbed: Any) -> None:
    stubbed.suite('variants="base,pad8"')
    stubbed.fault(base=WRONG, pad8=WRONG)
    result = stubbed.run(SEMANTICS, "-vv")
    assert len(told_in_full(result)) == result.parseoutcomes()["failed"] > len(failed_quantities(result))
    assert not last_screen(result)[-1].endswith("in full")


def test_what_does_not_follow_from_the_first_divergence_is_told_in_full_too(stubbed: Any) -> None:
    """A second fault, and a test that is none of a golden case, are not left out."""
    stubbed.suite('variants="base"')
    stubbed.fault(base=[WRONG, {"type": "is_loss_debug", "tensor": "old_log_probs", "factor": 1.5}])
    stubbed.write(
        "test_other.py",
        """
        def test_one():
            assert 1 == 2

        def test_two():
            assert 1 == 3
    """,
    )
    names = told_in_full(stubbed.run(SEMANTICS))
    assert len(names) == 4
    assert sum(name.startswith("test_golden[dr_grpo/base/rank0/micro0] [step0/") for name in names) == 2
    assert {"test_one", "test_two"} < {*names}


def test_a_green_session_has_no_such_screen(stubbed: Any) -> None:
    stubbed.suite('variants="base"')
    stubbed.run(SEMANTICS).stdout.no_fnmatch_line("*golden replays*")


def test_github_shows_each_group_at_the_test(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    stubbed.suite('variants="base,pad8"')
    stubbed.fault(base=WRONG)
    (line,) = [one for one in stubbed.run(SEMANTICS).outlines if one.startswith("::error ")]
    assert re.match(
        r"::error file=test_suite\.py,line=2,title=drift%3A advantages.*::  \d+ failed quantities .*%0A  probably: ",
        line,
    )


def test_junit_has_first_divergence_and_cause(stubbed: Any) -> None:
    stubbed.suite('variants="base"')
    stubbed.fault(base=WRONG)
    stubbed.run(SEMANTICS, "--junitxml=junit.xml")
    tests = ElementTree.parse(stubbed.folder / "junit.xml").getroot().iter("testcase")
    failing = [test for test in tests if test.find("failure") is not None]
    assert failing
    for test in failing:
        found = {one.get("name"): one.get("value", "") for one in test.iter("property")}
        assert found["regress_first_divergence"].startswith("drift: advantages")
        assert "(rule " in found["regress_cause"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pakced", "no golden test has 'pakced' in its name; did you mean packed?"),
        ("dr_grop and base", "no golden test has 'dr_grop' in its name; did you mean dr_grpo?"),
        ("dr_grpo and not (advnatages or base)", "'advnatages' in its name; did you mean advantages?"),
    ],
)
def test_a_misspelt_name_that_selects_nothing_is_named(everywhere: Any, text: str, says: str) -> None:
    everywhere.suite('variants="base"')
    result = everywhere.run(SEMANTICS, "-k", text)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines([f"*{says}*".replace("[", "[[]")])
