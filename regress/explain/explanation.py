"""Explanation of a trainer from its recorded updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regress.compare.dumps.opened_dump import open_side
from regress.errors import CompareError, RegressError
from regress.explain import clip_range, loss_statements, solution_statements
from regress.explain.advantage_candidates import Advantages, candidates, constant
from regress.explain.aggregation_weights import AggregationRule, rules
from regress.explain.centred_weights import centred
from regress.explain.denominator_readings import Reading, read
from regress.explain.hypothesis_search import Found, search
from regress.explain.logits_at_temperature import add_log_probs
from regress.explain.loss_statements import either
from regress.explain.loss_tokens import Mask, find_mask
from regress.explain.policy_log_probs import OLD, REFERENCE, Policies, policies
from regress.explain.preset_match import agreements, followed
from regress.explain.selection_hypotheses import without_drawn, without_low_entropy
from regress.explain.statement import Explanation, Statement, UpdateExplanation
from regress.explain.trust_regions import regions
from regress.explain.update_sources import chosen
from regress.explain.update_tokens import Bools, Floats, UpdateTokens, read_update
from regress.grpo.objective_presets import make_objective, preset_values


def explain_dump(
    path: str | Path, *, step: int | None = None, update: int | None = None, preset: str | None = None
) -> Explanation:
    """Explain from its recorded updates what a trainer really does, each statement with its evidence.

    Args:
        path: a dump with token gradients, or a golden case; log-probs, reference log-probs, rewards or advantages add
            to what is reported.
        step, update: only these updates; by default all with token gradients.
        preset: the preset that the trainer should follow; where it does not, the explanation says so.

    Raises:
        ConfigError: for a preset that does not exist.
        DumpError: if the dump cannot be read. CompareError: if it has no token gradients there.
    """
    if preset is not None:
        preset_values(preset)
    return _explanation(str(path), read_updates(path, step, update), preset)


def read_updates(path: str | Path, step: int | None, update: int | None) -> Iterator[UpdateTokens]:
    """Yield the tokens of the updates that `explain_dump` explains; raises as it does."""
    source = open_side(str(path))
    for place in chosen(source, step, update):
        found = read_update(source, place.step, place.update)
        add_log_probs(found, source)
        yield found


def explain_update(path: str, found: UpdateTokens, preset: str | None = None) -> Explanation:
    """Explain an update that was read from a dump."""
    return _explanation(path, [found], preset)


def _explanation(path: str, updates: Iterable[UpdateTokens], preset: str | None) -> Explanation:
    explained = [_explained(update, preset) for update in updates]
    refusals = [refusal for _, refusal in explained if refusal is not None]
    refusal = refusals[0].to_json() if len(refusals) == len(explained) else None
    return Explanation(path, tuple(one for one, _ in explained), preset, refusal)


def _explained(update: UpdateTokens, preset: str | None) -> tuple[UpdateExplanation, RegressError | None]:
    """Return what an update shows, and why the preset cannot be evaluated; None if it can, or none is asked for."""
    mask = find_mask(update)
    statements = list(solution_statements.dependence(mask))
    undetermined = {"everything else": "the gradients are not those of the next tokens' log-probs"}
    refusal: RegressError | None = None
    foreign = any(statement.departure for statement in statements)
    if not foreign:  # else temperature and derivatives are those of another loss
        read = _read(mask)
        statements = [*solution_statements.temperature(mask), *statements, *_statements(read, preset)]
        undetermined = _undetermined(read, statements)
        if preset is not None:
            try:
                if read.unjudged:
                    raise CompareError(
                        read.known.note or "which tokens are clipped does not show: tap old_log_probs"
                    )
                statements.append(followed(read.mask, read.known, read.readings, read.found, preset))
            except CompareError as error:
                undetermined["preset"] = str(error)
            except RegressError as error:
                refusal = CompareError(f"{preset} cannot be evaluated: {error}")
                undetermined["preset"] = str(refusal)
    return UpdateExplanation(
        update.place.step or 0, update.place.update, tuple(statements), undetermined
    ), refusal


@dataclass(frozen=True)
class _Read:
    """Hold the masks and policies of an update, and what explains its gradients, before anything is said of it."""

    mask: Mask
    known: Policies
    advantages: list[Advantages]
    found: Found
    readings: list[Reading]

    @property
    def unjudged(self) -> bool:
        """True if the recorded log-probs leave open which tokens are clipped, and what the loss is."""
        return self.known.unknown and not self.readings


def _read(mask: Mask) -> _Read:
    mask, known = _with_clipped(mask)
    advantages = candidates(mask.update)
    mask, known, found, readings = _searched(mask, known, advantages)
    return _Read(mask, known, advantages, found, readings)


def _statements(read: _Read, preset: str | None) -> Iterator[Statement]:
    mask, known, found, readings = read.mask, read.known, read.found, read.readings
    selects = preset is None or make_objective(preset).compares_tokens
    yield from solution_statements.masks(mask, selects=selects, clips=read.unjudged)
    if read.unjudged:
        mask = replace(mask, clipped=mask.missing)  # the loss has them, or had them before the clip
    yield from entropies(mask, rules(mask))
    if readings:
        yield from loss_statements.statements(found, readings, mask, known)
        yield from clip_range.clips(found, readings, mask, known)
        if preset is None:
            yield from agreements(mask, known, readings, found)
    elif not read.advantages:
        yield from centred(mask, known)


def _searched(
    mask: Mask, known: Policies, advantages: list[Advantages]
) -> tuple[Mask, Policies, Found, list[Reading]]:
    """Return the mask, the policies, and what explains the gradients; again once tokens count as left out."""
    found = _supervised(mask, known) or search(mask, known, advantages, rules(mask))
    readings = read(found, mask)
    if not readings:
        return mask, known, found, readings
    again = without_drawn(mask, known, readings[0].match.advantages.values)
    return (mask, known, found, readings) if again is mask else _searched(again, policies(again), advantages)


def _supervised(mask: Mask, known: Policies) -> Found | None:
    """Return the matches of an advantage of 1, as of supervised fine-tuning, which has neither ratio nor clip.

    They come first: a KL term with a huge coefficient beside any advantages would have the same gradients.
    """
    if mask.update.get("is_loss_debug/advantages") is not None:
        return None
    found = search(mask, known, constant(mask.update), rules(mask))
    matches = tuple(match for match in found.matches if not match.factor.clips and not match.penalty)
    return replace(found, matches=matches) if matches else None


def _with_clipped(mask: Mask) -> tuple[Mask, Policies]:
    """Return the mask with out-of-range tokens as clipped, not those amid tokens with a gradient.

    The range is that of the quantity whose clipping explains the most tokens.
    """
    known = policies(replace(mask, clipped=mask.missing))
    missing = mask.missing
    ratio = known.log_ratio()
    if ratio is None or not missing.any() or known.on_policy(mask.policy | missing):
        mask = without_low_entropy(mask)
        return mask, policies(mask)
    outside = [_outside(mask, missing, region.values) for region in regions(known)]
    mask = without_low_entropy(replace(mask, clipped=max(outside, key=np.count_nonzero)))
    return mask, policies(mask)


def _outside(mask: Mask, missing: Bools, values: Floats) -> Bools:
    """Return the missing tokens whose value lies beyond that of every token with a gradient and the same sign."""
    inside = mask.policy & ~np.isnan(values)
    found = np.zeros_like(missing)
    for own, at in _signs(mask):
        for sign in (1, -1):
            same = inside & (own == sign)
            top, bottom = values[same].max(initial=-np.inf), values[same].min(initial=np.inf)
            found |= missing & (at == sign) & ((values > top) | (values < bottom))
    return found


def _signs(mask: Mask) -> Iterator[tuple[Floats, Floats]]:
    """Yield signs of the advantages of tokens with a gradient, and of tokens without one.

    They are recorded, or those that the other tokens of the sample have together. Where tokens of one sample differ,
    each may also have its own, and one without a gradient may have either.
    """
    recorded = mask.update.get("is_loss_debug/advantages")
    if recorded is not None:
        yield np.sign(recorded), np.sign(recorded)
        return
    sample, g = mask.update.sample, np.where(mask.policy, -np.nan_to_num(mask.g), 0.0)
    total, size = (np.bincount(sample, each, minlength=len(mask.speaking)) for each in (g, np.abs(g)))
    yield np.sign(total)[sample], np.sign(total)[sample]
    if (size > np.abs(total) * (1 + 1e-9)).any():
        for sign in (1.0, -1.0):
            yield np.sign(g), np.full_like(g, sign)


def _undetermined(read: _Read, statements: list[Statement]) -> dict[str, str]:
    """Return the subjects that nothing is said on, each with the reason."""
    update, said = read.mask.update, {statement.subject for statement in statements}
    out: dict[str, str] = {}
    if "temperature" not in said:
        out["temperature"] = "the recording did not find one"
    if "mask" not in said:
        out["mask"] = "no token has a gradient"
    without = update.get("is_loss_debug/advantages") is None and not update.trajectories
    reference = update.get(*REFERENCE)
    hint = "" if reference is not None else " (for a KL term tap ref_log_probs)"
    note = read.known.note
    for subject in sorted({"aggregation", "advantages"} - said):
        why = update.notes.get("rewards", "tap rewards or advantages")
        nothing = note or f"no known combination of advantages, weights and ratio explains it{hint}"
        out[subject] = why if without else nothing
    if "kl" not in said and "detached" not in said:
        agree = note or "policy and reference agree, or nothing explains it"
        out["kl"] = agree if reference is not None else "tap ref_log_probs"
    if "ratio" not in said and "detached" not in said:
        out["ratio"] = (
            (note or "nothing explains it") if update.get(*OLD) is not None else "tap old_log_probs"
        )
    if "entropy" not in said:
        out["entropy"] = "its derivatives are too small or follow no known weights"
    return out


FLAT = 1e-3
"""Relative spread up to which the derivatives of a weight rule count as those of one coefficient."""
ABSENT = 1e-3
"""Derivative by the entropy, relative to the largest by a log-prob, up to which its absence counts as shown."""


def entropies(mask: Mask, rules: list[AggregationRule]) -> Iterator[Statement]:
    """Yield statements on the entropy bonus; none where its derivatives are too noisy to tell."""
    if "token_gradient/entropy_gradient" not in mask.update.values or not mask.policy.any():
        return
    tokens = mask.known & (mask.update.block >= 0)
    largest = float(np.abs(mask.g[mask.policy]).max())
    live = tokens & mask.entropy
    if not live.any():
        hidden = float(np.median(mask.rounding[tokens & mask.policy]))
        if hidden <= ABSENT * largest:
            found = float(np.abs(mask.h[tokens]).max(initial=0.0))
            evidence: dict[str, Any] = {"largest derivative": found, "by log-prob": largest}
            yield Statement("entropy", "no entropy has a gradient", ("none",), evidence)
        return
    yield from _bonus(mask, rules, live)
    if mask.expected is None or not (live & ~mask.expected).any():
        return
    count = int((live & ~mask.expected).sum())
    text = f"{count} tokens outside of {mask.source} have an entropy bonus"
    evidence = {"tokens": count, "inside": int((live & mask.expected).sum())}
    yield Statement("entropy", text, ("masked tokens",), evidence, departure=True)


def _bonus(mask: Mask, rules: list[AggregationRule], live: Bools) -> Iterator[Statement]:
    """Yield the coefficient under every rule of weights that the derivatives follow."""
    fits: dict[str, float] = {}
    names: list[str] = []
    for rule in rules:
        weights = rule.values[live]
        if rule.length == "free" or not np.isfinite(weights).all():
            continue
        coefficients: Floats = -mask.h[live] / weights
        middle = float(np.median(coefficients))
        if middle != 0 and _spread(mask, coefficients, middle) <= FLAT:
            fits.setdefault(f"{middle:.5g} x {rule.words}", middle)
            names.append(f"{rule.name}: {middle:.5g}")
    if not fits:
        return
    text = f"a bonus of {either(list(fits))}"
    evidence = {"tokens": int(live.sum()), "coefficient": list(fits.values())}
    yield Statement("entropy", text, tuple(dict.fromkeys(names)), evidence)


def _spread(mask: Mask, values: Floats, middle: float) -> float:
    """Return the relative spread of nine tenths of the tokens: single ones may be ill-conditioned."""
    return float(np.quantile(np.abs(values - middle), 0.9)) / abs(middle)
