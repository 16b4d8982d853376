"""The corpus of faults: each must fail first where it broke first, and what changes nothing must not be flagged.

Nothing recorded is edited: the engine computes something else, and the golden cases have to notice. What is expected of
a fault stands beside it (tests/faults). One of each category is tried by default, ``-m faults`` tries all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.replay.replay_plan import world_size
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from tests.faults.fault import REFUSED, Fault, Shown
from tests.faults.registry import corpus
from tests.faults.trials.common_practice import measured, noticed
from tests.faults.trials.rows import MARGINS
from tests.faults.trials.trial import (
    Judged,
    Trial,
    judged,
    scheduled,
    score,
    stage_right,
    tensor_of,
    tensor_right,
    trials_of,
    variant_named,
)
from tests.golden_cases import STORE, opened

Hit = NDArray[np.bool_]


# which tokens have to be wrong: [B, T] of a microbatch, of which those in the loss count


def behind_another(micro: Any) -> Hit:
    """Tokens of all samples of a packed row but the first."""
    hit = np.zeros(micro.layout.shape, bool)
    for segment in micro.layout.segments:
        hit[segment.row, segment.col :] |= segment.col > 0
    return hit


def after_another_token(micro: Any) -> Hit:
    ids = micro.input_ids
    return np.concatenate([np.zeros((len(ids), 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def above_or_below(low: float, high: float) -> Callable[[Any], Hit]:
    """Tokens that the clip stops at one of its bounds."""
    return lambda m: ((m.ratio > high) & (m.advantages > 0)) | ((m.ratio < low) & (m.advantages < 0))


TOKENS: dict[str, Callable[[Any], Hit]] = {
    "all": lambda micro: micro.layout.attention_mask,
    "behind another": behind_another,
    "behind padding": lambda m: np.broadcast_to(~m.layout.attention_mask[:, :1], m.layout.shape),
    # a group of equal rewards has no advantages, whatever they are divided by
    "of varied groups": lambda micro: micro.advantages != 0,
    "after another": after_another_token,
    "above or below 0.8 1.2": above_or_below(0.8, 1.2),
    "above or below 0.9 1.1": above_or_below(0.9, 1.1),
    "clipped and disliked": lambda m: ((m.ratio < 0.8) | (m.ratio > 1.2)) & (m.advantages < 0),
}
"""Words of `Shown.tokens` -> those tokens."""
WRONG = [fault for fault in corpus().values() if fault.wrong]
QUIET = [fault for fault in corpus().values() if not fault.wrong]
REST = (pytest.mark.faults, pytest.mark.extended)


def some(trials: Iterable[Trial], *, of: Callable[[Trial], object]) -> list[Any]:
    """The trials as parameters, of which the first for each value of ``of`` is tried by default.

    That is the first of those on the fewest ranks: four take several times as long.
    """
    trials = [*trials]
    chosen: dict[object, Trial] = {}
    for one in sorted((one for one in trials if not one.fault.held_out), key=ranks_of):
        chosen.setdefault(of(one), one)
    found = []
    for one in trials:
        default = one is chosen.get(of(one))
        found.append(pytest.param(one, id=one.name, marks=pytest.mark.faults if default else REST))
    return found


def ranks_of(trial: Trial) -> int:
    """Return the number of ranks of a trial's variant."""
    return world_size({}, variant_named(trial.shown.variant).overrides)


def silent_trials() -> list[Trial]:
    """Trials of faults where they are said to be unable to show, in a replay that is named."""
    found = []
    for fault in WRONG:
        for where in fault.silent:
            case, slash, variant = where.partition("/")
            precision = Precision.FLOAT32 if variant.endswith("-fp32") else Precision.FLOAT64
            steps = fault.shown[0].steps
            if slash:
                shown = Shown(case, variant.removesuffix("-fp32"), "", steps=steps)
                found.append(Trial(fault, shown, precision))
    return found


