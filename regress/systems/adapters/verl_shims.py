"""Shims of verl: what it lacks on a CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def cpu_platform() -> None:
    """Register a platform called cpu in verl's own registry, and choose it."""
    import torch
    from verl.plugin.platform import PlatformRegistry, set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    class CPU(PlatformCUDA):  # type: ignore[misc]  # untyped base
        device_name = vendor_name = "cpu"
        device_module = SimpleNamespace(
            is_available=lambda: True, current_device=lambda: "cpu", mem_get_info=lambda *_: (0, 0)
        )
        for name in ("empty_cache", "memory_allocated", "memory_reserved", "synchronize"):
            setattr(device_module, name, nothing)
        is_available = is_platform_available = lambda self, use_smi_check=False: True
        current_device = ray_resource_name = lambda self: "cpu"
        device_count = lambda self: 1  # noqa: E731  # one line of the shim
        set_device = synchronize = empty_cache = nothing
        manual_seed = manual_seed_all = lambda self, seed: torch.manual_seed(seed)
        communication_backend_name = lambda self: "gloo"  # noqa: E731  # one line of the shim

    os.environ["VERL_PLATFORM"] = "cpu"
    PlatformRegistry.register(platform="cpu")(CPU)
    set_platform(CPU())


def flash_on_cpu(patches: Any) -> None:
    """Give verl's Ulysses wrapper what flash attention computes for packed rows ``(1, T, heads, dim)``."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations import flash_attention

    def varlen(q: Any, k: Any, v: Any, attention_mask: Any, query_length: int, **given: Any) -> Any:
        if q.shape[0] != 1 or attention_mask is not None or given.get("position_ids") is None:
            raise NotImplementedError("only packed rows with position ids are expected here")
        number = (given["position_ids"][0] == 0).cumsum(0)
        seen = (number[:, None] == number) & torch.ones(len(number), len(number)).tril().bool()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=given.get("softmax_scale")
        )
        return found.transpose(1, 2).contiguous()

    patches._flash_attention_forward = varlen
    AttentionInterface.register("cpu_varlen", flash_attention.flash_attention_forward)
