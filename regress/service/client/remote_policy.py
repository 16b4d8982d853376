"""Policy whose model lies in a service: the passes of the training step, sent as datums.

The loss stays the engine's: of an objective that no loss of the wires is, `accumulate` computes it from the log-probs
that the service returned, and its derivative by each of them goes back as the weights of the wires' custom loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from regress.dump.taps import at
from regress.engine.mini_batch import LossTokens, Microbatch
from regress.engine.policy_interface import Loss, Result
from regress.errors import ConfigError, NotFinite
from regress.grpo.importance_ratios import sampler_weights
from regress.grpo.objective import Objective
from regress.grpo.policy_losses import LOSSES
from regress.grpo.segment_sums import alone
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import ShardLayout
from regress.service.client.microbatch_datums import datums_of, gradients_of, loss_token_values
from regress.service.client.service_backend import LossConfig, RemoteModel
from regress.service.service_api import Array, Datum, PassResult


@dataclass(frozen=True)
class WireLoss:
    """Loss that the wires name, and its settings."""

    name: str
    config: dict[str, float] = field(default_factory=dict)


def wire_loss(objective: Objective, *, own_loss: bool) -> WireLoss | None:
    """Return the wires' loss that an objective is, but for the factors of its tokens; None if there is none.

    Args:
        own_loss: True if ``algorithm.loss_function`` computes the loss.
    """
    loss = LOSSES[objective.loss]
    beyond = (
        own_loss
        or objective.kl_in_loss
        or objective.importance_level != "token"
        or objective.delta is not None
        or objective.dual_clip is not None
        or objective.log_ratio_min is not None
        or objective.log_ratio_max is not None
        or not loss.wire
        or objective.compares_tokens
        or objective.off_policy_threshold is not None
        or objective.correction_policy == "current"
        or (objective.old_log_probs == "current" and loss.on_ratio)
    )
    if beyond:
        return None
    low, high = objective.clip_range
    bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
    return WireLoss(loss.wire, bounds if loss.clips_ratio else {})


def datum_values(part: LossTokens, objective: Objective) -> dict[str, Tensor]:
    """Return the ``[K]`` values that the datums of loss tokens hold: advantages times every factor, and old log-probs.

    The product is rounded once, to float32.
    """
    assert part.weights is not None
    assert part.advantages is not None
    factor = part.weights.double() * part.advantages.double()
    old, sampler = part.old_log_probs, part.sampler_log_probs
    if part.correction is not None:
        factor = factor * part.correction.double()
    elif objective.sampler_correction != "none" and old is not None and sampler is not None:
        factor = (
            factor
            * sampler_weights(old, sampler, part.sequence, part.num_sequences, objective, alone).double()
        )
    return {"advantages": factor.float()} | ({} if old is None else {"logprobs": old})


def entropy_coefficient(objective: Objective, weights: Tensor, wire: str) -> float | None:
    """Return the coefficient of each token's entropy in a sum over tokens; None without an entropy term.

    Args:
        weights: ``[K]`` factors of the tokens, which have to be one number.

    Raises:
        ConfigError: if the wire cannot carry the term.
    """
    if objective.entropy_coef == 0.0:
        return None
    stated = f"algorithm.entropy_coef={objective.entropy_coef:g}"
    if wire != "weaver":
        raise ConfigError(f"""{stated} has no place in Tinker's protocol, whose losses are functions of log-probs alone;
        set algorithm.entropy_coef=0 or service.train_service.backend=weaver""")
    if len(weights) and float(weights.min()) != float(weights.max()):
        raise ConfigError(f"""{stated} with algorithm.aggregation={objective.aggregation} weighs the entropies of tokens
        differently, and Weaver's protocol has one entropy_coeff for all; set algorithm.aggregation=token-mean or
        algorithm.entropy_coef=0""")
    return objective.entropy_coef * float(weights[0]) if len(weights) else objective.entropy_coef


Sent = Callable[[Sequence[Datum], PassResult], None]


class RemotePolicy:
    """Model in a service, for the log-probs that precede the updates.

    Attributes:
        device, dtype: those of the numbers on this side of the wire.
    """

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    @property
    def log_prob_dtype(self) -> torch.dtype:
        """Type of the log-probs: what the wires carry."""
        return torch.float32

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        data = [datums_of(micro, {}) for micro in microbatches]
        result = self.model.forward([datum for part in data for datum in part])
        return split(microbatches, result)


class RemoteUpdate:
    """Passes of one optimizer update.

    Args:
        policy: the model.
        tokens: the loss tokens of the mini-batch, with all that is known of them before.
        loss: loss of the wires; None: the custom loss.
        config: its further settings.
        sent: called with what was sent with a gradient, and the result.
    """

    backward_scale = 1.0
    computes_losses = True
    sums_gradients = False

    def __init__(
        self,
        policy: RemotePolicy,
        tokens: LossTokens,
        objective: Objective,
        loss: WireLoss | None,
        config: LossConfig,
        sent: Sent,
    ) -> None:
        self._model = policy.model
        self._tokens = tokens
        self._objective = objective
        self._loss = loss
        self._config = config
        self._sent = sent
        self.result: PassResult | None = None

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        return RemotePolicy(self._model).log_probs(microbatches)

    def values(self, microbatches: Sequence[Microbatch], *, entropy: bool) -> list[TokenLogProbs]:
        """Return the log-probs of the loss tokens of each microbatch; no wire carries entropies."""
        assert not entropy
        return [TokenLogProbs(log_probs, None) for log_probs in self.log_probs(microbatches)]

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss[Result]) -> list[Result]:
        """Run all microbatches as one request of the service, or two for the custom loss."""
        if self._loss is None:
            return self._custom(microbatches, loss)
        data = [datums_of(micro, self._values(micro)) for micro in microbatches]
        whole = [datum for part in data for datum in part]
        self._finish(
            whole, self._model.forward_backward(whole, self._loss.name, {**self._loss.config, **self._config})
        )
        assert self.result is not None
        results = []
        for index, (micro, log_probs) in enumerate(
            zip(microbatches, split(microbatches, self.result), strict=True)
        ):
            with at(micro=index):
                results.append(loss(micro, TokenLogProbs(log_probs, None))[1])
        return results

    def _custom(self, microbatches: Sequence[Microbatch], loss: Loss[Result]) -> list[Result]:
        data = [datum for micro in microbatches for datum in datums_of(micro, self._values(micro))]
        gradients: list[Array] = []
        results = []
        forward = self._model.forward(data)
        self._refuse_nan(forward)
        for index, (micro, log_probs) in enumerate(
            zip(microbatches, split(microbatches, forward), strict=True)
        ):
            leaf = log_probs.requires_grad_()
            with at(micro=index):
                share, result = loss(micro, TokenLogProbs(leaf, None))
            share.backward()
            gradients += gradients_of(micro, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            results.append(result)
        sent = [
            replace(datum, inputs={**datum.inputs, "surrogate_weights": values})
            for datum, values in zip(data, gradients, strict=True)
        ]
        self._finish(sent, self._model.backward(data, gradients, self._config))
        return results

    def _refuse_nan(self, result: PassResult) -> None:
        """Refuse log-probs without a loss before a gradient of them is sent.

        Raises:
            NotFinite: naming the datum.
        """
        for index, output in enumerate(result.outputs):
            if not np.isfinite(output["logprobs"]).all():
                raise NotFinite(f"""the service returned log-probs of datum {index} that are not finite, so no update
                was made; lower optimizer.learning_rate, or look at the service's forward_data""")

    def _finish(self, data: Sequence[Datum], result: PassResult) -> None:
        self.result = result
        self._sent(data, result)

    def _values(self, micro: Microbatch) -> dict[str, Tensor]:
        """Return what a datum tells of its loss tokens: advantages times every factor, and old log-probs."""
        part = self._tokens.select(micro.select, micro.sequence, len(micro.sample_ids))
        return datum_values(part, self._objective)

    def zero_grad(self) -> None:
        """Do nothing: an update of the service drops its gradients."""

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Refuse: the service clips in its update."""
        raise NotImplementedError("gradients lie in the service, which clips them in its update")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing: the parameters lie in the service."""
        return iter(())

    def shard(self, name: str) -> ShardLayout | None:
        """Return None: no parameter is split here."""
        return None

    def sum_over_context_parallel(self, values: Tensor) -> Tensor:
        """Return the values unchanged: samples are whole."""
        return values


def split(microbatches: Sequence[Microbatch], result: PassResult) -> list[Tensor]:
    """Return the log-probs of a result as ``[K]`` values of each microbatch."""
    outputs = [output["logprobs"] for output in result.outputs]
    found, start = [], 0
    for micro in microbatches:
        stop = start + len(micro.layout.segments)
        found.append(loss_token_values(micro, outputs[start:stop], torch.float32))
        start = stop
    return found
