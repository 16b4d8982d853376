"""Batches of verl: recorded samples as its trainers hand them to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regress.systems.exported import Sample


def padded_rows(samples: Sequence[Sample], width: int, *, scaled: bool) -> Any:
    """Return prompts padded on the left and completions on the right, with verl's own advantages.

    Args:
        width: columns of the completions.
        scaled: advantages are divided by the standard deviation of the group.
    """
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    P, C = max(len(one.prompt) for one in samples), width

    def right(values: Sequence[Sequence[Any]], dtype: Any) -> Any:
        return torch.tensor([[*row, *[0] * (C - len(row))] for row in values], dtype=dtype)

    def left(values: Sequence[Sequence[int]]) -> Any:
        return torch.tensor([[*[0] * (P - len(row)), *row] for row in values])

    responses = right([one.completion for one in samples], torch.long)
    mask = right([one.mask for one in samples], torch.long)
    prompts = left([one.prompt for one in samples])
    seen = torch.cat(
        [
            left([[1] * len(one.prompt) for one in samples]),
            right([[1] * len(one.completion) for one in samples], torch.long),
        ],
        1,
    )
    rewards = right([[0.0] * (len(one.completion) - 1) + [one.reward] for one in samples], torch.float32)
    groups = np.array([one.key[0] for one in samples], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, groups, norm_adv_by_std_in_grpo=scaled)

    def floats(values: Sequence[Sequence[float | None]]) -> Any:
        return right([[value or 0.0 for value in row] for row in values], torch.float32)

    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": seen,
            "position_ids": (seen.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "old_log_probs": floats([one.sampler or [] for one in samples]),
            "advantages": advantages,
            "ref_log_prob": floats([one.reference or [] for one in samples]),
        },
        batch_size=[len(samples)],
    )


def jagged(rows: Sequence[Sequence[Any]], kind: type) -> Any:
    """Return rows of unequal length as a nested tensor of integers or floats."""
    import torch

    dtype = torch.long if kind is int else torch.float32
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def nest(batch: Any, samples: Sequence[Sample]) -> None:
    """Leave the rows of a batch unpadded, as the trainer v1 of verl does."""
    lengths = [len(one.completion) for one in samples]
    batch["prompts"] = jagged([one.prompt for one in samples], int)
    batch["responses"] = jagged([one.completion for one in samples], int)
    batch["response_mask"] = batch["loss_mask"] = jagged([one.mask for one in samples], int)
    for name in ("old_log_probs", "advantages", "ref_log_prob"):
        rows = [row[:length].tolist() for row, length in zip(batch[name], lengths, strict=True)]
        batch[name] = jagged(rows, float)
    for name in ("attention_mask", "max_response_len"):
        batch.pop(name)
