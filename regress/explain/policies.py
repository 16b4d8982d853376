"""Log-probs of the policies that a loss may use, as an update recorded them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regress.explain.mask import Mask
from regress.explain.update import Bools, Floats

ON_POLICY = 1e-5
"""Largest log-ratio at which a token counts as on policy: rounding of two forward passes in float32."""


@dataclass(frozen=True)
class Policies:
    """Log-probs of a token under the policies that a loss may use; None where they are not recorded.

    Attributes:
        note: why those of the policy itself are taken for the old ones, with the remedy; empty where they are recorded.
    """

    own: Floats | None
    old: Floats | None
    reference: Floats | None
    note: str = ""

    def log_ratio(self) -> Floats | None:
        """Return the log-ratio of each token against the old policy; None where either is unknown."""
        return None if self.own is None or self.old is None else self.own - self.old

    def on_policy(self, tokens: Bools) -> bool | None:
        """True if every ratio is 1 but for rounding, None if the dump does not tell."""
        ratio = self.log_ratio()
        if ratio is None or np.isnan(ratio[tokens]).any():
            return None
        return bool((np.abs(ratio[tokens]) <= ON_POLICY).all())


def policies(mask: Mask) -> Policies:
    """Read the log-probs of an update; values that are missing for a token of the loss count as not recorded."""
    get = mask.update.get

    def whole(values: Floats | None) -> Floats | None:
        return None if values is None or np.isnan(values[mask.effective]).any() else values

    own = whole(get("forward_data/log_probs"))
    old = whole(get("is_loss_debug/old_log_probs", "old_log_probs/old_log_probs"))
    reference = whole(get("is_loss_debug/ref_log_probs", "ref_log_probs/ref_log_probs"))
    used = mask.update.temperatures
    other = [
        told for told in mask.update.forward_temperatures for real in used if abs(told - real) > 1e-3 * real
    ]
    if not other:
        return Policies(own, old, reference)
    note = (
        f"log-probs were recorded at temperature {other[0]:g}, so the policy is taken to be the old one: record with "
        f"temperature={used[0]:.6g}"
    )
    return Policies(old, old, reference, note)
