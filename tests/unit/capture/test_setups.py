"""Models, heads and loops of many kinds under `record`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from capture_loops import (
    VOCABULARY,
    batch,
    compare,
    failed,
    make_samples,
    mean_loss,
    padded,
    recorded,
    tiny_model,
)
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from regress import record
from regress.dump.dump_reader import DumpReader
from regress.dump.record import Record
from regress.errors import CaptureError


def records(folder: Path, type: str) -> list[Record]:
    reader = DumpReader(folder)
    return [reader.read(name) for name in reader.names() if name.startswith(f"{type}/")]


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "use_cache": False,
}
HEADS = {
    "tied": lambda: tiny_model(tie_word_embeddings=True),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=2.5)),
    "capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=3.0)),
}


@pytest.mark.parametrize("name", HEADS)
def test_log_probs_are_those_of_the_models_own_logits(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = HEADS[name]()
    inputs = padded(make_samples())
    logits = model(**inputs).logits
    want = (
        logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0].detach().numpy()
    )
    recorded(tmp_path / "a", model, updates=1, options={"token_gradient": True})
    (found,) = records(tmp_path / "a", "forward_data")
    mask = inputs["attention_mask"][:, 1:].numpy() * inputs["attention_mask"][:, :-1].numpy()
    np.testing.assert_allclose(found.tensors["log_probs"][:, 1:] * mask, want * mask, atol=2e-6)
    (share,) = records(tmp_path / "a", "token_gradient")
    assert share.tensors["token_residual"].max() < 3e-6


class Plain(nn.Module):
    """A model of one's own, without any API of transformers."""

    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)
        self.doubled = doubled

    def forward(self, tokens: Tensor, attention_mask: Tensor, keep: int = 0) -> Tensor:
        hidden = self.rnn(self.embed(tokens))[0]
        logits = self.out(hidden[:, -keep:] if keep else hidden)
        return logits * 2 if self.doubled else logits  # type: ignore[no-any-return]


