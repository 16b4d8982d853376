"""Each hypothesis on an optimizer update is what AdamW makes with that very mistake."""

from __future__ import annotations

import numpy as np
import pytest

from regress.compare.diagnosis.related_values import RelatedValues
from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses
from regress.compare.dumps.adamw_settings import Adam
from tests.unit.compare.diagnosis.synthetic_update import SETTINGS, updated


def test_weight_decay_in_the_gradient() -> None:
    known, wrong = UpdateHypotheses(updated(), SETTINGS), updated(coupled=True)
    (found,) = (h for h in known.of("optimizer", "w/exp_avg") if h.numbers.get("id") == "coupled=True")
    np.testing.assert_allclose(found.values, wrong["optimizer"]["w/exp_avg"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("counter", [1, -1])
def test_a_step_counter_that_is_off_by_one(counter: int) -> None:
    known, wrong = UpdateHypotheses(updated(), SETTINGS), updated(counter=counter)
    (found,) = (h for h in known.of("param", "w") if h.numbers.get("id") == f"count={4 + counter}")
    np.testing.assert_allclose(found.values, wrong["param"]["w"], rtol=0, atol=1e-13)


def test_of_a_large_tensor_some_wrong_elements_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regress.compare.diagnosis.update_hypotheses._FEW", 4)
    truth, wrong = updated(), updated(coupled=True)["optimizer"]["w/exp_avg"]
    affected = np.zeros(wrong.shape, bool)
    affected[1:3] = True
    asked = UpdateHypotheses(truth, SETTINGS).of("optimizer", "w/exp_avg", affected)
    (few,) = (h for h in asked if h.numbers.get("id") == "coupled=True")
    assert few.rows is not None
    assert len(few.rows) == 3
    assert affected.reshape(-1)[few.rows].all()
    np.testing.assert_allclose(few.values, wrong.reshape(-1)[few.rows], rtol=0, atol=1e-13)
    whole = few.whole()
    assert whole is not None
    np.testing.assert_allclose(whole.values, wrong, rtol=0, atol=1e-13)


@pytest.mark.parametrize("known", ["before", "after"])
@pytest.mark.parametrize("limit", [None, 1.5], ids=["free", "clipped"])
def test_settings_that_nobody_tells_are_proven_by_two_updates(known: str, limit: float | None) -> None:
    """The update with the state before it known, or the next one, tells decays, clip, rate, weight decay and eps."""
    steps = 4 if known == "before" else 3
    near = updated(steps=7 - steps, limit=limit)
    hypotheses = UpdateHypotheses(updated(steps=steps, limit=limit), {}, RelatedValues(**{known: near}))
    wrong = updated(steps=steps, counter=1, limit=limit)["param"]["w"]
    (found,) = (h for h in hypotheses.of("param", "w") if h.numbers.get("id") == f"count={steps + 1}")
    np.testing.assert_allclose(found.values, wrong, rtol=0, atol=1e-8)
    told = [h.numbers.get("id") for h in hypotheses.of("optimizer", "w/exp_avg")]
    assert ("max_grad_norm=None" in told) is (limit is not None)


@pytest.mark.parametrize("before", [True, False], ids=["with the state before", "alone"])
def test_settings_that_records_of_the_state_tell_need_no_proof_but_the_clip(before: bool) -> None:
    adam = Adam(0.02, (0.9, 0.99), 1e-8, None)
    earlier = {"optimizer": updated(steps=3)["optimizer"]} if before else {}
    known = UpdateHypotheses(updated(), {}, RelatedValues(before=earlier, optimizer=lambda _: (adam, 0.03)))
    (found,) = (h for h in known.of("optimizer", "w/exp_avg") if h.numbers.get("id") == "coupled=True")
    wrong = updated(coupled=True)["optimizer"]["w/exp_avg"]
    np.testing.assert_allclose(found.values, wrong, rtol=0, atol=1e-12)


def test_of_a_first_update_alone_the_direction_is_known_and_nothing_that_needs_the_rate() -> None:
    known = UpdateHypotheses(updated(steps=1), {})
    (found,) = known.of("param", "w")
    assert found.numbers["id"] == "fit:learning_rate"
    assert found.direction is not None
    step = updated(steps=1)["param"]["w"] - 0.02 * found.direction
    again = updated(steps=1)["optimizer"]
    moved = again["w/exp_avg"] / 0.1 / (np.sqrt(again["w/exp_avg_sq"] / 0.01) + 1e-8)
    np.testing.assert_allclose(updated(steps=1)["param"]["w"] - 0.02 * moved, step, rtol=0, atol=1e-12)


def test_values_that_no_adamw_makes_prove_no_settings() -> None:
    truth, before = updated(), updated(steps=3)
    truth["optimizer"]["w/exp_avg"] = truth["optimizer"]["w/exp_avg"] + 0.01
    known = UpdateHypotheses(truth, {}, RelatedValues(before=before))
    assert not [*known.of("optimizer", "w/exp_avg"), *known.of("param", "w")]
