"""Plants in verl's FSDP engine, its losses and its Ulysses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from plants.rewriting import rewritten


@contextmanager
def tokens_of_this_rank_only(system: Any) -> Iterator[None]:
    """Divide by the tokens of this rank, in place of those of all ranks."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    before = "batch_num_tokens, op=torch.distributed.ReduceOp.SUM, group=self.get_data_parallel_group()"
    with rewritten(
        FSDPEngine.forward_backward_batch, {before: f"{before.replace('batch_num', '0 * batch_num', 1)}"}
    ):
        yield


@contextmanager
def sequence_ranks_not_scaled(system: Any) -> Iterator[None]:
    """Do not multiply the gradient of gathered log-probs by the ranks of a sequence, over which FSDP averages."""
    from verl.utils.ulysses import gather_outputs_and_unpad

    change = {"Gather.apply(group, x, gather_dim, grad_scaler)": "Gather.apply(group, x, gather_dim, False)"}
    with rewritten(gather_outputs_and_unpad, change):
        yield


@contextmanager
def log_probs_of_the_next_token(system: Any) -> Iterator[None]:
    """Take the log-prob of the next token for that of a token of the completion."""
    from verl.workers.utils.padding import no_padding_2_padding

    before = "values[seq_offset - resp_len - 1 : seq_offset - 1]"
    with rewritten(no_padding_2_padding, {before: "values[seq_offset - resp_len : seq_offset]"}):
        yield


@contextmanager
def deviation_of_the_population(system: Any) -> Iterator[None]:
    """Divide advantages by the deviation of the population, in place of that of the sample."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    before = "torch.std(scores_tensor)"
    with rewritten(compute_grpo_outcome_advantage, {before: "torch.std(scores_tensor, unbiased=False)"}):
        yield


@contextmanager
def dual_clip_of_gains(system: Any) -> Iterator[None]:
    """Apply the second clip to positive advantages, too."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    before = "torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)"
    with rewritten(compute_policy_loss_vanilla, {before: "clip_pg_losses2"}):
        yield


@contextmanager
def norm_of_this_rank_only(system: Any) -> Iterator[None]:
    """Clip by the norm of this rank's shards."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    before = "_get_total_norm(grads, "
    with rewritten(fsdp2_clip_grad_norm_, {before: "_get_total_norm([g.to_local() for g in grads], "}):
        yield


@contextmanager
def microbatches_reversed(system: Any) -> Iterator[None]:
    """Turn the order of the microbatches."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    change = {"in enumerate(micro_batches):": "in enumerate(list(micro_batches)[::-1]):"}
    with rewritten(FSDPEngine.forward_backward_batch, change):
        yield


@contextmanager
def entropy_computed(system: Any) -> Iterator[None]:
    """Compute the entropy, though its coefficient is 0."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    before = (
        'calculate_entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)'
    )
    with rewritten(FSDPEngineWithLMHead.prepare_model_outputs, {before: "calculate_entropy = True"}):
        yield


@contextmanager
def logits_in_float64(system: Any) -> Iterator[None]:
    """Compute log-probs from logits in float64."""
    from verl.workers.engine.fsdp import transformer_impl

    own = transformer_impl.logprobs_from_logits

    def precise(logits: Any, labels: Any, **options: Any) -> Any:
        return own(logits=logits.double(), labels=labels, **options).float()

    with patch.object(transformer_impl, "logprobs_from_logits", precise):
        yield


@contextmanager
def log_ratio_not_clamped(system: Any) -> Iterator[None]:
    """Leave out the clamp of the log-ratio to 20."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    before = "torch.clamp(negative_approx_kl, min=-20.0, max=20.0)"
    with rewritten(compute_policy_loss_vanilla, {before: "negative_approx_kl"}):
        yield


@contextmanager
def reduced_each_time(system: Any) -> Iterator[None]:
    """Reduce the gradients of every microbatch, in place of their sum."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    before = "if is_last_micro_batch or not defer_sync:"
    with rewritten(FSDPEngine._gradient_sync_context, {before: "if True:"}):
        yield
