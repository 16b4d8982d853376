"""``python -m tests.faults``: the corpus in words, and a run of some of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.faults.fault import CATEGORIES, KINDS
from tests.faults.trials.commands import faults
from tests.faults.trials.rows import from_json

GOLDEN = Path(__file__).parents[2] / "golden"


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(faults, arguments)


def test_faults_are_listed_by_pattern_kind_and_category() -> None:
    found = asked("list", "clip*", "mean_of_means")
    assert found.exit_code == 0, found.output
    assert "clip_range_off" in found.output
    assert "dense/longest-first, dapo/mbs4" in found.output
    only = asked("list", "--kind", "harmless", "--category", "J")
    assert "kl_by_expm1" in only.output
    assert "kl_detached" not in only.output


def test_all_kinds_and_categories_can_be_asked_for() -> None:
    for option, names in (("--kind", KINDS), ("--category", CATEGORIES)):
        for name in names:
            run = asked("list", option, name)
            assert run.exit_code == 0, run.output
            assert "\n0 faults" not in run.output


def test_a_fault_is_shown_with_what_is_known_of_it() -> None:
    found = asked("show", "mean_of_means")
    for text in (
        "category:   loss normalization",
        "met in:     transformers PR#34191, open-instruct PR#1161",
        "mechanism:  The loss is the mean of each microbatch's mean.",
        "diagnosis:  mean-of-means",
        "part:       tuning",
        "code:       tests.faults.normalization.mean_of_means",
        "dense/longest-first: shows in weights weights (float64)",
        "dense/mbs4: cannot show: a mean over samples",
    ):
        assert text in found.output
    proven = asked("show", "schedule_not_stepped").output
    assert "proof:      the schedule of these cases is constant" in proven
    assert "part:" not in proven


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("list --kind harmles", "did you mean harmless?"),
        ("run --kind harmles", "did you mean harmless?"),
        ("list --category ZZ", "'ZZ' is not one of 'A', 'B'"),
    ],
)
def test_a_misspelt_name_is_told_the_nearest(arguments: str, words: str) -> None:
    run = asked(*arguments.split())
    assert run.exit_code == 2, run.output
    assert words in run.output


@pytest.mark.parametrize("verb", ["show", "run"])
def test_an_unknown_fault_is_refused_with_the_nearest(verb: str) -> None:
    found = asked(verb, "mean_of_mean")
    assert found.exit_code == 2
    assert "there is no fault 'mean_of_mean': did you mean mean_of_means?" in found.output


def test_a_run_says_what_was_caught_and_writes_it(tmp_path: Path) -> None:
    place = ["--golden-dir", str(GOLDEN), "--report", str(tmp_path), "--matrix", str(tmp_path / "kill.md")]
    found = asked("run", "counter_one_ahead", "kl_by_expm1", *place)
    assert found.exit_code == 0, found.output
    assert "step-counter: right" in found.output
    assert "1 fault: 1 caught by the margin of their kind" in found.output
    assert "0 of 3 replays flagged that must not be" in found.output
    rows = from_json((tmp_path / "faults.json").read_text())
    assert [(row.fault, row.caught) for row in rows] == [
        ("kl_by_expm1", False),
        ("kl_by_expm1", False),
        ("kl_by_expm1", False),
        ("counter_one_ahead", True),
    ]
    assert not any(rows[-1].common.values())
    page = (tmp_path / "kill.md").read_text()
    assert "counter\\_one\\_ahead" in page
    again = asked("matrix", str(tmp_path / "faults.json"), "--out", str(tmp_path / "again.md"))
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.md").read_text() == page


def test_a_fault_that_cannot_show_escapes(tmp_path: Path) -> None:
    place = ["--golden-dir", str(GOLDEN), "--case", "dense", "--variant", "mbs4", "--report", str(tmp_path)]
    found = asked("run", "mean_of_means", *place)
    assert found.exit_code == 1
    assert "escaped: mean_of_means" in found.output
    assert json.loads((tmp_path / "faults.json").read_text())["rows"][0]["multiple"] is not None


@pytest.mark.extended
def test_parts_are_chosen_and_diagnoses_left_out(tmp_path: Path) -> None:
    place = ["--golden-dir", str(GOLDEN), "--report", str(tmp_path)]
    found = asked("run", "counter_one_*", "--part", "tuning", "--no-diagnosis", *place)
    assert found.exit_code == 0, found.output
    rows = from_json((tmp_path / "faults.json").read_text())
    assert rows
    assert not any(row.held_out or row.rules or row.diagnosis for row in rows)


@pytest.mark.extended
def test_the_right_part_is_blamed_where_no_value_shows_a_mask_or_a_zero(tmp_path: Path) -> None:
    place = ["--golden-dir", str(GOLDEN), "--report", str(tmp_path)]
    found = asked("run", "lower_radius_of_the_trust_region_halved", "equal_rewards_not_set_to_zero", *place)
    assert found.exit_code == 0, found.output
    rows = {row.fault: row for row in from_json((tmp_path / "faults.json").read_text())}
    assert rows["lower_radius_of_the_trust_region_halved"].rules == ("mask-of-the-loss",)
    assert rows["equal_rewards_not_set_to_zero"].rules == ("advantage-of-equal-rewards",)


@pytest.mark.extended
def test_a_ratio_as_a_change_of_1_is_flagged_in_no_precision(tmp_path: Path) -> None:
    """Its least value is off by the rounding of 1, which is the size of what it is made of."""
    place = ["--golden-dir", str(GOLDEN), "--case", "dapo", "--report", str(tmp_path)]
    found = asked("run", "ratio_by_expm1", *place)
    assert "0 of 3 replays flagged that must not be" in found.output
