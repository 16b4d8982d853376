"""Fields of the objective, without the rules between them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields.advantage_fields import AdvantageFields
from regress.grpo.fields.aggregation_fields import AggregationFields
from regress.grpo.fields.correction_fields import CorrectionFields
from regress.grpo.fields.kl_entropy_fields import TermFields
from regress.grpo.fields.loss_fields import LossFields
from regress.grpo.policy_losses import LOSSES


@dataclass
class ObjectiveFields(CorrectionFields, AggregationFields, TermFields, LossFields, AdvantageFields):
    """All fields, in the order in which a step needs them: bases come last to first."""

    @property
    def needs_reference(self) -> bool:
        """True if log-probs of a reference model enter the objective."""
        return self.kl_coef != 0.0

    @property
    def kl_in_loss(self) -> bool:
        """True if the KL from the reference is a term of the loss."""
        return self.needs_reference and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL from the reference is subtracted from the reward."""
        return self.needs_reference and self.kl_placement == "reward"

    @property
    def has_entropy_term(self) -> bool:
        """True if the loss has an entropy term, now or after an adaptive controller raised its coefficient."""
        return self.entropy_coef != 0.0 or self.entropy_controller == "adaptive"

    @property
    def compares_tokens(self) -> bool:
        """True if the loss of a token depends on the other tokens of the batch under the current policy."""
        normalized = self.correction_normalize and self.correction_policy == "current"
        return bool(LOSSES[self.loss].marks) or self.top_entropy_quantile < 1.0 or normalized

    @property
    def corrects_over_rollout(self) -> bool:
        """True if weights for the sampler are computed once a rollout, from tokens that one update may not have.

        Normalized ones are divided by their mean over the rollout, and those of a sample count the tokens that
        rejection leaves out afterwards. Source: verl 0.9 ``compute_rollout_correction_and_rejection_mask``.
        """
        before = self.sampler_correction != "none" and self.correction_policy == "old"
        return before and (self.correction_normalize or self.rejection is not None)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio, however they were given."""
        if self.clip_bounds == "absolute":
            return self.clip_low, self.clip_high
        return 1.0 - self.clip_low, 1.0 + self.clip_high
