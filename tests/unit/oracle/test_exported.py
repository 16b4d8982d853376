"""Truth of an exported case: the golden values themselves, and those of another objective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress import DumpReader, GoldenStore, compare_sources, export_case
from regress.errors import ConfigError, GoldenError
from regress.oracle import truth

GOLDEN = Path(__file__).parents[3] / "golden"


def exported(name: str, folder: Path) -> Path:
    return export_case(GoldenStore(GOLDEN).case(name), folder / name)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported("dense", tmp_path_factory.mktemp("exports"))


def grad_norm(dump: Path, step: int = 0) -> float:
    (record,) = DumpReader(dump).records("gradient", step=step)
    return float(record.meta["grad_norm"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dapo", id="several updates of a step, and a warm optimizer"),
        *(
            pytest.param(name, marks=pytest.mark.extended)
            for name in ("dense", "lora", "moe", "gpt2", "tied", "tools", "dr_grpo", "gspo", "cispo")
        ),
    ],
)
def test_truth_of_an_export_is_that_of_its_case(name: str, tmp_path: Path) -> None:
    dump = truth(exported(name, tmp_path), {}, None, tmp_path / "truth")

    found = compare_sources(f"golden:{name}", dump, golden_dir=GOLDEN)
    assert found.exit_code == 0, found.failed[:3]


def test_first_updates_only(dense: Path, tmp_path: Path) -> None:
    dump = truth(dense, {}, 1, tmp_path)

    assert [record.step for record in DumpReader(dump).records("param")] == [0]


def test_another_objective_has_other_gradients(dense: Path, tmp_path: Path) -> None:
    own = truth(dense, {}, 1, tmp_path / "own")
    others: dict[str, dict[str, Any]] = {
        "preset": {"algorithm.preset": "trl:dapo", "algorithm.old_log_probs": "sampler"},
        "field": {"algorithm.aggregation": "token-mean"},
        "supervised": {
            "advantages": 1.0,
            "algorithm.loss": "reinforce",
            "algorithm.old_log_probs": "current",
            "algorithm.kl_coef": 0.0,
        },
    }

    norms = {name: grad_norm(truth(dense, one, 1, tmp_path / name)) for name, one in others.items()}

    assert len({round(norm, 6) for norm in (grad_norm(own), *norms.values())}) == 4


def test_given_advantages_are_those_of_the_samples_that_resampling_draws(dense: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {
        "trainer.resampling": "max_min",
        "trainer.mini_batch_size": None,
        "algorithm.loss": "reinforce",
        "algorithm.old_log_probs": "current",
        "algorithm.kl_coef": 0.0,
    }
    dump = DumpReader(truth(dense, {**chosen, "advantages": 1.0}, 1, tmp_path))
    used = [record.tensors for record in dump.records("is_loss_debug", step=0)]
    advantages = np.concatenate([one["advantages"][one["effective_valid"].astype(bool)] for one in used])
    masks = [
        one["response_mask"].astype(bool) for one in (r.tensors for r in dump.records("batch_inputs", step=0))
    ]
    assert set(advantages.tolist()) == {1.0}
    assert 0 < len(advantages) == sum(int(mask.sum()) for mask in masks)
    (rollout,) = dump.records("trajectory", step=0)
    assert len(advantages) < int(rollout.tensors["loss_mask"].sum())


def test_given_advantages_leave_the_sampler_weights_of_the_rollout(tmp_path: Path) -> None:
    """They are normalized before rejection, so those of the tokens that are left would be others."""
    case = exported("kl_cov", tmp_path)

    def weights(name: str, chosen: dict[str, Any]) -> list[Any]:
        dump = DumpReader(truth(case, chosen, 1, tmp_path / name))
        return [record.tensors["sampler_weights"] for record in dump.records("is_loss_debug", step=0)]

    for own, given in zip(weights("own", {}), weights("given", {"advantages": 1.0}), strict=True):
        np.testing.assert_array_equal(own, given)


def test_learning_rate_of_the_export_gives_way_to_a_given_one(dense: Path, tmp_path: Path) -> None:
    still = truth(dense, {"optimizer.learning_rate": 0.0, "optimizer.weight_decay": 0.0}, 2, tmp_path)

    (before,), (after,) = (DumpReader(still).records("param", step=step) for step in (0, 1))
    assert all((before.tensors[name] == after.tensors[name]).all() for name in before.tensors)


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        ({"model.dtype": "float32"}, ConfigError, "model.dtype is none of an objective or optimizer"),
        ({"advantages": "one"}, ConfigError, "advantages='one' is not a number"),
        ({"algorithm.clip_lo": 0.1}, ConfigError, "clip_lo"),
    ],
)
def test_refused_overrides(
    dense: Path, tmp_path: Path, overrides: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        truth(dense, overrides, 1, tmp_path)


def test_refused_exports(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="is not an exported case"):
        truth(tmp_path, {}, 1, tmp_path / "truth")
    with pytest.raises(GoldenError, match="holds 3 updates, not 4; ask for 1 to 3"):
        truth(dense, {}, 4, tmp_path / "truth")
    changed = tmp_path / "changed"
    changed.mkdir()
    for part in ("model", "reference", "rollouts", "export.json", "optimizer.safetensors"):
        (changed / part).symlink_to(dense / part)
    objective = json.loads((dense / "objective.json").read_text())
    objective["updates"][0]["samples"].reverse()
    (changed / "objective.json").write_text(json.dumps(objective))
    with pytest.raises(GoldenError, match="other samples than mini-batches"):
        truth(changed, {}, 1, tmp_path / "truth")
