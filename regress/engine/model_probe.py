"""Trial of a model on two short samples: does the engine compute what the model computes of each sample alone?

Transformers builds hundreds of architectures. The engine brings its own masks, positions and selection of logits to
all of them, and float64 to those that let it; what a model makes of these shows only when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.dump.float64_watch import Float64Watch
from regress.dump.taps import receiving
from regress.dump.trajectory import Trajectory
from regress.engine.attention import MASKED, VarlenSegments
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.config.model_config import FAMILIES
from regress.engine.mini_batch import TokenBatch
from regress.engine.numeric_types import arithmetic
from regress.errors import ConfigError, reason
from regress.layout import BatchPlan

LENGTHS = (5, 4)
"""Tokens of the two samples."""
_CAUSES = {
    "packed": "its state crosses the border of packed samples; set batching.layout=padded",
    "padded": "it does not heed the masks and positions that it is given; give a model that does",
}


def require_computed(model: PreTrainedModel, config: Config, key: str) -> None:
    """Refuse a model that the engine cannot compute in the dtype and layout of a run.

    The built-in families are left out, as golden cases watch them; so are models with parts of the user's own, which
    are judged by golden cases and not by themselves.

    Args:
        key: section of the configuration that asks for the model.

    Raises:
        ConfigError: naming the operation that leaves float64, or what differs from the samples alone.
    """
    own = config.model.attention is not None or config.model.patch is not None
    if own or model.config.model_type in FAMILIES:
        return
    samples = [_tokens(model, length, start) for start, length in enumerate(LENGTHS)]
    layout = config.batching.layout
    plan = BatchPlan(layout=layout, padding_side=config.batching.padding_side)
    try:
        with in_float64(model, key), receiving(None):
            alone, together = _alone(model, samples), _together(model, samples, plan)
    except ConfigError:
        raise
    except Exception as error:  # whatever a model makes of arguments that it does not know
        raise ConfigError(f"""{key}: {type(model).__name__} does not take the masks and positions of the engine
        ({reason(error)}); give a causal language model whose forward takes attention masks of [B, 1, T, T] and
        position_ids""") from error
    largest = max(1.0, *(float(values.abs().max()) for values in alone))
    gap = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
    if not gap <= torch.finfo(model.dtype).eps ** 0.5 * largest:
        raise ConfigError(f"""batching.layout={layout}: log-probs of two samples that {type(model).__name__} computes
        together differ by {gap:.2g} from those of each sample alone, as {_CAUSES[layout]}""")


@contextmanager
def in_float64(model: PreTrainedModel, stated: str) -> Iterator[None]:
    """Refuse, at the end, a float64 model in whose passes an operation gave anything narrower.

    Args:
        stated: key of the configuration that asks for the model, with its value.

    Raises:
        ConfigError: naming the first one.
    """
    if model.dtype != torch.float64:
        yield
        return
    with Float64Watch(model) as watch:
        yield
    if watch.narrow:
        first = watch.narrow[0]
        raise ConfigError(f"""{stated}: {first} gives {first.dtype} inside of the float64 model, and true float64 does
        not reach it; change that line to keep the dtype of what it gets, or compare runs in float32""")


def _tokens(model: PreTrainedModel, length: int, start: int) -> list[int]:
    """Return token ids that are not padding and differ from sample to sample."""
    embedding: Any = model.get_input_embeddings()
    size = int(embedding.weight.shape[0])
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    known = [token for token in range(min(size, 64)) if token != pad] or [0]
    return [known[(7 * place + 3 * start + 1) % len(known)] for place in range(length)]


def _alone(model: PreTrainedModel, samples: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probs of each sample as the model computes them with nothing given but its tokens.

    In float64 the backward pass is tried, too, without a gradient of the weights.
    """
    double, masked = model.dtype == torch.float64, model.config._attn_implementation in MASKED
    found: list[Tensor] = []
    with arithmetic(model.dtype):
        for tokens in samples:
            ids, states = torch.tensor([tokens], device=model.device), list[Tensor]()
            handle = model.get_input_embeddings().register_forward_hook(
                lambda _, __, out, to=states: to.append(out)
            )
            segments = {} if masked else {"varlen": VarlenSegments(None, (len(tokens),))}
            try:
                with torch.set_grad_enabled(double):
                    logits = model(input_ids=ids, use_cache=False, **segments).logits[0, :-1]
            finally:
                handle.remove()
            values = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            if double and states[0].requires_grad:
                values.sum().backward(inputs=states)
            found.append(values.detach())
    return found


def _together(model: PreTrainedModel, samples: Sequence[list[int]], plan: BatchPlan) -> list[Tensor]:
    """Return the log-probs of the samples, each, as the engine computes them in one microbatch."""
    masks = [[0, *[1] * (len(tokens) - 1)] for tokens in samples]
    rows = [
        Trajectory(str(number), 0, tokens, mask, 0.0, 1)
        for number, (tokens, mask) in enumerate(zip(samples, masks, strict=True))
    ]
    micros = TokenBatch(rows, device=model.device).microbatches(plan)
    (values,) = LocalPolicy(model).log_probs(micros)
    return list(values.split([sum(mask) for mask in masks]))
