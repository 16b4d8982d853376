"""Interface between the training step and a model, however it is wrapped or split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor, nn

from regress.engine.mini_batch import Microbatch
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import ShardLayout

Result = TypeVar("Result")
Loss = Callable[[Microbatch, TokenLogProbs], tuple[Tensor, Result]]


class Policy(Protocol):
    """Interface that the training step needs of a model, however it is wrapped or split."""

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens of each microbatch, ``[K]`` each, without a graph."""

    def values(self, microbatches: Sequence[Microbatch], *, entropy: bool) -> list[TokenLogProbs]:
        """Return log-probs and, if wanted, entropies of the loss tokens of each microbatch, without a graph."""

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss[Result]) -> list[Result]:
        """Run forward and backward over all microbatches; gradients accumulate.

        ``loss`` gets a microbatch and the log-probs of its loss tokens, and returns the scalar to back-propagate
        (that microbatch's share of the loss) and anything else to hand back. It is called under the coordinates
        of the microbatch (``dump.at(micro=...)``).
        """

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Return the total 2-norm of the logical gradient before clipping; scale the gradients down to
        ``max_norm``.
        """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank under their logical names; with an adapter those that are trained."""

    def shard(self, name: str) -> ShardLayout | None:
        """Return the part of the parameter of that name that lies on this rank; ``None`` for all of it."""

    def sum_over_context_parallel(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that each hold part of the same samples, on all of them; differentiable."""

    @property
    def computes_losses(self) -> bool:
        """True if log-probs, and so losses, are computed on this rank."""

    @property
    def sums_gradients(self) -> bool:
        """True if `forward_backward` ends with a sum of all gradients that are there over ranks."""

    @property
    def backward_scale(self) -> float:
        """Factor that each share of the loss is multiplied by before the backward pass, because gradients
        are averaged.
        """
