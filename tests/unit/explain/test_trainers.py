"""`explain_dump` on a bench of trainers: it names what they do, and says nothing false."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_bench import LONGEST, Loss, Run, World, objective_advantages, preset, record, trl, trl_advantages

from regress import explain_dump
from regress.explain.statement import Explanation
from regress.grpo.presets import PRESETS, make_objective

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean/microbatch",
    "sapo": "seq-mean-token-mean/microbatch",
    "bnpo": "token-mean/microbatch",
    "dr_grpo": "seq-mean-token-sum-norm/microbatch",
    "luspo": "seq-mean-token-sum/microbatch",
    "dapo": "token-mean/global",
    "cispo": "token-mean/global",
}
DIVIDED = {
    "group": "divided by the standard deviation of the group (sample deviation)",
    "batch": "divided by the standard deviation of the batch (sample deviation)",
    "none": "not divided",
}
WHITENED = {
    "reinforce_plus_plus": "reward, whitened over tokens (sample deviation)",
    "reinforce_plus_plus_baseline": "reward minus the mean of the group, whitened over tokens (sample deviation)",
}


@dataclass(frozen=True)
class Case:
    """A trainer, and what is true of it."""

    name: str
    run: Run
    loss: Loss
    aggregation: str
    advantages: str
    preset: str = ""
    scale: str = "group"
    beta: float = 0.0
    kl: str = "none"
    entropy: float = 0.0
    clip: tuple[float, float] = (0.8, 1.2)
    cap: float = 5.0
    objective: Any = field(default=None, compare=False)

    def scores(self, world: World) -> Tensor:
        return trl_advantages(world, self.scale)


def trl_cases() -> list[Case]:
    cases = []
    for number, (loss_type, accumulation) in enumerate((t, a) for t in AGGREGATIONS for a in (1, 2, 4)):
        scale = ("group", "batch", "none")[number % 3]
        beta, entropy = (0.0, 0.05)[number % 2], (0.0, 0.0, 0.02)[(number // 2) % 3]
        off = 0.3 if accumulation == 2 and loss_type not in ("luspo",) else 0.0
        run = Run(
            number,
            temperature=(1.0, 0.7, 1.3)[number % 3],
            accumulation=accumulation,
            ranks=2 if number % 4 == 3 else 1,
            off_policy=off,
            tools=number % 5 == 4,
        )
        loss = trl(loss_type, beta=beta, entropy_coef=entropy)
        words = f"reward minus the mean of the group, {DIVIDED[scale]}"
        kl = "k3 times the ratio" if beta else "none"
        name = f"trl:{loss_type}-{accumulation}"
        case = Case(name, run, loss, AGGREGATIONS[loss_type], words, "", scale, beta, kl, entropy)
        cases.append(case)
    return cases


def preset_cases() -> list[Case]:
    cases = []
    for number, name in enumerate(PRESETS):
        objective = make_objective(name)
        changes = {"kl_coef": 0.0} if objective.kl_in_reward else {}
        objective = make_objective(name, **changes)
        run = Run(100 + number, accumulation=(2, 4, 1)[number % 3], off_policy=(0.0, 0.2)[number % 2])
        if objective.advantage in WHITENED:
            words = WHITENED[objective.advantage]
        elif objective.advantage == "constant":
            words = "1 for every sample"
        else:
            baseline = (
                "mean of the group" if objective.advantage == "grpo" else "mean of the others of the group"
            )
            words = f"reward minus the {baseline}, {DIVIDED[objective.scale]}"
        kl = objective.kl_estimator + (" times the ratio" if objective.kl_bias_correction else "")
        cases.append(
            Case(
                name,
                run,
                preset(objective),
                f"{objective.aggregation}/{objective.denominator_scope}",
                words,
                name,
                beta=objective.kl_coef,
                kl=kl if objective.kl_coef else "none",
                clip=objective.clip_range,
                cap=objective.clip_range[1],
                objective=objective,
            )
        )
    return cases


CASES = [*trl_cases(), *preset_cases()]
BY_DEFAULT = {
    "trl:dapo-4",
    "trl:grpo-2",
    "trl:bnpo-2",
    "trl:dr_grpo-4",
    "trl:cispo-1",
    "dapo",
    "verl:gspo",
    "trl:rloo",
}


def explained(case: Case, folder: Path) -> Explanation:
    world = World(case.run)
    return explain_dump(record(world, case.loss, case.scores(world), folder))


def assert_nothing_false(found: Explanation, case: Case) -> None:
    assert not found.departures, found.to_text()
    said = {statement.subject: statement for statement in found.statements}
    if "temperature" in said:
        assert said["temperature"].values[0] == pytest.approx(case.run.temperature, rel=1e-3)
    assert "scale" not in said
    if "mask" in said:
        assert said["mask"].values == ("as expected",)
    if "advantages" in said:
        assert case.advantages in said["advantages"].values
    if "aggregation" in said:
        assert case.aggregation in said["aggregation"].values, found.to_text()
    if "kl" in said:
        assert case.kl in said["kl"].values, found.to_text()
        if case.beta:
            assert any(c == pytest.approx(case.beta, rel=1e-4) for c in said["kl"].evidence["coefficient"])
    if "entropy" in said and case.entropy:
        assert f"token-mean/microbatch: {case.entropy:.5g}" in said["entropy"].values, found.to_text()
    elif "entropy" in said:
        assert said["entropy"].values == ("none",)
    if "clip" in said:
        if said["clip"].values[0] == "capped":
            assert "cispo" in case.name
            assert said["clip"].values[2] == pytest.approx(case.cap, rel=1e-4)
            return
        low, high = said["clip"].values
        assert low is None or low[0] <= case.clip[0] <= low[1], found.to_text()
        assert high is None or high[0] <= case.clip[1] <= high[1], found.to_text()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in BY_DEFAULT else pytest.mark.extended)
        for case in CASES
    ],
)
def test_what_a_trainer_does_is_named(case: Case, tmp_path: Path) -> None:
    found = explained(case, tmp_path / "dump")
    assert_nothing_false(found, case)
    for subject in ("temperature", "mask", "aggregation", "advantages", "entropy"):
        assert found.about(subject) is not None, found.to_text()


def test_the_bench_holds_every_preset_and_loss() -> None:
    assert len(CASES) >= 42
    assert {case.preset for case in CASES} >= set(PRESETS)
    assert max(len(t.tokens) - t.prompt_length for t in World(Run()).trajectories) < LONGEST


@pytest.mark.parametrize("seed", [0, 13])
def test_ratios_of_whole_samples_are_clipped_by_themselves(seed: int, tmp_path: Path) -> None:
    """The derivative of a product of ratios has the number of tokens as a factor, and the clip does not."""
    case = next(case for case in CASES if case.name == "trl:rloo")
    found = explained(replace(case, run=replace(case.run, seed=seed, off_policy=0.1)), tmp_path / "dump")
    assert_nothing_false(found, case)
    clip = found.about("clip")
    assert clip is not None
    assert clip.evidence["clipped of positive advantage"] > 0


def test_objective_advantages_are_those_of_the_trainer() -> None:
    world = World(Run())
    of_samples = trl_advantages(world).repeat_interleave(world.mask.sum(1).long())
    found = objective_advantages(world, make_objective("trl:dapo"))
    torch.testing.assert_close(found, of_samples, check_dtype=False)
