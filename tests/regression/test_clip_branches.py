"""A replay is judged in the branches of the clip that it took where rounding decided, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.dump_reader import DumpReader
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_reads import truth_of
from regress.replay.case_run import replay
from regress.replay.fault_injection import injected
from regress.replay.probes.loss_probes import coefficients_off, minimum_before_the_advantage
from regress.replay.replay_judge import judge_replay, stored_tolerances
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

CASE = GoldenStore(Path(__file__).parents[2] / "golden").case("dense")
CHOSEN = Replay(CASE, VARIANTS["mbs3"], Precision.FLOAT32)
STEP = 2
RATIOS = 0.02
"""Tolerance of ratios: about that of bfloat16."""


def at_the_bound() -> tuple[int, float]:
    """Token of negative advantage that is next to the lower bound and not clipped, and the way over it."""
    truth = CASE.truth(f"step_{STEP:06}")
    ratio, advantage = truth["ratio"]["prob_ratio"], truth["advantages"]["advantages"]
    token = int(np.where((advantage < 0) & (ratio > 0.8), ratio, np.inf).argmin())
    return token, float(np.log(ratio[token] / 0.8)) * 1.1


def over_the_bound(run: Any, *, scale: float = 1.0) -> None:
    """Carry that token over the bound, and scale all gradients of its update."""
    token, way = at_the_bound()
    known = run.trainer._train_step

    def step(mini: Any) -> Any:
        if run.trainer.updates == STEP:
            old = mini.tokens.old_log_probs.clone()
            old[int(mini.batch.mask[:token].sum())] += way
            mini = replace(mini, tokens=replace(mini.tokens, old_log_probs=old))
        return known(mini)

    run.trainer._train_step = step
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.register_hook(lambda gradient: gradient * (scale if run.trainer.updates == STEP else 1.0))


def tolerance(quantity: str) -> Tolerance | None:
    loose = quantity in ("ratio", "old_log_probs")
    return Tolerance(RATIOS) if loose else stored_tolerances(CASE, Precision.FLOAT32)(quantity)


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("carried")
    return replay(CASE, CHOSEN.variant, CHOSEN.precision, folder, prepare=over_the_bound)


def judged(dump: Any, **options: Any) -> list[Verdict]:
    return judge_replay(CASE, dump, CHOSEN.plan, CHOSEN.precision, tolerance=tolerance, **options)


def failing(verdicts: list[Verdict]) -> set[str]:
    return {verdict.quantity for verdict in verdicts if not verdict.ok}


def branches(verdicts: list[Verdict]) -> list[tuple[int | None, int]]:
    return [(v.place.step, v.count) for v in verdicts if v.name == "clip_branches"]


def test_a_token_that_rounding_carried_over_a_bound_is_no_failure(carried: Any) -> None:
    found = judged(carried)
    assert failing(found) == set()
    assert branches(found) == [(STEP, 1)]
    assert {"token_gradient", "gradient"} <= failing(judged(carried, truth=truth_of(CASE)))


def test_what_else_is_wrong_fails_beside_it(tmp_path: Path) -> None:
    def scaled(run: Any) -> None:
        over_the_bound(run, scale=1.01)

    found = judged(replay(CASE, CHOSEN.variant, CHOSEN.precision, tmp_path, prepare=scaled))
    assert branches(found) == [(STEP, 1)]
    assert next(verdict.quantity for verdict in found if not verdict.ok) == "gradient"


def test_a_dump_with_a_gap_is_judged_by_the_stored_values(carried: Any) -> None:
    class Gap(DumpReader):
        def names(self, *args: Any, **chosen: Any) -> list[str]:
            found = super().names(*args, **chosen)
            return [
                name for name in found if not name.startswith(f"token_gradient/step_{STEP:06}_rank0_micro1")
            ]

    found = judged(Gap(carried.folder))
    assert branches(found) == []
    assert {"missing", "drift"} <= {verdict.status for verdict in found}


def test_ratios_beyond_their_tolerance_are_none_of_rounding(carried: Any) -> None:
    found = judge_replay(CASE, carried, CHOSEN.plan, CHOSEN.precision)
    assert next(verdict.quantity for verdict in found if not verdict.ok) == "old_log_probs"
    assert branches(found) == []


@pytest.mark.parametrize("inject", [coefficients_off, minimum_before_the_advantage])
def test_an_engine_that_does_not_give_the_golden_values_gives_no_other_ones(
    carried: Any, inject: Callable[[Any], None]
) -> None:
    """Who changed the engine has the change in the dump and in all that it computes anew."""
    with injected(inject):
        found = judged(carried)
    assert branches(found) == []
    assert {"token_gradient", "gradient"} <= failing(found)
