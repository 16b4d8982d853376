"""Changing a case: what is written, what is not, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase, ToleranceEntry
from regress.golden.case_update import commit


def stats(folder: Path) -> dict[str, tuple[int, int]]:
    """Return modification time and inode of each file, which show that a file was touched."""
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*")}


def test_a_commit_of_the_same_touches_nothing(recorded: Path, make_truth: Any, provenance: Any) -> None:
    before = stats(recorded)
    tolerances = {"loss": {"float32": ToleranceEntry(1e-6, reason="measured")}}
    assert commit(recorded, truth=make_truth(), provenance=provenance) == []
    assert commit(recorded, truth=make_truth(), provenance={"versions": {"torch": "3.0"}}) == []
    assert commit(recorded, provenance={}) == []
    assert stats(recorded) == before
    assert commit(recorded, tolerances=tolerances, provenance=provenance) == [recorded / "manifest.json"]
    before = stats(recorded)
    assert commit(recorded, tolerances=tolerances, inputs=["case.yaml"], provenance={}) == []
    assert stats(recorded) == before


def test_exactly_what_changes_is_rewritten(recorded: Path, content: Any, provenance: Any) -> None:
    before = content(recorded)
    new = np.arange(8.0)
    written = commit(
        recorded, truth={"step_000001": {"log_probs": {"log_probs": new}}}, provenance=provenance
    )
    after = content(recorded)
    assert [path.name for path in written][-1] == "manifest.json"
    assert len(written) == 2
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"manifest.json", "truth/step_000001/log_probs.safetensors"}
    assert (GoldenCase(recorded).truth_of("step_000001", "log_probs")["log_probs"] == new).all()


def test_tensors_that_are_not_mentioned_stay(recorded: Path, make_truth: Any, provenance: Any) -> None:
    changes = {"step_000001": {"gradient": {"lm_head.weight": np.zeros((4, 3)), "new.bias": np.ones(2)}}}
    commit(recorded, truth=changes, provenance=provenance)
    found = GoldenCase(recorded).truth_of("step_000001", "gradient")
    old = make_truth()["step_000001"]["gradient"]
    assert list(found) == ["lm_head.weight", "model.norm.weight", "new.bias"]
    assert (found["model.norm.weight"] == old["model.norm.weight"]).all()
    assert not found["lm_head.weight"].any()


def test_none_removes(recorded: Path, provenance: Any) -> None:
    changes: dict[str, Any] = {
        "step_000001": {"gradient": {"lm_head.weight": None}, "grad_norm": None},
        "step_000000_update0": None,
    }
    commit(recorded, truth=changes, provenance=provenance)
    case = GoldenCase(recorded)
    assert case.wheres() == ["step_000000_update1", "step_000001"]
    assert case.quantities("step_000001") == ["gradient", "log_probs", "optimizer"]
    assert list(case.truth_of("step_000001", "gradient")) == ["model.norm.weight"]
    assert not (recorded / "truth" / "step_000000_update0").exists()
    commit(recorded, truth={"step_000001": {"gradient": {"model.norm.weight": None}}}, provenance=provenance)
    assert GoldenCase(recorded).quantities("step_000001") == ["log_probs", "optimizer"]


def test_replacing_removes_what_is_not_mentioned(recorded: Path, provenance: Any) -> None:
    truth = {"step_000001": {"loss": {"loss": np.float64(2.0)}}}
    commit(recorded, truth=truth, provenance=provenance, replace=True)
    case = GoldenCase(recorded)
    assert case.wheres() == ["step_000001"]
    assert case.quantities("step_000001") == ["loss"]
    assert len(list((recorded / "truth").rglob("*.safetensors"))) == 1
    case.verify_inputs()


def test_the_bytes_depend_on_nothing_but_the_values(
    tmp_path: Path, make_inputs: Any, make_truth: Any, content: Any, provenance: Any
) -> None:
    """One commit, or one for each tensor in any order, as several workers would make them."""
    whole, pieces = make_inputs(tmp_path / "a"), make_inputs(tmp_path / "b")
    truth = make_truth()
    commit(whole, truth=truth, provenance=provenance)
    parts = [(w, q, n) for w, row in truth.items() for q, tensors in row.items() for n in tensors]
    np.random.default_rng(0).shuffle(parts)
    for where, quantity, name in parts:
        values = truth[where][quantity][name]
        commit(pieces, truth={where: {quantity: {name: values}}}, provenance=provenance)
    assert content(whole) == content(pieces)


def test_the_manifest_reads_like_a_report(recorded: Path, make_truth: Any) -> None:
    text = (recorded / "manifest.json").read_text()
    tree = json.loads(text)
    assert list(tree) == sorted(tree)
    lines = [line for line in text.splitlines() if '"lm_head.weight": ' in line]
    assert len(lines) == 3
    entry = tree["truth"]["step_000001"]["gradient"]["tensors"]["lm_head.weight"]
    values = make_truth()["step_000001"]["gradient"]["lm_head.weight"]
    assert (entry["shape"], entry["dtype"]) == ("4x3", "float64")
    expected = {
        "min": values.min(),
        "max": values.max(),
        "mean": values.mean(),
        "absmax": np.abs(values).max(),
        "l2": np.sqrt((values**2).sum()),
    }
    assert {name: entry[name] for name in expected} == pytest.approx(expected, rel=1e-8)
    assert tree["truth"]["step_000001"]["grad_norm"]["tensors"]["grad_norm"]["shape"] == "scalar"
    assert set(tree["inputs"]) == {
        "case.yaml",
        "model/config.json",
        "model/model.safetensors",
        "optimizer.safetensors",
        "reference/config.json",
        "reference/model.safetensors",
        "trajectories/step_000000.safetensors",
        "trajectories/step_000001.safetensors",
    }


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(0),
        np.zeros((3, 0, 2), np.float32),
        np.array(True),
        np.arange(5, dtype=np.uint64) + 2**63,
        np.array([1e308, -1e308, 1e308]),
        np.array([5e-324, 0.0, -0.0]),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.arange(6)[::2],
        np.array([[1, 2]], dtype=">i4"),
        3,
    ],
)
def test_every_kind_of_tensor(unrecorded: Path, values: Any, provenance: Any) -> None:
    commit(unrecorded, truth={"step_000000": {"loss": {"x": values}}}, provenance=provenance)
    found = GoldenCase(unrecorded).truth_of("step_000000", "loss")["x"]
    assert found.shape == np.shape(values)
    assert found.tolist() == np.asarray(values).tolist()
    assert np.signbit(found.astype(float)).tolist() == np.signbit(np.asarray(values).astype(float)).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite(
    recorded: Path, bad: float, dtype: Any, content: Any, provenance: Any
) -> None:
    before = content(recorded)
    values = np.ones((2, 3)).astype(dtype)
    values[1, 2] = bad
    with pytest.raises(
        GoldenError,
        match=rf"step_000001/kl: kl is {bad} at \[1, 2\] \(1 of 6 elements are not finite\), which no golden may be",
    ):
        commit(recorded, truth={"step_000001": {"kl": {"kl": values}}}, provenance=provenance)
    assert content(recorded) == before


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ({"step_0": {"loss": {"x": 1.0}}}, "'step_0' is not an optimizer update: write step_000000"),
        ({"step_000000_rank0": {"loss": {"x": 1.0}}}, "is not an optimizer update"),
        ({"../../x": {"loss": {"x": 1.0}}}, "is not an optimizer update"),
        ({"step_000000": {"../x": {"x": 1.0}}}, "'../x' is not a name of a quantity"),
        ({"step_000000": {"loss": {"a\nb": 1.0}}}, "cannot be stored: tensor name"),
        ({"step_000000": {"loss": {"$float": 1.0}}}, "the manifest cannot be written"),
        ({"step_000000": {"loss": {"x": "text"}}}, "cannot be stored: tensor 'x' is a str"),
    ],
)
def test_refused_truth(unrecorded: Path, truth: Any, says: str, content: Any, provenance: Any) -> None:
    before = content(unrecorded)
    with pytest.raises(GoldenError, match=re.escape(says)):
        commit(unrecorded, truth=truth, provenance=provenance)
    assert content(unrecorded) == before


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (ToleranceEntry(1e-6), "loss at float32 has no reason, but a tolerance is never set without one"),
        (
            ToleranceEntry(-1.0, reason="r"),
            "has relative = -1.0, but a tolerance is a finite number of at least 0",
        ),
        (ToleranceEntry(float("nan"), reason="r"), "has relative = nan"),
        (ToleranceEntry(0.0, float("inf"), reason="r"), "has absolute = inf"),
        (ToleranceEntry(0.0, basis={"x": object()}, reason="r"), "the manifest cannot be written"),
    ],
)
def test_refused_tolerances(unrecorded: Path, entry: ToleranceEntry, says: str, provenance: Any) -> None:
    with pytest.raises(GoldenError, match=re.escape(says)):
        commit(unrecorded, tolerances={"loss": {"float32": entry}}, provenance=provenance)
    assert not (unrecorded / "manifest.json").exists()


def test_inputs_are_hashed_anew_when_asked(recorded: Path, provenance: Any) -> None:
    (recorded / "model" / "config.json").write_text("{}")
    (recorded / "model" / "new.json").write_text("{}")
    (recorded / "reference" / "config.json").unlink()
    with pytest.raises(GoldenError, match=r"model/config\.json is not the file that was recorded"):
        GoldenCase(recorded).verify_inputs()
    commit(
        recorded,
        inputs=["model/config.json", "model/new.json", "reference/config.json"],
        provenance=provenance,
    )
    GoldenCase(recorded).verify_inputs()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "model/../../x", "manifest.json", "truth/x", ".x", "a\\b", ""]
)
def test_paths_that_no_input_can_have(recorded: Path, path: str, provenance: Any) -> None:
    with pytest.raises(GoldenError, match="is not an input: give its path within"):
        commit(recorded, inputs=[path], provenance=provenance)


def test_an_input_that_never_was(recorded: Path, provenance: Any) -> None:
    with pytest.raises(GoldenError, match=r"model/none\.json does not exist, so it cannot be recorded"):
        commit(recorded, inputs=["model/none.json"], provenance=provenance)


def test_a_damaged_file_heals_when_its_content_is_recorded_again(
    recorded: Path, make_truth: Any, provenance: Any, content: Any
) -> None:
    before = content(recorded)
    (victim,) = recorded.glob("truth/step_000001/log_probs.*")
    victim.write_bytes(b"rubbish")
    new = {
        "step_000001": {"log_probs": {"log_probs": make_truth()["step_000001"]["log_probs"]["log_probs"] * 2}}
    }
    commit(recorded, truth=new, provenance=provenance)
    victim.write_bytes(b"what a copy left over")
    assert commit(recorded, truth=make_truth(), provenance=provenance)[0] == victim
    victim.write_bytes(b"rubbish again")
    assert commit(recorded, truth=make_truth(), provenance=provenance) == [victim]
    commit(recorded, truth=make_truth(), provenance=provenance)
    assert content(recorded) == before


def test_a_damaged_file_of_which_a_part_would_stay_is_refused(recorded: Path, provenance: Any) -> None:
    (victim,) = recorded.glob("truth/step_000001/gradient.*")
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(GoldenError, match=r"gradient.*bytes, but .* were recorded: restore it"):
        commit(recorded, truth={"step_000001": {"gradient": {"x": np.ones(1)}}}, provenance=provenance)


def test_what_killed_writers_left_is_removed(recorded: Path, provenance: Any, content: Any) -> None:
    before = content(recorded)
    (recorded / "truth" / "step_000001" / ".partial-7-loss.safetensors").touch()
    (recorded / "truth" / "step_000001" / "loss.safetensors").touch()
    (recorded / ".partial-7-manifest.json").touch()
    (recorded / "truth" / "step_000009").mkdir()
    (recorded / "truth" / "step_000009" / "loss.safetensors").touch()
    (recorded / "truth" / "notes.txt").write_text("mine")
    assert commit(recorded, provenance=provenance) == []
    assert content(recorded) == before | {"truth/notes.txt": b"mine"}
    assert not (recorded / "truth" / "step_000009").exists()


def test_a_folder_that_is_no_case(tmp_path: Path, provenance: Any) -> None:
    with pytest.raises(GoldenError, match=r"has no case\.yaml, so it is not a case"):
        commit(tmp_path, provenance=provenance)
    with pytest.raises(GoldenError, match=r"none has no case\.yaml, so it is not a case"):
        commit(tmp_path / "none", provenance=provenance)
    with pytest.raises(GoldenError, match=r"none is not a folder that can be read"):
        commit(tmp_path / "none" / "case", provenance=provenance)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from regress.golden.case_update import commit
for number in range(int(sys.argv[2]), 24, 4):
    truth = {"step_000001": {"gradient": {f"p{number}": np.full(3, float(number))}}}
    commit(Path(sys.argv[1]), truth=truth, provenance={})
"""


def test_writers_take_turns(recorded: Path) -> None:
    """Four processes add tensors to the same quantity, and none is lost; what is read meanwhile is whole."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(recorded)]
    writers = [subprocess.Popen([*command, str(number)], env=environ) for number in range(4)]
    seen, refused = [0], {f"{recorded} was updated while it was in use: run again"}
    while any(writer.poll() is None for writer in writers):
        try:
            case = GoldenCase(recorded)
            values = case.truth("step_000001")["gradient"]
        except GoldenError as error:
            refused.add(str(error))
            continue
        seen.append(len(values))
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    assert len(refused) == 1, refused
    assert seen == sorted(seen)
    assert len({*seen}) > 2
    found = GoldenCase(recorded).truth_of("step_000001", "gradient")
    assert {name: array[0] for name, array in found.items() if name[1:].isdigit()} == {
        f"p{number}": number for number in range(24)
    }
