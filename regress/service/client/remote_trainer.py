"""Trainer whose model lies in a service: the engine's own training step, with passes and updates made there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from regress.dump.request_index import requested
from regress.dump.trajectory import Trajectory
from regress.engine.config.training_config import OptimizerConfig
from regress.engine.grpo_trainer import AfterUpdate, MiniBatch, Trainer, UnfinishedStep, nothing
from regress.engine.step_metrics import Values
from regress.engine.training_passes import accumulate
from regress.engine.training_step import StepOutcome
from regress.service.client.remote_api_dumps import RemoteDumps
from regress.service.client.remote_policy import RemotePolicy, RemoteUpdate, entropy_coefficient, wire_loss
from regress.service.client.remote_rollouts import Reference
from regress.service.service_api import AdamParams, Datum, PassResult


class RemoteAdamW(Optimizer):
    """Settings of the service's AdamW, in the place where a schedule of learning rates looks for them.

    Its own `step` changes nothing: `RemoteTrainer` sends the update.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        placeholder = torch.nn.Parameter(torch.zeros(()))
        super().__init__([placeholder], {"lr": config.learning_rate})
        self._config = config

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever called
        """Do nothing."""

    def params(self) -> AdamParams:
        """Return the settings of the next update: every one of them is sent, whatever the defaults of a wire are."""
        config = self._config
        return AdamParams(
            learning_rate=float(self.param_groups[0]["lr"]),
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.max_grad_norm or 0.0,
        )


@dataclass
class RemoteTrainer(Trainer):
    """Parts of a training step whose passes a service makes.

    Attributes:
        dumps: writer of the remote API mode's files.
    """

    policy: RemotePolicy  # type: ignore[assignment]  # only checkpoints need weights, and those are refused
    reference: Reference | None  # type: ignore[assignment]  # the same
    dumps: RemoteDumps | None = None
    _step: int = 0

    def step(
        self, step: int, *, start: UnfinishedStep | None = None, after_update: AfterUpdate = nothing
    ) -> Values:
        """Roll out, then let the service update the model; returns the metrics of the step."""
        self._step = step
        return super().step(step, start=start, after_update=after_update)

    def _rolled_out(self, step: int) -> UnfinishedStep:
        work = super()._rolled_out(step)
        if self.dumps is not None:
            self.dumps.prepared(step, work)
        return work

    def _laid_out(self, trajectories: Sequence[Trajectory], masks: Sequence[Sequence[int]]) -> MiniBatch:
        """Lay a mini-batch out; log-probs of the sampler at another temperature are not values of the policy's."""
        mini = super()._laid_out(trajectories, masks)
        if self.config.rollout_worker.temperature == 1.0:
            return mini
        return replace(mini, tokens=replace(mini.tokens, sampler_log_probs=None))

    def _train_step(self, mini: MiniBatch) -> StepOutcome:
        """Make one optimizer update in the service.

        Raises:
            NotFinite: if the loss is not finite; the service was then not asked to update.
            ServiceError: for whatever the service refuses.
        """
        objective = self.config.algorithm
        direct = wire_loss(objective, own_loss=objective.loss_function is not None)
        settings = self._settings(mini)
        sent: list[tuple[Sequence[Datum], PassResult]] = []
        update = RemoteUpdate(
            self.policy,
            mini.tokens,
            objective,
            direct,
            settings,
            lambda data, result: sent.append((data, result)),
        )
        part = accumulate(
            update,
            mini.tokens,
            mini.microbatches,
            replace(objective, entropy_coef=0.0),  # of the entropies the service knows alone
            loss_function=self.token_loss,
        )
        data, result = sent[0]
        name = "surrogate" if direct is None else direct.name
        if self.dumps is not None:
            self.dumps.datums(
                self._step, self.updates, data, name, {**(direct.config if direct else {}), **settings}
            )
        if part.problem is not None:
            raise part.problem
        assert isinstance(self.optimizer, RemoteAdamW)
        params = self.optimizer.params()
        metrics = self.policy.model.optim_step(params)
        self.optimizer.step()  # for the schedule
        loss, terms = part.loss, part.terms
        if objective.entropy_coef:
            loss, terms = _with_entropy(loss, terms, data, result, direct=direct is not None)
        outcome = StepOutcome(loss, _grad_norm(metrics), part.metrics, terms=terms)
        if self.dumps is not None:
            own = {"loss": part.loss, **{key: metric.value for key, metric in part.metrics.items()}}
            asked = self._requested(name, {**(direct.config if direct else {}), **settings}, params)
            self.dumps.metrics(self._step, self.updates, result, metrics, own, asked)
        return outcome

    def _requested(self, loss: str, settings: Mapping[str, Any], params: AdamParams) -> dict[str, Any]:
        return requested(
            loss=loss, config=settings, adam=vars(params), temperature=self.config.rollout_worker.temperature
        )

    def _settings(self, mini: MiniBatch) -> dict[str, float | bool]:
        """Return what the loss is asked besides its own settings."""
        assert mini.tokens.weights is not None
        wire = self.policy.model.wire
        settings: dict[str, float | bool] = {}
        own = mini.tokens.weights if mini.tokens.entropy_weights is None else mini.tokens.entropy_weights
        coefficient = entropy_coefficient(self.config.algorithm, own, wire)
        if coefficient is not None:
            settings["entropy_coeff"] = coefficient
        if wire == "weaver" and self.config.debug.enable_data_dump:
            settings["enable_debug_dump"] = self._step % self.config.debug.dump_every_n_steps == 0
        return settings


def _with_entropy(
    own: float, terms: Mapping[str, float], data: Sequence[Datum], result: PassResult, *, direct: bool
) -> tuple[float, dict[str, float]]:
    """Return the loss with its entropy term, which the service alone can tell: its loss less what else is in it."""
    besides = own if direct else _surrogate(data, result)
    entropy = result.metrics.get("loss:sum", math.nan) - besides
    return own + entropy, {**terms, "entropy": entropy}


def _surrogate(data: Sequence[Datum], result: PassResult) -> float:
    """Return the custom loss as the service computes it: the sum of log-probs times their weights."""
    pairs = zip(data, result.outputs, strict=True)
    return math.fsum(float(datum.inputs["surrogate_weights"] @ out["logprobs"]) for datum, out in pairs)


def _grad_norm(metrics: Mapping[str, float]) -> float:
    """Return the gradient norm before clipping; NaN where a service does not tell it."""
    return float(metrics.get("grad_norm", math.nan))
