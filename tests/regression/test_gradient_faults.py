"""Faults between loss and logits, where every value of the forward pass is right: found at the token, and named.

Without gradients of tokens all of them would show first in the gradients of parameters, all of which they break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from regress.compare.diagnosis.causes import Diagnosis, diagnose
from regress.compare.diagnosis.divergence import Divergence, find_divergence
from regress.faults import gradient
from regress.faults.patch import Fault
from regress.golden.store import GoldenStore
from regress.replay.judge import judge_replay
from regress.replay.matrix import Replay
from regress.replay.run import replay
from regress.replay.run_context import run_context_of
from regress.replay.variants import VARIANTS, Precision

GOLDEN = Path(__file__).parents[2] / "golden"
TOKEN, ENTROPY, LOGITS = "token_gradient", "entropy_gradient", "logit_gradient"


@dataclass(frozen=True)
class Case:
    """A fault, where it is looked for, and what is to be said of it: the first rule, or all that may be meant."""

    inject: Callable[[Any], None]
    case: str
    first: str
    rules: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.inject.__name__}-{self.case}"


CASES = (
    Case(gradient.kl_detached, "dense", TOKEN, ("kl-detached",)),
    Case(gradient.normalization_without_gradient, "dense", LOGITS, ("log-softmax-backward",)),
    Case(gradient.entropy_detached, "dr_grpo", ENTROPY, ("entropy-detached",)),
    Case(gradient.loss_divided_by_microbatches, "dense", TOKEN, ("token-gradient-of-microbatches",)),
    # the rest is extended
    Case(gradient.old_log_probs_not_detached, "dense", TOKEN, ("policy-loss-detached",)),
    Case(gradient.old_log_probs_not_detached, "dr_grpo", TOKEN, ("loss-detached",)),
    Case(gradient.kl_gradient_of_another_estimator, "dense", TOKEN, ("kl-gradient-estimator",)),
    Case(gradient.advantages_not_detached, "dense", TOKEN, ("token-gradient",)),
    Case(gradient.gradient_through_the_clip, "dense", TOKEN, ("gradient-through-the-clip",)),
    Case(gradient.gradient_of_the_clipped_term, "dense", TOKEN, ("clip-stops-too-much",)),
    Case(gradient.clip_gradient_on_the_wrong_side, "dense", TOKEN, ("clip-gradient-side",)),
    Case(gradient.ratio_detached, "dense", TOKEN, ("ratio-not-in-the-gradient",)),
    Case(gradient.ratio_detached, "dr_grpo", TOKEN, ("ratio-not-in-the-gradient",)),
    # before the first update ratios are 1, and the two weights have gradients that are the same
    Case(
        gradient.weight_not_detached, "cispo", TOKEN, ("ratio-not-detached", "sampler-weights-not-detached")
    ),
    Case(gradient.ratio_gradient_of_each_token, "gspo", TOKEN, ("ratio-gradient-level",)),
    Case(gradient.loss_scaled, "dense", TOKEN, ("token-gradient-power-of-two",)),
    Case(gradient.loss_reversed, "dense", TOKEN, ("token-gradient-sign",)),
    Case(
        gradient.denominator_of_the_microbatch_on_the_way_back,
        "dense",
        TOKEN,
        ("token-gradient-denominators",),
    ),
    Case(gradient.temperature_without_gradient, "dr_grpo", LOGITS, ("log-softmax-backward",)),
    Case(gradient.entropy_without_gradient, "dr_grpo", LOGITS, ("entropy-backward",)),
    Case(gradient.last_rows_without_gradient, "dense", LOGITS, ("logit-gradient",)),
)
DEFAULT = 4


@pytest.fixture
def found(tmp_path: Path) -> Callable[[Case], tuple[Divergence, list[Diagnosis]]]:
    """The divergence of a replay in microbatches of four with a fault, and its diagnoses."""

    def run(case: Case) -> tuple[Divergence, list[Diagnosis]]:
        chosen = Replay(GoldenStore(GOLDEN).case(case.case), VARIANTS["mbs4"], Precision.FLOAT64)
        with Fault(case.inject).injected():
            dump = replay(chosen.case, chosen.variant, chosen.precision, tmp_path / case.name)
        verdicts = judge_replay(chosen.case, dump, chosen.plan, chosen.precision)
        scene = run_context_of(chosen, dump.manifest.provenance.config)
        divergence = find_divergence(verdicts, scene)
        assert divergence is not None, "not caught"
        return divergence, diagnose(divergence, scene)

    return run


def _some() -> list[Any]:
    rest = pytest.mark.extended
    return [case if i < DEFAULT else pytest.param(case, marks=rest) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", _some(), ids=lambda case: case.name)
def test_a_fault_of_the_backward_pass_is_found_where_it_is_and_named(
    case: Case, found: Callable[[Case], tuple[Divergence, list[Diagnosis]]]
) -> None:
    divergence, diagnoses = found(case)
    first = divergence.first
    assert (first.quantity, first.place.rank, first.place.micro) == (case.first, 0, 0)
    assert first.quantity == first.name
    assert tuple(told.rule for told in diagnoses)[: len(case.rules)] == case.rules
    assert not {*divergence.independent} - {"invariants"}


def test_every_fault_of_the_room_is_tried() -> None:
    made = {
        name
        for name, value in vars(gradient).items()
        if callable(value)
        and getattr(value, "__module__", "") == gradient.__name__
        and [*getattr(value, "__annotations__", {})] == ["patch", "return"]
    }
    assert made == {case.inject.__name__ for case in CASES}
