"""State in words what must hold in every update, and name the records that each check needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

STATEMENTS: Mapping[str, tuple[str, str]] = {
    "masks": ("loss tokens and padding are disjoint", "response_mask or effective_valid"),
    "tokens": (
        "loss tokens of all ranks and microbatches add up to those of the mini-batch",
        "num_loss_tokens and mini_batch_loss_tokens in the metadata of loss",
    ),
    "weight_sum": (
        "the weights of a mean add up to 1",
        "an aggregation that is a mean, and weight_sum in the metadata of loss",
    ),
    "advantages": (
        "advantages of a group add up to 0",
        "is_loss_debug with advantages, groups of the samples (trajectories, or data.group_size in its configuration) "
        "and, where there is one, algorithm.advantage (grpo or rloo, not normalized over the batch)",
    ),
    "token_ids": (
        "all records of a token name the same token id",
        "input_ids in batch_inputs or forward_data",
    ),
    "log_probs": ("no log-prob is above 0", "log_probs at the places of input_ids"),
    "certain": ("a log-prob is 0 only where the policy is certain", "log_probs in forward_data"),
    "entropy": (
        "entropies lie between 0 and the logarithm of the vocabulary",
        "entropy in forward_data",
    ),
    "given_logits": (
        "log-probs and entropies are those of the recorded logits",
        "activations of lm_head, and rollout_worker.temperature in its configuration",
    ),
    "on_policy": (
        "at the first update every ratio is 1",
        "algorithm.old_log_probs (recompute or current) in its configuration",
    ),
    "ratio": (
        "the ratio is exp(log p - log p_old)",
        "is_loss_debug with prob_ratio, and algorithm.importance_level (token) in its configuration",
    ),
    "loss": (
        "the loss is the sum of weights times token losses",
        "is_loss_debug with weights and elementwise_loss, and loss",
    ),
    "parts": (
        "ranks that split the model hold different parts of it",
        "ranks that split it, and param or gradient",
    ),
    "metrics": (
        "a metric of the update is that of all microbatches together, and theirs is that of their tokens",
        "metrics, and metric_parts in the metadata of loss",
    ),
}
"""Name of an invariant -> its sentence, and what it is made of."""


def not_asked(names: Collection[str], left: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a sentence for each invariant that is none of these names, or of which a part was left out.

    Args:
        left: name -> why, for each update of which it was not checked in full.
    """
    for name, (sentence, needs) in STATEMENTS.items():
        why = left.get(name, ())
        if why:
            more = f" (and at {len(why) - 1} more place{'s' * (len(why) > 2)})" if len(why) > 1 else ""
            part = "in part, " if name in names else ""
            yield f"{sentence} ({part}{name}; {why[0]}{more})"
        elif name not in names:
            yield f"{sentence} ({name}; it needs {needs})"
