"""Transformer blocks compiled by torch, for the trainer's forward and backward passes only.

Every block is compiled separately, and all share the code: compilation takes the time of one block, the hooks
that record a block's output stay outside, and parameters keep their names. The sampler runs the same model
uncompiled, and so does every copy of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from regress.engine.recurrent_layers import recurrent_layers
from regress.errors import ConfigError, RegressError, reason

LIMIT = 64
"""Maximum compilations of a block before a run is stopped; torch would silently go on uncompiled."""

SIMD_BITS = {"DEFAULT": 1, "AVX2": 256, "AVX512": 512}
"""Width of inductor's vector code by the instruction set in use. torch 2.13 does not tell them apart itself: it writes
vector code that no compiler takes where torch uses no vectors, and after a change of ``ATEN_CPU_CAPABILITY`` it takes
kernels from its cache that crash."""


def blocks_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that the model declares as never split over devices: its transformer blocks."""
    kinds = set(model._no_split_modules or ())
    return {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}


class CompiledBlocks:
    """Blocks of a model under one backend of ``torch.compile``.

    Raises:
        ConfigError: if the backend cannot compile here, the model does not say which its blocks are, or they carry a
            state from token to token.
    """

    def __init__(self, model: PreTrainedModel, backend: str) -> None:
        self.backend = backend
        recurrent = next(iter(recurrent_layers(model)), None)
        if recurrent is not None:
            raise ConfigError(f"""model.compile={backend} would compile {type(recurrent).__name__}, which runs sample by
            sample, anew for every layout; set model.compile=null""")
        self._try_out(model)
        blocks = list(blocks_of(model).values())
        if not blocks:
            raise ConfigError(f"""model.compile={backend}: {type(model).__name__} names no transformer blocks
            (_no_split_modules); set model.compile=null""")
        # dynamic: microbatches differ in size, and torch would compile the first one's for itself, then all again
        compiled: Mapping[type, Any] = {
            kind: torch.compile(kind.forward, backend=backend, dynamic=True, options=_options(backend))
            for kind in {type(block) for block in blocks}
        }
        self._forwards = [(block, MethodType(compiled[type(block)], block)) for block in blocks]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the blocks compiled within this context.

        Raises:
            RegressError: if torch cannot compile one of them, or compiles it too often.
        """
        for block, forward in self._forwards:
            block.forward = forward
        try:
            with _strict(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own, about its access to tensors
                yield
        except FailOnRecompileLimitHit as error:
            raise RegressError(f"""model.compile={self.backend}: a block was compiled {LIMIT} times and still meets new
            shapes; give all microbatches one shape (batching.pad_to_length, batching.micro_batch_size) or set
            model.compile=null""") from error
        except TorchDynamoException as error:
            raise RegressError(f"""model.compile={self.backend}: torch cannot compile a block ({reason(error)}); try
            another backend or set model.compile=null""") from error
        finally:
            for block, _ in self._forwards:
                del block.forward

    def _try_out(self, model: PreTrainedModel) -> None:
        """Compile a trivial function, so that a missing C++ compiler shows here and not after the rollout."""
        try:
            torch.compile(torch.sin, backend=self.backend)(torch.zeros(2, device=model.device))
        except Exception as error:  # backends raise errors of any type
            raise ConfigError(f"""model.compile={self.backend} cannot compile on this machine ({reason(error)});
            inductor needs a C++ compiler, eager and aot_eager need none""") from error


def _options(backend: str) -> dict[str, Any] | None:
    bits = SIMD_BITS.get(torch.backends.cpu.get_cpu_capability())
    return {"cpp.simdlen": bits} if backend == "inductor" and bits is not None else None


def _strict() -> AbstractContextManager[None]:
    """Return a context that raises at the recompile limit, where torch would silently run blocks uncompiled."""
    limits = {"recompile_limit": LIMIT, "accumulated_recompile_limit": 100 * LIMIT}
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        {**limits, "fail_on_recompile_limit_hit": True}
    )
    return patch
