"""Cause of a difference between the log-probs of a sampler and those of the trainer on the same tokens.

A cause is named only if it explains the difference down to rounding; otherwise the sentence says what was ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regress.dump.tensor_placements import local
from regress.live.guarded_microbatch import Microbatch


class EarlierWeights:
    """A copy of this rank's part of the parameters as they were before the last update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[Tensor] | None = None

    @property
    def known(self) -> bool:
        """True once an update was made since the first call of `keep`."""
        return self._held is not None

    def keep(self) -> None:
        """Copy the parameters, which are about to change."""
        parts = [local(p) for p in self._model.parameters()]
        if self._held is None:
            self._held = [part.clone() for part in parts]
        else:
            torch._foreach_copy_(self._held, parts)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Put the earlier weights into the model inside; afterwards its own are back, bit for bit.

        Random state and the training mode of modules are the same afterwards, too; dropout is off inside.
        """
        assert self._held is not None
        parts = [local(p) for p in self._model.parameters()]
        own = [part.clone() for part in parts]
        modes = [(module, module.training) for module in self._model.modules()]
        with torch.random.fork_rng(), torch.no_grad():
            try:
                self._model.eval()
                torch._foreach_copy_(parts, self._held)
                yield
            finally:
                torch._foreach_copy_(parts, own)
                for module, mode in modes:
                    module.training = mode


TOLERANCE = {"float64": 1e-10, "float32": 3e-5, "float16": 8e-3, "bfloat16": 6e-2}
"""Root mean square of the difference, in nats, that a sampler computing in this dtype may have. NeMo-RL calls a run
suspicious above a mean of exp|difference| of 1.05, which is the value for bfloat16; the others keep its proportion to
the spacing of their numbers, float32 at least the effect of other kernels."""

ENOUGH = 16
"""Loss tokens below which nothing is said about signs and shifts: 16 equal signs by chance have the odds 1 : 32768."""


def mismatch(micro: Microbatch, dtype: str, stale: Callable[[Microbatch], Tensor | None]) -> str | None:
    """Return a sentence if the sampler's log-probs are beyond their tolerance, with the cause that is proven.

    Args:
        dtype: in which the sampler computes.
        stale: returns the log-probs of the weights before the last update, or None if they cannot be computed.
    """
    expected = micro.expected
    if micro.sampler is None or expected is None or not bool(micro.mask.any()):
        return None
    tolerance = TOLERANCE[dtype]
    difference = (micro.sampler - expected)[micro.mask].to(torch.float64)
    missing = ~torch.isfinite(difference)
    if bool(missing.any()):
        index = int(missing.nonzero()[0])
        return (
            f"the sampler's log-probs are missing (not finite) at {int(missing.sum())} of {missing.numel()} loss "
            f"tokens, first at {micro.place(index)}"
        )
    size = _rms(difference)
    if size <= tolerance:
        return None
    where = int(difference.abs().argmax())
    mismatch = (
        f"log-probs of the sampler differ from the trainer's by {size:.3g} nats (root mean square over "
        f"{difference.numel()} loss tokens; {dtype} allows {tolerance:g}), most at {micro.place(where)} "
        f"({float(micro.sampler[micro.mask][where]):.4g} and {float(expected[micro.mask][where]):.4g})"
    )
    return f"{mismatch}: {_cause(micro, difference, tolerance, stale)}"


def _cause(
    micro: Microbatch, difference: Tensor, tolerance: float, stale: Callable[[Microbatch], Tensor | None]
) -> str:
    for find in (_zero_filled, _shifted, _routed, _outdated):
        cause = find(micro, difference, tolerance)
        if cause:
            return cause
    older = stale(micro)
    assert micro.sampler is not None
    if older is not None and _rms((micro.sampler - older)[micro.mask].to(torch.float64)) <= tolerance:
        return "they are those of the weights before the last update, so the sampler did not get the new ones"
    cause = _truncated(difference, tolerance) or _rounded(difference)
    stale_too = "" if older is None else ", stale weights"
    return (
        cause
        or f"no known cause explains them; ruled out: zeros, a shift, a cut-off support, rounding{stale_too}"
    )


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0


def _zero_filled(micro: Microbatch, difference: Tensor, tolerance: float) -> str:
    assert micro.sampler is not None
    zeros = micro.sampler[micro.mask] == 0
    if not bool(zeros.any()) or _rms(difference[~zeros]) > tolerance:
        return ""
    rest = "" if bool(zeros.all()) else ", and the others agree"
    return f"{int(zeros.sum())} of them are exactly 0, a filled-in value{rest}"


def _shifted(micro: Microbatch, difference: Tensor, tolerance: float) -> str:
    assert micro.sampler is not None
    assert micro.expected is not None
    T = micro.mask.shape[1]
    for shift in (1, -1, 2, -2):
        here = slice(max(0, -shift), T - max(0, shift))
        there = slice(max(0, shift), T - max(0, -shift))
        both = micro.mask[:, here] & micro.mask[:, there]
        gap = (micro.sampler[:, there] - micro.expected[:, here])[both].to(torch.float64)
        if gap.numel() >= ENOUGH and _rms(gap) <= tolerance:
            which = "next" if shift < 0 else "previous"
            return f"they are those of the {which} token ({abs(shift)} away): a shift by {shift:+d}"
    return ""


def _routed(micro: Microbatch, difference: Tensor, tolerance: float) -> str:
    if micro.routing is None or micro.sampler_routing is None:
        return ""
    flips = (
        (micro.routing.sort(-1).values != micro.sampler_routing.sort(-1).values)
        .flatten(2)
        .any(-1)[micro.mask]
    )
    if not bool(flips.any()) or bool(flips.all()) or _rms(difference[~flips]) > tolerance:
        return ""
    return f"{int(flips.sum())} of the tokens were sent to other experts, and the others agree"


def _outdated(micro: Microbatch, difference: Tensor, tolerance: float) -> str:
    if micro.weight_versions is None or micro.weight_version is None:
        return ""
    versions = micro.weight_versions[micro.mask]
    other = versions != micro.weight_version
    if not bool(other.any()) or _rms(difference[~other]) > tolerance:
        return ""
    which = ", ".join(str(version) for version in versions[other].unique().tolist())
    rest = "" if bool(other.all()) else ", and the others agree"
    return (
        f"{int(other.sum())} of them are of stale weights (version {which}, and {micro.weight_version} is trained), "
        f"first {micro.place(int(other.nonzero()[0]))}{rest}"
    )


def _truncated(difference: Tensor, tolerance: float) -> str:
    if difference.numel() < ENOUGH or float(difference.min()) < -tolerance:
        return ""
    kept = math.exp(-float(difference.mean()))
    return (
        "the sampler's are never lower, as after top-p, top-k or min-p renormalized the kept mass "
        f"(on average {kept:.3f})"
    )


def _rounded(difference: Tensor) -> str:
    """Name the coarsest usual dtype whose rounding has this size, if the difference has no common sign."""
    size, mean = _rms(difference), abs(float(difference.mean()))
    if difference.numel() < ENOUGH or mean > 3 * size / math.sqrt(difference.numel()):
        return ""
    fits = [dtype for dtype in ("float32", "float16", "bfloat16") if size <= TOLERANCE[dtype]]
    return f"they have no common sign and the size of rounding in {fits[0]}" if fits else ""
