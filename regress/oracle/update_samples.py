"""Samples of an update as its records have them: tokens, loss mask, and what is wrong where no rollout holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regress.dump.coordinates import Place
from regress.dump.trajectory import Trajectory, joined
from regress.errors import OracleError
from regress.explain.loss_tokens import find_mask
from regress.explain.update_tokens import Bools, UpdateTokens
from regress.oracle.dump_rollouts import Rollouts

FROM_GRADIENTS = "the token gradients themselves"
"""Source of a loss mask that nobody tapped."""


def token_ids(tokens: UpdateTokens, at: Place) -> list[tuple[int, ...]]:
    ids = tokens.get("batch_inputs/input_ids")
    if ids is None or np.isnan(ids).any():
        raise OracleError(f"""{at.words} does not hold the token ids of every sample, so nothing can be computed from
        them; record batch_inputs of all ranks""")
    bounds = tokens.frame.offsets
    return [
        tuple(int(value) for value in ids[bounds[i] : bounds[i + 1]])
        for i in range(len(tokens.frame.samples))
    ]


def foreign(at: Place, ids: Sequence[tuple[int, ...]], rollouts: Rollouts) -> OracleError:
    """Return the error for samples that are of no rollout, which says whether they are several in one."""
    samples = [sample for rollout in reversed(rollouts.known) for sample in rollout.samples]
    for own in ids:
        parts = joined(own, samples)
        if parts:
            names = ", ".join(f"{one.group_id}/{one.run_id}" for one in parts)
            return OracleError(f"""a sample of {at.words} is {len(parts)} samples of the rollout one behind the other
            ({names}), and is trained as one: restart the position ids of a packed row at each sample, or give
            record(cu_seq_lens=) where these tell the samples apart""")
    return OracleError(f"""the samples of {at.words} are not those of any recorded rollout, so their rewards are
    unknown; tap the trajectories that the update trains on""")


def loss_mask(tokens: UpdateTokens, at: Place) -> tuple[Bools, str]:
    """Return the tokens of the loss as tapped, else those that have a gradient, and where this is from."""
    for name in ("is_loss_debug/effective_valid", "forward_data/response_mask", "batch_inputs/response_mask"):
        values = tokens.get(name)
        if values is not None:
            return np.nan_to_num(values) != 0, "the tapped loss mask"
    if "token_gradient/token_gradient" not in tokens.values:
        raise OracleError(f"""nothing tells the loss tokens of {at.words}; tap them with tap_batch(loss_mask=...), or
        the rollouts with tap_trajectories, or record with token_gradient=True""")
    mask = find_mask(tokens)
    if not mask.speaking.all():
        raise OracleError(f"""nothing tells the loss tokens of {at.words}, and not every sample has a gradient that
        would; tap them with tap_batch(loss_mask=...), or the rollouts with tap_trajectories""")
    return mask.policy, FROM_GRADIENTS


def untapped(tokens: UpdateTokens, number: int, ids: tuple[int, ...], mask: Bools) -> Trajectory:
    """Return a sample of unknown reward under the key that the dump has for it."""
    group, run = tokens.frame.samples[number]
    start, stop = tokens.frame.offsets[number : number + 2]
    own = [int(value) for value in mask[start:stop]]
    prompt = own.index(1) if 1 in own else max(len(own) - 1, 1)
    return Trajectory(group, run, list(ids), own, 0.0, prompt)
