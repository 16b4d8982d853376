"""Context parallelism: the columns of a microbatch are split over ranks, and attention spans all of them.

Every rank holds the queries, keys and values of its columns. Three methods bring queries and keys together, all
computing what scaled-dot-product attention computes under the whole layout's block-causal mask:

* ``ulysses``: exchange columns for heads, attend to all columns with a share of the heads, exchange back.
* ``ring``: keys and values travel from rank to rank; partial results are merged by their log-sum-exp.
* ``all_gather``: every rank gathers all keys and values.

Ulysses: DeepSpeed Ulysses (arXiv 2309.14509). Ring: Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from regress.engine.recurrent_layers import recurrent_layers
from regress.errors import ConfigError
from regress.parallel.all_gather_attention import all_gather_attention
from regress.parallel.context_columns import ContextSegments
from regress.parallel.ring_attention import ring_attention
from regress.parallel.split_requirements import heads_refusal, recurrent_refusal
from regress.parallel.ulysses_attention import ulysses_attention

__all__ = ["METHODS", "ContextSegments", "apply"]

METHODS: Mapping[str, Callable[..., tuple[Tensor, None]]] = {
    "ulysses": ulysses_attention,
    "ring": ring_attention,
    "all_gather": all_gather_attention,
}


def apply(model: PreTrainedModel, method: str, ranks: int, *, tp: int = 1) -> None:
    """Install the attention ``method`` in the model; its forward then needs ``context=ContextSegments`` as a keyword.

    Args:
        ranks: size of the mesh dimension ``cp``.
        tp: size of the mesh dimension ``tp``, which takes its share of the heads first.

    Raises:
        ConfigError: if the ranks cannot share the heads, or the model has other layers than attention that mix tokens.
    """
    recurrent = next(iter(recurrent_layers(model)), None)
    if recurrent is not None:
        raise ConfigError(recurrent_refusal(type(recurrent).__name__, model.config.model_type, ranks))
    heads = model.config.num_attention_heads // tp
    refusal = heads_refusal(heads, ranks, tp) if method == "ulysses" else None
    if refusal is not None:
        raise ConfigError(refusal)
    model.set_attn_implementation(method)


for _name, _function in METHODS.items():
    AttentionInterface.register(_name, _function)
