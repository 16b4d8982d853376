"""Hypotheses about advantages and weights: other statistics of rewards, other denominators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.beside import Beside
from regress.compare.diagnosis.extent import ROUNDINGS
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis
from regress.layout import TokenFrame

_SAME = 1e-9
"""Relative error up to which a formula gives the golden values, so that it is the right one."""
_EPSILONS = (0.0, 1e-8, 1e-6, 1e-4)


def advantage_guesses(
    golden: Floats, frame: TokenFrame, mask: NDArray[np.bool_], beside: Beside, config: Mapping[str, object]
) -> Iterator[Hypothesis]:
    """Yield advantages of other groups, baselines and deviations; nothing where no such formula gives the golden ones.

    Args:
        golden: ``[frame.size]`` advantages; ``mask`` the tokens that count.
    """
    keys = [*beside.rewards]
    if not keys or not {*frame.samples} <= {*keys}:
        return
    place = {key: index for index, key in enumerate(keys)}
    chosen = np.array([place[key] for key in frame.samples])
    rewards = np.array([beside.rewards[key] for key in keys], np.float64)
    groups = np.unique([group for group, _ in keys], return_inverse=True)[1]
    eps = config.get("eps")
    known = [float(eps)] if isinstance(eps, int | float) else []
    size = float(np.abs(golden[mask]).max(initial=0.0))
    right = set()
    told = [*_advantages(rewards, groups, [*dict.fromkeys((*known, *_EPSILONS))])]
    for title, values in told:
        tokens = np.repeat(values[chosen], frame.lengths)
        if (
            np.isfinite(values).all()
            and float(np.abs(tokens - golden)[mask].max(initial=0.0)) <= _SAME * size
        ):
            right.add(title)
    if not right:
        return
    others = {f"of {name}": part for name, part in _other_groups(groups).items()}
    for title, values in (*told, *_of_other_groups(rewards, others, known or [0.0])):
        if title not in right and np.isfinite(values).all():
            tokens = np.where(mask, np.repeat(values[chosen], frame.lengths), np.nan)
            yield Hypothesis("formula", tokens, {"what": f"rewards {title}"})
    for name, dtype in ROUNDINGS.items():
        coarse = rewards.astype(dtype).astype(np.float64)
        for title, values in _advantages(coarse, groups, known or [0.0]):
            if title in right:
                tokens = np.where(mask, np.repeat(values[chosen], frame.lengths), np.nan)
                yield Hypothesis("formula", tokens, {"what": f"those of rewards rounded to {name}"})


def _other_groups(groups: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    count = int(groups.max()) + 1
    index = np.arange(len(groups))
    return {
        "interleaved groups": index % count,
        "the whole batch": np.zeros_like(index),
        "groups that begin one sample later": np.roll(groups, 1),
        "groups that begin one sample earlier": np.roll(groups, -1),
    }


def _of_other_groups(
    rewards: Floats, others: Mapping[str, NDArray[np.int64]], epsilons: Sequence[float]
) -> Iterator[tuple[str, Floats]]:
    for name, groups in others.items():
        for title, values in _advantages(rewards, groups, epsilons):
            yield f"{title} {name}", values


def _advantages(
    rewards: Floats, groups: NDArray[np.int64], epsilons: Sequence[float]
) -> Iterator[tuple[str, Floats]]:
    """Yield titles and values ``[N]`` of advantages."""
    whole = np.zeros_like(groups)
    baselines: dict[str, Floats] = {
        "as they are": np.zeros_like(rewards),
        "less the mean of the group": _each(rewards, groups, np.mean),
        "less the mean of the batch": _each(rewards, whole, np.mean),
        "less the mean of the others of the group": _others_mean(rewards, groups),
        "less the median of the group": _each(rewards, groups, np.median),
        "less the best of the group": _each(rewards, groups, np.max),
    }
    spreads: dict[str, Floats] = {"": np.ones_like(rewards)}
    for where, own in (("group", groups), ("batch", whole)):
        for ddof, words in ((0, "population deviation"), (1, "deviation")):
            spreads[f" over the {words} of the {where}"] = _each(rewards, own, _spread(ddof))
        spreads[f" over the variance of the {where}"] = _each(rewards, own, _spread(1)) ** 2
    for (base, mean), (over, spread) in product(baselines.items(), spreads.items()):
        if not over:
            yield base, rewards - mean
            continue
        for eps in epsilons:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(rewards == mean, 0.0, (rewards - mean) / (spread + eps))
                inside = np.where(rewards == mean, 0.0, (rewards - mean) / np.sqrt(spread**2 + eps))
            yield f"{base}{over} plus {eps:g}", values
            if eps:
                yield f"{base}{over} with {eps:g} below the root", inside


def _spread(ddof: int) -> Callable[[Floats], float]:
    return lambda own: float(np.std(own, ddof=ddof)) if own.size > ddof else 0.0


def _each(rewards: Floats, groups: NDArray[np.int64], of: Callable[[Floats], float]) -> Floats:
    found = np.zeros_like(rewards)
    for group in np.unique(groups):
        found[groups == group] = of(rewards[groups == group])
    return found


def _others_mean(rewards: Floats, groups: NDArray[np.int64]) -> Floats:
    size = _each(rewards, groups, len)
    total = _each(rewards, groups, np.sum)
    return np.asarray((total - rewards) / np.maximum(size - 1, 1), np.float64)


def weight_guesses(
    golden: Floats, frame: TokenFrame, mask: NDArray[np.bool_], beside: Beside
) -> Iterator[Hypothesis]:
    """Yield weights of other aggregations and denominators.

    Args:
        golden: ``[frame.size]`` weights; ``mask`` the loss tokens.
    """
    counts = np.array([*beside.counts.values()], np.float64)
    if not counts.sum() or not {*frame.samples} <= {*beside.counts}:
        return
    own = np.repeat([float(beside.counts[key]) for key in frame.samples], frame.lengths)
    live = int((counts > 0).sum())
    long = float(counts.max())
    with np.errstate(divide="ignore"):
        mean = 1.0 / own
    rows: dict[str, Floats] = {
        "token-mean": np.full(frame.size, 1.0 / counts.sum()),
        "seq-mean-token-mean": mean / len(counts),
        "seq-mean-token-mean over samples with loss tokens": mean / max(live, 1),
        "seq-mean-token-sum": np.full(frame.size, 1.0 / len(counts)),
        "seq-mean-token-sum over samples with loss tokens": np.full(frame.size, 1.0 / max(live, 1)),
        "a sum over tokens": np.ones(frame.size),
        "a sum of the means of samples": mean,
        "seq-mean-token-sum-norm of the longest sample": np.full(frame.size, 1.0 / (len(counts) * long)),
        "a mean over all tokens, prompts included": np.full(frame.size, 1.0 / max(sum(frame.lengths), 1)),
        "a denominator one token short": golden * counts.sum() / max(counts.sum() - 1, 1),
    }
    for title, values in rows.items():
        chosen = np.where(mask, values, np.nan)
        if np.isfinite(chosen[mask]).all():
            yield Hypothesis("formula", chosen, {"what": title})


def rounded_inputs(
    of: Callable[..., Floats], inputs: Mapping[str, Floats], golden: Floats, mask: NDArray[np.bool_]
) -> Iterator[Hypothesis]:
    """Yield what a formula gives with one input rounded to a narrower dtype, if it gives the golden values without.

    Args:
        of: function of the inputs by position; ``inputs`` their names and ``[frame.size]`` values.
    """
    known = [*inputs.values()]
    with np.errstate(over="ignore", invalid="ignore"):
        plain = of(*known)
        size = float(np.abs(golden[mask]).max(initial=0.0))
        if not float(np.abs(plain - golden)[mask].max(initial=0.0)) <= _SAME * max(size, 1e-300):
            return
        for name, dtype in ROUNDINGS.items():
            for number, title in enumerate(inputs):
                coarse = [*known]
                coarse[number] = known[number].astype(dtype).astype(np.float64)
                values = np.where(mask, of(*coarse), np.nan)
                yield Hypothesis("formula", values, {"what": f"that of {title} rounded to {name}"})
            every = [value.astype(dtype).astype(np.float64) for value in known]
            if len(known) > 1:
                words = f"that of all its inputs rounded to {name}"
                yield Hypothesis("formula", np.where(mask, of(*every), np.nan), {"what": words})
