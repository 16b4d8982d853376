"""Parts of a step that ranks exchange: whose problem is told, and whose loss counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from regress.engine.engine_ranks import SingleProcess
from regress.engine.training_passes import Part
from regress.engine.training_step import step_outcome
from regress.errors import NotFinite, RegressError
from regress.grpo.argument_checks import InputError
from regress.grpo.update_metrics import Metric
from regress.layout import Mesh, RankPlan


def test_another_problem_is_told_before_one_of_finite_values() -> None:
    parts = [
        Part(problem=NotFinite("late")),
        Part(problem=RegressError("first"), grad_norm=math.nan),
        Part(problem=InputError("second")),
    ]

    class Three(SingleProcess):
        def gather(self, value: Any) -> list[Any]:
            return parts

    with pytest.raises(RegressError, match=r"^first$"):
        step_outcome(Three(), Part())


def test_ranks_with_the_same_loss_count_once() -> None:
    def part(number: int) -> Part:
        return Part(float(number), {"x": Metric(float(number), 1)}, {"policy": float(number)}, grad_norm=0.0)

    class Four(SingleProcess):
        def __init__(self) -> None:
            self.plan = RankPlan(Mesh(dp=2, tp=2))

        def gather(self, value: Any) -> list[Any]:
            places = [self.plan.mesh.coordinates(rank) for rank in range(4)]
            return [part(1 + 10 * place["dp"] + 100 * place["tp"]) for place in places]

    outcome = step_outcome(Four(), Part())
    assert (outcome.loss, outcome.terms, outcome.grad_norm) == (12.0, {"policy": 12.0}, 0.0)
    assert (outcome.metrics["x"].total, outcome.metrics["x"].count) == (12.0, 2)
