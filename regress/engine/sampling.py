"""Batched sampling with Hugging Face ``generate``, and the log-probs of the tokens exactly as sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import cast

import torch
from torch import BoolTensor, Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from regress.engine.attention import VARLEN
from regress.engine.decision_margins import ArgmaxMargins, TopKMargins, TopPMargins, note_draws, watched
from regress.engine.numeric_types import arithmetic


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; ``greedy`` ignores temperature, top_p and top_k.

    Attributes:
        stop_ids: tokens that end a completion besides ``eos_id``.
        stopped: tells of the tokens of a completion so far that it ends here; None: only tokens end it.
    """

    max_new_tokens: int
    eos_id: int
    pad_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()
    stopped: Callable[[Sequence[int]], bool] | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return (self.eos_id, *self.stop_ids)


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


class OwnDraws(LogitsProcessor):
    """Draws the next token of each row with the row's own generator, and leaves only that token possible.

    A token is the first whose cumulative probability exceeds one uniform number, computed in float64. So what a
    row draws depends on its own distribution and generator, and on no other row of the batch.
    """

    def __init__(self, generators: Sequence[Random]) -> None:
        self._generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = torch.tensor([rng.random() for rng in self._generators], dtype=torch.float64)
        probs = scores.double().softmax(-1)
        chosen = inverse_cdf(probs, uniform).to(scores.device)
        note_draws(probs, uniform, chosen)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


BLOCK = 512  # of the vocabulary: sums of blocks leave the device in place of every probability


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability exceeds the row's number, ``[B]`` on the CPU.

    Args:
        probs: ``[B, V]`` float64, at least one of each row above 0; rows need not add up to 1.
        uniform: ``[B]`` float64 in [0, 1).
    """
    blocks = pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).cpu()  # cumsum on a GPU has no deterministic kernel
    block, rest = _first_above(sums, uniform * sums.sum(-1))
    inside, _ = _first_above(blocks[torch.arange(len(probs)), block.to(probs.device)].cpu(), rest)
    return block * BLOCK + inside


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place of each row at which the cumulative weight exceeds the target, and the target less
    the weight before it.

    Rounding may leave a target at the total: the last weight above 0 then counts.
    """
    total = weights.cumsum(-1)
    last = weights.shape[1] - 1 - weights.flip(1).gt(0).int().argmax(-1)
    place = (total <= target[:, None]).sum(-1).minimum(last)
    before = (total - weights).gather(1, place[:, None]).squeeze(1)
    return place, (target - before).clamp(min=0.0)


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    generators: Sequence[Random],
    limits: Sequence[int] | None = None,
) -> list[Completion]:
    """Sample one completion per prompt, in one batch (left padded).

    Args:
        generators: one a row, from which its tokens are drawn; greedy sampling draws nothing.
        limits: the longest completions of the rows, in place of ``params.max_new_tokens``.

    The global random state is not used, so a run without sampling (mock mode) sees the same one.

    Raises:
        UndefinedDistribution: naming the prompt's row, if the model gives no finite probabilities.
    """
    limits = limits or [params.max_new_tokens] * len(prompts)
    width = max(len(prompt) for prompt in prompts)
    rows = [[params.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    recorder = LogProbRecorder()
    draws = [] if params.greedy else [OwnDraws(generators)]
    with torch.no_grad(), _sampler(model), arithmetic(model.dtype):
        generate = cast(Callable[..., Tensor], model.generate)
        sequences = generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=GenerationConfig(
                do_sample=False,  # `OwnDraws` leaves one token to choose from
                max_new_tokens=max(limits),
                eos_token_id=list(params.ends),
                pad_token_id=params.pad_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([*_warpers(params), recorder, *draws]),
            stopping_criteria=StoppingCriteriaList(_rules(params, width)),
        )
    log_probs = recorder.finish(sequences).cpu()
    drawn = sequences[:, width:].cpu().tolist()
    return [
        _completion(tokens[:limit], row[:limit], params)
        for tokens, row, limit in zip(drawn, log_probs, limits, strict=True)
    ]


def _completion(tokens: list[int], log_probs: Tensor, params: SamplingParams) -> Completion:
    for length in range(1, len(tokens) + 1):
        if tokens[length - 1] in params.ends or (params.stopped and params.stopped(tokens[:length])):
            return Completion(tokens[:length], log_probs[:length].clone(), "stop")
    return Completion(tokens, log_probs.clone(), "length")


class _Stopped(StoppingCriteria):
    """Ends the rows whose completions end by a rule of their own."""

    def __init__(self, rule: Callable[[Sequence[int]], bool], width: int) -> None:
        self._rule, self._width = rule, width

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> BoolTensor:
        rows = input_ids[:, self._width :].tolist()
        done = torch.tensor([self._rule(row) for row in rows], device=input_ids.device)
        return cast(BoolTensor, done)


def _rules(params: SamplingParams, width: int) -> list[StoppingCriteria]:
    return [] if params.stopped is None else [_Stopped(params.stopped, width)]


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the processors that turn the policy's logits into the distribution that is drawn from."""
    watch = watched()
    if params.greedy:
        return [ArgmaxMargins()] if watch else []
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers += [TopKMargins(params.top_k)] if watch else []
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers += [TopPMargins(params.top_p)] if watch else []
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
