"""Exports: files written, cases refused, and no trace of an interrupted one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from regress.cli import main
from regress.engine.config.config_schema import Config
from regress.errors import GoldenError
from regress.grpo.objective import Objective
from regress.replay import case_export
from regress.replay.case_export import export_case
from regress.replay.export_objective import formulas, objective_of
from tests.as_subtests import as_subtests
from tests.golden_cases import STORE

OTHER: dict[str, Any] = {
    "eps": 1e-3,
    "ddof": 0,
    "norm_length": 7,
    "gamma": 0.5,
    "dual_clip": 3.0,
    "delta": 2.0,
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_index_holds_the_hash_of_every_file(tmp_path: Path) -> None:
    folder = export_case(STORE.case("dapo"), tmp_path / "dapo")
    index = json.loads((folder / "export.json").read_text())
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"export.json"}
    assert index["sha256"] == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files
    }
    assert (index["case"], index["derived"]) == ("dapo", True)


def test_the_checkpoints_load_and_name_their_parameters_as_the_optimizer_state_does(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = export_case(STORE.case("dense"), tmp_path / "dense")
    names = {name for name, _ in AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters()}
    AutoModelForCausalLM.from_pretrained(folder / "reference")
    AutoTokenizer.from_pretrained(folder / "model")
    moments = load_file(folder / "optimizer.safetensors")
    assert moments.keys() == {f"{name}/{key}" for name in names for key in ("exp_avg", "exp_avg_sq")}
    objective = json.loads((folder / "objective.json").read_text())
    assert objective["optimizer_steps"].keys() == names


@pytest.mark.parametrize("name", ["dapo", "tools"])
def test_derived_values_and_log_probs_stand_at_the_loss_tokens_and_nowhere_else(
    name: str, tmp_path: Path
) -> None:
    """A truncated completion that the objective drops has none, the answer of a tool has none."""
    folder = export_case(STORE.case(name), tmp_path / name)
    objective = json.loads((folder / "objective.json").read_text())
    rollouts = {
        (step, row["group_id"], row["run_id"]): row
        for step in {update["step"] for update in objective["updates"]}
        for row in lines(folder / "rollouts" / f"step_{step:06d}.jsonl")
    }
    dropped = 0
    for update in objective["updates"]:
        derived = lines(folder / "derived" / f"{update['name']}.jsonl")
        assert [[row["group_id"], row["run_id"]] for row in derived] == update["samples"]
        for row in derived:
            rollout = rollouts[update["step"], row["group_id"], row["run_id"]]
            drop = (
                objective["algorithm"]["mask_truncated_completions"] and rollout["finish_reason"] == "length"
            )
            dropped += drop
            mask = [bool(value) and not drop for value in rollout["loss_mask"]]
            for values in (row["advantages"], row["token_weights"], rollout["old_log_probs"]):
                assert [value is not None for value in values] == mask
    assert bool(dropped) == (name == "dapo")


def changed(spec: Any) -> Any:
    """Another value of a field of the objective."""
    if "choices" in spec.metadata:
        return next(choice for choice in spec.metadata["choices"] if choice != spec.default)
    if isinstance(spec.default, bool):
        return not spec.default
    return OTHER.get(spec.name, (spec.default or 0.0) + 0.5)


@as_subtests("name", [spec.name for spec in fields(Objective)])
def test_every_field_of_the_objective_is_told(name: str) -> None:
    """A constant that a trainer has to know and the export does not name would make two cases look the same."""
    spec = next(spec for spec in fields(Objective) if spec.name == name)
    told = []
    for value in (spec.default, changed(spec)):
        config = Config()
        setattr(config.algorithm, name, value)
        found = objective_of(config, [], [])
        assert isinstance(found["algorithm"], dict)
        assert found["algorithm"][name] == value
        told.append(found)
    assert told[0] != told[1]


BOUNDS = {"correction_max": 2.0}
NEEDED: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.1},
    **{f"{level}_{kind}": BOUNDS for level in ("token", "sequence") for kind in ("truncate", "mask")},
}
"""Value -> what has to be said with it."""


@pytest.mark.parametrize(
    "name",
    ["advantage", "scale", "loss", "importance_level", "aggregation", "sampler_correction", "old_log_probs"],
)
def test_formulas_differ_where_the_objective_does(name: str) -> None:
    choices = next(spec for spec in fields(Objective) if spec.name == name).metadata["choices"]
    base = {"importance_level": "sequence"} if name == "sequence_gradient" else {}
    told = [
        json.dumps(dict(formulas(Objective(**base, **NEEDED.get(choice, {}), **{name: choice}))))
        for choice in choices
    ]
    assert len(set(told)) == len(choices)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = CliRunner().invoke(
        main, ["golden", "export", "dense", str(tmp_path), "--golden-dir", str(STORE.root)]
    )
    assert done.exit_code == 2
    assert "is not empty: give another folder, or --overwrite" in done.output
    with pytest.raises(GoldenError, match="holds no export of a case, so --overwrite spares it"):
        export_case(STORE.case("dense"), tmp_path, overwrite=True)
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_export_that_breaks_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_case(STORE.case("dense"), tmp_path / "case")
    before = (folder / "export.json").read_bytes()

    def breaks(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(case_export, "readme", breaks)
    with pytest.raises(GoldenError, match=r"cannot be written \(No space left on device\)"):
        export_case(STORE.case("dapo"), folder, overwrite=True)
    assert (folder / "export.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["case"]
    monkeypatch.undo()
    export_case(STORE.case("dapo"), folder, overwrite=True)
    assert json.loads((folder / "export.json").read_text())["case"] == "dapo"
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_learning_rates_are_those_of_the_schedule() -> None:
    config = Config()
    config.optimizer.lr_scheduler, config.optimizer.warmup_steps = "linear", 2
    rate = config.optimizer.learning_rate
    assert case_export.learning_rates(config, 4) == pytest.approx([0, rate / 2, rate, rate / 2])
