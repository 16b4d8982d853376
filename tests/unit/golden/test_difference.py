"""Differences between two recordings of a case, in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase, ToleranceEntry
from regress.golden.commit import commit
from regress.golden.difference import Side, ToleranceChange, change_of, compare


def change(old: Any, new: Any) -> Any:
    return change_of("step_000000", "gradient", old, new)


def test_the_worst_tensor_is_the_one_that_moved_most_for_its_size() -> None:
    old = {"big": np.array([1000.0, -2000.0]), "small": np.array([0.1, 0.2]), "same": np.ones(3)}
    new = {"big": np.array([1000.0, -2010.0]), "small": np.array([0.1, 0.1]), "same": np.ones(3)}
    found = change(old, new)
    assert (found.tensors, found.changed, found.worst) == (3, 2, "small")
    assert (found.max_error, found.relative) == (pytest.approx(0.1), pytest.approx(0.5))


def test_zeros_of_another_sign_are_a_change_without_an_error() -> None:
    found = change({"a": np.array([0.0, 1.0])}, {"a": np.array([-0.0, 1.0])})
    assert (found.changed, found.max_error, found.relative) == (1, 0.0, 0.0)


def test_away_from_zero_and_to_the_end_of_the_range() -> None:
    assert change({"a": np.zeros(2)}, {"a": np.array([0, 1e-300])}).relative == np.inf
    assert change({"a": np.array([-1.7e308])}, {"a": np.array([1.7e308])}).max_error == np.inf


def test_tensors_that_come_go_or_turn_into_others() -> None:
    old = {"gone": np.ones(1), "wider": np.ones(2, np.float32), "longer": np.ones(2)}
    new = {"came": np.ones(1), "wider": np.ones(2, np.float64), "longer": np.ones((3, 1))}
    found = change(old, new)
    assert (found.tensors, found.changed, found.worst) == (4, 4, "")
    assert found.detail == (
        "came new; gone removed; longer float64 3x1, was float64 2; wider float64 2, was float32 2"
    )


def test_integers_and_masks() -> None:
    found = change({"a": np.array([True, False])}, {"a": np.array([True, True])})
    assert (found.max_error, found.relative) == (1.0, 1.0)


def test_whole_cases(
    recorded: Path, tmp_path: Path, make_inputs: Any, make_truth: Any, provenance: Any
) -> None:
    twin = make_inputs(tmp_path / "twin")
    truth = make_truth()
    del truth["step_000001"]["optimizer"]
    truth["step_000001"]["loss"] = {"loss": np.float64(1.0)}
    (twin / "model" / "config.json").write_text("{}")
    (twin / "reference" / "config.json").unlink()
    commit(
        twin,
        truth=truth,
        tolerances={"loss": {"float32": ToleranceEntry(1e-6, reason="measured")}},
        provenance=provenance,
    )
    old, new = (Side(GoldenCase(folder).manifest, [folder]) for folder in (recorded, twin))
    found = compare(old, new)
    assert [(c.where, c.quantity, c.status) for c in found.changes] == [
        ("step_000001", "loss", "new"),
        ("step_000001", "optimizer", "removed"),
    ]
    assert found.tolerances == [
        ToleranceChange("loss", "", "float32", "none", "1e-06 of the scale", None, "measured")
    ]
    assert found.inputs == ["input model/config.json changed", "input reference/config.json was removed"]
    assert not compare(new, new)
    assert not compare(Side(None, []), Side(None, []))


def test_only_what_differs_is_read_and_damage_is_named(
    recorded: Path, make_truth: Any, provenance: Any
) -> None:
    old = Side(GoldenCase(recorded).manifest, [recorded])
    truth = {"step_000001": {"log_probs": {"log_probs": np.zeros(8)}}}
    commit(recorded, truth=truth, provenance=provenance)
    new = Side(GoldenCase(recorded).manifest, [recorded])
    with pytest.raises(GoldenError, match=r"log_probs\.\w+\.safetensors is missing"):
        compare(old, new)
    for path in recorded.glob("truth/*/gradient.*"):
        path.unlink()
    assert not compare(new, new)
