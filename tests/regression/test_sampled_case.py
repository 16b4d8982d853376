"""The case whose rollouts are sampled in every replay; the faults of the sampler are in test_faults.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from regress.compare.verdicts.verdict import Verdict
from regress.errors import GoldenError, ReplayError
from regress.golden.golden_case import GREEDY
from regress.golden.golden_directory import GoldenStore
from regress.replay import case_recording
from regress.replay.case_run import replay
from regress.replay.case_truth import require_rollouts
from regress.replay.fault_injection import injected
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS
from tests.faults.sampler import sampler_without_temperature

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENS, LOG_PROBS, MISMATCH = "trajectory", "sampler_log_probs", "mismatch"


def _judged(folder: Path) -> list[Verdict]:
    """Return the verdicts of a replay that are not ok."""
    chosen = Replay(GoldenStore(GOLDEN).case("rollout"), VARIANTS["base"], Precision.FLOAT64)
    dump = replay(chosen.case, chosen.variant, chosen.precision, folder / "replay")
    verdicts = judge_replay(chosen.case, dump, chosen.plan, chosen.precision)
    return [verdict for verdict in verdicts if not verdict.ok]


@pytest.mark.extended
def test_the_mismatch_of_sampler_and_trainer_is_a_quantity_of_its_own(tmp_path: Path) -> None:
    """Where the trainer's log-probs are at another temperature, the sampler is as it was and its tokens too."""

    def at_another_temperature(patch: Any) -> None:
        from regress.engine.causal_lm_policy import LocalPolicy

        right = LocalPolicy._token_log_probs

        def colder(self: LocalPolicy, logits: Any, targets: Any, entropy: Any) -> Any:
            return right(self, logits * 1.01, targets, entropy)

        patch.setattr(LocalPolicy, "_token_log_probs", colder)

    with injected(at_another_temperature):
        failed = _judged(tmp_path)
    first_step = {verdict.quantity for verdict in failed if verdict.place.step == 0}
    assert MISMATCH in first_step
    assert not {TOKENS, LOG_PROBS} & first_step


@pytest.mark.extended
def test_a_decision_near_its_boundary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN / "rollout", tmp_path / "rollout")
    case = GoldenStore(tmp_path).case("rollout")
    monkeypatch.setattr(case_recording, "MARGIN", 0.5)
    with pytest.raises(ReplayError, match="a decision of the sampler lies within"):
        case_recording.sample_rollouts(case, tmp_path / "work")
    assert (tmp_path / "rollout" / GREEDY).is_dir()


@pytest.mark.extended
def test_values_of_other_rollouts_are_never_golden(tmp_path: Path) -> None:
    case = GoldenStore(GOLDEN).case("rollout")
    with injected(sampler_without_temperature):
        dump = replay(case, VARIANTS["base"], Precision.FLOAT64, tmp_path)
    with pytest.raises(ReplayError, match="record the case again: regress golden record rollout"):
        require_rollouts(case, dump)


def test_rollouts_are_recorded_or_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "case.yaml").write_text("reason: a test\nrollouts: drawn\n")
    with pytest.raises(GoldenError, match="has rollouts 'drawn': write recorded or sampled"):
        GoldenStore(tmp_path).case("mine")
