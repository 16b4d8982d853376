"""Trainers that tell their values by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regress.errors import GuardError

if TYPE_CHECKING:
    from regress.live.guard import Guard

TRL = ("_generate_and_score_completions", "_compute_loss", "_get_per_token_logps_and_entropies")
"""Methods of TRL's trainers that are observed; those of 1.16."""


def model_of(trained: Any) -> nn.Module:
    """Return the model of a trainer, or the model itself.

    Raises:
        GuardError: if there is none.
    """
    model = trained if isinstance(trained, nn.Module) else getattr(trained, "model", None)
    if not isinstance(model, nn.Module):
        raise GuardError(f"""guard({type(trained).__name__}) finds no model: give the torch.nn.Module that is trained,
        or a trainer with a .model""")
    return model


def attach(guard: Guard, trained: Any) -> AbstractContextManager[None]:
    """Observe a trainer that is known inside; do nothing for another, whose loop calls `Guard.batch`."""
    return _trl(guard, trained) if all(hasattr(trained, name) for name in TRL) else nullcontext()


@contextmanager
def _trl(guard: Guard, trainer: Any) -> Iterator[None]:
    """Observe `GRPOTrainer` and `RLOOTrainer` of TRL 1.16; rows carry their sample, group and version along."""
    generate, compute_loss, log_probs = (getattr(trainer, name) for name in TRL)
    guard.expect_groups(trainer.num_generations)
    under_way: list[dict[str, Any]] = []
    count = 0

    def generate_tagged(inputs: Any) -> Any:
        nonlocal count
        output = generate(inputs)
        if trainer.model.training:
            B, device = len(output["prompt_ids"]), output["prompt_ids"].device
            first = count * trainer.accelerator.num_processes + trainer.accelerator.process_index * B
            count += B
            output["regress_sample"] = torch.arange(first, first + B, device=device)
            output["regress_version"] = torch.full((B,), guard.updates, device=device)
        return output

    def compute_watched(model: Any, inputs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and "regress_sample" in inputs:
            under_way.append(inputs)
        try:
            return compute_loss(model, inputs)
        finally:
            under_way.clear()

    def log_probs_told(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = log_probs(model, *args, **kwargs)
        if under_way and result[0].requires_grad:
            inputs = under_way.pop()
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            samples = inputs["regress_sample"]
            guard.batch(
                log_probs=result[0],
                loss_mask=mask,
                old_log_probs=inputs.get("old_per_token_logps"),
                sampler_log_probs=inputs.get("sampling_per_token_logps"),
                advantages=inputs["advantages"],
                samples=samples.tolist(),
                groups=(samples // trainer.num_generations).tolist(),
                on_policy=bool((inputs["regress_version"] == guard.updates).all()),
                recompute=lambda: log_probs(model, *args, **{**kwargs, "compute_entropy": False})[0],
            )
        return result

    replaced = dict(zip(TRL, (generate_tagged, compute_watched, log_probs_told), strict=True))
    for name, function in replaced.items():
        setattr(trainer, name, function)
    try:
        yield
    finally:
        for name in replaced:
            delattr(trainer, name)
