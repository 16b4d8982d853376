"""The first diagnosis of a change of the engine is right, or there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import UNKNOWN, diagnose
from regress.compare.diagnosis.rules.rule_table import RULES
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.replay_context import run_context_of
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS
from tests.regression.changes.change import Change
from tests.regression.diagnosed_faults import CHANGES

GOLDEN = Path(__file__).parents[2] / "golden"
BY_DEFAULT = (
    "kl_counted_thrice-dense-mbs4",
    "mean_so_far-dense-mbs4",
    "gradients_not_dropped-dense-mbs4",
    "decay_in_the_gradient-dense-mbs4",
    "target_gradient_doubled-dense-mbs4",
)
"""One of each kind of proof: terms, microbatches, the last update, an optimizer's formula, parts of logits."""


def rows() -> list[Any]:
    rest = pytest.mark.extended
    return [pytest.param(one, id=one.name, marks=() if one.name in BY_DEFAULT else rest) for one in CHANGES]


@pytest.mark.parametrize("change", rows())
def test_the_first_diagnosis_is_right_or_there_is_none(change: Change, tmp_path: Path) -> None:
    chosen = Replay(GoldenStore(GOLDEN).case(change.case), VARIANTS[change.variant], Precision.FLOAT64)
    with change.injected as prepare:
        dump = replay(
            chosen.case, chosen.variant, chosen.precision, tmp_path, steps=change.steps, prepare=prepare
        )
    plan = [update for update in chosen.plan if update.step < change.steps]
    verdicts = judge_replay(chosen.case, dump, plan, chosen.precision)
    scene = run_context_of(chosen, dump.manifest.provenance.config)
    found = find_divergence([v for v in verdicts if (v.place.step or 0) < change.steps], scene)
    assert found is not None, "not caught"
    told = diagnose(found, scene)
    print(f"{change.name}: {told[0]}")
    assert told[0].rule in (UNKNOWN, *change.rules)
    assert told[0].rule != UNKNOWN or change.name not in BY_DEFAULT


def test_the_list_names_rules_that_exist_and_each_change_once() -> None:
    known = {rule.id for rule in RULES}
    assert {rule for change in CHANGES for rule in change.rules} <= known
    assert len({change.name for change in CHANGES}) == len(CHANGES) >= 50
    assert {*BY_DEFAULT} <= {change.name for change in CHANGES}
