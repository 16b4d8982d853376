"""Plants in TRL's GRPOTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from plants.rewriting import rewritten


@contextmanager
def tokens_of_this_rank_only() -> Iterator[None]:
    """Divide by this rank's tokens times the ranks, in place of the tokens of all ranks."""
    from trl import GRPOTrainer

    before = "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()"
    after = "num_items_in_batch = loss_mask.sum() * self.accelerator.num_processes"
    with rewritten(GRPOTrainer._generate_and_score_completions, {before: after}):
        yield


@contextmanager
def temperature_left_out() -> Iterator[None]:
    """Score completions at temperature 1, whatever they were sampled with."""
    from trl.trainer import grpo_trainer

    own = grpo_trainer.add_fused_lm_head

    def faulty(model: Any, *args: Any, **options: Any) -> Any:
        return own(model, *args, **{**options, "temperature": 1.0})

    with patch.object(grpo_trainer, "add_fused_lm_head", faulty):
        yield


@contextmanager
def baseline_of_the_batch() -> Iterator[None]:
    """Subtract the mean of the whole batch, in place of that of the group."""
    from trl import GRPOTrainer

    before = "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)\n"
    after = "mean_grouped_rewards = torch.nanmean(rewards).expand(len(rewards) // num_generations)\n"
    with rewritten(GRPOTrainer._generate_and_score_completions, {before: after}):
        yield


@contextmanager
def k1_as_a_loss() -> Iterator[None]:
    """Add the plain log-ratio to the reference as KL term, whose expected gradient is 0."""
    from trl import GRPOTrainer

    before = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
    with rewritten(GRPOTrainer._compute_loss, {before: "per_token_logps - ref_per_token_logps"}):
        yield


@contextmanager
def sequence_ratio_summed() -> Iterator[None]:
    """Add the log-ratios of a sequence up, and do not average them."""
    from trl import GRPOTrainer

    before = "(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)"
    with rewritten(GRPOTrainer._compute_loss, {before: "(log_ratio * mask).sum(-1)"}):
        yield


@contextmanager
def tool_tokens_trained() -> Iterator[None]:
    """Train on the results of tools."""
    from trl import GRPOTrainer

    before = 'completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]'
    with rewritten(GRPOTrainer._compute_loss, {before: "completion_mask"}):
        yield


@contextmanager
def rows_reversed() -> Iterator[None]:
    """Turn the order of the rows of a generated batch, and of all that belongs to them."""
    from trl import GRPOTrainer

    own = GRPOTrainer._generate_and_score_completions

    def turned(self: Any, inputs: Any) -> Any:
        return {name: value.flip(0) if value.dim() else value for name, value in own(self, inputs).items()}

    with patch.object(GRPOTrainer, "_generate_and_score_completions", turned):
        yield


@contextmanager
def old_log_probs_computed() -> Iterator[None]:
    """Compute the old log-probs in a pass of their own, though the policy is the same."""
    from trl import GRPOTrainer

    before = "if self.args.gradient_accumulation_steps % generate_every != 0 or ("
    with rewritten(GRPOTrainer._generate_and_score_completions, {before: "if True or ("}):
        yield


@contextmanager
def forward_in_pieces() -> Iterator[None]:
    """Compute the log-probs of a microbatch in forward passes of five rows."""
    from trl import GRPOTrainer

    before = "compute_entropy=True,\n"
    with rewritten(GRPOTrainer._compute_loss, {before: "compute_entropy=True, batch_size=5,\n"}):
        yield


@contextmanager
def advantages_in_float64() -> Iterator[None]:
    """Compute advantages in float64."""
    from trl import GRPOTrainer

    own = GRPOTrainer._calculate_rewards
    before = "advantages = torch.nan_to_num(advantages, nan=0.0)"
    with (
        patch.object(GRPOTrainer, "_calculate_rewards", lambda self, *args: own(self, *args).double()),
        rewritten(GRPOTrainer._generate_and_score_completions, {before: f"{before}.float()"}),
    ):
        yield


@contextmanager
def maximum_of_losses() -> Iterator[None]:
    """Take the larger of the two losses, in place of the smaller of the two objectives."""
    from trl import GRPOTrainer

    before = "-torch.min(per_token_loss1, per_token_loss2)"
    with rewritten(GRPOTrainer._compute_loss, {before: "torch.max(-per_token_loss1, -per_token_loss2)"}):
        yield
