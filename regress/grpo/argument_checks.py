"""Checks of the arguments of this package's functions; every message names the culprit and the remedy."""

import torch
from torch import Tensor

from regress.errors import RegressError, TaskError


class InputError(RegressError):
    """Tensors that do not belong together or hold unusable values."""


def check_sequences(sequence_K: Tensor, num_sequences: int) -> None:
    """Raise `InputError` unless ``sequence_K`` holds non-decreasing integers in ``[0, num_sequences)``."""
    if sequence_K.dim() != 1 or sequence_K.dtype != torch.int64:
        found = f"shape {tuple(sequence_K.shape)} and dtype {sequence_K.dtype}"
        raise InputError(
            f"sequence_K has {found}: it must be one int64 sample index per loss token, shape [K]."
        )
    if sequence_K.numel() == 0:
        return
    falls = torch.nonzero(sequence_K[1:] < sequence_K[:-1])
    if falls.numel():
        at = int(falls[0]) + 1
        raise InputError(f"""sequence_K falls from {int(sequence_K[at - 1])} to {int(sequence_K[at])} at token {at}: the
        tokens of a sample must be adjacent and samples in order, so sort tokens by sample first.""")
    low, high = int(sequence_K[0]), int(sequence_K[-1])
    if low < 0 or high >= num_sequences:
        culprit = low if low < 0 else high
        raise InputError(f"""sequence_K names sample {culprit}, but there are {num_sequences}: every index must lie in
        [0, {num_sequences}), so count samples without tokens too.""")


def check_same_length(**tensors_K: Tensor | None) -> None:
    """Raise `InputError` unless every given tensor is 1-D and as long as the first."""
    given = {name: tensor for name, tensor in tensors_K.items() if tensor is not None}
    first, reference = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.dim() != 1 or tensor.shape != reference.shape:
            raise InputError(f"""{name} has shape {tuple(tensor.shape)} where {first} has {tuple(reference.shape)}: both
            must hold one value per loss token, so index both with the same mask first.""")


def check_finite(name: str, values_K: Tensor) -> None:
    """Raise `InputError` naming the first token of ``values_K`` that is NaN or infinite."""
    at = first_not_finite(values_K)
    if at is not None:
        raise InputError(f"""{name} is {float(values_K[at].detach())} at token {at}: it must be finite at every loss
        token, so leave such tokens out of the loss mask or find what produced them.""")


def check_rewards(rewards_N: Tensor, groups_N: Tensor, *, missing: bool = False) -> None:
    """Raise unless every sample has a finite reward (`TaskError`) and a group (`InputError`).

    Args:
        rewards_N: [N], or [N, F] of several reward functions.
        missing: True if NaN means that a reward function left the sample out.
    """
    if rewards_N.dim() not in (1, 2) or groups_N.shape != rewards_N.shape[:1]:
        raise InputError(f"""groups_N has shape {tuple(groups_N.shape)} where rewards_N has {tuple(rewards_N.shape)}:
        both must hold one value per sample, so give every sample one group and one reward.""")
    if rewards_N.numel() == 0:
        raise InputError("rewards_N is empty: advantages need at least one group with one sample to score.")
    known = rewards_N.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) if missing else rewards_N
    bad = first_not_finite(known.flatten())
    if bad is not None:
        at = bad // (known.numel() // len(known))
        value = float(rewards_N.flatten()[bad])
        remedy = "so mend the reward function or score such a completion 0"
        if value != value:
            remedy += "; missing_rewards=exclude leaves such samples out"
        raise TaskError(f"sample {at} has reward {value}: rewards must be finite numbers, {remedy}.")


def first_not_finite(values: Tensor) -> int | None:
    """Return the index of the first NaN or infinity of a 1-D tensor, or None."""
    bad = torch.nonzero(~torch.isfinite(values))
    return int(bad[0]) if bad.numel() else None
