"""Names of parameters in models with adapters, without what the implementation of an adapter adds to them."""

from __future__ import annotations

import re

_ADDED = re.compile(
    r"\.base_layer(?=\.|$)(?!(?:\.base_layer)*\.lora_)|(?<=\.lora_[AB])\.default(?=\.|$)|(?<=\.lora_embedding_[AB])\.default(?=\.|$)"
)


def plain_adapter_name(name: str) -> str:
    """Return a parameter's name as the file of an adapter has it, without ``base_model.model.``.

    peft keeps the layer that it adapts in ``base_layer``, and adapters by name: ``q_proj.base_layer.weight`` is
    ``q_proj.weight``, and ``q_proj.lora_A.default.weight`` is ``q_proj.lora_A.weight``. The adapter of a second
    parameter of one module, which wraps the first, stays apart. Adapters of other names than peft's own, ``default``,
    keep theirs.
    """
    return _ADDED.sub("", name) if "_" in name else name
