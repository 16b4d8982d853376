"""Opening cases: what can be read of them, and what the sentence says where something is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase, GoldenStore, ToleranceEntry
from regress.golden.case_update import commit


def test_an_unrecorded_case_is_legal(unrecorded: Path) -> None:
    case = GoldenStore(unrecorded.parent).case("tiny")
    assert case.manifest is None
    assert (case.name, case.folder, case.reason) == ("tiny", unrecorded, "The smallest case there can be.")
    assert case.claims == ["kl"]
    assert case.config == {"seed": 3, "algorithm": {"kl_coef": 1e-3}}
    assert case.recipe == {"made": "by hand"}
    assert case.wheres() == []
    case.verify_inputs()
    assert list(case.trajectories()) == [0, 1]
    assert case.tolerance("log_probs", "float32") is None
    with pytest.raises(GoldenError, match="recorded are none yet: run regress golden record"):
        case.truth("step_000000")


def test_what_was_committed_is_read_bit_for_bit(recorded: Path, make_truth: Any) -> None:
    case = GoldenStore(recorded.parent).case("tiny")
    truth = make_truth()
    assert case.wheres() == list(truth)
    case.verify_inputs()
    for where, quantities in truth.items():
        assert case.quantities(where) == sorted(quantities)
        found = case.truth(where)
        for quantity, tensors in quantities.items():
            assert sorted(found[quantity]) == sorted(tensors)
            for name, values in tensors.items():
                values = np.asarray(values)
                array = found[quantity][name]
                assert (array.dtype, array.shape, array.tobytes()) == (
                    values.dtype,
                    values.shape,
                    values.tobytes(),
                )
    assert [t.tokens for t in case.trajectories()[1]] == [[5, 6, 7, 9], [5, 6, 7, 9]]


def test_updates_come_in_the_order_they_are_made(unrecorded: Path, provenance: Any) -> None:
    wheres = [f"step_{step:06d}_update{update}" for step in (0, 3) for update in range(11)]
    truth = {where: {"loss": {"loss": np.float64(1)}} for where in reversed(wheres)}
    commit(unrecorded, truth=truth, provenance=provenance)
    assert GoldenCase(unrecorded).wheres() == wheres


def test_tolerances(recorded: Path, provenance: Any) -> None:
    measured = ToleranceEntry(
        2e-6, 0.0, {"perturbation": 5e-7, "kappa": 4}, "4 times the response to one ulp"
    )
    hopeless = ToleranceEntry(None, reason="differences of nearly equal numbers")
    commit(
        recorded,
        tolerances={"log_probs": {"float32": measured, "bfloat16": hopeless}},
        provenance=provenance,
    )
    case = GoldenCase(recorded)
    assert case.tolerance("log_probs", "float32") == measured
    assert case.tolerance("log_probs", "bfloat16") == hopeless
    assert case.tolerance("log_probs", "float64") is None
    commit(recorded, tolerances={"log_probs": {"bfloat16": None}}, provenance=provenance)
    assert GoldenCase(recorded).tolerance("log_probs", "bfloat16") is None
    assert GoldenCase(recorded).tolerance("log_probs", "float32") == measured


def test_names_are_folders_with_a_case(recorded: Path) -> None:
    root = recorded.parent
    (root / "checks").mkdir()
    (root / ".pending" / "x").mkdir(parents=True)
    (root / ".pending" / "case.yaml").touch()
    (root / "README.md").touch()
    assert GoldenStore(root).names() == ["tiny"]
    assert GoldenStore(root / "none").names() == []


def test_a_folder_that_lost_its_case_file_is_named(recorded: Path) -> None:
    (recorded / "case.yaml").unlink()
    store = GoldenStore(recorded.parent)
    assert store.names() == ["tiny"]
    with pytest.raises(GoldenError, match=r"tiny/case\.yaml is missing: restore it from version control"):
        store.case("tiny")


def test_an_unknown_case(recorded: Path) -> None:
    with pytest.raises(
        GoldenError, match=r"golden/moe does not exist, so there is no case 'moe': cases here are tiny"
    ):
        GoldenStore(recorded.parent).case("moe")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".pending", "checks", "a\0b", "a b", "ä"])
def test_names_that_no_case_can_have(recorded: Path, name: str) -> None:
    with pytest.raises(GoldenError, match="is not a name of a golden case"):
        GoldenStore(recorded.parent).case(name)


def test_unknown_quantities_and_updates(recorded: Path) -> None:
    case = GoldenCase(recorded)
    with pytest.raises(GoldenError, match=r"has no 'kl' at step_000001: recorded are grad_norm, gradient"):
        case.truth_of("step_000001", "kl")
    with pytest.raises(
        GoldenError, match="has no optimizer update 'step_000009': recorded are step_000000_update0"
    ):
        case.truth("step_000009")


def test_changed_inputs_are_refused_unless_asked_for(recorded: Path) -> None:
    text = (recorded / "case.yaml").read_text()
    (recorded / "case.yaml").write_text(text.replace("seed: 3", "seed: 4"))
    with pytest.raises(GoldenError, match=r"case\.yaml does not match its recorded hash"):
        GoldenCase(recorded)
    case = GoldenCase(recorded, allow_changed_inputs=True)
    assert case.config["seed"] == 4
    with pytest.raises(GoldenError, match=r"case\.yaml is not the file that was recorded"):
        case.verify_inputs()


def test_additional_inputs_are_named(recorded: Path) -> None:
    (recorded / "model" / "model.safetensors.index.json").write_text("{}")
    (recorded / "model" / ".DS_Store").touch()
    with pytest.raises(GoldenError, match=r"index\.json is not of the recording, but would be read with it"):
        GoldenCase(recorded).verify_inputs()


def test_a_renamed_trajectory(unrecorded: Path) -> None:
    folder = unrecorded / "trajectories"
    (folder / "step_000001.safetensors").rename(folder / "step_000007.safetensors")
    with pytest.raises(GoldenError, match=r"step_000007\.safetensors holds step 1: it was renamed"):
        GoldenCase(unrecorded).trajectories()
    (folder / "step_000007.safetensors").rename(folder / "again.safetensors")
    (folder / "step_000001.safetensors").write_bytes((folder / "again.safetensors").read_bytes())
    with pytest.raises(GoldenError, match=r"step_000001\.safetensors holds step 1, which another file holds"):
        GoldenCase(unrecorded).trajectories()


def test_a_case_that_is_updated_while_it_is_in_use(recorded: Path, make_truth: Any, provenance: Any) -> None:
    case = GoldenCase(recorded)
    commit(recorded, truth=make_truth(2.0), provenance=provenance)
    assert len(case.truth_of("step_000001", "optimizer")) == 1, "the same in both"
    with pytest.raises(GoldenError, match="tiny was updated while it was in use: run again"):
        case.truth("step_000001")


def test_no_trajectories(unrecorded: Path) -> None:
    for path in (unrecorded / "trajectories").iterdir():
        path.unlink()
    with pytest.raises(GoldenError, match="trajectories holds no trajectories"):
        GoldenCase(unrecorded).trajectories()


def test_the_engine_can_replay_them_where_they_lie(recorded: Path) -> None:
    """The manifest beside the folder is that of a case, which the reader of dumps must not take for its own."""
    from regress.dump import read_trajectories

    assert list(read_trajectories(recorded / "trajectories")) == [0, 1]
    assert list(read_trajectories(recorded / "trajectories" / "step_000001.safetensors")) == [1]
