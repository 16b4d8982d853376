"""What a step reports is judged: a metric that is computed or combined wrongly is caught and named, nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regress.compare.verdicts.verdict import Verdict
from regress.dump.metrics_file import METRICS
from regress.golden.store import GoldenStore
from regress.replay.judge import judge_replay, records_of
from regress.replay.layouts import LAYOUTS
from regress.replay.matrix import Replay
from regress.replay.metrics_file import judge_metrics_file
from regress.replay.run import replay
from regress.replay.variants import VARIANTS, Precision

sys.path.insert(0, str(Path(__file__).parent))
import metric_faults as bugs  # by the name under which the ranks import it

GOLDEN = Path(__file__).parents[2] / "golden"
UPDATE, STEP = "metrics", "step_metrics"


@dataclass(frozen=True)
class Case:
    """A fault, where it is looked for, and the metrics that must fail, among others."""

    inject: Callable[[Any], None]
    names: tuple[str, ...]
    quantity: str = UPDATE
    variant: str = "mbs4"
    case: str = "dense"

    @property
    def id(self) -> str:
        return f"{self.inject.__name__}-{self.case}-{self.variant}"


def _training(*names: str) -> tuple[str, ...]:
    return tuple(f"training_step/{name}" for name in names)


CASES = (
    Case(bugs.mean_of_means, _training("policy_loss", "kl", "entropy", "approx_kl/k3", "ratio/mean")),
    Case(bugs.clip_sides_swapped, _training("clip_ratio/low", "clip_ratio/high")),
    Case(bugs.advantages_by_token, ("rollouts/advantages_mean", "rollouts/advantages_std"), STEP),
    # the rest is extended
    Case(bugs.last_microbatch, _training("clip_ratio/low", "ratio/min")),
    Case(bugs.loss_averaged, _training("loss")),
    Case(bugs.dual_clip_with_the_low_one, _training("clip_ratio/dual")),
    Case(bugs.second_estimator, _training("approx_kl/k3")),
    Case(bugs.reversed_kl, _training("approx_kl/k1")),
    Case(bugs.entropy_of_prompts, _training("entropy")),
    Case(bugs.greatest_ratio_absolute, _training("ratio/max")),
    Case(bugs.norm_after_clipping, _training("grad_norm"), case="gpt2"),
    Case(bugs.next_learning_rate, _training("learning_rate")),
    Case(bugs.terms_without_coefficients, _training("dr_component_kl")),
    Case(bugs.population_deviation, ("rollouts/returns_std",), STEP),
    Case(bugs.length_with_the_prompt, ("rollouts/completion_length_mean",), STEP),
    Case(bugs.first_update_only, ("training_epoch/loss_mean",), STEP, case="cispo"),
)
RANKS = (
    Case(bugs.mean_over_ranks, _training("policy_loss", "kl", "clip_ratio/low"), variant="dp2"),
    # the rest is extended
    Case(bugs.own_metrics, _training("kl"), variant="dp2"),
    Case(bugs.first_rank_only, _training("kl"), variant="cp2"),
    Case(bugs.every_rank_counted, _training("loss"), variant="tp2"),
)


def _some(cases: tuple[Case, ...], default: int) -> list[Any]:
    rest = pytest.mark.extended
    return [case if i < default else pytest.param(case, marks=rest) for i, case in enumerate(cases)]


def _judged(case: Case, folder: Path, launch: Any = None) -> list[Verdict]:
    """Return the verdicts of a replay that are not ok."""
    chosen = Replay(
        GoldenStore(GOLDEN).case(case.case), {**VARIANTS, **LAYOUTS}[case.variant], Precision.FLOAT64
    )
    dump = replay(chosen.case, chosen.variant, chosen.precision, folder / case.id, launch=launch)
    verdicts = judge_replay(chosen.case, dump, chosen.plan, chosen.precision)
    return [verdict for verdict in verdicts if not verdict.ok]


def _require(case: Case, failed: list[Verdict]) -> None:
    assert {*case.names} <= {verdict.name for verdict in failed if verdict.quantity == case.quantity}
    assert {verdict.quantity for verdict in failed} <= {UPDATE, STEP, "replicas", "invariants"}
    assert failed[0].quantity == case.quantity
    worst = max(verdict.multiple for verdict in failed if verdict.name == case.names[0])
    assert worst >= 1e3


@pytest.mark.parametrize("case", _some(CASES, 3), ids=lambda case: case.id)
def test_a_metric_that_is_wrong_is_named(case: Case, tmp_path: Path) -> None:
    with bugs.injected(case.inject):
        failed = _judged(case, tmp_path)
    _require(case, failed)


@pytest.mark.parametrize("case", _some(RANKS, 1), ids=lambda case: case.id)
def test_a_metric_that_ranks_combine_wrongly_is_named(case: Case, tmp_path: Path) -> None:
    _require(case, _judged(case, tmp_path, bugs.BrokenRanks(case.inject)))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("training_step/kl", True),
        ("rollouts/returns_std", False),
        ("rollouts/total_rollouts", False),
        ("final/total_batches", False),
    ],
)
def test_a_file_of_metrics_that_holds_another_number_is_named(
    tmp_path: Path, name: str, update: bool
) -> None:
    """What the program writes is compared with what its steps reported."""
    chosen = Replay(GoldenStore(GOLDEN).case("dense"), VARIANTS["tracking-on"], Precision.BITWISE)
    dump = replay(chosen.case, chosen.variant, chosen.precision, tmp_path)
    records = partial(records_of, dump)
    assert all(verdict.ok and verdict.count for verdict in judge_metrics_file(dump, chosen.plan, records))
    path = tmp_path / METRICS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(row for row in reversed(rows) if name in row and ("update" in row) == update)
    row[name] += 1e-9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = [verdict for verdict in judge_metrics_file(dump, chosen.plan, records) if not verdict.ok]
    assert len(failed) == 1
    assert name in failed[0].detail
