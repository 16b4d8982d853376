"""Trainers that do their steps in another order or call their model in another way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_loops import compare, failed, make_samples, mean_loss, padded, tiny_model
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, OPTConfig, OPTForCausalLM

from regress import record
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.dump.dump_reader import DumpReader
from regress.errors import CaptureError

TOTAL = 50


def back(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """One forward and backward pass."""
    loss = mean_loss(model(**inputs).logits, inputs, TOTAL)
    loss.backward()
    return loss.detach()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> None:
    """Train one step as usual."""
    optimizer.zero_grad()
    back(model, inputs)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> None:
    """Compute loss and gradient inside of the optimizer's step."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = back(model, inputs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return float(loss)

    optimizer.step(closure)


def beside_a_critic(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> None:
    """Run the backward pass of another model between clipping and the step."""
    optimizer.zero_grad()
    back(model, inputs)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    critic = tiny_model()
    back(critic, inputs)
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
    optimizer.step()


Step = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Tensor]], None]


def trained(folder: Path, step: Step, updates: int = 2) -> Path:
    """Record a training made of such steps."""
    model, inputs = tiny_model(), padded(make_samples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with record(folder, model):
        for _ in range(updates):
            step(model, optimizer, inputs)
    return folder


@pytest.mark.parametrize("step", [with_closure, beside_a_critic])
def test_the_gradient_is_that_before_clipping_in_any_order_of_calls(tmp_path: Path, step: Step) -> None:
    golden, actual = trained(tmp_path / "a", plain), trained(tmp_path / "b", step)
    report = compare(golden, actual)
    assert report.exit_code == 0, failed(report)
    assert [v.place.step for v in report.verdicts if v.quantity == "grad_norm"] == [0, 1]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_is_skipped_after_clipping_is_a_step(tmp_path: Path, to_none: bool) -> None:
    model, inputs = tiny_model(), padded(make_samples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with record(tmp_path / "a", model):
        for skipped in (True, False):
            optimizer.zero_grad(set_to_none=to_none)
            back(model, inputs)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if not skipped:
                optimizer.step()
    names = [n.removesuffix(".safetensors") for n in DumpReader(tmp_path / "a").names()]
    assert [n for n in names if "forward_data" in n] == [
        f"forward_data/step_00000{step}_rank0_micro0" for step in (0, 1)
    ]
    assert [n for n in names if n.startswith(("gradient", "param"))] == [
        "gradient/step_000000_rank0",
        "gradient/step_000001_rank0",
        "param/step_000001_rank0",
    ]


@pytest.mark.parametrize("other", ["position_ids", "labels"])
def test_other_integers_are_not_taken_for_token_ids(tmp_path: Path, other: str) -> None:
    model, inputs = tiny_model(), padded(make_samples())
    embedded: dict[str, Any] = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
        other: torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"]),
    }
    with (
        pytest.raises(
            CaptureError, match=r"token ids are not among the forward arguments .*record\(input_ids="
        ),
        record(tmp_path / "a", model),
    ):
        model(**embedded)


def test_the_mask_of_an_encoder_is_not_that_of_the_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 40,
        "pad_token_id": 0,
    }
    heads: dict[str, Any] = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads))
    inputs = padded(make_samples())
    read = {"input_ids": inputs["input_ids"].flip(1), "attention_mask": inputs["attention_mask"].flip(1)}
    with (
        pytest.raises(CaptureError, match="no attention mask tells whether it is padding"),
        record(tmp_path / "a", model, read_from="hidden_states"),
    ):
        model(**read, decoder_input_ids=inputs["input_ids"])
    with record(tmp_path / "b", model):
        out = model(
            **read,
            decoder_input_ids=inputs["input_ids"],
            decoder_attention_mask=inputs["attention_mask"],
        )
        mean_loss(out.logits, inputs, TOTAL).backward()
    dump = DumpReader(tmp_path / "b")
    (name,) = (n for n in dump.names() if n.startswith("batch_inputs"))
    mask = dump.read(name).tensors["attention_mask"]
    assert (mask.astype(int) == inputs["attention_mask"].numpy()).all()


@pytest.mark.parametrize(
    "kind", [pytest.param(torch.optim.SGD, marks=pytest.mark.extended), torch.optim.AdamW]
)
def test_a_bias_whose_gradient_is_rounding_is_equal_and_one_that_is_wrong_is_not(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": 16,
    }
    others: dict[str, Any] = {"vocab_size": 40, "num_attention_heads": 2, "dropout": 0, "pad_token_id": 0}

    def run(name: str, parts: int, factor: float = 1.0, rate: float = 1e-3) -> Path:
        torch.manual_seed(0)
        model = OPTForCausalLM(OPTConfig(**sizes, **others, max_position_embeddings=64, init_std=0.3))
        optimizer: Any = kind(model.parameters(), lr=rate)  # type: ignore[call-arg]
        rows = make_samples()
        model.get_parameter("model.decoder.layers.1.self_attn.q_proj.bias").register_hook(
            lambda g: g * factor
        )
        with record(tmp_path / name, model):
            for _ in range(2):
                optimizer.zero_grad()
                for number in range(parts):
                    back(model, padded(rows[number::parts]))
                optimizer.step()
        return tmp_path / name

    golden = run("a", 1)
    report = compare(golden, run("b", 3))
    assert report.exit_code == 0, failed(report)
    found = failed(compare(golden, run("c", 3, factor=1.001)))
    assert "layers.1.self_attn.q_proj.bias" in found["gradient"]
    assert "param" in failed(compare(golden, run("d", 3, rate=1.5e-3)))


