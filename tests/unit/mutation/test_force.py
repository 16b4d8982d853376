"""Mutants in force: where the function is used, until they are taken back, and errors are told from others."""

from __future__ import annotations

import gc

import pytest
import torch

from mutation.force import in_force, remember
from mutation.mutants import Mutant, Planted, mutants, unchanged
from regress.grpo import kl_divergence
from regress.grpo.objective_presets import make_objective

PATH, FUNCTION = "regress/grpo/kl_divergence.py", "kl_estimate"


def planted(old: str, new: str) -> Planted:
    return Planted(PATH, FUNCTION, 0, 1, "planted", old, "", 1, old, new)


def value(kind: str = "k3") -> float:
    objective = make_objective("trl:grpo", kl_coef=0.1, kl_placement="loss", kl_estimator=kind)
    return float(kl_divergence.kl_estimate(torch.tensor([0.1]), torch.tensor([0.3]), objective))


def test_a_mutant_is_in_force_until_it_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = value()
    wrong = set()
    monkeypatch.setattr("mutation.force._remembered", {})
    remember([PATH])  # or each mutant looks through all objects of this session
    for mutant in mutants([PATH]):
        if mutant.function == FUNCTION:
            with in_force(mutant) as force:
                assert force.functions == 1
                assert not force.started
                try:
                    wrong.add(value())
                except Exception:  # a mutant may do anything
                    continue
                assert force.started
    assert value() == right
    assert wrong - {right}


def test_what_is_put_into_force_unchanged_computes_the_same() -> None:
    right = value()
    gc.freeze()  # as a warm forkserver does
    with in_force(unchanged(planted("", ""))) as force:
        assert value() == right
        assert force.started


def test_errors_that_pass_through_the_mutant_are_told_from_others() -> None:
    with in_force(unchanged(planted("", ""))) as force:
        with pytest.raises(AttributeError) as inside:
            kl_divergence.kl_estimate(None, None, None)  # type: ignore[arg-type]  # nothing that it could read
        with pytest.raises(ZeroDivisionError) as outside:
            raise ZeroDivisionError
        assert force.raised(inside.value)
        assert not force.raised(outside.value)
        outside.value.__cause__ = inside.value
        assert force.raised(outside.value)
    with in_force(unchanged(planted("", ""))) as later:
        assert not later.raised(inside.value)  # of another run


def test_a_function_that_is_not_there() -> None:
    with (
        pytest.raises(LookupError, match="no function gone"),
        in_force(Mutant(PATH, "gone", 0, 1, "", "", "")),
    ):
        pass


def test_a_function_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutation.force._functions", lambda: iter(()))
    with pytest.raises(LookupError, match="is loaded"), in_force(unchanged(planted("", ""))):
        pass
    assert value() > 0
