"""A softmax in half precision hides in the tolerance of a half-precision run, and shows given that run's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from regress.compare.update_records import Records
from regress.compare.updates.update_invariants import judge_invariants
from regress.compare.verdicts.verdict import Verdict
from regress.engine import causal_lm_policy
from regress.golden.golden_directory import GoldenStore
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.replay.case_run import replay
from regress.replay.replay_judge import judge_replay, records_of
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[2] / "golden"
GIVEN = "given_logits"


def in_half_precision(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy: Any, **_: Any
) -> TokenLogProbs:
    log_p = (logits / temperature).bfloat16().log_softmax(-1)
    chosen = log_p.gather(-1, targets[..., None]).squeeze(-1).float()
    return TokenLogProbs(chosen, -(log_p.exp() * log_p).sum(-1).float() if entropy else None)


def entropy_in_half_precision(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy: Any, **_: Any
) -> TokenLogProbs:
    wide = (logits.float() / temperature).log_softmax(-1)
    log_p = wide.bfloat16()
    chosen = wide.gather(-1, targets[..., None]).squeeze(-1)
    return TokenLogProbs(chosen, -(log_p.exp() * log_p).sum(-1).float() if entropy else None)


def judged(folder: Path, variant: str, precision: Precision) -> list[Verdict]:
    chosen = Replay(GoldenStore(GOLDEN).case("dense"), VARIANTS[variant], precision)
    dump = replay(chosen.case, chosen.variant, precision, folder / "replay")
    return judge_replay(chosen.case, dump, chosen.plan, precision)


@pytest.mark.parametrize(
    "variant", ["base", *(pytest.param(v, marks=pytest.mark.extended) for v in ("mbs4", "chunked"))]
)
def test_half_precision_inside_the_softmax_of_a_half_precision_run(tmp_path: Path, variant: str) -> None:
    with mock.patch.object(causal_lm_policy, "token_log_probs", in_half_precision):
        failed = [v for v in judged(tmp_path, variant, Precision.BFLOAT16) if not v.ok]
    found = next(v for v in failed if v.name == GIVEN)
    assert found.multiple > 10
    assert "log_probs" in found.detail or "entropy" in found.detail
    assert not [v for v in failed if v.quantity == "activations"]


@pytest.mark.extended
def test_half_precision_inside_the_entropy_alone(tmp_path: Path) -> None:
    with mock.patch.object(causal_lm_policy, "token_log_probs", entropy_in_half_precision):
        failed = [v for v in judged(tmp_path, "base", Precision.BFLOAT16) if not v.ok]
    assert "entropy" in next(v for v in failed if v.name == GIVEN).detail


@pytest.mark.extended
@pytest.mark.parametrize("precision", [Precision.FLOAT64, Precision.FLOAT32, Precision.BFLOAT16])
def test_a_healthy_run_holds_with_room(tmp_path: Path, precision: Precision) -> None:
    chosen = Replay(GoldenStore(GOLDEN).case("dr_grpo"), VARIANTS["packed-chunked-mbs4"], precision)
    dump = replay(chosen.case, chosen.variant, precision, tmp_path / "replay")
    for update in chosen.plan:
        verdicts = judge_invariants(
            Records.of(records_of(dump, update), update.frame),
            place=update.place,
            planned=update.records,
            config=dump.manifest.provenance.config,
        )
        (found,) = [v for v in verdicts if v.name == GIVEN]
        assert found.ok
        assert found.count
