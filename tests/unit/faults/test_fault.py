"""Faults come and go: the engine is broken inside, and as it was afterwards; the registry finds them by itself."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tests.faults
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.rules.rule_table import RULES
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.errors import ReplayError
from regress.replay.fault_injection import Patch
from regress.replay.probes import probes
from regress.replay.variant import Precision
from tests.faults import registry
from tests.faults.fault import CATEGORIES, REGISTERED, Fault, Shown, fault
from tests.faults.registry import corpus, fault_named, faults_named, installed
from tests.faults.trials.trial import Judged, Trial, row_of

LOCAL = [fault for fault in corpus().values() if not fault.of_run and "ranks" not in fault.inject.__module__]
"""Faults that break code without asking for their rank."""


def replaced(one: Fault, error: type[Exception] | None = None) -> list[tuple[Any, str, Any, Any]]:
    """Owner and name of what a fault replaces, what is there before, and what is there inside."""
    found: list[tuple[Any, str, Any, Any]] = []
    right = Patch.setattr

    def noted(self: Patch, owner: Any, name: str, value: Any) -> None:
        before = inspect.getattr_static(owner, name)
        right(self, owner, name, value)
        found.append((owner, name, before, inspect.getattr_static(owner, name)))

    with suppress(ZeroDivisionError), mock.patch.object(Patch, "setattr", noted), one.injected() as prepare:
        assert prepare is None
        if error is not None:
            raise error
    return found


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_faults_change_the_engine_while_they_last(error: type[Exception] | None) -> None:
    for one in LOCAL:
        found = replaced(one, error)
        assert found, f"{one.name} changes nothing"
        for owner, name, before, inside in found:
            assert inside is not before, f"{one.name} leaves {name} as it is"
            assert inspect.getattr_static(owner, name) is before, f"{one.name} leaves {name} broken"


def test_a_fault_that_draws_is_the_same_in_every_replay() -> None:
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        torch.rand(3)
        with fault_named("dropout_left_on").injected():
            drawn.append(torch.rand(5))
    torch.rand(3)
    assert torch.equal(*drawn)
    torch.set_rng_state(before)
    with fault_named("dropout_left_on").injected():
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_faults_of_a_run_prepare_it() -> None:
    one = fault_named("counter_one_ahead")
    with installed(one.name) as prepare:
        assert prepare is one.inject
    with installed(None) as prepare:
        assert prepare is None


def test_the_corpus_is_large_and_can_be_told_apart() -> None:
    known = [*corpus().values()]
    kinds = Counter(one.kind for one in known)
    assert kinds["semantic"] + kinds["precision"] >= 150
    assert {one.category for one in known if one.wrong} == {*CATEGORIES}
    assert {*probes()} <= {*corpus()}
    assert all(one.mechanism.endswith((".", "`")) for one in known), "not a sentence"
    assert all(one.title and one.words == one.words.strip() for one in known)
    assert [one.name for one in known if not one.source and one.wrong] == []


def test_a_third_is_held_out() -> None:
    wrong = [one for one in corpus().values() if one.wrong]
    share = sum(one.held_out for one in wrong) / len(wrong)
    assert 0.25 < share < 0.42


def test_a_module_of_faults_is_found_without_another_edit(tmp_path: Path) -> None:
    """The package of faults has one more module: a decorated function in it is all that a fault needs."""
    (tmp_path / "mine.py").write_text(
        "from tests.faults.fault import fault, met_in\n"
        "@fault('K', 'ratio', on='dense/mbs4 dapo/mbs4')\n"
        "@met_in('mine#1')\n"
        "def ratio_of_my_own(patch):\n"
        "    'Nothing yet.'\n"
    )
    before = dict(REGISTERED)
    with mock.patch.object(tests.faults, "__path__", [*tests.faults.__path__, str(tmp_path)]):
        registry.corpus.cache_clear()
        try:
            found = fault_named("ratio_of_my_own")
        finally:
            registry.corpus.cache_clear()
            REGISTERED.clear()
            REGISTERED.update(before)
            sys.modules.pop("tests.faults.mine", None)
            with suppress(AttributeError):
                del tests.faults.mine
    assert [(shown.case, shown.variant) for shown in found.shown] == [("dense", "mbs4"), ("dapo", "mbs4")]
    assert found.mechanism == "Nothing yet."
    assert "ratio_of_my_own" not in corpus()


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ReplayError, match="there is no fault 'mean_of_mean': did you mean mean_of_means"):
        fault_named("mean_of_mean")
    with pytest.raises(ReplayError, match=r"there is no fault 'zzz': python -m tests\.faults list shows all"):
        faults_named(["zzz"])
    assert {one.name for one in faults_named(["ratio_inverted", "kl_det*"])} == {
        "kl_detached",
        "ratio_inverted",
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"kind": "typo"}, "fault wrong_one is of kind 'typo'; choose one of semantic, precision"),
        ({"category": "?"}, "fault wrong_one has category '\\?'; choose one of A, B"),
        ({"first": ""}, "fault wrong_one says nowhere what fails first; give first"),
        ({"blind": ("luck",)}, "fault wrong_one names the check 'luck'; choose one of loss 5 %"),
        ({"kind": "equivalent"}, "fault wrong_one has a proof and is not of kind equivalent, or the reverse"),
        (
            {"proof": "none needed"},
            "fault wrong_one has a proof and is not of kind equivalent, or the reverse",
        ),
    ],
)
def test_what_a_fault_must_say(arguments: dict[str, Any], problem: str) -> None:
    def wrong_one(patch: Patch) -> None:
        """Change nothing."""

    with pytest.raises(ValueError, match=problem):
        fault(**{"category": "A", "first": "weights", **arguments})(wrong_one)
    assert "wrong_one" not in REGISTERED


def test_a_name_is_given_once() -> None:
    def kl_detached(patch: Patch) -> None:
        """Change nothing."""

    with pytest.raises(
        ValueError, match=r"fault kl_detached is the name of one in regress\.replay\.probes\.loss_probes, too"
    ):
        fault(category="A", first="weights")(kl_detached)
    assert isinstance(fault_named("kl_detached"), Fault)


def test_rules_that_are_accepted_are_rules() -> None:
    known = {rule.id for rule in RULES}
    assert {name: {*one.rules} - known for name, one in corpus().items() if {*one.rules} - known} == {}


@pytest.mark.parametrize(
    ("problem", "failed", "first", "caught"),
    [
        ("an error of its own", False, "weights", False),  # an error of the tool proves nothing
        ("an error of its own", False, "refused", False),
        ("it lies in 0 parts, says the engine", False, "refused", True),
        ("", True, "weights", True),
        ("", True, "refused", True),
        ("", False, "weights", False),
    ],
)
def test_a_fault_is_caught_by_verdicts_or_by_the_refusal_that_was_written_down(
    problem: str, failed: bool, first: str, caught: bool
) -> None:
    one = replace(fault_named("offset_checked"), shown=())
    shown = Shown("dense", "tp2", first, says="lies in 0 parts")
    bad = Verdict(Status.DRIFT, "weights", "weights", Place(0, None, 0, 0), multiple=1e4, over=9, count=9)
    verdicts = [bad] if failed else []
    found = Judged(mock.Mock(), verdicts, find_divergence(verdicts), problem=problem)
    with mock.patch("tests.faults.trials.trial.measured", return_value={}):
        row = row_of(Trial(one, shown, Precision.FLOAT64), found, 0.0)
    assert row.caught == caught
    assert (row.margin > 0) == caught
