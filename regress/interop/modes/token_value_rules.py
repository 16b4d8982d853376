"""Rules for values of tokens that one mode passes on to another: masks, old log-probs, advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from regress.interop.modes.advantage_rules import advantages
from regress.interop.modes.discrepancy import TRAINER, Discrepancy, some
from regress.interop.modes.mode_rows import OLD, Floats, ModeRow, moved
from regress.interop.modes.step_context import WEIGHTS, Link, StepContext

ENOUGH = 3
"""Fewest different values that prove where values come from."""
Pairs = Sequence[tuple[ModeRow, ModeRow]]


def values(context: StepContext) -> Iterator[Discrepancy]:
    """Yield what is wrong with the values that one mode passes on to the next."""
    for link in context.links:
        if link.what == WEIGHTS:  # such datums have neither masks nor old log-probs
            yield from advantages(context, link)
            continue
        known = [found for found in (_others_datums(link), _masks(link), _old(link)) if found]
        yield from known
        if not any(found.rule in ("mask-shifted", "values-of-other-datums") for found in known):
            yield from advantages(context, link)


def _masks(link: Link) -> Discrepancy | None:
    """Return a shift of the loss mask, or masks that are left out."""
    known = [(a, b) for a, b in link.pairs if a.mask is not None and b.mask is not None]
    known = [(a, b) for a, b in known if not (a.idle and b.mask is not None and not b.mask.any())]
    wrong = [(a, b) for a, b in known if not _same_masks(a, b)]
    if not wrong:
        return None
    one, other = link.whose
    names = [a.name for a, _ in wrong]
    for by, words in ((1, "one token too late"), (-1, "one token too early")):
        if all(_same_masks(a, b, by) for a, b in wrong):
            return Discrepancy(
                "mask-shifted",
                f"the loss mask of {other} lies {words}: the mask of a datum belongs to its targets, which are the "
                "tokens from the second on (loss_mask[1:])",
                (f"{some(names, 'datum')}: every token has the mask that its neighbour has with {one}",),
                ("batch_inputs", "advantages", "loss", "token_loss", "gradient"),
            )
    if all(b.mask is not None and b.mask[1:].all() for _, b in wrong):
        if all(not _outside(a, b).any() for a, b in wrong):
            return None  # a wire without masks, whose advantages are 0 where nothing is trained on
        return Discrepancy(
            "mask-lost",
            f"the loss mask does not reach {other}: tokens of the prompt are trained on",
            (f"{some(names, 'datum')} with a mask of 1 everywhere, and advantages outside of that of {one}",),
            ("batch_inputs", "advantages", "loss", "token_loss", "gradient"),
        )
    return None


def _same_masks(a: ModeRow, b: ModeRow, by: int = 0) -> bool:
    """Return True if one mask is the other, moved by some places; one of zeros is not a moved one."""
    mine, its = a.mask, b.mask
    if mine is None or its is None or mine.size != its.size:
        return False
    return bool((moved(mine, by) == its)[1:].all()) and (not by or bool(mine.any()))


def _outside(a: ModeRow, b: ModeRow) -> Floats:
    found = b.values.get("advantages")
    if found is None or a.mask is None or found.size != a.mask.size:
        return np.zeros(0)
    return np.nan_to_num(found)[~a.mask]


def _old(link: Link) -> Discrepancy | None:
    """Return where wrong old log-probs come from, if that can be proven."""
    known = [(a, b, pair) for a, b in link.pairs if (pair := _at(a, b, OLD)) is not None]
    scale = max((float(np.abs(mine).max(initial=0.0)) for _, _, (mine, _) in known), default=0.0)
    bound = link.close * max(scale, 1e-6)
    differing = [(a, b, pair) for a, b, pair in known if not _all_close(pair, bound)]
    wrong = [(a, b) for a, b, _ in differing]
    if not wrong:
        return None
    other = link.whose[1]
    names = [a.name for a, _ in wrong]
    explains = (OLD, "ratio", "token_loss", "policy_loss", "loss", "gradient")
    if link.whose[0] == TRAINER and _all(wrong, partial(_at, source="sampler"), bound, ENOUGH):
        return Discrepancy(
            "old-log-probs-of-the-sampler",
            f"old log-probs of {other} are those of the sampler, and the trainer's own were computed by the policy: "
            "choose one of the two for both (algorithm.old_log_probs)",
            (f"{some(names, 'datum')}: every value is the sampler's",),
            explains,
        )
    for source in (OLD, "sampler"):
        for by, words in ((1, "of the next token"), (-1, "of the token before")):
            if _all(wrong, partial(_shifted, source=source, by=by), bound, ENOUGH):
                return Discrepancy(
                    "log-probs-shifted",
                    f"old log-probs of {other} are shifted by one token: a list as long as the tokens begins with the "
                    "first token, which nothing predicts, and targets begin with the second (logprobs[1:])",
                    (f"{some(names, 'datum')}: every value is that {words}",),
                    explains,
                )
    if _all(wrong, _recomputed, link.close * 1e-2 * max(scale, 1e-6), ENOUGH):
        return Discrepancy(
            "old-log-probs-recomputed",
            f"{other} takes log-probs of its own forward pass for the old ones, so that every ratio is 1",
            (f"{some(names, 'datum')}: old_log_probs and log_probs are the same number at every token",),
            explains,
        )
    if all(not np.nan_to_num(its).any() for _, _, (_, its) in differing):
        return Discrepancy(
            "old-log-probs-lost",
            f"old log-probs do not reach {other}, which takes them as 0",
            (f"{some(names, 'datum')}: every value is 0",),
            explains,
        )
    return None


def _recomputed(a: ModeRow, b: ModeRow) -> tuple[Floats, Floats] | None:
    """Return the own log-probs of the other row and its old ones; only a service has its own."""
    return _inside(a, b, b.values.get("log_probs"))


def _at(a: ModeRow, b: ModeRow, source: str) -> tuple[Floats, Floats] | None:
    """Return values of a row and the other's old log-probs at the loss tokens, where both are known."""
    found = _inside(a, b, a.values.get(source))
    if found is None:
        return None
    both = np.isfinite(found[0]) & np.isfinite(found[1])
    return found[0][both], found[1][both]