def require_place(trial: Trial, found: Judged) -> None:
    """Fail unless the first that failed is what the fault broke, where it broke it, and nothing beside."""
    shown = trial.shown
    assert not found.problem, found.problem
    assert found.divergence is not None, "not caught"
    first, failed = found.divergence.first, found.with_the_first
    assert stage_right(shown, found), f"{first.quantity} {first.name} at {first.place}"
    if trial.precision is not Precision.FLOAT32 or trial.fault.kind == "precision":
        assert tensor_right(shown, found), sorted({tensor_of(verdict) for verdict in failed})
    assert shown.status in ("", first.status)
    assert shown.says in " ".join(verdict.detail for verdict in failed)
    if shown.place:
        assert str(first.place) == shown.place
    if shown.update is not None:
        assert first.place.update == shown.update
    if shown.ranks is not None:
        assert {v.place.rank for v in failed if v.place.rank is not None} == set(shown.ranks)
    if shown.names != ".*" and first.status is Status.DRIFT and trial.precision is Precision.FLOAT64:
        (update,) = (u for u in found.plan if (u.step, u.update) == (first.place.step, first.place.update))
        known = found.replay.case.truth(update.where).get(shown.quantity, {})
        wanted = {name for name in known if re.fullmatch(shown.names, name)}
        assert wanted <= {tensor_of(verdict) for verdict in failed}


def require_tokens(trial: Trial, found: Judged, micros: Callable[[Judged], list[Any]]) -> None:
    """Fail unless the tokens that fail are those that the fault breaks."""
    shown = trial.shown
    here, place = micros(found), found.with_the_first[0].place
    hits = [int((TOKENS[shown.tokens](micro) & (micro.response_mask != 0)).sum()) for micro in here]
    assert sum(hits) > 0
    name = shown.probe or found.with_the_first[0].name
    where = (place.step, place.update)
    over = {
        v.place.micro: v.over
        for v in found.failed
        if v.name == name and (v.place.step, v.place.update) == where
    }
    assert over == {index: count for index, count in enumerate(hits) if count}


@pytest.mark.parametrize("trial", some(trials_of(WRONG), of=lambda one: one.fault.category))
def test_a_fault_fails_first_where_it_is(trial: Trial, micros: Callable[[Judged], list[Any]]) -> None:
    found = judged(trial, STORE, diagnosed=trial.fault.category == "R")
    if trial.shown.first == REFUSED:
        assert trial.shown.says in found.problem
        return
    require_place(trial, found)
    exact = trial.precision is Precision.FLOAT64
    if trial.shown.tokens and exact:
        require_tokens(trial, found, micros)
    multiple = max(verdict.multiple for verdict in (found.with_the_first if exact else found.failed))
    print(f"{trial.name}: {multiple:.2g} times the tolerance ({trial.fault.source})")
    least = MARGINS[trial.fault.kind] if exact else MARGINS["precision"]
    assert multiple >= least or math.isinf(multiple) or found.with_the_first[0].status is not Status.DRIFT
    common = noticed(measured(found.replay.case, found.plan, found.verdicts))
    assert [check for check in trial.fault.blind if common.get(check)] == []
    if found.diagnoses and not trial.fault.held_out:
        assert score(trial.fault, found) == "right", found.diagnoses[0]


@pytest.mark.parametrize(
    "trial", some(trials_of(QUIET), of=lambda one: (one.fault.kind, "HTB".find(one.fault.category)))
)
def test_what_changes_nothing_is_not_flagged(trial: Trial) -> None:
    found = judged(trial, STORE)
    assert not found.problem, found.problem
    assert [f"{v.quantity} {v.name} at {v.place}: {v.multiple:.3g}" for v in found.failed] == []
    assert found.verdicts


@pytest.mark.parametrize("trial", some(silent_trials(), of=lambda one: one.fault.category in "GC"))
def test_where_it_changes_nothing_it_is_no_fault(trial: Trial) -> None:
    found = judged(trial, STORE)
    assert not found.problem, found.problem
    assert found.failed == []


