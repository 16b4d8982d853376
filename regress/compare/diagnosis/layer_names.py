"""Layers of a model, found by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from regress.compare.verdicts.verdict import Verdict

FIRST, LAST = "embedding", "head"
"""Names for the parts of a model before its first layer and after its last."""

_NUMBER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?)[./](\d+)(?:[./]|$)")
_FIRST = re.compile(r"(?:^|[./])(?:embed_tokens|embeddings?|wte|wpe)(?:[./]|$)")
_LAST = re.compile(r"(?:^|[./])(?:lm_head|logits|norm|ln_f|final_norm|output)(?:[./]|$)")


def layer_of(name: str) -> str | None:
    """Return the layer number, ``"embedding"``, ``"head"`` (the last norm and the logits), or None."""
    if found := _NUMBER.search(name):
        return found[1]
    if _FIRST.search(name):
        return FIRST
    return LAST if _LAST.search(name) else None


def layer_order(layer: str) -> tuple[int, int]:
    """Return a key that sorts layers from the input of the model to its output."""
    if layer.isdigit():
        return 1, int(layer)
    return (0, 0) if layer == FIRST else (2, 0)


def multiples_by_layer(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Return the largest tolerance ratio of every layer, from input to output; empty without layers."""
    return merged_layers({layer: v.multiple} for v in verdicts if (layer := layer_of(v.name)) is not None)


def merged_layers(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the larger tolerance ratio of each layer."""
    found: dict[str, float] = {}
    for layers in several:
        for layer, multiple in layers.items():
            found[layer] = max(multiple, found.get(layer, 0.0))
    return {layer: found[layer] for layer in sorted(found, key=layer_order)}
