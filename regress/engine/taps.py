"""What the training step hands to the dump: the engine's only instrumentation.

With no recorder active every function returns at once. Token quantities are recorded as local ``[B, T]`` tensors
under the microbatch's layout, each value at its own token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regress.dump.tap import at, tap, wanted
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.policy import Policy
from regress.grpo.logprobs import TokenLogProbs
from regress.grpo.losses import TokenLoss
from regress.grpo.objective import Objective
from regress.layout import BatchPlan


def old_log_probs(batches: Sequence[TokenBatch], tokens: Sequence[LossTokens]) -> None:
    """Log-probs of the policy and the reference before the updates, for the whole rollout, right padded."""
    if not (wanted("old_log_probs") or wanted("ref_log_probs")):
        return
    whole = TokenBatch([t for batch in batches for t in batch.trajectories])
    (layout,) = whole.microbatches(BatchPlan())
    samples = {"samples": layout.sample_ids}
    for stage in ("old_log_probs", "ref_log_probs"):
        values = [getattr(part, stage) for part in tokens]
        if all(value is not None for value in values):
            rows = torch.cat([batch.scatter_rows(value) for batch, value in zip(batches, values, strict=True)])
            tap(stage, layout=layout.layout, meta=samples, **{stage: rows})


def microbatch(
    micro: Microbatch,
    part: LossTokens,
    out: TokenLogProbs,
    terms: TokenLoss,
    share: Tensor,
    objective: Objective,
) -> None:
    """Inputs, forward data, loss terms and the loss of one microbatch."""
    with torch.no_grad():
        if wanted("batch_inputs"):
            _batch_inputs(micro, part)
        if wanted("forward_data"):
            _forward_data(micro, out)
        if wanted("is_loss_debug"):
            _is_loss_debug(micro, part, out, terms, share)
        if wanted("loss"):
            _loss(micro, part, terms, share, objective)