HEALTHY = dict.fromkeys(
    (shown.case, shown.variant)
    for fault in WRONG
    for shown in fault.shown
    if not variant_named(shown.variant).applies_to(opened(shown.case))
)
"""Replays of the faults that the matrix does not already prove right without a fault."""


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("case", "variant"), HEALTHY)
def test_without_a_fault_everything_passes(case: str, variant: str, tmp_path: Path) -> None:
    from regress.replay.case_run import replay
    from regress.replay.replay_judge import judge_replay

    chosen = Replay(opened(case), variant_named(variant), Precision.FLOAT64)
    steps = None if scheduled(chosen) or chosen.variant.resume_at else 1
    dump = replay(chosen.case, chosen.variant, chosen.precision, tmp_path / "replay", steps=steps)
    plan = [update for update in chosen.plan if steps is None or update.step < steps]
    verdicts = judge_replay(chosen.case, dump, plan, chosen.precision)
    assert [v for v in verdicts if not v.ok and (steps is None or v.place.step == 0)] == []


def test_tool_tokens_in_the_loss_are_counted(micros: Callable[[Judged], list[Any]]) -> None:
    (trial,) = trials_of([corpus()["tool_tokens_in_the_loss"]])
    found = judged(trial, STORE, diagnosed=False)
    samples = {t.key: t for t in found.replay.case.trajectories()[0]}
    expected = {}
    for index, micro in enumerate(micros(found)):
        keys = [micro.update.frame.samples[segment.sample] for segment in micro.layout.segments]
        masks = [samples[key].loss_mask[samples[key].prompt_length :] for key in keys]
        expected[index] = sum(mask.count(0) for mask in masks)
    over = {v.place.micro: v.over for v in found.failed if v.name == "response_mask"}
    assert over == {index: count for index, count in expected.items() if count}


def test_a_microbatch_left_out_is_named_with_its_tokens(micros: Callable[[Judged], list[Any]]) -> None:
    (trial,) = trials_of([corpus()["last_microbatch_left_out"]])
    found = judged(trial, STORE, diagnosed=False)
    last = micros(found)[-1]
    first = found.failed[0]
    start = last.update.frame.samples[last.layout.segments[0].sample]
    assert f"sample {start[0]}/{start[1]}, position 0" in first.detail
    assert "was produced by no microbatch" in first.detail
    assert first.over == last.layout.num_tokens
    missing = {str(v.place) for v in found.failed if v.status is Status.MISSING and v.place.step == 0}
    assert missing == {"step0/rank0/micro2"}


@pytest.mark.extended
def test_rolled_labels_are_wrong_at_the_border_alone() -> None:
    (trial,) = trials_of([corpus()["labels_rolled_after_the_split"]])
    found = judged(trial, STORE, diagnosed=False)
    update = found.replay.plan[0]
    targets = update.layouts[0][0].targets
    last = targets.shape[1] - 1
    positions = [
        (segment.sample, segment.start + last - segment.col)
        for segment in targets.segments
        if segment.col <= last < segment.col + segment.stop - segment.start
    ]
    wanted = [
        f"sample {update.frame.samples[sample][0]}/{update.frame.samples[sample][1]}, position {position},"
        for sample, position in positions
        if update.loss_mask[update.frame.offsets[sample] + position]
    ]
    first = found.failed[0]
    assert first.place == Place(0, None, 0, 0)
    assert (first.over, len(wanted) > 0) == (len(wanted), True)
    assert first.worst is not None
    assert first.worst.where.startswith(tuple(wanted))


def test_words_for_tokens_are_known() -> None:
    told = {shown.tokens for fault in WRONG for shown in fault.shown} - {""}
    assert told == {*TOKENS}


def replays_of(fault: Fault) -> set[tuple[str, str]]:
    return {(shown.case, shown.variant) for shown in fault.shown}


def test_replays_exist_and_are_told_apart() -> None:
    cases = {*STORE.names()}
    for fault in corpus().values():
        assert len(replays_of(fault)) == len(fault.shown), fault.name
        for shown in fault.shown:
            assert shown.case in cases, fault.name
            assert variant_named(shown.variant)
            assert re.compile(shown.names)
