"""`record` around a plain PyTorch loop: any two layouts of one batch are equal, faults are named, nothing changes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_loops import compare, failed, recorded, steps, tiny_model, token_losses
from torch import Tensor, nn

from regress import record
from regress.dump.dump_reader import DumpReader
from regress.errors import CaptureError


@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        ("packed", 1),
        pytest.param("left", 4, marks=pytest.mark.extended),
        pytest.param("packed", 4, marks=pytest.mark.extended),
        pytest.param("right", 4, marks=pytest.mark.extended),
    ],
)
def test_layouts_of_one_batch_are_equal(tmp_path: Path, layout: str, accumulation: int) -> None:
    recorded(tmp_path / "a", layout="right")
    recorded(tmp_path / "b", layout=layout, accumulation=accumulation)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    checked = {verdict.quantity for verdict in report.verdicts}
    assert {
        "log_probs",
        "entropy",
        "loss",
        "gradient",
        "grad_norm",
        "param",
        "optimizer",
        "batch_inputs",
    } <= checked


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    def trained(record_it: bool) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        model = tiny_model(attention_dropout=0.1)
        if record_it:
            recorded(tmp_path / "a", model, accumulation=2)
        else:
            for _ in steps(model, accumulation=2):
                pass
        return model.state_dict(), torch.get_rng_state()

    weights, state = trained(False)
    own, own_state = trained(True)
    assert all(torch.equal(weights[name], own[name]) for name in weights)
    assert torch.equal(state, own_state)


def test_gradients_are_those_before_clipping(tmp_path: Path) -> None:
    recorded(tmp_path / "free", clip=None, updates=1)
    recorded(tmp_path / "clipped", clip=1e-3, updates=1)
    free, clipped = (DumpReader(tmp_path / name) for name in ("free", "clipped"))
    (name,) = (name for name in free.names() if name.startswith("gradient/"))
    assert free.read(name).checksum() == clipped.read(name).checksum()
    (state,) = (name for name in free.names() if name.startswith("optimizer/"))
    assert free.read(state).checksum() != clipped.read(state).checksum()


def test_no_tensor_outlives_its_step(tmp_path: Path) -> None:
    model = tiny_model()
    kept: list[weakref.ref[Any]] = []
    model.model.register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out.last_hidden_state)))
    with record(tmp_path / "a", model):
        for _ in steps(model):
            gc.collect()
            assert all(ref() is None for ref in kept)
    gc.collect()
    assert len(kept) == 2
    assert all(ref() is None for ref in kept)


def fails(folder: Path, model: nn.Module) -> None:
    with record(folder, model):
        for update in steps(model):
            1 / (1 - update)


def test_hooks_are_gone_after_an_exception(tmp_path: Path) -> None:
    model = tiny_model()
    before = (torch.autograd.backward, torch.nn.utils.clip_grad._clip_grads_with_norm_)
    with pytest.raises(ZeroDivisionError):
        fails(tmp_path / "a", model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert before == (torch.autograd.backward, torch.nn.utils.clip_grad._clip_grads_with_norm_)
    assert not (tmp_path / "a" / "manifest.json").exists()


def trains_another(folder: Path) -> None:
    with record(folder, tiny_model()):
        for _ in steps(tiny_model()):
            pass


def test_no_forward_pass_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"no forward pass of Qwen3Model with gradients was captured: give"
    ):
        trains_another(tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_mask_off_by_one_is_seen_in_the_gradient_alone(tmp_path: Path) -> None:
    def faulty(logits: Tensor, inputs: dict[str, Tensor], total: int) -> Tensor:
        losses, mask = token_losses(logits, inputs)
        mask = mask & torch.roll(mask, -1, 1)
        return (losses * mask).sum() / total

    recorded(tmp_path / "a", updates=1)
    recorded(tmp_path / "b", loss=faulty, updates=1)
    found = failed(compare(tmp_path / "a", tmp_path / "b"))
    assert next(iter(found)) == "loss"
    assert not {"log_probs", "entropy", "batch_inputs"} & found.keys()


def test_a_fault_before_the_head_is_named_with_sample_and_position(tmp_path: Path) -> None:
    recorded(tmp_path / "a", updates=1)
    model = tiny_model()
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda m, a, out: torch.cat([out[..., :4], out[..., 4:5] * 1.01, out[..., 5:]], -1)
    )
    recorded(tmp_path / "b", model, updates=1)
    handle.remove()
    found = failed(compare(tmp_path / "a", tmp_path / "b"))
    assert next(iter(found)) == "log_probs"
    assert "position" in found["log_probs"]


def test_layouts_agree_to_rounding_in_true_float64(tmp_path: Path) -> None:
    from regress import true_float64

    options = {"token_gradient": True, "temperature": 1.0}
    with true_float64():
        for layout, accumulation in (("right", 1), ("packed", 4)):
            model = tiny_model().double()
            recorded(
                tmp_path / layout, model, layout=layout, accumulation=accumulation, options=options, clip=None
            )
    report = compare(tmp_path / "right", tmp_path / "packed")
    assert report.exit_code == 0, failed(report)
    assert {"log_probs", "token_gradient", "gradient"} <= {verdict.quantity for verdict in report.verdicts}
    assert all(
        v.relative < 1e-12 for v in report.verdicts if v.quantity in ("log_probs", "gradient", "param")
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # a name of transformers
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_activations_of_a_checkpointed_model(tmp_path: Path, reentrant: bool) -> None:
    options = {"activations": r"^(model\.layers\.\d+|lm_head)$"}
    recorded(tmp_path / "a", updates=1, options=options)
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    recorded(tmp_path / "b", model.train(), updates=1, layout="left", options=options)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    names = {verdict.name for verdict in report.verdicts if verdict.quantity == "activations"}
    assert names == {"model.layers.0", "model.layers.1", "lm_head"}
