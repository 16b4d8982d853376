"""The report on a screen, in a log, and in GitHub's summary of a step."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.coordinates import Place
from regress.report import github_summary
from regress.report.github_summary import LIMIT, append_step_summary, step_summary
from regress.report.report_model import Report
from regress.report.terminal_report import HEIGHT, WIDTH, colourful, first_failing, rank_tables, screen, whole
from regress.report.verdict_entries import Call

QUANTITIES = ("batch_inputs", "log_probs", "ratio", "loss", "gradient")


def call(quantity: str, rank: int, micro: int | None, multiple: float, where: str = "dense/dp8") -> Call:
    status = Status.DRIFT if multiple > 1 else Status.OK
    worst = Worst((0,), quantity, 1.0, 1.0 + multiple * 1e-6, multiple * 1e-6) if multiple > 1 else None
    figures = {"multiple": multiple, "max_error": multiple * 1e-6, "tolerance": 1e-6, "count": 8}
    verdict = Verdict(
        status, quantity, quantity, Place(0, None, rank, micro), "not | alike <b>", worst, **figures
    )  # type: ignore[arg-type]  # figures are numbers
    return Call(where, "float32", verdict)


def calls(ranks: int, micros: int, wrong: int = -1) -> list[Call]:
    return [
        call(quantity, rank, micro, 300.0 if rank == wrong and quantity != "batch_inputs" else 0.25)
        for quantity in QUANTITIES
        for rank in range(ranks)
        for micro in range(micros)
    ]


@settings(deadline=None)
@given(
    st.integers(1, 64),
    st.integers(1, 12),
    st.integers(-1, 63),
    st.integers(0, 9),
    st.booleans(),
)
def test_it_fits_a_screen(ranks: int, micros: int, wrong: int, errors: int, colour: bool) -> None:
    report = Report("x" * 90, calls(ranks, micros, wrong), {f"case/v{n}": "why " * 40 for n in range(errors)})
    text = screen(report, colour=colour)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert ("\x1b[" in text) == colour


def test_the_first_failing_quantity_by_rank_and_microbatch() -> None:
    lines = screen(Report("x", calls(8, 2, wrong=5))).splitlines()
    assert lines[0] == "✗ x: 80 checks: 8 failed in dense/dp8"
    assert lines[1].startswith("✗ drift: log_probs: ")
    table = lines[lines.index("log_probs of dense/dp8: 2 of 16 checks failed") :]
    assert table[1].split() == ["micro0", "micro1"]
    assert ["rank5", "✗", "0.0003", "✗", "0.0003"] in [line.split() for line in table]
    assert ["rank0", "✓", "2.5e-07", "✓", "2.5e-07"] in [line.split() for line in table]
    assert "4 more ranks" in table
    assert "diff: max 0.0003, min 2.5e-07, mean 3.77e-05" in table


def test_the_text_holds_every_rank_and_failure() -> None:
    text = whole(
        Report("x", calls(64, 2, wrong=63), {"dense/cp2": "no"}, notes=["so"], environment={"a": "b"})
    )
    assert len(re.findall(r"^rank\d+ ", text, re.MULTILINE)) == 64 * len(QUANTITIES)
    for words in ("--- ratio of dense/dp8: 2 of 128 checks failed ---", "! dense/cp2: no", "so", "a: b"):
        assert words in text
    assert text.count("✗ drift:") == 8
    assert "dense/dp8/step0/rank0/micro0: log_probs" in text
    assert "…" not in text


def test_what_has_no_difference_is_named() -> None:
    missing = Verdict(Status.MISSING, "kl", "kl", Place(0, None, 1, 0), multiple=math.inf)
    table = first_failing([call("kl", 0, 0, 0.5), Call("dense/dp8", "", missing)])
    assert table is not None
    assert table.statistics == "diff: max 5e-07, min 5e-07, mean 5e-07, 1 without a number"
    (whole_table,) = rank_tables([Call("dense/dp8", "", missing)])
    assert whole_table.statistics == "diff: none, 1 without a number"
    assert first_failing([call("kl", 0, 0, 0.5)]) is None


@pytest.mark.parametrize(
    ("terminal", "environment", "colours"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"GITHUB_ACTIONS": "true"}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": "", "FORCE_COLOR": ""}, True),
        (False, {"GITHUB_ACTIONS": "true", "NO_COLOR": "1"}, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_when_there_are_colours(terminal: bool, environment: dict[str, str], colours: bool) -> None:
    assert colourful(terminal, environment) is colours


def test_the_summary_of_a_step_is_a_table_whose_cells_are_text() -> None:
    text = step_summary(Report("x|y", calls(2, 1, wrong=1), {"dense/cp2": "a | b\n<c>"}))
    assert text.startswith("### ❌ x\\|y: 10 checks: 4 failed in dense/dp8")
    assert "| dense/cp2 | a \\| b<br>&lt;c> |" in text
    rows = [line for line in text.splitlines() if line.startswith("| drift")]
    assert len(rows) == 4
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 2 for row in rows)


@pytest.mark.parametrize("before", [0, 10, LIMIT - 40_000, LIMIT - 10, LIMIT])
def test_the_summary_of_a_step_stays_within_githubs_limit(
    before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.md"
    path.write_bytes(b"x" * before)
    monkeypatch.setenv(github_summary.VARIABLE, str(path))
    report = Report("ä" * 9, calls(64, 8, wrong=3), {f"case/{n}": "ü" * 900 for n in range(700)})
    assert append_step_summary(report) == path
    data = path.read_bytes()
    assert before <= len(data) <= LIMIT
    added = data[before:].decode()
    assert added.startswith("### ") == (before < LIMIT - 1000)
    if added:
        assert added.endswith("the files of the report hold all of it.\n")


def test_without_github_nothing_is_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(github_summary.VARIABLE, raising=False)
    assert append_step_summary(Report("x")) is None


def test_a_remedy_is_never_cut_off() -> None:
    """Catches an ellipsis where a sentence says what to do: errors and causes take as many lines as they need."""
    remedy = "run regress golden calibrate dense --golden-dir /a/rather/long/path/of/goldens, then review what it says"
    report = Report(
        "pytest", [], errors={"dense/dp2-packed-budget64": f"there are no measured tolerances yet: {remedy}"}
    )
    for width in (40, 80, 200):
        shown = screen(report, width=width)
        assert "".join(remedy.split()) in "".join(shown.split())
        assert all(len(line) <= width for line in shown.splitlines())