def _shifted(a: ModeRow, b: ModeRow, source: str, by: int) -> tuple[Floats, Floats] | None:
    """Return the values of a row's neighbours and the other's old log-probs, where both are loss tokens."""
    return _inside(a, b, a.values.get(source), by)


def _inside(a: ModeRow, b: ModeRow, mine: Floats | None, by: int = 0) -> tuple[Floats, Floats] | None:
    """Return values ``by`` places on and the old log-probs of a row at the loss tokens; None where it has none."""
    its, mask = b.values.get(OLD), a.mask if a.mask is not None else b.mask
    if mine is None or its is None or mask is None or not mine.size == its.size == mask.size:
        return None
    here = np.flatnonzero(mask & moved(mask, -by))
    return mine[here + by], its[here]


def _all_close(pair: tuple[Floats, Floats] | None, bound: float) -> bool:
    return pair is not None and bool((np.abs(pair[0] - pair[1]) <= bound).all())


def _all(
    pairs: Pairs, of: Callable[[ModeRow, ModeRow], tuple[Floats, Floats] | None], bound: float, least: int
) -> bool:
    """Return True if all values are close, and there are enough different ones to prove it."""
    seen: set[float] = set()
    for a, b in pairs:
        found = of(a, b)
        if found is None or not _all_close(found, bound):
            return False
        seen.update(np.round(found[0] / max(bound, 1e-300)).tolist())
    return len(seen) >= least


def _others_datums(link: Link) -> Discrepancy | None:
    """Return values that belong to other datums: rows whose inputs of the loss are, as a whole, those of another."""
    names = (OLD, "advantages")
    wrong = [
        (a, b) for a, b in link.pairs if not _alike(link, _content(a, names), _content(b, names), least=0)
    ]
    if len(wrong) < 2:
        return None
    pool = [(a, _content(a, names)) for a, _ in link.pairs]
    from_: dict[str, str] = {}
    for a, b in wrong:
        own = _content(b, names)
        same = [c for c, values in pool if c is not a and _alike(link, values, own)]
        if not same:
            return None
        from_[a.name] = same[0].name
    if len({*from_.values()}) < len(from_):
        return None
    one, other = link.whose
    first = next(iter(from_))
    return Discrepancy(
        "values-of-other-datums",
        f"{other} computes datums with the log-probs and advantages of other datums: chunks or results were put "
        "together in another order than they were taken apart",
        (f"{some([*from_], 'datum')}: {first} has the values that {from_[first]} has with {one}",),
        (OLD, "advantages", "ratio", "token_loss", "policy_loss", "loss", "gradient"),
    )


def _content(row: ModeRow, names: Sequence[str]) -> Mapping[str, Floats]:
    """Return the values of the loss tokens in a row, in their order; fewer than `ENOUGH` log-probs prove nothing."""
    mask = row.mask
    found = {}
    for name in names:
        values = row.values.get(name)
        if values is not None:
            found[name] = values if mask is None or mask.size != values.size else values[mask]
    return found


def _alike(link: Link, a: Mapping[str, Floats], b: Mapping[str, Floats], least: int = ENOUGH) -> bool:
    """Return True if two rows have the same values of everything that both have."""
    common = [name for name in a if name in b]
    if OLD not in common:
        return least == 0
    for name in common:
        x, y = a[name], b[name]
        if x.size != y.size:
            return False
        both: NDArray[np.bool_] = np.isfinite(x) & np.isfinite(y)
        bound = link.close * max(float(np.abs(x[both]).max(initial=0.0)), 1e-6)
        if not (np.abs(x - y)[both] <= bound).all():
            return False
    return np.unique(a[OLD][np.isfinite(a[OLD])]).size >= least
