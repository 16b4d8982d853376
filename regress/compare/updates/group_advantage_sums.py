"""Sums of advantages over groups, which are 0 where the objective takes the mean of a group off its rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.ulps import spacing
from regress.compare.updates.invariant_counts import Checked
from regress.dump.numpy_arrays import Array
from regress.layout import SampleKey, TokenFrame

NAME = "advantages"
"""Name of the invariant."""
GroupOf: TypeAlias = Mapping[SampleKey, tuple[str, int]]
"""Group of each sample, and the number of samples that were sampled for it."""
_SPACINGS = 64
"""Spacings of their dtype, for each sample, that rounding may add to a sum, relative to the largest advantage."""


@dataclass(frozen=True)
class GroupSum:
    """The sum over a group that an update holds whole; rounding may make it as large as ``bound``."""

    group: str
    total: float
    bound: float


def centred(config: Mapping[str, Any]) -> bool | None:
    """Return whether advantages of a group must add up to 0 under a configuration; None where it does not tell."""
    objective = config.get("algorithm") or {}
    if "advantage" not in objective:
        return None
    by_function = objective.get("reward_aggregation", "sum_then_normalize") != "sum_then_normalize"
    shifted = by_function or objective.get("normalize_advantages")  # by a mean over the batch
    return objective["advantage"] in ("grpo", "rloo") and not shifted


def check_group_sums(
    known: Checked,
    values: Iterable[tuple[NDArray[np.int64], Array]],
    frame: TokenFrame,
    groups: GroupOf,
    config: Mapping[str, Any],
) -> None:
    """Check the sums of all groups that are whole, and tell of those that are not, or that nothing says to be 0.

    Args:
        values: canonical indices and advantages of tokens.
        groups: those that the rollouts tell; a sample that is none of them belongs to the group that it is named by,
            of the size that the configuration gives.
    """
    must = centred(config)
    if must is False:
        return
    advantages, eps = _of_samples(values, frame, masked=must is not None)
    if not advantages:
        return
    found, lacking = _sums(advantages, eps, frame, _with_sizes(frame, groups, config))
    apart = max(found, key=lambda one: abs(one.total), default=None)
    if must is None and apart is not None and not abs(apart.total) <= apart.bound:
        known.leave(
            "nothing tells that the objective takes the mean of a group off its rewards, and those of group "
            f"{apart.group} add up to {apart.total:.6g}; regress explain tells their formula"
        )
        return
    for one in found:
        known.number(0.0, one.total, one.bound, f"the sum over group {one.group}")
    for reason in lacking:
        known.leave(reason)


def _with_sizes(frame: TokenFrame, groups: GroupOf, config: Mapping[str, Any]) -> GroupOf:
    """Return the groups, with the size that the configuration gives where rollouts tell none or a smaller one."""
    size = (config.get("data") or {}).get("group_size")
    if not isinstance(size, int):
        return groups
    named = {key: (key[0], size) for key in frame.samples}
    return {**named, **{key: (group, max(size, own)) for key, (group, own) in groups.items()}}


def _of_samples(
    values: Iterable[tuple[NDArray[np.int64], Array]], frame: TokenFrame, *, masked: bool
) -> tuple[dict[int, float], float]:
    """Return the advantage of each sample, by its number, and the spacing of their dtype.

    Args:
        masked: the values are those of loss tokens; if False, prompts may have a 0 before them.
    """
    found: dict[int, float] = {}
    eps = 0.0
    for canonical, advantages in values:
        samples = np.searchsorted(frame.offsets, canonical, side="right") - 1
        eps = max(eps, spacing(advantages.dtype))
        for sample in np.unique(samples):
            own = advantages[samples == sample]
            trained = own if masked else own[own != 0]
            found[int(sample)] = float(trained[0]) if trained.size else found.get(int(sample), 0.0)
    return found, eps


def _sums(
    advantages: Mapping[int, float], eps: float, frame: TokenFrame, groups: GroupOf
) -> tuple[list[GroupSum], list[str]]:
    """Return the sums over whole groups, and a reason for all others together."""
    members: dict[tuple[str, int], list[int]] = {}
    unknown = 0
    for number, key in enumerate(frame.samples):
        if key in groups:
            members.setdefault(groups[key], []).append(number)
        else:
            unknown += number in advantages
    found, lacking = [], []
    for (group, size), own in members.items():
        there = [advantages[number] for number in own if number in advantages]
        if len(there) < size or len(own) > size:
            lacking.append(f"{len(there)} of the {size} samples of group {group}")
        elif size > 1:
            bound = _SPACINGS * size * eps * max(1.0, *map(abs, there))
            found.append(GroupSum(group, math.fsum(there), bound))
    return found, [*_reasons(lacking, unknown, bool(members))]


def _reasons(lacking: Sequence[str], unknown: int, members_known: bool) -> Iterator[str]:
    if lacking:
        more = f", as of {len(lacking) - 1} more" if len(lacking) > 1 else ""
        yield f"the update holds advantages of {lacking[0]} only{more}"
    if unknown and members_known:
        yield f"nothing tells the group of {unknown} samples, or its size"