def test_autocast_inside_of_the_forward_pass_alone(tmp_path: Path) -> None:
    """As accelerate wraps a model: products in bfloat16, logits returned in float32."""

    def run(name: str, parts: int) -> Path:
        model = tiny_model()
        original = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out = original(*args, **kwargs)
            out.logits = out.logits.float()
            return out

        model.forward = forward
        rows = make_samples()
        with record(tmp_path / name, model):
            for number in range(parts):
                back(model, padded(rows[number::parts]))
        return tmp_path / name

    golden = run("a", 1)
    report = compare(golden, run("b", 2))
    assert report.exit_code == 0, failed(report)
    assert DumpReader(golden).manifest.provenance.config["model"]["dtype"] == "bfloat16"


def test_optimizers_that_step_within_the_backward_call(tmp_path: Path) -> None:
    def run(name: str, within: bool) -> Path:
        model, inputs = tiny_model(), padded(make_samples())
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p: Any) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        if within:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
        with record(tmp_path / name, model):
            for _ in range(2):
                back(model, inputs)
                for p in () if within else model.parameters():
                    step(p)
        return tmp_path / name

    golden, actual = run("a", within=False), run("b", within=True)
    report = compare(golden, actual)
    assert not {"gradient", "param", "log_probs"} & failed(report).keys()
    gradients = [
        {name: len(dump.read(name).tensors) for name in dump.names() if name.startswith("gradient")}
        for dump in (DumpReader(golden), DumpReader(actual))
    ]
    assert gradients[0] == gradients[1]
    assert len(gradients[0]) == 2


def test_a_mask_of_pairs_that_hides_more_than_the_future_is_refused(tmp_path: Path) -> None:
    model, ids = tiny_model(), torch.randint(2, 40, (1, 6))
    causal = torch.ones(6, 6).tril().bool()[None, None]
    blocks = causal.clone()
    blocks[..., 3:, :3] = False
    with record(tmp_path / "a", model):
        model(input_ids=ids, attention_mask=causal).logits.sum().backward()
    added = torch.zeros(1, 1, 6, 6).masked_fill(~blocks, -torch.inf)
    for mask in (blocks, added, added.bfloat16()):
        if mask.dtype == torch.bfloat16:
            model = model.bfloat16()
        with (
            pytest.raises(
                CaptureError, match=r"hides pairs of tokens, .* record\(attention_mask=...\), or pos"
            ),
            record(tmp_path / "b", model, overwrite=True),
        ):
            model(input_ids=ids, attention_mask=mask)


def test_nothing_is_ruled_out_that_the_dumps_do_not_tell(tmp_path: Path) -> None:
    """Log-probs are recorded by us: another temperature or mask of the trainer leaves them as they are."""

    def run(name: str, temperature: float) -> Path:
        model, inputs = tiny_model(), padded(make_samples())
        with record(tmp_path / name, model, read_from="hidden_states"):
            mean_loss(model(**inputs).logits / temperature, inputs, TOTAL).backward()
        return tmp_path / name

    report = compare(run("a", 1.0), run("b", 0.9))
    assert next(iter(failed(report))) == "loss"
    divergence = find_divergence(report.verdicts)
    assert divergence is not None
    causes = " ".join(found.cause for found in diagnose(divergence))
    assert "mask or temperature" in causes


class Holder(nn.Module):
    """A trainer's module that holds the model, as those of Lightning do."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_the_one_model_that_a_module_trains_is_found(tmp_path: Path) -> None:
    """Its parameters have the names that they have without the module, so that the two can be compared."""
    inputs = padded(make_samples(4))
    for name in ("held", "plain"):
        model: Any = tiny_model()
        frozen = tiny_model().requires_grad_(False)
        given = Holder(policy=model, reference=frozen) if name == "held" else model
        with record(tmp_path / name, given):
            plain(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    assert compare(tmp_path / "plain", tmp_path / "held").exit_code == 0


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            lambda: {"actor": tiny_model(), "critic": tiny_model()},
            r"several language models \(actor, critic\)",
        ),
        (
            lambda: {"actor": tiny_model(), "value": nn.Linear(2, 1)},
            r'trains value.weight beside the language model actor.*record\(head="actor.lm_head"',
        ),
    ],
)
def test_a_module_that_trains_more_than_one_model_is_refused(tmp_path: Path, parts: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words), record(tmp_path, Holder(**parts())):
        pass


class ColumnsFirst(nn.Module):
    """A model whose layers get ``[T, B, H]``, and a gate within them that gets rows."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = rows
        self.embed = nn.Embedding(40, 8)
        self.layer = Gated()
        self.lm_head = nn.Linear(8, 40)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.embed(input_ids)
        states = self.layer(states) if self.rows else self.layer(states.transpose(0, 1)).transpose(0, 1)
        return self.lm_head(states)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)

    def forward(self, states: Tensor) -> Tensor:
        scores = self.gate(states.reshape(-1, 8)).softmax(-1)
        return states * (1 + scores[:, :1].reshape(*states.shape[:2], 1))


def test_rows_of_a_module_are_placed_by_what_the_modules_around_it_get(tmp_path: Path) -> None:
    inputs = padded(make_samples(5))
    for name in ("rows", "columns"):
        model = ColumnsFirst(name == "rows")
        with record(tmp_path / name, model, head="lm_head", activations="gate"):
            loss = model(**inputs).log_softmax(-1)[..., 0].mean()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = compare(tmp_path / "rows", tmp_path / "columns")
    assert [v.name for v in found.verdicts if v.quantity == "activations"] == ["layer.gate"]
    assert not failed(found)
