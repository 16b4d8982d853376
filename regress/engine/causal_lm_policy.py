"""Policy: a causal language model that computes log-probs of the loss tokens of microbatches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regress.dump.module_selection import joined
from regress.dump.taps import at
from regress.engine import loss_token_gradients, step_taps
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.attention import VARLEN, block_causal_mask, masks_of_layers
from regress.engine.compiled_blocks import CompiledBlocks
from regress.engine.local_tensor import local
from regress.engine.log_prob_projection import Entropy, chunked_log_probs, hidden_at, logits_at
from regress.engine.mini_batch import Microbatch
from regress.engine.numeric_types import arithmetic
from regress.engine.policy_interface import Loss, Result
from regress.grpo.selective_log_softmax import Pieces, TokenLogProbs, token_log_probs
from regress.layout import ShardLayout


class LocalPolicy:
    """Model on one device, in one process.

    Args:
        model: a Hugging Face causal language model.
        temperature: the logits are divided by it, as in the sampler.
        entropy_gradient: True if the loss has an entropy term.
        compile: backend of ``torch.compile`` under which the transformer blocks run; ``None``: uncompiled.
        log_prob_chunk_size: loss tokens whose logits are held at once; ``None``: those of the whole microbatch.
        pieces: sizes in which their softmax is computed.

    Attributes:
        recorded_modules: names of those whose outputs are dumped.
        running: the microbatch whose forward pass was the last to begin.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        compile: str | None = None,
        log_prob_chunk_size: int | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.pieces = pieces or Pieces()
        self.log_prob_chunk_size = log_prob_chunk_size
        self._entropy: Entropy = True if entropy_gradient else "no_grad"
        self.compile = compile
        self._callable: nn.Module = model  # called in place of the model, which may be wrapped
        self._blocks = None if compile is None else CompiledBlocks(model, compile)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.recorded_modules: frozenset[str] = frozenset()
        self.running: Microbatch | None = None
        head = model.get_output_embeddings()
        self._head = next((name for name, module in model.named_modules() if module is head), "")

    @property
    def entropy_gradient(self) -> bool:
        """True if the loss has an entropy term, through which gradients flow."""
        return self._entropy is True

    @entropy_gradient.setter
    def entropy_gradient(self, enabled: bool) -> None:
        self._entropy = True if enabled else "no_grad"

    @property
    def computes_losses(self) -> bool:
        """True if log-probs, and so losses, are computed on this rank."""
        return True

    @property
    def sums_gradients(self) -> bool:
        """True if `forward_backward` ends with a sum of all gradients that are there over ranks."""
        return False

    @property
    def backward_scale(self) -> float:
        """Factor that each share of the loss is multiplied by before the backward pass."""
        return 1.0

    @property
    def log_prob_dtype(self) -> torch.dtype:
        """Type of the log-probs: float64 for a float64 model, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens of each microbatch, ``[K]`` each, without a graph."""
        return [found.log_probs for found in self.values(microbatches, entropy=False)]

    def values(self, microbatches: Sequence[Microbatch], *, entropy: bool) -> list[TokenLogProbs]:
        """Return log-probs and, if wanted, entropies of the loss tokens of each microbatch, without a graph."""
        with torch.no_grad():
            return [self._forward(micro, entropy="no_grad" if entropy else False) for micro in microbatches]

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss[Result]) -> list[Result]:
        """Run one microbatch after the other; see :class:`Policy`."""
        results: list[Result] = []
        for index, micro in enumerate(microbatches):
            with self._accumulating(last=index == len(microbatches) - 1):
                with at(micro=step_taps.number(index)):
                    step_taps.inputs(micro)
                    share, result = loss(micro, self._forward(micro, entropy=self._entropy))
                with arithmetic(self.dtype):
                    self._backward(share)
            loss_token_gradients.write()
            results.append(result)
        return results

    def _accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context for the passes of one microbatch; after the last one the gradient is complete."""
        return nullcontext()

    def _backward(self, share: Tensor) -> None:
        share.backward()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.model.zero_grad(set_to_none=True)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Return the total 2-norm of the gradient before clipping, and clip."""
        named = {name: local(p.grad) for name, p in self.named_parameters() if p.grad is not None}
        wide = self.log_prob_dtype  # a norm in bfloat16 is off by up to 0.4 %
        norms = {name: torch.linalg.vector_norm(grad, dtype=wide) for name, grad in named.items()}
        norm = self._total_norm(norms)
        if max_norm is not None:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            for grad in named.values():
                grad.mul_(factor)
        return norm

    def _total_norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm of all gradients together, from the norm of each."""
        if not norms:
            return torch.zeros((), dtype=self.log_prob_dtype, device=self.device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names of the Hugging Face model, of an adapter's only; tied ones once."""
        return trained_parameters(self.model)

    def shard(self, name: str) -> ShardLayout | None:
        """Return None: parameters are whole."""
        return None

    @property
    def rearranges(self) -> bool:
        """True if the first backward pass decides how gradients are summed in all later ones."""
        return False

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters whose part on this rank lies on no lower rank."""
        return frozenset(name for name, _ in self.named_parameters())

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor that corresponds to this rank's part of the named parameter,
        placed like it.
        """
        return whole

    def sum_over_context_parallel(self, values: Tensor) -> Tensor:
        """Return the values unchanged: samples are whole."""
        return values

    def output_shard(self, module: str, shape: tuple[int, ...]) -> ShardLayout | None:
        """Return the part of a module's whole output that an output of this shape is; ``None`` for all of it."""
        return None

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that run on this rank, by name."""
        return {name: module for name, module in self.model.named_modules() if name}

    @property
    def architecture(self) -> PreTrainedModel:
        """Model with the names and shapes of all parameters and modules; its values may be out of date."""
        return self.model

    def whole_model(self) -> PreTrainedModel:
        """Return the model with all of its parameters, to sample from, copy and save; all ranks call this
        together.
        """
        return self.model

    def _forward(
        self,
        micro: Microbatch,
        *,
        entropy: Entropy,
        model: PreTrainedModel | None = None,
        hidden: Tensor | None = None,
    ) -> TokenLogProbs:
        """Compute the log-probs of the loss tokens of a microbatch.

        Args:
            model: the last stage of a pipeline, in place of the whole model.
            hidden: hidden states from the previous stage, in place of token ids.
        """
        model = self.model if model is None else model
        counted = micro.effective.bool()
        if self.log_prob_chunk_size is None:
            with arithmetic(self.dtype), logits_at(model, micro.predictors, counted):
                logits = self._run(model, micro, hidden).squeeze(0)
            return self._of_logits(logits, micro.targets, entropy)
        with arithmetic(self.dtype), joined(dim=1):
            with hidden_at(model, micro.predictors) as found:
                self._run(model, micro, hidden)
            return chunked_log_probs(
                model,
                found[0],
                micro.targets,
                functools.partial(self._of_logits, entropy=entropy),
                chunk=self.log_prob_chunk_size,
                counted=counted,
            )

    def _of_logits(self, logits: Tensor, targets: Tensor, entropy: Entropy) -> TokenLogProbs:
        """Compute the log-probs of the loss tokens from logits ``[K, V]``, whose gradient is caught if it
        is recorded.
        """
        if self._head in self.recorded_modules:
            loss_token_gradients.catch_logits(logits, functools.partial(self.output_shard, self._head))
        return self._token_log_probs(logits, targets, entropy)

    def _token_log_probs(self, logits: Tensor, targets: Tensor, entropy: Entropy) -> TokenLogProbs:
        return token_log_probs(
            logits,
            targets,
            temperature=self.temperature,
            vocab_chunk=self.pieces.columns,
            block=self.pieces.elements,
            entropy=entropy,
        )

    def _run(self, model: PreTrainedModel, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        """Return the logits of the model, ``[1, K, V]``, or the hidden states of a stage that is not the last."""
        self.running = micro
        call = self._callable if model is self.model else model
        first: dict[str, object] = (
            {"input_ids": micro.input_ids} if hidden is None else {"inputs_embeds": hidden}
        )
        if getattr(model.config, "output_router_logits", False):  # its loss is the engine's own (RouterLoss)
            first["output_router_logits"] = False
        with nullcontext() if self._blocks is None else self._blocks.active():
            logits: Tensor = call(
                **first,
                position_ids=micro.position_ids,
                use_cache=False,
                varlen=micro.varlen,
                **self._attention(micro),
            ).logits
        return logits

    def _attention(self, micro: Microbatch) -> dict[str, object]:
        """Return the keyword arguments that tell the model's attention which tokens see which."""
        implementation = self.model.config._attn_implementation
        if implementation == VARLEN:
            return {"attention_mask": torch.from_numpy(micro.layout.attention_mask).to(self.device)}
        mask = block_causal_mask(micro.layout, implementation, self.dtype, self.device)
        return {"attention_mask": masks_of_layers(mask, self.model.config)}
