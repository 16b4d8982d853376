"""Inputs of a case: what is written, how stale the policy is that samples, and recipes that cannot be followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from regress.errors import ConfigError
from regress.golden.golden_case import GoldenCase
from regress.replay.case_recipe import Recipe, make_inputs
from regress.replay.case_run import replay
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE

Tiny = Callable[..., GoldenCase]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def ratios(case: GoldenCase, folder: Path) -> Any:
    """Importance ratios of the first update, whose old log-probs are the sampler's."""
    dump = replay(case, BASE, Precision.FLOAT64, folder, steps=1)
    (record,) = dump.records("is_loss_debug", 0)
    return record.tensors["prob_ratio"][record.tensors["effective_valid"] != 0]


def test_two_recordings_of_a_recipe_are_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        case = tiny(name, algorithm={"kl_coef": 0.1})
        make_inputs(case, tmp_path / "work" / name)
        made.append(contents(case.folder))
    assert made[0] == made[1]
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= made[0].keys()
    assert {"reference/model.safetensors", "optimizer.safetensors"} <= made[0].keys()
    assert {"trajectories/step_000000.safetensors"} == {n for n in made[0] if n.startswith("traj")}
    assert "reference/tokenizer.json" not in made[0]


def test_everybody_may_read_the_weights(tiny: Tiny, tmp_path: Path) -> None:
    case = tiny(algorithm={"kl_coef": 0.1})
    make_inputs(case, tmp_path / "work")
    modes = {path.stat().st_mode & 0o777 for path in case.folder.glob("*/model.safetensors")}
    assert modes == {0o644}


def test_the_reference_is_the_policy_before_it_was_trained(tiny: Tiny, tmp_path: Path) -> None:
    case = tiny(algorithm={"kl_coef": 0.1})
    make_inputs(case, tmp_path / "work")
    weights = [load_file(case.folder / part / "model.safetensors") for part in ("model", "reference")]
    assert weights[0].keys() == weights[1].keys()
    assert any((weights[0][name] != weights[1][name]).any() for name in weights[0])


def test_inputs_of_an_earlier_recipe_do_not_stay(tiny: Tiny, tmp_path: Path) -> None:
    case = tiny()
    for stale in ("reference/model.safetensors", "trajectories/step_000007.safetensors", "model/old.json"):
        (case.folder / stale).parent.mkdir(exist_ok=True)
        (case.folder / stale).write_text("of an earlier recipe")
    make_inputs(case, tmp_path / "work")
    left = contents(case.folder)
    assert not any(name.startswith("reference/") for name in left)
    assert not {"trajectories/step_000007.safetensors", "model/old.json"} & left.keys()


def test_without_lag_the_policy_itself_samples(tiny: Tiny, tmp_path: Path) -> None:
    fresh, stale = tiny("fresh", lag=0), tiny("stale", lag=2)
    for case in (fresh, stale):
        make_inputs(case, tmp_path / "work" / case.name)
    np.testing.assert_allclose(ratios(fresh, tmp_path / "fresh"), 1, atol=1e-5)  # sampled in float32
    assert np.abs(ratios(stale, tmp_path / "stale") - 1).max() > 1e-3


def test_the_whole_lag_is_the_policy_before_it_was_trained(tiny: Tiny, tmp_path: Path) -> None:
    """Sampled by the reference: the sampler's log-probs are then those of the reference."""
    case = tiny(algorithm={"kl_coef": 0.1}, lag=3)
    make_inputs(case, tmp_path / "work")
    dump = replay(case, BASE, Precision.FLOAT64, tmp_path / "replay")
    (record,) = dump.records("is_loss_debug", 0)
    np.testing.assert_allclose(
        record.tensors["old_log_probs"], record.tensors["ref_log_probs"], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmsteps": 3}, "'warmsteps' is not a key of it; use model, overrides, warm_steps, lag, steps"),
        ({"model": None}, "model is None; write a mapping"),
        ({"overrides": ["a=1"]}, r"overrides is \['a=1'\]; write a mapping"),
        ({"warm_steps": 0}, "warm_steps is 0; write a whole number from 1"),
        ({"warm_steps": "8"}, "warm_steps is '8'; write a whole number from 1"),
        ({"steps": True}, "steps is True; write a whole number from 1"),
        ({"lag": -1}, r"lag is -1; write a whole number from 0 up to warm_steps \(3\)"),
        ({"lag": 4}, r"lag is 4; write a whole number from 0 up to warm_steps \(3\)"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_named(tiny: Tiny, change: dict[str, Any], message: str) -> None:
    case = tiny(**change)
    with pytest.raises(ConfigError, match=message) as error:
        Recipe.of(case)
    assert str(case.folder / "case.yaml") in str(error.value)


def test_a_recipe_without_a_model_is_named(tiny: Tiny) -> None:
    case = tiny()
    path = case.folder / "case.yaml"
    tree = yaml.safe_load(path.read_text())
    del tree["recipe"]["model"]
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="it has no model; say in model how the initial weights are made"):
        Recipe.of(GoldenCase(case.folder))
