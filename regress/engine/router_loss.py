"""Load-balancing loss of the routers of a mixture of experts, a term beside the losses of tokens.

With T tokens in L layers, k of E experts each: ``E sum_e f_e P_e`` with ``f_e`` the share of the L T tokens that chose
expert e, and ``P_e`` the mean over them of its probability. Tokens are all tokens of the samples, prompts included;
padding is none. Source: Switch Transformer, arXiv 2101.03961, eq. 4 to 6, over all layers together as in transformers 5
``load_balancing_loss_func``, which TRL 1.16 adds with ``router_aux_loss_coef``.

Choices have no gradient, so that with the shares known the loss is linear in the probabilities: a pass before the
update counts the choices of the whole mini-batch, and each router then adds what its own tokens contribute. No rank
and no microbatch has to wait for another, and the loss depends on no layout, unless ``model.router_scope`` asks for the
mean over microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regress.dump.taps import receiving
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.model_config import ModelConfig
from regress.engine.engine_ranks import Ranks
from regress.engine.mini_batch import Microbatch
from regress.errors import ConfigError

RECORDED = "router_logits"
"""Name under which transformers' models say which modules are routers."""


class _AddedLoss(torch.autograd.Function):
    """Values, and beside them a loss that is back-propagated with a factor of 1 whenever they are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


@dataclass
class _Counts:
    """Sums over the routers of a microbatch: choices ``[E]``, probabilities ``[E]``, and rows (layers times tokens)."""

    choices: Tensor
    probabilities: Tensor
    rows: int = 0


@dataclass
class RouterLoss:
    """Load-balancing loss of a policy.

    Args:
        policy: with a mixture of experts whose routers run on the rank of their tokens.
        coefficient: of the loss.
        scope: ``global``: over the mini-batch; ``microbatch``: mean over its microbatches, of all ranks.

    Raises:
        ConfigError: if the model has no routers that transformers knows.
    """

    policy: LocalPolicy
    coefficient: float
    scope: str
    experts: int = 0
    _microbatches: Sequence[Microbatch] = ()
    _weights: list[Tensor] | None = None
    _counts: list[_Counts] = field(default_factory=list)
    _active: bool = False

    def __post_init__(self) -> None:
        routers = _routers(self.policy)
        if not routers:
            raise ConfigError(f"""model.router_coef={self.coefficient:g}: {type(self.policy.model).__name__} has no
            routers; set it to 0 or take a mixture-of-experts model""")
        self.experts = int(self.policy.model.config.num_experts)
        for router in routers:
            router.register_forward_hook(self._routed)

    @contextmanager
    def of_update(self, microbatches: Sequence[Microbatch], world: Ranks) -> Iterator[float]:
        """Count the choices of a mini-batch; inside, passes over its microbatches have the loss. All ranks call it.

        Yields:
            The loss of the mini-batch, coefficient included.
        """
        self._microbatches, self._weights = microbatches, None
        zeros = torch.zeros(self.experts, dtype=torch.float64, device=self.policy.device)
        self._counts = [_Counts(zeros.clone(), zeros.clone()) for _ in microbatches]
        self._active = True
        try:
            with receiving(None):  # activations are those of the pass that is trained
                self.policy.values(microbatches, entropy=False)
            value, self._weights = self._shares(world)
            yield value
        finally:
            self._active, self._weights = False, None

    def share(self, micro: Microbatch) -> float:
        """Return what the tokens of a microbatch contribute to the loss, inside of `of_update`."""
        index = next(at for at, known in enumerate(self._microbatches) if known is micro)
        assert self._weights is not None
        return float((self._weights[index] * self._counts[index].probabilities).sum())

    def _shares(self, world: Ranks) -> tuple[float, list[Tensor]]:
        """Return the loss, and the weight of each expert's probability at a token of each microbatch, ``[E]`` each."""
        rows = [counts.rows for counts in self._counts]
        zeros = torch.zeros(self.experts, dtype=torch.float64, device=self.policy.device)
        factor = self.coefficient * self.experts
        if self.scope == "global":
            total = world.sum(torch.tensor(float(sum(rows)), dtype=torch.float64, device=zeros.device))
            choices = world.sum(sum((counts.choices for counts in self._counts), zeros))
            weights = [factor * choices / total.square().clamp(min=1.0)] * len(rows)
        else:
            used = float(sum(count > 0 for count in rows))
            total = world.sum(torch.tensor(used, dtype=torch.float64, device=zeros.device))
            weights = [
                factor * counts.choices / max(counts.rows, 1) ** 2 / total.clamp(min=1.0)
                for counts in self._counts
            ]
        own = sum(
            (
                (weight * counts.probabilities).sum()
                for weight, counts in zip(weights, self._counts, strict=True)
            ),
            zeros.sum(),
        )
        return float(world.sum(own)), weights

    def _routed(self, module: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Count what a router chose, or add what its tokens contribute to the loss."""
        micro = self.policy.running
        index = next((at for at, known in enumerate(self._microbatches) if known is micro), None)
        if not self._active or index is None or micro is None:
            return None
        logits, scores, chosen = output
        counted = torch.from_numpy(micro.layout.attention_mask).to(logits.device).flatten().bool()
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)[counted]
        if self._weights is None:
            found = self._counts[index]
            found.choices += torch.bincount(chosen[counted].flatten(), minlength=self.experts)
            found.probabilities += probabilities.detach().sum(0)
            found.rows += len(probabilities)
            return None
        if not torch.is_grad_enabled():
            return None
        weight = self._weights[index].to(probabilities.dtype)
        loss = (probabilities * weight).sum() * self.policy.backward_scale
        return logits, _AddedLoss.apply(scores, loss), chosen


def router_loss(policy: LocalPolicy, config: ModelConfig) -> RouterLoss | None:
    """Return the loss that a configuration asks for, if any."""
    return RouterLoss(policy, config.router_coef, config.router_scope) if config.router_coef else None


def _routers(policy: LocalPolicy) -> list[nn.Module]:
    """Return the modules that transformers records as routers: they return logits, scores and choices."""
    kinds = {
        getattr(kinds.get(RECORDED), "target_class", kinds.get(RECORDED))
        for module in policy.model.modules()
        if isinstance(kinds := getattr(module, "_can_record_outputs", None), dict)
    }
    known = tuple(kind for kind in kinds if isinstance(kind, type))
    return [module for module in policy.modules().values() if isinstance(module, known)] if known else []
