"""Read a loss from the logits that a softmax takes, or from the last hidden state where none tells it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_loops import FusedLogProbs, compare, failed, make_samples, padded, tiny_model
from styles import PAD, Model, samples
from torch import Tensor, nn

from regress import record
from regress.dump.dump_reader import DumpReader

MICRO = "step_000000_rank0_micro0.safetensors"
LogProbs = Callable[[Any, dict[str, Tensor], float], Tensor]
"""Function that gives the log-probs ``[B, T - 1]`` of a model for inputs and a temperature."""


def eager(model: Any, inputs: dict[str, Tensor], temperature: float) -> Tensor:
    log_p = (model(**inputs).logits[:, :-1] / temperature).log_softmax(-1)
    found: Tensor = log_p.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    return found


def fused(model: Any, inputs: dict[str, Tensor], temperature: float) -> Tensor:
    """The decoder is called by itself, and the head is fused with the loss."""
    hidden = model.model(**inputs).last_hidden_state[:, :-1]
    targets = inputs["input_ids"][:, 1:]
    flat: Any = FusedLogProbs.apply(
        hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, targets.reshape(-1), temperature
    )
    found: Tensor = flat.reshape(targets.shape)
    return found


_compiled = torch.compile(
    lambda logits, targets, temperature: (
        (logits / temperature).log_softmax(-1).gather(-1, targets[..., None])
    ),
    backend="aot_eager",
)


def compiled(model: Any, inputs: dict[str, Tensor], temperature: float) -> Tensor:
    found: Tensor = _compiled(model(**inputs).logits[:, :-1], inputs["input_ids"][:, 1:], temperature)[..., 0]
    return found


def trained(folder: Path, log_probs: LogProbs, temperature: float, size: int = 8, **options: Any) -> str:
    """Record two microbatches or one, and return what the manifest says that they were read from."""
    model, rows = tiny_model(), make_samples()
    with record(folder, model, **options):
        for start in range(0, len(rows), size):
            inputs = padded(rows[start : start + size])
            (-(log_probs(model, inputs, temperature) * inputs["attention_mask"][:, 1:]).sum() / 50).backward()
    told: str = json.loads((folder / "manifest.json").read_text())["config"]["capture"]["read_from"]
    return told


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler
@pytest.mark.parametrize("token_gradient", [True, False])
@pytest.mark.parametrize(
    ("log_probs", "temperature", "way"),
    [
        (fused, 1.0, "hidden_states"),
        (fused, 0.7, "hidden_states"),
        (compiled, 1.0, "logits"),
        (compiled, 0.7, "hidden_states"),
    ],
)
def test_a_loss_that_no_softmax_tells_is_read_from_hidden_states(
    tmp_path: Path, log_probs: LogProbs, temperature: float, way: str, token_gradient: bool
) -> None:
    assert trained(tmp_path / "a", eager, temperature, token_gradient=token_gradient) == "logits"
    told = trained(tmp_path / "b", log_probs, temperature, 4, token_gradient=token_gradient)
    assert told == way
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    checked = {verdict.quantity for verdict in report.verdicts if verdict.count}
    assert {"log_probs", "entropy", "loss", "gradient"} <= checked
    assert ("token_gradient" in checked) is token_gradient


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2 / 3])
def test_head_and_hidden_states_tell_the_temperature_of_logits(tmp_path: Path, temperature: float) -> None:
    trained(tmp_path / "a", eager, temperature, token_gradient=True)
    reader = DumpReader(tmp_path / "a")
    assert reader.read(f"token_gradient/{MICRO}").meta["temperatures"] == [
        pytest.approx(temperature, rel=1e-5)
    ]
    assert reader.read(f"forward_data/{MICRO}").meta["temperature"] == pytest.approx(temperature, rel=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_the_temperature_is_found_through_the_rounding_of_bfloat16(
    tmp_path: Path, temperature: float
) -> None:
    def coarse(model: Any, inputs: dict[str, Tensor], divisor: float) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits[:, :-1]
        found: Tensor = (
            (logits.float() / divisor).log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
        )
        return found

    trained(tmp_path / "a", coarse, temperature, token_gradient=True)
    meta = DumpReader(tmp_path / "a").read(f"token_gradient/{MICRO}").meta
    assert meta["temperatures"] == [temperature]


def test_a_fused_loss_at_another_temperature_is_seen(tmp_path: Path) -> None:
    trained(tmp_path / "a", eager, 1.0, token_gradient=True)
    trained(tmp_path / "b", fused, 0.9, token_gradient=True)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert next(iter(failed(report))) == "log_probs"


class Sink(torch.autograd.Function):
    """Hands outputs on, and back no gradient at all for those that nobody used, as DistributedDataParallel does."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Any:
        """Return the outputs."""
        ctx.set_materialize_grads(False)
        return tuple(one.clone() for one in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return their gradients."""
        return gradients


@pytest.mark.parametrize("way", [None, "logits", "hidden_states"])
def test_logits_that_are_returned_and_not_used(tmp_path: Path, way: str | None) -> None:
    """The loss is computed inside; accelerate returns the logits in float32, and nobody looks at those."""

    def run(folder: Path, wrapped: bool) -> None:
        model, inputs = tiny_model(), padded(make_samples())
        original, labels = model.forward, inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            out.logits = out.logits * 1.0
            return out

        model.forward = forward
        with record(folder, model, token_gradient=True, read_from=way):
            out = model(**inputs, labels=labels)
            loss = Sink.apply(out.loss, out.logits)[0] if wrapped else out.loss  # type: ignore[no-untyped-call]  # of torch
            loss.backward()

    run(tmp_path / "a", False)
    run(tmp_path / "b", True)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    assert "token_gradient" in {verdict.quantity for verdict in report.verdicts if verdict.count}


class Pair(Model):
    """Returns values beside the logits."""

    def forward(self, tokens: Tensor) -> Any:
        """Return logits ``[B, T, V]`` and values ``[B, T]``."""
        logits = super().forward(tokens)
        return logits, logits.mean(-1)


@pytest.mark.parametrize("graded", [True, False])
def test_a_model_that_returns_a_tuple_beside_another_one(tmp_path: Path, graded: bool) -> None:
    """A reference model, or a critic, of the same shape runs between the forward pass and the loss."""

    def run(folder: Path, beside: bool) -> None:
        model, other = Pair(), Pair()
        ids = nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD)
        with record(folder, model, token_gradient=True):
            own = model(ids)[0][:, :-1] / 0.7
            if beside:
                with torch.set_grad_enabled(graded):
                    other(ids)
            own.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()

    run(tmp_path / "a", False)
    run(tmp_path / "b", True)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


@pytest.mark.parametrize("told", [True, False])
def test_the_passes_of_another_model_are_not_those_of_this_one(tmp_path: Path, told: bool) -> None:
    """A critic of the same shape runs between the forward pass and the loss, and is trained as well."""

    def run(folder: Path, beside: bool) -> None:
        model: Any = tiny_model() if told else Model()
        other: Any = tiny_model() if told else Model()
        ids = nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD) % 40

        def logits(of: Any) -> Tensor:
            found: Tensor = of(ids, attention_mask=torch.ones_like(ids)).logits if told else of(ids)
            return found[:, :-1] / 0.7

        with record(folder, model, token_gradient=True):
            own = logits(model)
            if beside:
                logits(other).log_softmax(-1).gather(-1, ids[:, :-1, None]).sum().backward()
            own.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()

    run(tmp_path / "a", False)
    run(tmp_path / "b", True)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


def test_both_ways_of_seeing_agree(tmp_path: Path) -> None:
    """Hidden states and head on one side, the softmax on the other: the same tokens, the same numbers."""
    for way in ("hidden_states", "logits"):
        model, inputs = tiny_model(), padded(make_samples())
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        weights = torch.randn(ids.shape[0], ids.shape[1] - 1, generator=torch.Generator().manual_seed(2))
        with record(tmp_path / way, model, token_gradient=True, read_from=way):
            log_p = model(**inputs).logits[:, :-1].log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            chosen = log_p.gather(-1, ids[:, 1:, None])[..., 0]
            ((chosen * weights + 0.1 * entropy) * mask[:, 1:]).sum().backward()
    one, other = DumpReader(tmp_path / "hidden_states"), DumpReader(tmp_path / "logits")
    name = "step_000000_rank0_micro0.safetensors"
    for record_type, tensors in (
        ("forward_data", ("log_probs", "entropy")),
        ("token_gradient", ("token_gradient", "entropy_gradient")),
    ):
        golden, actual = (reader.read(f"{record_type}/{name}") for reader in (one, other))
        assert golden.meta["samples"] == actual.meta["samples"]
        for tensor in tensors:
            np.testing.assert_allclose(
                np.asarray(actual.tensors[tensor], np.float64),
                np.asarray(golden.tensors[tensor], np.float64),
                atol=3e-5,
                err_msg=tensor,
            )
    for way in ("hidden_states", "logits"):
        manifest = json.loads((tmp_path / way / "manifest.json").read_text())
        assert manifest["config"]["capture"]["read_from"] == way