def train_plain(folder: Path, model: Plain, keep: int = 0, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = padded(make_samples(), "left")
    with record(folder, model, **options):
        logits = model(inputs["input_ids"], inputs["attention_mask"], keep)
        targets = inputs["input_ids"][:, -logits.shape[1] :]
        (-logits[:, :-1].log_softmax(-1).gather(-1, targets[:, 1:, None]).mean()).backward()
        optimizer.step()


def test_a_plain_module_names_its_head(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"Plain does not tell its output head .* record\(head=\"lm_head\"\)"
    ):
        train_plain(tmp_path / "a", Plain(), read_from="hidden_states")
    with pytest.raises(
        CaptureError, match=r"head='lm_head' is not a module of Plain: its children are embed, rnn, out"
    ):
        train_plain(tmp_path / "a", Plain(), head="lm_head")
    train_plain(tmp_path / "a", Plain(), head="out")
    train_plain(tmp_path / "b", Plain(), head="out", decoder="rnn")
    assert compare(tmp_path / "a", tmp_path / "b").exit_code == 0


def test_logits_to_keep_count_from_the_right(tmp_path: Path) -> None:
    train_plain(tmp_path / "all", Plain(), head="out")
    train_plain(tmp_path / "kept", Plain(), keep=4, head="out")
    (whole,), (kept,) = (records(tmp_path / name, "forward_data") for name in ("all", "kept"))
    np.testing.assert_allclose(
        kept.tensors["log_probs"][:, -3:], whole.tensors["log_probs"][:, -3:], rtol=1e-5
    )
    assert not kept.tensors["log_probs"][:, :-3].any()


def test_logits_that_are_not_those_of_the_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"logits of Plain are not its head applied to .* record\(head=\.\.\.\)"
    ):
        train_plain(tmp_path / "a", Plain(doubled=True), head="out")
    model = Plain(doubled=True)
    train_plain(tmp_path / "b", model, decoder="rnn", head=lambda hidden: model.out(hidden) * 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_lora_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def lora() -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = tiny_model()
        torch.manual_seed(5)
        return peft.get_peft_model(model, config)  # type: ignore[no-any-return]

    recorded(tmp_path / "a", lora(), updates=1)
    recorded(tmp_path / "b", lora(), updates=1, layout="packed")
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    (gradient,) = records(tmp_path / "a", "gradient")
    assert len(gradient.tensors) == 8
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in gradient.tensors


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it where a graph resumes
@pytest.mark.parametrize("how", ["wrapped", pytest.param("in_place", marks=pytest.mark.extended)])
def test_compiled(tmp_path: Path, how: str) -> None:
    recorded(tmp_path / "a", updates=1)
    model = tiny_model()
    if how == "wrapped":
        compiled: Any = torch.compile(model, backend="eager")
        recorded(tmp_path / "b", compiled, updates=1)
    else:
        model.compile(backend="eager")
        recorded(tmp_path / "b", model, updates=1)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


def test_the_scale_of_a_grad_scaler_is_divided_out(tmp_path: Path) -> None:
    recorded(tmp_path / "a", updates=1, options={"token_gradient": True})
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rows = make_samples()
    total = sum(len(row) - 1 for row in rows)
    inputs = batch(rows, "right")
    with record(tmp_path / "b", model, token_gradient=True):
        scaler.scale(mean_loss(model(**inputs).logits, inputs, total)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


def test_a_clip_that_nobody_could_see_is_not_taken_for_the_gradient(tmp_path: Path) -> None:
    model = tiny_model()
    with record(tmp_path / "a", model):
        for _ in steps_with_own_clip(model):
            pass
    assert not records(tmp_path / "a", "gradient")
    assert records(tmp_path / "a", "gradient_clipped")


def steps_with_own_clip(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = padded(make_samples())
    yield 0
    mean_loss(model(**inputs).logits, inputs, 45).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)
    optimizer.step()


def test_a_clip_function_imported_before_is_seen(tmp_path: Path) -> None:
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    recorded(tmp_path / "free", clip=None, updates=1)
    for name, clip in (
        ("norm", lambda p: clip_grad_norm_(p, 1e-3)),
        ("value", lambda p: clip_grad_value_(p, 1e-3)),
    ):
        model = tiny_model()
        with record(tmp_path / name, model):
            for _ in steps_with(model, clip):
                pass
        (free,), (found,) = (records(tmp_path / folder, "gradient") for folder in ("free", name))
        assert free.checksum() == found.checksum()


def test_a_scaling_function_imported_before_tells_norm_and_limit(tmp_path: Path) -> None:
    """A trainer's module that clips in two calls, both imported by name before the recording began."""
    trainer = ModuleType("a_trainer_of_its_own")
    exec("from torch.nn.utils import clip_grads_with_norm_ as scale, get_total_norm as total", vars(trainer))
    held = trainer.scale

    def clip(parameters: Any) -> None:
        own = list(parameters)
        trainer.scale(own, 1e-3, total := trainer.total([p.grad for p in own]))
        norms.append(float(total))

    norms: list[float] = []
    model = tiny_model()
    sys.modules[trainer.__name__] = trainer
    try:
        with record(tmp_path / "dump", model):
            exec("from torch.nn.utils import clip_grads_with_norm_ as late", vars(trainer))
            for _ in steps_with(model, clip):
                pass
    finally:
        del sys.modules[trainer.__name__]
    (gradient,), (optimizer,) = (
        records(tmp_path / "dump", record_type) for record_type in ("gradient", "optimizer")
    )
    assert gradient.meta["grad_norm"] == pytest.approx(norms[0], rel=1e-6)
    assert optimizer.meta["max_grad_norm"] == 1e-3
    assert trainer.scale is held is trainer.late is torch.nn.utils.clip_grads_with_norm_


def steps_with(model: nn.Module, clip: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    rows = make_samples()
    inputs = padded(rows)
    yield 0
    mean_loss(model(**inputs).logits, inputs, sum(len(row) - 1 for row in rows)).backward()
    clip(model.parameters())
    optimizer.step()


def test_several_passes_of_one_backward_call_are_one_microbatch(tmp_path: Path) -> None:
    rows = make_samples()
    total = sum(len(row) - 1 for row in rows)
    recorded(tmp_path / "a", updates=1, options={"token_gradient": True})
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    parts = [padded(rows[:3]), padded(rows[3:], "left")]
    with record(tmp_path / "b", model, token_gradient=True):
        sum(mean_loss(model(**part).logits, part, total) for part in parts).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert len(records(tmp_path / "b", "forward_data")) == 1
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


def test_two_backward_calls_of_one_pass_add_up(tmp_path: Path) -> None:
    recorded(tmp_path / "a", updates=1, options={"token_gradient": True})
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    rows = make_samples()
    inputs = padded(rows)
    with record(tmp_path / "b", model, token_gradient=True):
        loss = mean_loss(model(**inputs).logits, inputs, sum(len(row) - 1 for row in rows))
        (loss * 0.25).backward(retain_graph=True)
        (loss * 0.75).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


def test_every_second_step_and_two_optimizers(tmp_path: Path) -> None:
    model = tiny_model()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:5], lr=0.1), torch.optim.AdamW(parameters[5:], lr=1e-3)]
    inputs = padded(make_samples())
    with record(tmp_path / "a", model, every_n_steps=2):
        for _ in range(4):
            mean_loss(model(**inputs).logits, inputs, 45).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model(**inputs)  # an evaluation that nobody back-propagates
    assert [record.step for record in records(tmp_path / "a", "forward_data")] == [0, 2]
    gradients, values = records(tmp_path / "a", "gradient"), records(tmp_path / "a", "param")
    assert [record.step for record in gradients] == [record.step for record in values] == [0, 2]
    assert all(len(record.tensors) == len(parameters) for record in (*gradients, *values))
