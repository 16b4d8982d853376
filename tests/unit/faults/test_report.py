"""Rows of a run of faults: what they add up to, and their pages."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.trials.report import markdown, page, size, summary, write
from tests.faults.trials.rows import FaultRow, from_json, score, to_json

CHECKS = {"loss 5 %": "loss within 5 %", "norm 3 %": "norm within 3 %"}
GOOD = FaultRow(
    *("mean_of_means", "A", "semantic", "mine#1", "dense", "mbs4", "float64"),
    held_out=False,
    fresh=False,
    expected="weights weights",
    caught=True,
    first="weights weights",
    place="step0/rank0/micro0",
    multiple=2e6,
    stage=True,
    tensor=True,
    rules=("mean-of-means",),
    diagnosis="right",
    common={"loss 5 %": False, "norm 3 %": True},
    values={"loss": 0.01, "grad_norm": math.inf},
)
EXACT = replace(GOOD, fault="tool_tokens", multiple=None, held_out=True, diagnosis="silent", category="Q")
ESCAPED = replace(
    GOOD,
    fault="missed",
    caught=False,
    multiple=0.0,
    first="",
    place="",
    stage=False,
    tensor=False,
    diagnosis="",
)
SMALL = replace(GOOD, fault="small", multiple=40.0)
ROUNDED = replace(SMALL, fault="rounded", kind="precision", precision="float32", diagnosis="wrong")
QUIET = replace(
    ESCAPED, fault="kl_by_expm1", kind="harmless", rules=(), expected="", common={"loss 5 %": True}
)
ALARM = replace(QUIET, fault="flagged", caught=True, first="kl <kl>|", multiple=7.0)


def test_faults_count_by_the_margin_of_their_kind() -> None:
    found = score([GOOD, EXACT, ESCAPED, SMALL, ROUNDED, QUIET])
    assert (len(found.faults), found.caught) == (5, 3)
    assert [*found.escaped] == ["missed", "small"]
    assert found.alarms == []
    assert found.exit_code == 1
    assert score([GOOD, EXACT, ROUNDED, QUIET]).exit_code == 0


def test_the_best_replay_of_a_fault_counts() -> None:
    weak = replace(GOOD, case="dapo", multiple=5.0)
    assert score([weak, GOOD]).escaped == []
    assert score([weak]).escaped == ["mean_of_means"]


def test_what_must_not_be_flagged_is_an_alarm_also_where_it_could_not_run() -> None:
    stuck = replace(QUIET, fault="stuck", caught=True, problem="no room")
    assert [row.fault for row in score([QUIET, ALARM, stuck]).alarms] == ["flagged", "stuck"]
    assert score([QUIET, stuck]).exit_code == 1


def test_diagnoses_are_counted_once_a_fault_and_by_part() -> None:
    found = score([GOOD, replace(GOOD, case="dapo", diagnosis="wrong"), EXACT, ROUNDED])
    assert found.diagnoses(held_out=False) == {"right": 1, "wrong": 1, "silent": 0}
    assert found.diagnoses(held_out=True) == {"right": 0, "wrong": 0, "silent": 1}


def test_common_checks_notice_and_disturb() -> None:
    found = score([GOOD, EXACT, QUIET])
    assert (found.noticed("norm 3 %"), found.noticed("loss 5 %")) == ((2, 2), (0, 2))
    assert (found.disturbed("loss 5 %"), found.disturbed("norm 3 %")) == ((1, 1), (0, 0))


def test_rows_come_back_from_json_without_what_is_not_finite() -> None:
    (back,) = from_json(to_json([GOOD]))
    assert back == replace(GOOD, values={"loss": 0.01})
    assert json.loads(to_json([EXACT]))["rows"][0]["multiple"] is None


@pytest.mark.parametrize(
    ("row", "text"), [(GOOD, "2e+06"), (EXACT, "exact"), (ESCAPED, "not caught"), (QUIET, "-")]
)
def test_sizes_in_words(row: FaultRow, text: str) -> None:
    assert size(row) == text


def test_lines_below_the_table() -> None:
    lines = [*summary(score([GOOD, ESCAPED, ALARM]), CHECKS)]
    assert "2 faults: 1 caught by the margin of their kind" in lines
    assert "right stage in 1 of 1 (100.0 %) of the replays that caught one" in lines
    assert "escaped: missed" in lines
    assert "must not be flagged: flagged-dense-mbs4: kl <kl>|" in lines
    assert any(line.startswith("norm within 3 %: notices 2 of 2") for line in lines)


def test_pages_escape_names_and_hold_every_fault(tmp_path: Path) -> None:
    rows = [GOOD, EXACT, ESCAPED, QUIET, ALARM, replace(GOOD, fault="<script>", first="a|b")]
    text = markdown(rows, CHECKS, {"A": "loss normalization", "Q": "tokens"})
    assert "## A. Loss normalization" in text
    assert "a\\|b" in text
    assert all(line.count(" | ") == 7 for line in text.splitlines() if line.startswith("| mean\\_of"))
    assert "<script>" not in page(rows, CHECKS)
    paths = write(tmp_path / "new", rows, CHECKS)
    assert [path.name for path in paths] == ["faults.json", "faults.html", "faults.txt"]
    assert from_json(paths[0].read_text())[1].multiple is None
