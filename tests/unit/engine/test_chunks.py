"""Log-probs in chunks: one chunk of logits at a time, the same numbers, the same records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from regress.dump.dump_reader import DumpReader
from regress.engine.config.config_schema import Config
from regress.engine.config.model_config import ModelConfig
from regress.engine.log_prob_projection import chunked_log_probs, require_plain_logits
from regress.engine.model_loading import build_model
from regress.engine.training_run import train
from regress.errors import ConfigError
from regress.grpo.selective_log_softmax import token_log_probs

MakeConfig = Callable[..., Config]


def tiny() -> PreTrainedModel:
    return build_model(ModelConfig(dtype="float64"), seed=0, vocab_size=24, pad_id=0, eos_id=1)


@pytest.mark.parametrize("count", [0, 1, 7, 12])
def test_no_more_rows_than_a_chunk_are_ever_projected_and_none_is_kept(count: int) -> None:
    model = tiny()
    hidden = torch.randn(1, count, 64, dtype=torch.float64, requires_grad=True)
    targets = torch.arange(count) % 24
    rows: list[int] = []
    kept: list[torch.Size] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, __, out: rows.append(out.shape[1]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        log_probs = partial(token_log_probs, temperature=0.7, entropy=True)
        out = chunked_log_probs(model, hidden, targets, log_probs, chunk=5)
        forward = list(rows)
        (out.log_probs.sum() + out.entropy.sum()).backward()  # type: ignore[union-attr]
    handle.remove()
    assert sum(forward) == count
    assert max(forward) <= 5
    assert rows == forward + forward[::-1], "every chunk is computed again once, the last one first"
    gradient, hidden.grad = hidden.grad, None
    whole = token_log_probs(head(hidden).squeeze(0), targets, temperature=0.7, entropy=True)
    (whole.log_probs.sum() + whole.entropy.sum()).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(out.log_probs, whole.log_probs, rtol=1e-13, atol=0)
    torch.testing.assert_close(out.entropy, whole.entropy, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_a_run_in_chunks_records_the_same(
    checkpointing: str, config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    """Also the logits: one tensor, the rows of the loss tokens, however many pieces they came in."""
    options = ["trajectory", "forward_data", "is_loss_debug", "loss", "activations", "gradient", "param"]
    shared = (
        "debug.enable_data_dump=true",
        *(f"debug.dump_options.{option}=true" for option in options),
        "model.dtype=float64",
        f"model.gradient_checkpointing={checkpointing}",
        "batching.micro_batch_size=3",
        "algorithm.kl_coef=0.1",
        "algorithm.entropy_coef=0.01",
        "max_steps=1",
    )
    readers = []
    for name, chunk in (("whole", "null"), ("chunks", "2")):
        run = config(*shared, f"batching.log_prob_chunk_size={chunk}", f"output_dir={tmp_path / name}")
        train(run, console)
        readers.append(DumpReader(run.debug.dump_dir))
    assert readers[0].names() == readers[1].names()
    for whole, chunks in zip(*readers, strict=True):
        assert list(whole.tensors) == list(chunks.tensors)
        for name, values in whole.tensors.items():
            other = chunks.tensors[name]
            assert (other.dtype, other.shape) == (values.dtype, values.shape)
            if values.dtype == np.float64:  # Adam divides by gradients of 1e-9, so parameters differ more
                rtol = 1e-7 if whole.type == "param" else 1e-10
                scale = np.abs(values).max(initial=0.0)
                np.testing.assert_allclose(other, values, rtol=rtol, atol=1e-11 * scale, err_msg=name)
            else:
                assert (other == values).all()


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = tiny()
    require_plain_logits(model)

    forward = model.forward

    def capped(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = 30 * (out.logits / 30).tanh()  # as Gemma 2 does
        return out

    model.forward = capped
    with pytest.raises(
        ConfigError, match="Qwen3ForCausalLM changes its logits after the output projection, whi"
    ):
        require_plain_logits(model)
