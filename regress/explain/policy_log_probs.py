"""Log-probs of the policies that a loss may use, as far as an update recorded them at the temperature of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regress.explain.logits_at_temperature import LOG_PROBS
from regress.explain.loss_tokens import Mask
from regress.explain.update_tokens import Bools, Floats

ON_POLICY = 1e-5
"""Largest log-ratio at which a token counts as on policy: rounding of two forward passes in float32."""

OWN = ("forward_data/log_probs",)
OLD = ("is_loss_debug/old_log_probs", "old_log_probs/old_log_probs")
REFERENCE = ("is_loss_debug/ref_log_probs", "ref_log_probs/ref_log_probs")
"""Values that hold the log-probs of the policy, of the one before the update, and of the reference."""


@dataclass(frozen=True)
class Policies:
    """Log-probs of a token under the policies that a loss may use; None where they are not known.

    Attributes:
        ratio: log-ratio of each token against the old policy; it may be known to be 0 where log-probs are not known.
        note: which log-probs are known at another temperature alone, with the remedy; empty for none.
        assumed: True if the policy is taken for the old one, which the gradients have to confirm.
    """

    own: Floats | None
    old: Floats | None
    reference: Floats | None
    ratio: Floats | None
    note: str = ""
    assumed: bool = False

    @property
    def unknown(self) -> bool:
        """True if the recorded log-probs do not tell which tokens are out of a clip range."""
        return self.assumed or self.ratio is None

    def log_ratio(self) -> Floats | None:
        """Return the log-ratio of each token against the old policy; None where either is unknown."""
        return self.ratio

    def on_policy(self, tokens: Bools) -> bool | None:
        """Return True if every ratio is 1 but for rounding, None if the dump does not tell."""
        if self.ratio is None or np.isnan(self.ratio[tokens]).any():
            return None
        return bool((np.abs(self.ratio[tokens]) <= ON_POLICY).all())


def policies(mask: Mask) -> Policies:
    """Read the log-probs of an update; values that are missing for a token of the loss count as not recorded.

    Log-probs at another temperature than that of the loss say at most that the policy is still the old one.
    """
    get, of_loss = mask.update.get, mask.update.of_loss

    def whole(values: Floats | None) -> Floats | None:
        return None if values is None or np.isnan(values[mask.effective]).any() else values

    own, old, reference = (whole(of_loss(*names)) for names in ((*OWN, LOG_PROBS), OLD, REFERENCE))
    note = _note(
        mask,
        {"the policy": (own, OWN), "the old policy": (old, OLD), "the reference": (reference, REFERENCE)},
    )
    if own is not None and old is not None:
        return Policies(own, old, reference, own - old, note)
    pair = whole(get(*OWN)), whole(get(OLD[1]))
    same = mask.update.elsewhere("forward_data") == mask.update.elsewhere("old_log_probs")
    if same and pair[0] is not None and pair[1] is not None:
        gap = pair[0] - pair[1]
        if (np.abs(gap[mask.effective]) <= ON_POLICY).all():
            either = old if own is None else own
            return Policies(either, either, reference, np.zeros_like(gap), note)
    if own is None and old is not None and note:
        return Policies(old, old, reference, np.zeros_like(old), note, assumed=True)
    return Policies(own, old, reference, None, note)


def _note(mask: Mask, found: dict[str, tuple[Floats | None, tuple[str, ...]]]) -> str:
    """Return which policies' log-probs were recorded at another temperature alone."""
    update, elsewhere = mask.update, {}
    for words, (values, names) in found.items():
        at = [update.elsewhere(name.partition("/")[0]) for name in names if update.get(name) is not None]
        other = next((one for one in at if one is not None), None)
        if values is None and other is not None:
            elsewhere[words] = other
    if not elsewhere:
        return ""
    used = ", ".join(f"{value:.6g}" for value in sorted({round(one, 9) for one in update.temperatures}))
    return (
        f"log-probs of {' and '.join(elsewhere)} were recorded at temperature {next(iter(elsewhere.values())):g} "
        f"alone, and those at {used}, which the loss takes, do not follow from them: record with "
        f"temperature={used.partition(',')[0]}"
    )
