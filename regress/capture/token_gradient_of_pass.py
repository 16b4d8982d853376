"""Token gradient of a forward pass, read from the gradient that a backward call leaves at its last hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regress.capture.forward_pass import Array, Pass, scattered, source_rows
from regress.capture.model_structure import Head
from regress.capture.token_gradient import ROUNDING, TokenGradient, residual_of, solve
from regress.layout import TokenLayout

PLAIN = 16
"""Largest residual, in units in the last place, at which temperature 1 is accepted without a search."""

COARSE = 1e-5
"""Spacing from which rounding of a dtype hides a small error of the temperature."""

SCALED = ("token_gradient", "entropy_gradient")
"""Tensors in units of the back-propagated loss."""


def add_token_gradient(
    p: Pass, hidden: Tensor, gradient: Tensor, head: Head, temperature: float | None, computed: torch.dtype
) -> None:
    """Solve for the token gradient of one backward call and add it to those of earlier calls.

    Args:
        hidden: ``[B, T', H]`` last hidden states.
        gradient: d loss / d hidden.
        temperature: divisor of the trainer's logits; None finds it.
        computed: coarsest dtype that the gradient was computed in.
    """
    rows, places = source_rows(p, hidden.shape[1])
    width = hidden.shape[-1]
    flat, slope = hidden.detach().reshape(-1, width), gradient.detach().reshape(-1, width)
    _note_strays(p, slope, rows)
    here = torch.from_numpy(rows).to(flat.device)
    targets = torch.from_numpy(p.target_ids.reshape(-1)[places]).to(flat.device)
    live = (slope.index_select(0, here) != 0).any(-1)
    kept = here[live]
    states, slopes = flat.index_select(0, kept), slope.index_select(0, kept)
    with torch.enable_grad():
        found = _solved(states, slopes, head, targets[live], temperature, computed)
    spots = places[live.cpu().numpy()]
    ids = p.inputs["input_ids"]
    shifts = shifted_residuals(found, states, slopes, head, ids, p.layout, spots, temperature)
    p.shifts |= {name: max(rest, p.shifts.get(name, 0.0)) for name, rest in shifts.items()}
    lost = ~found.recoverable_K
    values = {
        "token_gradient": found.log_prob_K.masked_fill(lost, 0),
        "entropy_gradient": found.entropy_K.masked_fill(lost, 0),
        "token_residual": found.residual_K.masked_fill(lost, 0),
    }
    for name, value in values.items():
        _add(p, name, scattered(value, spots, p.layout.shape))
    _note_errors(p, found, torch.finfo(computed).eps)
    recoverable = np.ones(p.layout.shape, bool)
    recoverable.reshape(-1)[spots] = found.recoverable_K.cpu().numpy()
    known = p.gradients.get("recoverable")
    p.gradients["recoverable"] = recoverable if known is None else known & recoverable
    if found.temperature is not None:
        p.temperatures.append(found.temperature)


def _note_errors(p: Pass, found: TokenGradient, eps: float) -> None:
    """Add the bounds of the rounding errors to those of earlier calls."""
    errors = {"token_gradient": found.log_prob_error_K, "entropy_gradient": found.entropy_error_K}
    worst = {}
    for name, error in errors.items():
        usable = found.recoverable_K & error.isfinite()
        worst[name] = float(error[usable].max()) if bool(usable.any()) else 0.0
    for name, bound in accuracy_of(worst, eps).items():
        p.accuracy[name] = bound + (p.accuracy.get(name, 0.0) if name in worst else 0.0)


def accuracy_of(errors: Mapping[str, float], eps: float) -> dict[str, float]:
    """Return the bounds that a dump tells, from the largest errors of the derivatives."""
    return {name: 2 * worst for name, worst in errors.items()} | {"token_residual": ROUNDING * eps}


def _solved(
    states: Tensor,
    slopes: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float | None,
    computed: torch.dtype,
) -> TokenGradient:
    """Solve at the temperature given; without one, at 1 if that leaves rounding only, else at the one found.

    A found temperature is rounded where the rounded number explains as much.
    """
    eps = torch.finfo(computed).eps
    first = solve(states, slopes, head, targets, temperature=temperature or 1.0, computed=computed)
    if temperature is not None or (_rest(first, slopes) <= PLAIN * eps and eps < COARSE):
        return first
    found = solve(states, slopes, head, targets, temperature=None, computed=computed)
    if found.temperature is None:
        return first
    meant = round(found.temperature, 2)
    if meant <= 0:
        return found
    again = solve(states, slopes, head, targets, temperature=meant, computed=computed)
    return again if _rest(again, slopes) <= 2 * _rest(found, slopes) else found


def _rest(found: TokenGradient, slopes: Tensor) -> float:
    """Return the norm of the unexplained part of all gradients, relative to theirs."""
    norms = slopes.double().nan_to_num().norm(dim=-1)
    return float((found.residual_K.nan_to_num() * norms).norm() / norms.norm().clamp(min=1e-300))


def _add(p: Pass, name: str, new: Array) -> None:
    known = p.gradients.get(name)
    if known is None:
        p.gradients[name] = new
    else:
        p.gradients[name] = np.maximum(known, new) if name == "token_residual" else known + new


def _note_strays(p: Pass, slope: Tensor, rows: NDArray[np.int64]) -> None:
    """Count rows that predict no token of their sample and have a gradient all the same."""
    stray = (slope != 0).any(-1)
    stray[torch.from_numpy(rows).to(stray.device)] = False
    p.strays += int(stray.sum())


def unscaled(found: Mapping[str, Array], scale: float) -> dict[str, Array]:
    """Divide derivatives by the factor of the backward pass."""
    return {
        name: value / scale if name in SCALED and scale != 1.0 else value for name, value in found.items()
    }


def gradient_facts(passes: Sequence[Pass], scale: float) -> dict[str, Any]:
    """Return the facts that a reader needs about the token gradients of a microbatch."""
    temperatures = sorted({temperature for p in passes for temperature in p.temperatures})
    meta: dict[str, Any] = {"backward_scale": scale, "accuracy": _accuracy(passes, scale)}
    if temperatures:
        meta["temperatures"] = temperatures
    shifts = {name for p in passes for name in p.shifts}
    if shifts:
        meta["target_residuals"] = {
            s: max(p.shifts.get(s, 0.0) for p in passes) for s in sorted(shifts, key=int)
        }
    strays = sum(p.strays for p in passes)
    if strays:
        meta["rows_without_target"] = strays
    return meta


def _accuracy(passes: Sequence[Pass], scale: float) -> dict[str, float]:
    """Return the largest error of each tensor, in the units that it is recorded in."""
    found: dict[str, float] = {}
    for p in passes:
        for name, error in p.accuracy.items():
            found[name] = max(found.get(name, 0.0), error / scale if name in SCALED else error)
    return found


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
