"""Each hypothesis on an optimizer update is what AdamW makes with that very mistake."""

from __future__ import annotations

import numpy as np
import pytest

from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses
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
