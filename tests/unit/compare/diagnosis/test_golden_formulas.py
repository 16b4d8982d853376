"""Diagnosis runs formulas on golden values: they give what the engine recorded, or no cause can be proven."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from regress.compare.diagnosis.counterfactuals import gives
from regress.compare.diagnosis.token_formulas import FORMULAS, TOKEN_GRADIENTS, TokenFormulas
from regress.engine.config import to_plain
from regress.golden.golden_case import GoldenCase
from regress.replay.case_truth import formulas_of
from regress.replay.replay_configuration import replay_config
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE
from tests.golden_cases import cases

CASES = [case for case in cases() if not case.sampled]
NORMALIZED = "weights are normalized over the rollout, of which rejection left tokens out"
OTHERWISE = {
    "cispo_kl": ("the coefficient of the KL in the reward adapts", {"advantages"}),
    "geo_mean": ("the coefficient of the KL in the reward adapts", {"advantages"}),
    "dppo_kl": ("each reward function is estimated by itself", {"advantages"}),
    "vespo_mask": (NORMALIZED, {"sampler_weights"}),
    "kl_cov": (
        f"rewards are normalized by function, and {NORMALIZED}",
        {"advantages", "sampler_weights", "policy_loss", "token_loss", *TOKEN_GRADIENTS},
    ),
}
"""Case -> why its formulas do not know what the engine did, and the quantities of which that is true."""


def each_of(case: GoldenCase, folder: Path) -> Iterator[TokenFormulas]:
    """Yield the formulas of each update."""
    config = to_plain(replay_config(case, BASE, Precision.FLOAT64, len(case.trajectories()), folder))
    for update in Replay(case, BASE, Precision.FLOAT64).plan:
        yield formulas_of(case, update, case.truth(update.where), config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_objective_gives_the_golden_values(case: GoldenCase, tmp_path: Path) -> None:
    wrong = set()
    for formulas in each_of(case, tmp_path):
        for quantity in FORMULAS:
            golden, formula = formulas.golden(quantity), formulas.formula(quantity)
            if golden is not None and (formula is None or not gives(formula, quantity, golden)):
                wrong.add(quantity)
    _, expected = OTHERWISE.get(case.name, ("", set()))
    assert wrong == expected
