"""The sampler is judged: what changes a drawn token, where a completion ends, or its log-probs is caught."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from regress.compare.verdicts.verdict import Verdict
from regress.errors import GoldenError, ReplayError
from regress.golden.case import GREEDY
from regress.golden.store import GoldenStore
from regress.replay import sampled
from regress.replay.judge import judge_replay
from regress.replay.layouts import LAYOUTS
from regress.replay.matrix import Replay
from regress.replay.rollout_variants import ROLLOUTS
from regress.replay.run import replay
from regress.replay.truth import require_rollouts
from regress.replay.variants import VARIANTS, Precision

sys.path.insert(0, str(Path(__file__).parent))
import metric_faults  # by the names under which the ranks import them
import rollout_faults as bugs

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENS, LOG_PROBS, MISMATCH = "trajectory", "sampler_log_probs", "mismatch"


@dataclass(frozen=True)
class Case:
    """A fault, and the first quantity that must fail, with one of the names that must."""

    inject: Callable[[Any], None]
    first: str = TOKENS
    name: str = "tokens"
    variant: str = "base"

    @property
    def id(self) -> str:
        return f"{self.inject.__name__}-{self.variant}"


CASES = (
    Case(bugs.temperature_ignored),
    Case(bugs.log_probs_before_the_temperature, LOG_PROBS, LOG_PROBS),
    # the rest is extended
    Case(bugs.no_top_p),
    Case(bugs.no_top_k),
    Case(bugs.same_stream_in_every_turn),
    Case(bugs.same_stream_for_a_group),
    Case(bugs.same_stream_in_every_step),
    Case(bugs.stream_of_the_batch),
    Case(bugs.stop_token_dropped),
    Case(bugs.one_token_short),
    Case(bugs.one_token_long),
    Case(bugs.reply_in_the_loss, name="loss_mask"),
    Case(bugs.log_probs_of_the_next_token, LOG_PROBS, LOG_PROBS),
    Case(bugs.cache_one_position_off),
    Case(bugs.padding_visible),
    Case(bugs.greedy_is_drawn, name=f"{GREEDY}/tokens"),
    Case(bugs.stream_of_the_batch, variant="rollout-batch1"),
)
HARMLESS = (bugs.stream_of_the_batch,)
"""Faults that do not show where each batch has one row."""

RANKS = (
    Case(bugs.stream_of_the_rank, variant="rollout-dp2-batch5"),
    Case(bugs.stream_by_own_number, variant="rollout-dp2-batch5"),
    Case(bugs.weights_of_the_first_step, variant="rollout-tp2"),
)


def _some(cases: tuple[Case, ...], default: int) -> list[Any]:
    rest = pytest.mark.extended
    return [case if i < default else pytest.param(case, marks=rest) for i, case in enumerate(cases)]


def _judged(case: Case, folder: Path, launch: Any = None) -> list[Verdict]:
    """Return the verdicts of a replay that are not ok."""
    chosen = Replay(
        GoldenStore(GOLDEN).case("rollout"),
        {**VARIANTS, **LAYOUTS, **ROLLOUTS}[case.variant],
        Precision.FLOAT64,
    )
    dump = replay(chosen.case, chosen.variant, chosen.precision, folder / case.id, launch=launch)
    verdicts = judge_replay(chosen.case, dump, chosen.plan, chosen.precision)
    return [verdict for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("case", _some(CASES, 2), ids=lambda case: case.id)
def test_a_fault_of_the_sampler_is_caught(case: Case, tmp_path: Path) -> None:
    with metric_faults.injected(case.inject):
        failed = _judged(case, tmp_path)
    if case.inject in HARMLESS and case.variant == "rollout-batch1":
        assert not failed
        return
    assert failed[0].quantity == case.first
    assert case.name in {verdict.name for verdict in failed}


@pytest.mark.extended
@pytest.mark.parametrize("case", RANKS, ids=lambda case: case.id)
def test_a_fault_of_a_rank_that_samples_is_caught(case: Case, tmp_path: Path) -> None:
    failed = _judged(case, tmp_path, metric_faults.BrokenRanks(case.inject))
    assert failed[0].quantity == case.first
    assert case.name in {verdict.name for verdict in failed}


@pytest.mark.extended
def test_the_mismatch_of_sampler_and_trainer_is_a_quantity_of_its_own(tmp_path: Path) -> None:
    """Where the trainer's log-probs are at another temperature, the sampler is as it was and its tokens too."""

    def at_another_temperature(patch: Any) -> None:
        from regress.engine.policy import LocalPolicy

        right = LocalPolicy._token_log_probs

        def colder(self: LocalPolicy, logits: Any, targets: Any, entropy: Any) -> Any:
            return right(self, logits * 1.01, targets, entropy)

        patch.setattr(LocalPolicy, "_token_log_probs", colder)

    with metric_faults.injected(at_another_temperature):
        failed = _judged(Case(at_another_temperature), tmp_path)
    first_step = {verdict.quantity for verdict in failed if verdict.place.step == 0}
    assert MISMATCH in first_step
    assert not {TOKENS, LOG_PROBS} & first_step


@pytest.mark.extended
def test_a_decision_near_its_boundary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN / "rollout", tmp_path / "rollout")
    case = GoldenStore(tmp_path).case("rollout")
    monkeypatch.setattr(sampled, "MARGIN", 0.5)
    with pytest.raises(ReplayError, match="a decision of the sampler lies within"):
        sampled.sample_rollouts(case, tmp_path / "work")
    assert (tmp_path / "rollout" / GREEDY).is_dir()


@pytest.mark.extended
def test_values_of_other_rollouts_are_never_golden(tmp_path: Path) -> None:
    case = GoldenStore(GOLDEN).case("rollout")
    with metric_faults.injected(bugs.temperature_ignored):
        dump = replay(case, VARIANTS["base"], Precision.FLOAT64, tmp_path)
    with pytest.raises(ReplayError, match="record the case again: regress golden record rollout"):
        require_rollouts(case, dump)


def test_rollouts_are_recorded_or_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "case.yaml").write_text("reason: a test\nrollouts: drawn\n")
    with pytest.raises(GoldenError, match="has rollouts 'drawn': write recorded or sampled"):
        GoldenStore(tmp_path).case("mine")
