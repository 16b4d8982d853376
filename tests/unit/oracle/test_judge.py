"""`regress oracle`: a recorded trainer judged without a baseline, and what cannot be judged."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from plain_loop import tiny_model, train

from regress.cli import main
from regress.errors import ConfigError, OracleError
from regress.oracle.oracle_judge import Judgement, judge_dump

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def judged(folder: Path, work: Path, **options: Any) -> Judgement:
    return judge_dump(folder, work, **{"preset": "dapo", **options})


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "dump"
    train(folder)
    return folder


def test_healthy_trainer_is_within_tolerance(healthy: Path, tmp_path: Path) -> None:
    found = judged(healthy, tmp_path)

    assert found.comparison.exit_code == 0, found.comparison.failed[:3]
    quantities = {verdict.quantity for verdict in found.comparison.verdicts}
    assert {
        "log_probs",
        "loss",
        "token_gradient",
        "gradient",
        "grad_norm",
        "param",
        "optimizer",
    } <= quantities
    assert {verdict.place.step for verdict in found.comparison.verdicts} == {0, 1}


def test_unknown_moments_are_no_difference(tmp_path: Path) -> None:
    """A trainer that goes on: its first recorded update has moments that nothing tells, later ones have not."""
    train(tmp_path / "dump", before=2)

    found = judged(tmp_path / "dump", tmp_path / "work")
    assert found.comparison.exit_code == 0, found.comparison.failed[:3]
    steps = {v.place.step for v in found.comparison.verdicts if v.quantity in ("param", "optimizer")}
    assert steps == {1}
    assert any("after step 0 were not judged: AdamW had made updates" in note for note in found.notes)


def test_wrong_deviation_is_found_though_log_probs_hold(tmp_path: Path) -> None:
    train(tmp_path / "dump", updates=1, ddof=0)

    found = judged(tmp_path / "dump", tmp_path / "work")
    failed = {verdict.quantity for verdict in found.comparison.failed}
    assert {"token_gradient", "gradient", "loss"} <= failed
    assert "log_probs" not in failed


@pytest.mark.extended
def test_objective_is_read_from_the_gradients(healthy: Path, tmp_path: Path) -> None:
    found = judged(healthy, tmp_path, preset=None)

    assert found.comparison.exit_code == 0
    assert "as its gradients prove" in found.claim.words
    assert any("give --preset to say what it should be" in note for note in found.notes)


@pytest.mark.extended
def test_entropy_bonus_is_not_overlooked(tmp_path: Path) -> None:
    train(tmp_path / "dump", updates=1, entropy=0.05)

    with pytest.raises(OracleError, match=r"has an entropy term .* give --preset"):
        judged(tmp_path / "dump", tmp_path / "work", preset=None)
    settings = {"algorithm.entropy_coef": 0.05}
    assert judged(tmp_path / "dump", tmp_path / "work", settings=settings).comparison.exit_code == 0


@pytest.mark.extended
def test_later_update_begins_with_the_recorded_weights(healthy: Path, tmp_path: Path) -> None:
    """A wrong first update must not make the second one look wrong."""
    found = judged(healthy, tmp_path, settings={"optimizer.max_grad_norm": 0.01})

    steps = {verdict.place.step for verdict in found.comparison.failed if verdict.quantity == "optimizer"}
    assert steps == {0, 1}
    assert not [verdict for verdict in found.comparison.failed if verdict.quantity == "log_probs"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"order": (5, 2, 7, 0, 3, 6, 1, 4)}, id="rows in another order", marks=pytest.mark.extended
        ),
        pytest.param({"repeated": True}, id="a row that fills the batch up"),
        pytest.param(
            {"told": ("advantages", "mask")},
            id="advantages tapped in place of rewards",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_other_batches_of_the_same_samples(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path / "dump", updates=1, **options)

    found = judged(tmp_path / "dump", tmp_path / "work")
    assert found.comparison.exit_code == 0, (found.comparison.failed[:3], found.comparison.problems)


def test_command(healthy: Path, tmp_path: Path) -> None:
    arguments = ["oracle", str(healthy), "--preset", "dapo", "--keep", str(tmp_path / "kept")]
    result = CliRunner().invoke(main, [*arguments, "--json", str(tmp_path / "report.json")])

    assert result.exit_code == 0, result.output
    assert "objective: dapo, as claimed" in result.output
    assert (tmp_path / "kept" / "dump" / "manifest.json").is_file()
    assert json.loads((tmp_path / "report.json").read_text())

    wrong = CliRunner().invoke(
        main, ["oracle", str(healthy), "--preset", "grpo", "--set", "algorithm.kl_coef=0"]
    )
    assert wrong.exit_code == 1, wrong.output


def test_refused_dumps(healthy: Path, tmp_path: Path) -> None:
    train(tmp_path / "bare", updates=1, initial_weights=False)
    with pytest.raises(OracleError, match="record with initial_weights=True, or give --model"):
        judged(tmp_path / "bare", tmp_path / "a")
    tiny_model().save_pretrained(tmp_path / "model")
    assert judged(tmp_path / "bare", tmp_path / "b", model=tmp_path / "model").comparison.exit_code == 0

    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path='.*/model': the checkpoint cannot be loaded"):
        judged(tmp_path / "bare", tmp_path / "c", model=tmp_path / "model")

    shutil.copytree(healthy, tmp_path / "changed")
    weights = tmp_path / "changed" / "initial_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(OracleError, match="was changed since it was recorded"):
        judged(tmp_path / "changed", tmp_path / "d")

    train(tmp_path / "untold", updates=1, told=("mask",))
    with pytest.raises(OracleError, match="nothing tells the advantages of step 0; tap rewards"):
        judged(tmp_path / "untold", tmp_path / "e")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"settings": {"model.dtype": "float32"}},
            ConfigError,
            "--set model.dtype is not a setting of an objective",
        ),
        ({"preset": "dr_grpo"}, OracleError, "give --set algorithm.norm_length=N"),
        ({"preset": "grpo"}, OracleError, "nothing tells the reference log-probs of step 0"),
        ({"preset": "bnpo"}, OracleError, "do not hold the samples in order, equally many each"),
        (
            {"settings": {"algorithm.old_log_probs": "sampler"}},
            OracleError,
            "give --set algorithm.old_log_probs=current",
        ),
    ],
)
def test_refused_objectives(
    healthy: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        judged(healthy, tmp_path, **options)


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from regress import record
    from regress.errors import CaptureError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks for a name that transformers gives up
        model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    with (
        pytest.raises(CaptureError, match="trains an adapter"),
        record(tmp_path / "refused", model, initial_weights=True),
    ):
        pass
    with record(tmp_path / "dump", model):
        ids = torch.randint(2, 24, (2, 6))
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    with pytest.raises(OracleError, match=r"of a trainer of an adapter \(LoRA"):
        judged(tmp_path / "dump", tmp_path / "work")
