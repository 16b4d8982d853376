"""Trainers in the styles of the wild, seen at the softmax: no head, no last hidden state, no mask is told."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_loops import make_samples, padded, tiny_model
from click.testing import CliRunner
from style_table import PAGE, head, start
from styles import FAULTS, PAD, STYLES, Model, samples, train
from torch import Tensor, nn

from regress import record
from regress.cli import main
from regress.compare.dumps.comparison import compare_dumps
from regress.dump.dump_reader import DumpReader
from regress.errors import CaptureError

pytestmark = pytest.mark.filterwarnings(  # of torch's compiler
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)
REFUSED = "refused with a sentence: temperature"
ONE_EACH = [*zip(STYLES, itertools.cycle(FAULTS), strict=False)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("style", STYLES)
def test_microbatches_of_any_size_are_the_same_training(tmp_path: Path, style: str) -> None:
    for size in (8, 3, 1):
        train(tmp_path / str(size), style, size)
    for size in (3, 1):
        found = compare_dumps(str(tmp_path / "8"), str(tmp_path / str(size)))
        assert found.exit_code == 0, [f"{v.quantity} {v.name}: {v.detail}" for v in found.failed]
        count = {v.quantity: v.count for v in found.verdicts if v.quantity in ("log_probs", "token_gradient")}
        assert all(count.values()), count
        assert not found.problems


@pytest.mark.one_in(5)
@pytest.mark.parametrize("style", STYLES)
def test_training_is_the_same_bit_for_bit(
    tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = train(tmp_path / "seen", style, 4, updates=2)
    with monkeypatch.context() as alone:
        alone.setattr("styles.record", lambda *args, **options: torch.enable_grad())
        unseen = train(tmp_path / "unseen", style, 4, updates=2)
    for one, other in zip(seen.parameters(), unseen.parameters(), strict=True):
        assert torch.equal(one, other)


def named(folder: Path, style: str, fault: str) -> str:
    """Return the output of the command on a fault, on one line."""
    train(folder / "right", style, 4, tapped=True)
    train(folder / "wrong", style, 4, fault, tapped=True)
    done = CliRunner().invoke(main, ["compare", str(folder / "right"), str(folder / "wrong")])
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("style", "fault"), ONE_EACH)
def test_a_frequent_fault_is_named(tmp_path: Path, style: str, fault: str) -> None:
    assert FAULTS[fault] in named(tmp_path, style, fault)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("style", "fault"),
    [(style, fault) for style in STYLES for fault in FAULTS if (style, fault) != ("compiled", "temperature")],
)
def test_every_frequent_fault_is_named_in_every_style(tmp_path: Path, style: str, fault: str) -> None:
    assert FAULTS[fault] in named(tmp_path, style, fault)


def test_the_page_lists_every_style() -> None:
    page = PAGE.read_text()
    assert page.startswith(head())
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [line.startswith(start(style)) for style, line in zip(STYLES, rows, strict=True)] == [True] * len(
        STYLES
    )
    every = len(FAULTS)
    for line in rows:
        assert line.endswith((f"yes | {every} of {every} |", f"yes | {every - 1} of {every}, {REFUSED} |")), (
            line
        )


def test_inputs_without_the_last_column_are_the_same_samples_in_every_microbatch(tmp_path: Path) -> None:
    """The last token of the longest row is never an input: only the targets of the loss tell it."""

    def recorded(folder: Path, size: int) -> Path:
        model, rows = tiny_model(), make_samples()
        with record(folder, model, token_gradient=True):
            for start in range(0, len(rows), size):
                inputs = padded(rows[start : start + size])
                ids, mask = inputs["input_ids"], inputs["attention_mask"]
                logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1]).logits
                chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                (-(chosen * mask[:, 1:]).sum() / 50).backward()
        return folder

    sides = [str(recorded(tmp_path / str(size), size)) for size in (8, 2)]
    found = compare_dumps(*sides)
    assert found.exit_code == 0, [f"{v.quantity} {v.name}: {v.detail}" for v in found.failed]


def test_a_sampled_padding_token_is_a_token_of_its_sample(tmp_path: Path) -> None:
    train(tmp_path / "a", "gather", 8)
    reader = DumpReader(tmp_path / "a")
    inputs = reader.read("batch_inputs/step_000000_rank0_micro0.safetensors")
    mask = np.asarray(inputs.tensors["attention_mask"])
    assert mask.sum(1).tolist() == [len(row) for row in samples()]
    assert mask[2, 5]
    assert np.asarray(inputs.tensors["input_ids"])[2, 5] == PAD


def test_a_loss_on_other_tokens_than_those_that_follow_is_refused(tmp_path: Path) -> None:
    model, ids = Model(), nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD)
    refused = pytest.raises(
        CaptureError, match=r"does each row train on the token of the ids \[8, 10\] that follows"
    )
    with refused, record(tmp_path / "a", model, token_gradient=True):
        other = (ids[:, 1:] * 5 + 1) % 44
        model(ids)[:, :-1].log_softmax(-1).gather(-1, other[..., None]).sum().backward()


def test_metrics_without_gradients_are_no_rows_of_the_loss(tmp_path: Path) -> None:
    def recorded(folder: Path, metric: bool) -> Path:
        model, ids = Model(), nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD)
        with record(folder, model, token_gradient=True):
            logits = model(ids)[:, :-1]
            if metric:
                with torch.no_grad():
                    logits.log_softmax(-1).exp().sum()
            (logits / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()
        return folder

    found = compare_dumps(str(recorded(tmp_path / "a", False)), str(recorded(tmp_path / "b", True)))
    assert found.exit_code == 0


class Bare(Model):
    """Embeddings that are rows of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(self.table.weight.detach().clone())
        del self.table

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, V]``."""
        logits: Tensor = self.out(self.blocks(self.rows[tokens]))
        return logits


def test_embeddings_may_be_rows_of_a_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STYLES, "bare", (Bare, STYLES["gather"][1]))
    sides = [tmp_path / str(size) for size in (8, 2)]
    for folder in sides:
        train(folder, "bare", int(folder.name))
    assert compare_dumps(*map(str, sides)).exit_code == 0


def test_steps_that_are_left_out_are_not_read(tmp_path: Path) -> None:
    train(tmp_path / "a", "gather", 4, updates=4, every_n_steps=2)
    names = [name for name in DumpReader(tmp_path / "a").names() if name.startswith("forward_data")]
    assert sorted({name.split("_")[2] for name in names}) == ["000000", "000002"]


def test_passes_may_run_before_any_loss(tmp_path: Path) -> None:
    def recorded(folder: Path, first_all: bool) -> Path:
        model, rows = Model(), samples()
        batches = [
            nn.utils.rnn.pad_sequence(rows[n : n + 4], batch_first=True, padding_value=PAD) for n in (0, 4)
        ]

        def back(ids: Tensor, logits: Tensor) -> None:
            (-logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum()).backward()

        with record(folder, model, token_gradient=True):
            if first_all:
                found = [model(ids) for ids in batches]
                for ids, logits in zip(batches, found, strict=True):
                    back(ids, logits)
            else:
                for ids in batches:
                    back(ids, model(ids))
        return folder

    found = compare_dumps(str(recorded(tmp_path / "a", False)), str(recorded(tmp_path / "b", True)))
    assert found.exit_code == 0


def test_two_backward_passes_of_one_forward_add_up(tmp_path: Path) -> None:
    def recorded(folder: Path, twice: bool) -> Path:
        model, ids = Model(), nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD)
        with record(folder, model, token_gradient=True):
            log_p = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
            if twice:
                (0.25 * log_p.sum()).backward(retain_graph=True)
            ((0.75 if twice else 1.0) * log_p.sum()).backward()
        return folder

    one, two = recorded(tmp_path / "a", False), recorded(tmp_path / "b", True)
    name = "token_gradient/step_000000_rank0_micro0.safetensors"
    golden, actual = (DumpReader(folder).read(name).tensors["token_gradient"] for folder in (one, two))
    np.testing.assert_allclose(actual, golden, atol=1e-6)


def test_a_loss_without_logits_is_refused(tmp_path: Path) -> None:
    model, ids = Model(), nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD)
    refused = pytest.raises(
        CaptureError, match=r"no softmax, .* of Model was reached .* record\(decoder=\.\.\., head"
    )
    with refused, record(tmp_path / "a", model):
        model.blocks(model.table(ids)).square().sum().backward()
    refused = pytest.raises(
        CaptureError, match=r"their gradient is not that of a softmax: .* run it uncompiled"
    )
    with refused, record(tmp_path / "b", model):
        model(ids).square().sum().backward()


def test_a_compiled_loss_at_another_temperature_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"their gradient is not that of a softmax: .* divides or bounds them"
    ):
        train(tmp_path / "a", "compiled", 4, "temperature")


@pytest.mark.parametrize("apart", [True, False])
def test_entropies_of_other_logits_than_the_log_probs(tmp_path: Path, apart: bool) -> None:
    """Entropies of logits that lead to log-probs as well are not separable: the residual says so."""
    model, ids = Model(), nn.utils.rnn.pad_sequence(samples(), batch_first=True, padding_value=PAD)
    with record(tmp_path / "a", model, token_gradient=True):
        logits = model(ids)[:, :-1]
        log_p = (logits / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        own = logits * 1.0 if apart else logits
        entropy = torch.logsumexp(own, -1) - (own.softmax(-1) * own).sum(-1)
        (-log_p.sum() - 0.01 * entropy.sum()).backward()
    found = DumpReader(tmp_path / "a").read("token_gradient/step_000000_rank0_micro0.safetensors").tensors
    gradient, bonus, rest = (
        np.asarray(found[name]) for name in ("token_gradient", "entropy_gradient", "token_residual")
    )
    covered = gradient != 0
    assert covered.sum() > 40
    np.testing.assert_allclose(gradient[covered], -1.0, rtol=1e-5)
    if apart:
        np.testing.assert_allclose(bonus[covered], -0.01, rtol=1e-3)
    assert bool(rest.max() > 1e-3) is not apart


@pytest.mark.parametrize(
    "option", [{"activations": ".*"}, {"routing": True}, {"classify": lambda arguments: None}]
)
def test_what_takes_hidden_states_is_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    refused = pytest.raises(
        CaptureError, match=r"takes hooks on the last hidden state, and Model is read from its"
    )
    with refused, record(tmp_path / "a", Model(), **option):
        pass


@pytest.mark.parametrize("find", [lambda: None, lambda a, b: a], ids=["none", "two"])
def test_a_finder_that_cannot_be_called_is_refused_at_once(tmp_path: Path, find: Any) -> None:
    refused = pytest.raises(CaptureError, match=r"record\(attention_mask=.*a function of all of them")
    with refused, record(tmp_path / "a", Model(), attention_mask=find):
        pass
