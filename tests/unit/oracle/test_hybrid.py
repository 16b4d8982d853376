"""`regress oracle` of a trainer of a hybrid model, with padded rows and with rows packed as collators pack them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
from plain_loop import MAX_NORM, advantages_of, rollout

from regress import Trajectory, at, record, tap_trajectories
from regress.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def hybrid(family: str) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2}
    linear = {"linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.3}
    special = {"vocab_size": 24, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    dense = {"num_experts": 0} if family == "qwen3_next" else {}
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **sizes, **heads, **linear, **kinds, **special, **dense)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def train(folder: Path, family: str, *, packed: bool) -> None:
    """Make two updates of four microbatches each, in rows of two samples if they are packed."""
    model = hybrid(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    with record(folder, model, token_gradient=True, initial_weights=True, activations="layers|embed|norm$"):
        for step in range(2):
            samples = rollout(step)
            with at(step=step):
                tap_trajectories(samples)
            advantages, total = advantages_of(samples), sum(sum(sample.loss_mask) for sample in samples)
            for first in range(0, 8, 2):
                backward(model, samples[first : first + 2], advantages[first : first + 2], total, packed)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def backward(
    model: PreTrainedModel, samples: list[Trajectory], advantages: torch.Tensor, total: int, packed: bool
) -> None:
    lengths = [len(sample.tokens) for sample in samples]
    flat = torch.tensor([token for sample in samples for token in sample.tokens])
    mask = torch.tensor([bit for sample in samples for bit in sample.loss_mask])
    if packed:  # as DataCollatorWithFlattening() does
        positions = torch.cat([torch.arange(length) for length in lengths])
        logits = model(input_ids=flat[None], position_ids=positions[None], use_cache=False).logits[0]
    else:
        ids = torch.nn.utils.rnn.pad_sequence(list(flat.split(lengths)), batch_first=True)
        there = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        rows = model(input_ids=ids, attention_mask=there, use_cache=False).logits
        logits = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    log_probs = logits[:-1].log_softmax(-1).gather(-1, flat[1:, None])[:, 0]
    ratio = (log_probs - log_probs.detach()).exp() * mask[1:]  # no first token of a sample is trained
    (-(ratio * advantages.repeat_interleave(torch.tensor(lengths))[1:]).sum() / total).backward()


@pytest.mark.extended
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_state_that_runs_into_the_next_packed_sample_is_found_and_named(
    family: str, tmp_path: Path
) -> None:
    for packed in (False, True):
        folder = tmp_path / f"packed-{packed}"
        train(folder, family, packed=packed)
        judged = CliRunner().invoke(main, ["oracle", str(folder), "--preset", "dapo"])
        assert judged.exit_code == packed, judged.output
        assert ("(rule state-across-samples" in judged.output) == packed, judged.output
