"""The last hidden state of a pass that is looked at where the softmax is: it tells what no softmax does.

A fused linear loss makes no logits, and a compiled one shows none: there the gradient of the last hidden state is read
through the head. Where a softmax was seen, states and head tell the temperature, of which its rows know nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regress.capture.forward_pass import Array, Pass, open_pass, token_values
from regress.capture.layout_inference import infer_layout
from regress.capture.model_structure import Anatomy, Head, whole
from regress.capture.output_head import check_logits, make_head, solver_head
from regress.capture.recording_settings import Settings
from regress.capture.softmax_passes import SoftmaxPass
from regress.capture.temperature_search import HIGHEST, LARGEST_ERROR, LOWEST
from regress.capture.token_gradient_of_pass import add_token_gradient

ROWS = 64
"""Most rows that a temperature is read from."""
HALVINGS = 60
ULPS = 4
"""Rounding of a logit in units in the last place, relative to the largest."""
FINEST = 1e-6
"""Least relative rounding that is assumed, whatever the dtype."""


@dataclass(eq=False)
class HiddenStates:
    """The hook on the gradient of a pass's last hidden state.

    Attributes:
        states: ``[..., H]`` as computed, detached.
        reached: is called with the pass if its hidden states tell the loss.
        dtype: returns the coarsest dtype that the trainer computes in.
    """

    anatomy: Anatomy
    settings: Settings
    of: SoftmaxPass
    states: Tensor
    reached: Callable[[SoftmaxPass], None]
    dtype: Callable[[], torch.dtype]
    autocast: torch.dtype | None = None

    def __call__(self, gradient: Tensor | None) -> None:
        """Read the pass from its hidden states, unless every row of a softmax lies at its token."""
        if gradient is None:  # of what nobody used, from a wrapper that hands it on so
            return
        p, asked = self.of, self.settings
        states = whole(self.states)
        states = states.reshape(p.found.input_ids.shape[0], -1, states.shape[-1])
        if p.from_states is None and p.is_told:
            if asked.token_gradient and p.divisor is None:
                with torch.no_grad():
                    p.divisor = divisor_of(p, states, solver_head(self.anatomy), self.dtype())
            return
        if p.from_states is None:
            p.from_states = self._opened(states)
        self.reached(p)
        read = p.from_states
        if asked.token_gradient or asked.temperature is None:
            add_token_gradient(
                read,
                states,
                whole(gradient.detach()),
                solver_head(self.anatomy),
                asked.temperature,
                self.dtype(),
            )
        if not read.values:
            read.divisor = asked.temperature or next(iter(read.temperatures), None)
            read.values = self._values(read, states)

    def _opened(self, states: Tensor) -> Pass:
        p = self.of
        ids = p.found.input_ids
        read = open_pass(p.found, infer_layout(p.found), ids.shape[1] - states.shape[1], p.absolute)
        read.samples = None if p.samples is None else p.samples(len(read.contents))
        read.reached = p.reached
        for arguments in p.held:
            read.hold(arguments)
        return read

    def _values(self, read: Pass, states: Tensor) -> dict[str, Array]:
        """Return log-probs and entropies as the forward pass computes them; autocast ended with it."""
        head, device = make_head(self.anatomy), states.device.type
        dtype = self.autocast
        with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            if self.of.last_logits is not None:
                name = type(self.anatomy.root).__name__
                check_logits(self.of.last_logits, head(states[-1:, -1].clone()), name)
            return token_values(read, states, head, read.divisor or 1.0)


def divisor_of(p: SoftmaxPass, states: Tensor, head: Head, dtype: torch.dtype) -> float | None:
    """Return what the trainer divides its logits by; None where that explains no log-prob.

    The entropy of softmax(z / T) rises with T, so that one row has one T; the log-probs have to agree with it.

    Args:
        states: ``[B, T', H]`` last hidden states; head: of float64 states.
    """
    group = p.groups_told[0]
    places, rows = group.places, group.rows
    known = torch.nonzero(rows.live_R & rows.log_probs_R.isfinite())[:, 0].cpu()
    _, width, H = states.shape
    row, column = (
        torch.from_numpy(places)[known] // group.width,
        torch.from_numpy(places)[known] % group.width,
    )
    source = column - 1 - (group.width - 1 - width)
    inside = source >= 0
    known, row, source = (each[inside][:ROWS] for each in (known, row, source))
    if not len(known):
        return None
    flat = states.detach().reshape(-1, H)
    z = head(flat[(row * width + source).to(flat.device)].double())
    known = known.to(rows.live_R.device)
    targets, log_probs, entropies = (
        each[known] for each in (rows.targets_R, rows.log_probs_R, rows.entropies_R)
    )
    return _divisor(z.to(targets.device), targets, log_probs, entropies, dtype)


def _divisor(
    z_KV: Tensor, targets_K: Tensor, log_probs_K: Tensor, entropies_K: Tensor, dtype: torch.dtype
) -> float | None:
    eps = max(torch.finfo(dtype).eps, FINEST)

    def entropies(t: float) -> tuple[Tensor, Tensor]:
        log_p = (z_KV / t).log_softmax(-1)
        p, finite = log_p.exp(), log_p.nan_to_num(neginf=0.0)
        mean = (p * finite).sum(-1)
        return -mean, (p * (finite - mean[:, None]).square()).sum(-1)

    low, high = LOWEST, HIGHEST
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        above = float((entropies(middle)[0] - entropies_K).sum()) > 0
        low, high = (low, middle) if above else (middle, high)
    size, variance = z_KV.abs().amax(-1) / low, entropies(low)[1]  # of log p: d H / d log T
    noise = 0.5 * eps * size * variance.sqrt()  # of a row's entropy; rows are rounded by themselves
    error = float(noise.norm() / variance.sum().clamp(min=1e-300))
    found = (z_KV / low).log_softmax(-1).gather(-1, targets_K[:, None])[:, 0]
    bound = (ULPS * eps + ULPS * error) * size
    if error > LARGEST_ERROR or bool(((found - log_probs_K).abs() > bound).any()):
        return None
    near = (round(low, digits) for digits in (1, 2))  # what was meant, if rounding hides the rest
    return next((meant for meant in near if abs(meant / low - 1) <= ULPS * error), low)
