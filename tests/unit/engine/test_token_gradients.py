"""Token gradients of the backward pass are recorded unchanged, and recording them changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from regress.dump.dump_reader import DumpReader
from regress.dump.record import Record
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording
from regress.engine import loss_token_gradients, training_passes
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.loss_token_gradients import catch_logits, recorded
from regress.engine.training_run import train

MakeConfig = Callable[..., Config]
EVERYTHING = (
    *("forward_data", "is_loss_debug", "loss", "batch_inputs", "activations", "gradient", "param"),
    "token_gradient",
)
RUN = (
    "model.dtype=float64",
    "batching.micro_batch_size=3",
    "algorithm.kl_coef=0.1",
    "algorithm.entropy_coef=0.01",
    "rollout_worker.temperature=0.8",
    "max_steps=2",
)


def options(*names: str) -> list[str]:
    return ["debug.enable_data_dump=true", *(f"debug.dump_options.{name}=true" for name in names)]


def by_place(reader: DumpReader, type: str) -> dict[Any, Record]:
    return {(r.step, r.update, r.micro): r for r in reader.records(type)}


@pytest.mark.parametrize("chunk", ["null", "2"])
def test_gradients_are_those_of_the_recorded_loss_by_their_formulas(
    chunk: str, config: MakeConfig, console: Console
) -> None:
    """Autograd and a derivation by hand agree for a clipped ratio with k3 and an entropy bonus."""
    run = config(*RUN, *options(*EVERYTHING), f"batching.log_prob_chunk_size={chunk}")
    train(run, console)
    reader = DumpReader(run.debug.dump_dir)
    terms, ids = by_place(reader, "is_loss_debug"), by_place(reader, "forward_data")
    logits, found = by_place(reader, "activations"), by_place(reader, "token_gradient")
    assert found.keys() == terms.keys()
    assert len(found) > 4
    for place, record in found.items():
        t, mask = terms[place].tensors, terms[place].tensors["effective_valid"].astype(bool)
        ratio, A, w = t["prob_ratio"], t["advantages"], t["weights"]
        open_ = np.where(A > 0, ratio <= 1 + run.algorithm.clip_high, ratio >= 1 - run.algorithm.clip_low)
        slope = 1 - np.exp(t["ref_log_probs"] - t["log_probs"])
        g = w * (-A * ratio * open_ + 0.1 * slope) * mask
        h = -0.01 * w * mask
        np.testing.assert_allclose(record.tensors["token_gradient"], g, rtol=1e-11, atol=1e-15)
        np.testing.assert_allclose(record.tensors["entropy_gradient"], h, rtol=1e-11, atol=1e-15)
        z = logits[place].tensors["lm_head"][0] / 0.8
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        p, hot = np.exp(log_p), np.eye(z.shape[1])[ids[place].tensors["input_ids"][mask]]
        H = -(p * log_p).sum(axis=1, keepdims=True)
        rows = g[mask][:, None] * (hot - p) - h[mask][:, None] * p * (log_p + H)
        np.testing.assert_allclose(record.tensors["logit_gradient"][0], rows / 0.8, rtol=1e-9, atol=1e-15)
        assert record.meta["backward_scale"] == 1.0
        assert record.meta["layout"] == terms[place].meta["layout"]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_what_the_loss_does_not_depend_on_has_zeros(
    entropy_coef: float, config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entropy without its term, or a detached one, and a policy loss without a gradient."""
    right: Any = training_passes.token_loss

    def wrong(log_probs: Tensor, *args: Any, entropy_K: Tensor | None, **rest: Any) -> Any:
        entropy = None if entropy_K is None else entropy_K.detach()
        return right(log_probs.detach().requires_grad_(), *args, entropy_K=entropy, **rest)

    monkeypatch.setattr(training_passes, "token_loss", wrong)
    run = config(
        "max_steps=1", f"algorithm.entropy_coef={entropy_coef}", *options("token_gradient", "activations")
    )
    monkeypatch.setattr(LocalPolicy, "_backward", lambda self, share: (share + anchor(self)).backward())
    train(run, console)
    records = list(DumpReader(run.debug.dump_dir).records("token_gradient"))
    assert records
    for record in records:
        assert list(record.tensors) == ["token_gradient", "entropy_gradient", "logit_gradient"]
        assert all((values == 0).all() for values in record.tensors.values())
        assert record.tensors["logit_gradient"].shape[1] > 0


def anchor(policy: LocalPolicy) -> Tensor:
    """Gives every parameter a gradient of zero."""
    return sum((parameter.sum() for _, parameter in policy.named_parameters()), torch.zeros(())) * 0.0


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), marks=pytest.mark.extended),
        ("batching.log_prob_chunk_size=2", "model.gradient_checkpointing=true"),
    ],
)
def test_recording_changes_no_bit_of_training(
    extra: tuple[str, ...], config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    names = [name for name in EVERYTHING if name != "token_gradient"]
    readers = []
    for folder, chosen in (("on", [*names, "token_gradient"]), ("off", names)):
        run = config(*RUN, *extra, *options(*chosen), f"output_dir={tmp_path / folder}")
        train(run, console)
        readers.append(DumpReader(run.debug.dump_dir))
    on, off = ({n: r for n in reader.names() for r in [reader.read(n)]} for reader in readers)
    assert {name for name in on if not name.startswith("token_gradient/")} == off.keys()
    assert len(on) > len(off)
    for name, record in off.items():
        assert record.checksum() == on[name].checksum(), name


def test_off_it_hooks_nothing(config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a gradient was caught")

    monkeypatch.setattr(loss_token_gradients, "_Gradient", never)
    run = config("max_steps=1", *options("forward_data", "activations"))
    train(run, console)
    with pytest.raises(AssertionError, match="a gradient was caught"):
        train(
            config("max_steps=1", "debug.overwrite=true", *options("token_gradient", "activations")), console
        )


def test_logits_are_caught_where_they_are_recorded(config: MakeConfig, console: Console) -> None:
    for module, there in (("lm_head", True), ("norm", False)):
        chosen = [*options("token_gradient", "activations"), f"debug.target_module_pattern={module}"]
        run = config("max_steps=1", "debug.overwrite=true", *chosen)
        train(run, console)
        for record in DumpReader(run.debug.dump_dir).records("token_gradient"):
            assert ("logit_gradient" in record.tensors) is there


def test_gradients_of_several_backward_passes_are_summed_and_nothing_is_kept(tmp_path: Path) -> None:
    caught = loss_token_gradients._Gradient
    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    tensor = values * 2
    found = caught(tensor)
    (tensor * 3).sum().backward(retain_graph=True)
    (tensor * 4).sum().backward()
    assert found.over(2.0).tolist() == [3.5] * 4
    assert values.grad is not None
    assert values.grad.tolist() == [14.0] * 4
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None


def broken(logits: Tensor) -> None:
    catch_logits(logits * 1, lambda _: None)
    raise ZeroDivisionError


def test_what_is_caught_goes_to_the_coordinates_of_its_forward_pass(tmp_path: Path) -> None:
    """Also when the backward pass runs elsewhere, or raises: then there is no record."""
    logits = torch.randn(3, 5, requires_grad=True)
    with recording(Recorder(tmp_path / "dump", options={"token_gradient": True})), at(step=2, rank=1):
        with pytest.raises(ZeroDivisionError), recorded(1.0), at(micro=7):
            broken(logits)
        with recorded(1.0), at(micro=8):
            catch_logits(logits * 1, lambda _: None)  # the loss of that microbatch was never made
    assert DumpReader(tmp_path / "dump").names() == []
