"""Samplers: weights at one moment, from which completions are drawn and prompts are scored."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.checkpoint.checkpoint_tensors import load_weights
from regress.engine.mini_batch import TokenBatch
from regress.engine.sampling import SamplingParams, UndefinedDistribution, sample
from regress.engine.tokenizer import completion_text
from regress.layout import BatchPlan
from regress.service.host.base_models import Base
from regress.service.service_api import Array, SampledSequence, SamplingRequest, SamplingResult, ServiceError
from regress.tasks.portable_draws import generator

KEPT = 4
"""Samplers whose weights stay in memory; those of others are read again when they are used."""


class SamplingNet:
    """Model of a base in this process, which holds the weights of one sampler after the other."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._held: object = None
        self._kept: dict[str, Mapping[str, Tensor]] = {}

    def with_weights(self, name: str, read: Callable[[], Mapping[str, Tensor]]) -> LocalPolicy:
        """Return the model with the weights of this name, which ``read`` gives if they are not at hand."""
        if self._held != name:
            weights = self._kept.pop(name, None) or read()
            load_weights(self.policy, weights)
            self._kept[name] = weights
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
            self._held = name
        return self.policy


@dataclass(frozen=True)
class Sampler:
    """Weights at one moment.

    Attributes:
        name: name of the weights, which are never others.
        read: reads the weights.
        step: optimizer steps of the weights.
    """

    base: Base
    net: SamplingNet
    name: str
    read: Callable[[], Mapping[str, Tensor]]
    step: int

    def sample(self, request: SamplingRequest) -> SamplingResult:
        """Return completions, drawn as one batch; draws come from the seed and the number of the completion alone.

        Completion 0 draws from ``random.Random(seed)``, completion i > 0 from ``generator("sample", seed, i)``, that of
        a row from ``random.Random(seed of the row)``.

        Raises:
            ServiceError: for a prompt or settings that cannot be.
        """
        policy = self.net.with_weights(self.name, self.read)
        prompts = [self._checked(prompt) for prompt in request.prompts]
        longest = [request.max_tokens, *(row.max_tokens for row in request.rows)]
        limits = [self._room(prompt, most) for prompt, most in zip(prompts, longest, strict=True)]
        _check(request, min(limits))
        seed = secrets.randbits(63) if request.seed is None else int(request.seed)
        generators = [Random(seed), *(generator("sample", seed, i) for i in range(1, request.count))]
        generators += [Random(row.seed) for row in request.rows]
        tokenizer = self.base.tokenizer
        params = SamplingParams(
            max_new_tokens=max(limits),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            temperature=request.temperature or 1.0,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            greedy=request.temperature == 0.0,
            stop_ids=tuple(int(token) for token in request.stop_token_ids),
            stopped=self._stops(request.stop),
        )
        try:
            found = sample(
                policy.architecture,
                [prompts[0]] * (request.count - 1) + prompts,
                params,
                generators=generators,
                limits=[limits[0]] * (request.count - 1) + limits,
            )
        except UndefinedDistribution as error:
            raise ServiceError(
                "nothing can be sampled, because the logits of these weights are not finite; sample from earlier ones",
                code="not_finite",
            ) from error
        sequences = [
            SampledSequence(
                np.asarray(one.tokens, dtype=np.int64),
                one.log_probs.numpy(),
                completion_text(tokenizer, one.tokens),
                "stop" if one.finish_reason == "stop" else "length",
            )
            for one in found
        ]
        scores = self.prompt_log_probs(*request.prompts) if request.prompt_logprobs else None
        return SamplingResult(sequences, scores, self.step, seed)

    def prompt_log_probs(self, *prompts: Array) -> Array:
        """Return the log-probs ``[P]`` of each prompt's tokens, NaN first, one prompt after the other."""
        return np.concatenate([self._scored(prompt) for prompt in prompts])

    def _scored(self, prompt: Array) -> Array:
        policy = self.net.with_weights(self.name, self.read)
        tokens = self._checked(prompt)
        if len(tokens) == 1:
            return np.full(1, np.nan, dtype=np.float32)
        row = Trajectory("prompt", 0, tokens, [0] + [1] * (len(tokens) - 1), 0.0, 1)
        micros = TokenBatch([row], device=policy.device).microbatches(BatchPlan())
        (values,) = policy.log_probs(micros)
        found: Array = torch.cat([values.new_full((1,), torch.nan), values]).cpu().numpy()
        return found

    def _room(self, prompt: Sequence[int], most: int | None) -> int:
        """Return how long a completion may be."""
        room = self.base.config.data.max_seq_length - len(prompt)
        return room if most is None else min(room, most)

    def _stops(self, texts: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """Return the rule that ends a completion at the token that completes one of the texts."""
        tokenizer = self.base.tokenizer

        def stopped(tokens: Sequence[int]) -> bool:
            text = tokenizer.decode(list(tokens), skip_special_tokens=False)
            return any(stop in text for stop in texts)

        return stopped if texts else None

    def _checked(self, prompt: Array) -> list[int]:
        limit = self.base.config.data.max_seq_length
        vocabulary = self.net.policy.architecture.config.vocab_size
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer) or not 1 <= len(prompt) <= limit:
            raise ServiceError(
                f"the prompt has the shape {list(prompt.shape)} and dtype {prompt.dtype}; send 1 to {limit} token ids"
            )
        bad = prompt[(prompt < 0) | (prompt >= vocabulary)]
        if len(bad):
            raise ServiceError(f"""the prompt holds the token {int(bad[0])}, and token ids are 0 to {vocabulary - 1};
            send those of the model's tokenizer""")
        return [int(token) for token in prompt]


def _check(request: SamplingRequest, limit: int) -> None:
    """Refuse settings that cannot be."""
    rules: Sequence[tuple[str, object, bool, str]] = (
        ("max_tokens", request.max_tokens, limit >= 1, "at least 1, and leave room for it after the prompt"),
        ("num_samples", request.count, request.count >= 1, "at least 1"),
        ("temperature", request.temperature, 0.0 <= request.temperature < float("inf"), "at least 0"),
        ("top_p", request.top_p, 0.0 < request.top_p <= 1.0, "above 0 and at most 1"),
        ("top_k", request.top_k, request.top_k >= -1, "at least 1, or -1 for all tokens"),
        ("stop", request.stop, all(request.stop), "texts that are not empty"),
    )
    for name, value, good, rule in rules:
        if not good:
            raise ServiceError(f"sampling_params.{name}={value!r} is not possible; give {rule}")
