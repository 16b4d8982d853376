"""Batched sampling with Hugging Face ``generate``, and the log-probs of the tokens exactly as sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from regress.engine.attention import VARLEN
from regress.engine.precision import arithmetic


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; ``greedy`` ignores the others."""

    max_new_tokens: int
    eos_id: int
    pad_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (the end token included), their log-probs, and the reason sampling stopped
    (``stop``/``length``).
    """

    tokens: list[int]
    log_probs: Tensor
    finish_reason: str


class UndefinedDistribution(Exception):  # noqa: N818 - it never reaches people; the rollout worker names the sample
    """The scores of a row of the batch hold NaN or infinity, or exclude every token: nothing can be drawn."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


class LogProbRecorder(LogitsProcessor):
    """Records the log-prob of each sampled token, which is known one call after its distribution.

    Only one ``[B, V]`` tensor is held at a time. Raises `UndefinedDistribution` for scores without a
    distribution.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._settle(input_ids[:, -1])
        undefined = ~scores.amax(-1).isfinite()  # NaN and infinity both survive the maximum
        if undefined.any():
            raise UndefinedDistribution(int(undefined.nonzero()[0]))
        self._last = scores
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Return ``[B, T_new]`` log-probs of all sampled tokens."""
        self._settle(sequences[:, -1])
        return torch.stack(self._columns, dim=1)

    def _settle(self, drawn: Tensor) -> None:
        if self._last is None:
            return
        wide = self._last if self._last.dtype == torch.float64 else self._last.float()
        self._columns.append(wide.log_softmax(-1).gather(1, drawn[:, None]).squeeze(1))
        self._last = None


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    seed: int,
    limits: Sequence[int] | None = None,
) -> list[Completion]:
    """Sample one completion per prompt, in one batch (left padded), with a generator of its own.

    ``limits`` are the longest completions of the rows, in place of ``params.max_new_tokens``.
    The global random state is left as it was, so a run without sampling (mock mode) sees the same one.

    Raises:
        UndefinedDistribution: naming the prompt's row, if the model gives no finite probabilities.
    """
    limits = limits or [params.max_new_tokens] * len(prompts)
    width = max(len(prompt) for prompt in prompts)
    rows = [[params.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    recorder = LogProbRecorder()
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad(), _sampler(model), arithmetic(model.dtype):
        torch.manual_seed(seed)
        generate = cast(Callable[..., Tensor], model.generate)
        sequences = generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=GenerationConfig(
                do_sample=not params.greedy,
                max_new_tokens=max(limits),
                eos_token_id=params.eos_id,
                pad_token_id=params.pad_id,
                use_cache=True,
                **({} if params.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
            ),
            logits_processor=LogitsProcessorList([*_warpers(params), recorder]),
        )
    log_probs = recorder.finish(sequences).cpu()
    drawn = sequences[:, width:].cpu().tolist()
    return [
        _completion(tokens[:limit], row[:limit], params.eos_id)
        for tokens, row, limit in zip(drawn, log_probs, limits, strict=True)
    ]


def _completion(tokens: list[int], log_probs: Tensor, eos_id: int) -> Completion:
    if eos_id not in tokens:
        return Completion(tokens, log_probs.clone(), "length")
    length = tokens.index(eos_id) + 1
    return Completion(tokens[:length], log_probs[:length].clone(), "stop")


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the samplers' logits processors; ``generate`` would run them after the recorder."""
    if params.greedy:
        return []
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers


@contextmanager
def _sampler(model: PreTrainedModel) -> Iterator[None]:
    """Switch to evaluation mode and an attention that works with a key-value cache; drop the model's sampling
    defaults.

    A checkpoint's generation_config.json (top_k, repetition penalty) would otherwise supply unset values.
    """
    implementation, training = model.config._attn_implementation, model.training
    defaults, model.generation_config = model.generation_config, GenerationConfig()
    if implementation == VARLEN:
        model.set_attn_implementation("sdpa")
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        model.generation_config = defaults
        if implementation == VARLEN:
            model.set_attn_implementation(VARLEN)
