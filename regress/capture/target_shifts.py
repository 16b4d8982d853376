"""Targets other than the next tokens, tried where these do not explain a loss, to detect a wrong shift."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regress.capture.hidden_state_gradients import Head
from regress.capture.token_gradient import TokenGradient, residual_of
from regress.layout import TokenLayout

SHIFTS = (-2, -1, 0, 1, 2)
"""Distances of the tried targets from the next token."""
UNEXPLAINED = 2e-2
"""Part of the gradients left unexplained by next tokens from which other targets are tried; bfloat16 leaves 3e-3."""


def shifted_residuals(
    found: TokenGradient,
    states_KH: Tensor,
    slopes_KH: Tensor,
    head: Head,
    ids: NDArray[Any],
    layout: TokenLayout,
    places: NDArray[np.int64],
    temperature: float | None,
) -> dict[str, float]:
    """Return the relative norm that other targets leave unexplained; empty if the next tokens explain the loss.

    Args:
        found: the solution for the next tokens.
        states_KH, slopes_KH: last hidden states and the gradient of the loss by them.
        ids: ``[B, T]`` token ids of the pass, under `layout`.
        places: flat index in ``[B, T]`` of the next token of each state.
        temperature: as given to the recording.

    Returns:
        ``{"-1": ..., "0": ..., "1": ...}`` by distance from the next token; distances without any token are left out.
    """
    norms = slopes_KH.double().nan_to_num().norm(dim=-1)
    rest = (found.residual_K.nan_to_num() * norms).norm() / norms.norm().clamp(min=1e-300)
    if not len(places) or float(rest) < UNEXPLAINED:
        return {}
    flat, owner = ids.reshape(-1), layout.sample_ids.reshape(-1)
    row = np.arange(flat.size) // layout.shape[1]
    candidates = {}
    for shift in SHIFTS:
        other = np.clip(places + shift, 0, flat.size - 1)
        same = (other == places + shift) & (row[other] == row[places]) & (owner[other] == owner[places])
        candidates[str(shift)] = torch.from_numpy(np.where(same, flat[other], -1)).to(states_KH.device)
    return residual_of(states_KH, slopes_KH, head, candidates, temperature=temperature)
