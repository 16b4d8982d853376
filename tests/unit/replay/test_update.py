"""Updates of golden values: their changes and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from regress.dump.numpy_arrays import raw
from regress.engine import grpo_trainer
from regress.errors import RegressError
from regress.golden.golden_case import GoldenCase
from regress.grpo.advantage_computation import token_advantages
from regress.grpo.objective_presets import PRESETS
from regress.replay.case_truth import compute_truth, flat
from regress.replay.drift_update import propose


@pytest.fixture
def changed_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS["grpo"], "eps", 1e-3)  # type: ignore[arg-type]  # read-only by its annotation


def test_nothing_changes_when_nothing_did(case: GoldenCase, tmp_path: Path) -> None:
    found = propose(case, tmp_path / "work")
    assert found.changes == []
    assert found.changed == {}
    assert sum(found.compared.values()) == len(flat(found.truth)) > 400


@pytest.mark.extended
@pytest.mark.usefixtures("changed_eps")
def test_a_changed_constant_touches_what_depends_on_it(case: GoldenCase, tmp_path: Path) -> None:
    found = propose(case, tmp_path / "work")
    new = flat(compute_truth(case, tmp_path / "again"))
    old = flat({where: case.truth(where) for where in case.wheres()})
    changed = {(change.where, change.quantity, change.name) for change in found.changes}
    for key, values in flat(found.truth).items():
        assert raw(values) == raw(new[key] if key in changed else old[key])
        if key not in changed:  # last bits of another processor at most
            np.testing.assert_allclose(new[key], old[key], rtol=0, atol=1e-11)
    quantities = {(change.where, change.quantity) for change in found.changes}
    assert ("step_000000", "advantages") in quantities
    assert ("step_000000", "gradient") in quantities
    assert ("step_000001", "log_probs") in quantities
    before_the_update = {
        "batch_inputs",
        "activations",
        "log_probs",
        "entropy",
        "old_log_probs",
        "ref_log_probs",
        "kl",
    }
    assert not {quantity for where, quantity in quantities if where == "step_000000"} & before_the_update
    assert not {quantity for _, quantity in quantities} & {
        "batch_inputs",
        "weights",
        "old_log_probs",
        "ref_log_probs",
    }


@pytest.mark.usefixtures("changed_eps")
def test_only_what_is_selected_changes(case: GoldenCase, tmp_path: Path) -> None:
    wanted = {("step_000001", "log_probs"), ("step_000002", "advantages")}
    found = propose(case, tmp_path / "work", selected=lambda *key: key in wanted)
    assert {(change.where, change.quantity) for change in found.changes} == wanted
    assert set(found.compared) == {"log_probs", "advantages"}


def test_values_that_differ_between_two_runs_are_refused(
    case: GoldenCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(*args: object) -> Tensor:
        values = token_advantages(*args)  # type: ignore[arg-type]  # handed on
        return values + torch.rand(()) * 1e-13

    monkeypatch.setattr(grpo_trainer, "token_advantages", noisy)
    with pytest.raises(RegressError) as error:
        propose(case, tmp_path / "work")
    assert "case dense: two runs of the same computation differ" in str(error.value)
    assert "look for a source of randomness" in str(error.value)


@pytest.mark.extended
def test_a_case_that_lost_its_signal_is_refused(
    case: GoldenCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS["grpo"], "clip_high", 100.0)  # type: ignore[arg-type]  # read-only by its annotation
    with pytest.raises(RegressError, match="cannot become golden, because some faults could not show in it"):
        propose(case, tmp_path / "work")


def test_values_that_are_not_finite_are_refused(
    case: GoldenCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Tensor:
        values = token_advantages(*args)  # type: ignore[arg-type]  # handed on
        return torch.where(torch.arange(len(values)) == 3, torch.nan, values)

    monkeypatch.setattr(grpo_trainer, "token_advantages", broken)
    with pytest.raises(RegressError, match="so no update was made"):  # by the training step itself
        propose(case, tmp_path / "work")
