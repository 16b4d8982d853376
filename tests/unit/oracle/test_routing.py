"""Routing of experts: recorded, compared with its margins, and forced on the engine, so that precision stands alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from off_policy_loop import tiny_mixture, tiny_model, train

from regress import record
from regress.compare.comparison_request import compare_sources
from regress.compare.dumps.comparison import Comparison
from regress.dump.dump_reader import DumpReader
from regress.errors import CaptureError
from regress.oracle.oracle_judge import judge_dump

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SETTINGS = {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.old_log_probs": "sampler"}
GATE = "model.layers.1.mlp.gate"
TOKEN = 50
"""Row of a token whose second expert is the fourth best in the faulty run."""


def with_wrong_choice() -> Any:
    model: Any = tiny_mixture()

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, experts = output
        experts = experts.clone()
        order = logits.argsort(-1, descending=True)
        experts[TOKEN] = order[TOKEN, [0, 3]]
        return logits, weights, experts

    model.model.layers[1].mlp.gate.register_forward_hook(choose)
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    old = train(folder / "golden", model=tiny_mixture(), routing=True)
    train(folder / "healthy", model=tiny_mixture(), routing=True, autocast=True, old=old)
    train(folder / "wrong", model=with_wrong_choice(), routing=True, autocast=True, old=old)
    return folder


def failed(found: Comparison) -> set[str]:
    return {f"{verdict.quantity}/{verdict.name}" for verdict in found.failed}


def test_choice_weights_and_logits_are_recorded(runs: Path) -> None:
    dump = DumpReader(runs / "golden")
    tensors = dump.read(dump.names("activations")[0]).tensors
    assert {name: tensor.shape[2:] for name, tensor in tensors.items() if name.startswith(GATE)} == {
        GATE: (8,),
        f"{GATE}/experts": (2,),
        f"{GATE}/weights": (2,),
    }
    assert (tensors[f"{GATE}/experts"][..., 0] < tensors[f"{GATE}/experts"][..., 1]).all()


def test_near_ties_are_told_and_wrong_choices_fail(runs: Path) -> None:
    options: Any = {"precision": "bfloat16", "only": "activations"}
    healthy = compare_sources(runs / "golden", runs / "healthy", **options)
    assert healthy.exit_code == 0, healthy.failed
    notes = [note for note in healthy.notes if "near-ties that rounding decides" in note]
    assert any("model.layers.0.mlp.gate chose other experts for 2 tokens" in note for note in notes)
    assert any("more differ after flips of earlier routers" in note for note in notes)

    wrong = compare_sources(runs / "golden", runs / "wrong", **options)
    assert failed(wrong) == {f"activations/{GATE}/experts"}


@pytest.mark.extended
def test_the_oracle_judges_precision_under_the_recorded_choice(runs: Path, tmp_path: Path) -> None:
    """Flips of near-ties change log-probs by more than rounding: with the choice forced nothing is left of that."""
    plain = compare_sources(runs / "golden", runs / "healthy", precision="bfloat16", only="log_probs")
    assert plain.exit_code == 1

    healthy = judge_dump(runs / "healthy", tmp_path / "a", preset="dapo", settings=SETTINGS)
    assert healthy.comparison.exit_code == 0, healthy.comparison.failed
    assert any("all values are judged under the recorded choice" in note for note in healthy.comparison.notes)

    wrong = judge_dump(runs / "wrong", tmp_path / "b", preset="dapo", settings=SETTINGS)
    assert failed(wrong.comparison) == {f"activations/{GATE}/experts"}


def test_the_load_balancing_loss_is_repeated(tmp_path: Path) -> None:
    """It is in the losses of microbatches and not in those of tokens, and the routers' gradients are those of both."""
    old = train(tmp_path / "first", model=tiny_mixture())
    train(tmp_path / "dump", model=tiny_mixture(), old=old, balance=0.5)
    settings = {**SETTINGS, "model.router_coef": 0.5}
    told = judge_dump(tmp_path / "dump", tmp_path / "told", preset="dapo", settings=settings)
    assert told.comparison.exit_code == 0, told.comparison.failed
    assert any(verdict.quantity == "loss" for verdict in told.comparison.verdicts)

    silent = judge_dump(tmp_path / "dump", tmp_path / "silent", preset="dapo", settings=SETTINGS)
    assert {f"gradient/{GATE}.weight", "loss/loss"} <= failed(silent.comparison)
    assert not any(one.startswith("token_gradient") for one in failed(silent.comparison))


def test_models_without_routers_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(CaptureError, match=r"record\(routing=True\) found no router in Qwen3ForCausalLM"),
        record(tmp_path / "dump", tiny_model(), routing=True),
    ):
        torch.zeros(1)
