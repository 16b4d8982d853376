"""`explain_dump` on a bench of trainers: it names what they do, and says nothing false."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_bench import objective_advantages, preset
from torch import Tensor
from trainer_bench import LONGEST, Loss, Run, World, in_grid, record, trl, trl_advantages

from regress import explain_dump
from regress.explain.statement import Explanation, Statement
from regress.grpo import objective_catalogue
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import PRESETS, make_objective

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
MEAN, OTHERS = "reward minus the mean of the group", "reward minus the mean of the others of the group"
BEST = "best reward of the group minus the second best, for the best sample alone"
WHITE = "whitened over tokens (sample deviation)"
ADVANTAGES = {
    "grpo": MEAN + ", {scale}",
    "rloo": OTHERS + ", {scale}",
    "reinforce_plus_plus": f"reward, {WHITE}",
    "reinforce_plus_plus_baseline": f"{MEAN}, {WHITE}",
    "constant": "1 for every sample",
    "opo": f"{MEAN} weighted by length (OPO)",
    "gpg": f"{MEAN}, not divided",  # no reward of the bench is 0
    "grpo_passk": BEST + ", {scale}",
    "gdpo": f"{MEAN}, divided by the standard deviation of the group, {WHITE}",
    "remax": "as recorded",
    "gae": "as recorded",
    "optimal_token_baseline": "as recorded",
    "tir_optimal_token_baseline": "as recorded",
}
"""Names that `explain` has to give each estimator; those that need more than a dump has are recorded."""
NO_RATIO = "1: on policy, or without a ratio"
RATIOS = {
    "token": "the ratio of the token",
    "sequence": "the mean ratio of the sample",
    "sequence_product": "the product of the ratios of the sample",
    "reinforce": NO_RATIO,
    "sapo": "SAPO's gate of the ratio, with temperatures 1 and 1.05",
    "vespo": "VESPO's weight of the sample, with exponents 2 and 3 and decays 3 and 2",
    "geo_mean": "the mean ratio of the sample, of log-ratios clipped at 0.2 (GMPO)",
    "sequence_truncate": "the product of the ratios of the sample, detached",
}
"""Names that `explain` has to give the factor of each loss, sampler correction, or level of the ratio."""
REGIONS = {
    "dppo_tv": "p - p_old",
    "dppo_kl": "the KL between the token and all others, with the sign of p - p_old",
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
    cap: float | None = None
    objective: Any = field(default=None, compare=False)

    def scores(self, world: World) -> Tensor:
        if self.objective is not None:
            return in_grid(world, objective_advantages(world, self.objective))
        return trl_advantages(world, self.scale)

    @property
    def loss_name(self) -> str:
        return "" if self.objective is None else str(self.objective.loss)

    @property
    def ratio(self) -> str:
        """Name of the factor of its advantages; empty where no test knows."""
        if self.objective is None:
            return ""
        correction = self.objective.sampler_correction
        return RATIOS.get(correction) or RATIOS.get(self.loss_name) or RATIOS[self.objective.importance_level]

    @property
    def causes(self) -> set[str]:
        """Factors of its gradients that are a departure: verl adds up the means of microbatches under geo_mean."""
        several = self.run.accumulation > 1
        summed = self.objective is not None and self.objective.denominator_scope == "microbatch_sum"
        return {"the number of microbatches"} if several and summed else set()


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
        case = replace(case, cap=5.0) if loss_type == "cispo" else case
        cases.append(case)
    return cases


def preset_case(name: str, run: Run, **changes: Any) -> Case:
    objective = make_objective(name, **changes)
    if objective.kl_in_reward:
        objective = make_objective(name, **changes | {"kl_coef": 0.0})
    recorded = bool(objective_catalogue.ADVANTAGES[objective.advantage].needs)
    scope = "microbatch" if objective.denominator_scope == "microbatch_sum" else objective.denominator_scope
    kl = objective.kl_estimator + (" times the ratio" if objective.kl_bias_correction else "")
    return Case(
        name,
        replace(run, advantages=run.advantages or recorded),
        preset(objective),
        f"{objective.aggregation}/{scope}",
        ADVANTAGES[objective.advantage].format(scale=DIVIDED[objective.scale]),
        name,
        beta=objective.kl_coef,
        kl=kl if objective.kl_coef else "none",
        clip=clip_of(objective),
        cap=cap_of(objective),
        objective=objective,
    )


def clip_of(objective: Objective) -> tuple[float, float]:
    """Return the bounds of what the loss clips: of the ratio, or of the distance of DPPO."""
    if objective.loss in REGIONS:
        return -objective.clip_low, objective.clip_high
    if objective.loss == "geo_mean":
        return math.exp(-objective.clip_low), math.exp(objective.clip_high)
    if objective.loss in ("ppo_clip", "cispo", "clip_cov"):
        return objective.clip_range
    return 0.0, math.inf


def cap_of(objective: Objective) -> float | None:
    """Return the ratio that larger ones count as, without losing their gradient."""
    if objective.loss == "cispo":
        return objective.clip_range[1]
    return objective.delta if objective.loss in REGIONS else objective.correction_max


def preset_cases() -> list[Case]:
    cases = []
    for number, name in enumerate(PRESETS):
        accumulation = (2, 4, 1)[number % 3]
        if make_objective(name).advantage == "grpo_passk":
            accumulation = (
                1  # one sample of a group has an advantage: a microbatch has too few tokens for a temperature
            )
        run = Run(100 + number, accumulation=accumulation, off_policy=(0.0, 0.2)[number % 2])
        cases.append(preset_case(name, run))
    return cases


NOT_RECORDED = [
    name for name in PRESETS if objective_catalogue.ADVANTAGES[make_objective(name).advantage].needs
]
CASES = [*trl_cases(), *preset_cases()]
BY_DEFAULT = {
    "trl:dapo-4",
    "trl:grpo-2",
    "trl:cispo-1",
    "verl:gspo",
    "trl:rloo",
}


def explained(case: Case, folder: Path) -> Explanation:
    world = World(case.run)
    return explain_dump(record(world, case.loss, case.scores(world), folder))


def assert_nothing_false(found: Explanation, case: Case) -> None:
    text = found.to_text()
    said = {statement.subject: statement for statement in found.statements}
    departures = [set(str(value).split(" or ")) for s in found.departures for value in s.values or ("",)]
    assert all(case.causes & each for each in departures), text
    if "temperature" in said:
        assert said["temperature"].values[0] == pytest.approx(case.run.temperature, rel=1e-3)
    if "scale" in said and case.causes:
        assert "(right where the means of microbatches are to be added up, as by verl's geo_mean)" in text
    if "mask" in said:
        assert said["mask"].values[0] == "as expected"
        selected = len(said["mask"].values) > 1
        assert not selected or (case.objective is not None and case.objective.compares_tokens), text
    if "advantages" in said:
        assert case.advantages in said["advantages"].values, text
    if "aggregation" in said:
        assert case.aggregation in said["aggregation"].values, text
    if "ratio" in said and case.ratio:
        assert {case.ratio, "on policy"} & set(said["ratio"].values), text
    if "preset" in said and case.preset and len(said["preset"].values) != 2:
        assert not said["preset"].values or case.preset in said["preset"].values, text
    if "kl" in said:
        assert case.kl in said["kl"].values, text
        if case.beta:
            assert any(c == pytest.approx(case.beta, rel=1e-4) for c in said["kl"].evidence["coefficient"])
    if "entropy" in said and case.entropy:
        assert f"token-mean/microbatch: {case.entropy:.5g}" in said["entropy"].values, text
    elif "entropy" in said:
        assert said["entropy"].values == ("none",)
    for statement in found.statements:
        if statement.subject == "clip":
            assert_clip_is_true(statement, case, text)


def assert_clip_is_true(clip: Statement, case: Case, text: str) -> None:
    if clip.values[0] == "capped":
        assert clip.values[2] == pytest.approx(case.cap, rel=1e-4), text
        return
    if case.loss_name in REGIONS and "bounds" not in clip.evidence:
        assert clip.text == "no token of this update is clipped", text
        return
    low, high = clip.evidence["bounds"][REGIONS[case.loss_name]] if case.loss_name in REGIONS else clip.values
    assert low is None or low[0] <= case.clip[0] <= low[1], text
    assert high is None or high[0] <= case.clip[1] <= high[1], text


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


@pytest.mark.one_in(2)
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NOT_RECORDED[:1] else pytest.mark.extended)
        for name in NOT_RECORDED
    ],
)
def test_advantages_that_need_what_no_dump_has_are_not_told_from_rewards(name: str, tmp_path: Path) -> None:
    """The values of a critic, rewards of greedy completions, and whole distributions are in no dump."""
    case = preset_case(name, Run(5, off_policy=0.2))
    found = explained(replace(case, run=replace(case.run, advantages=False)), tmp_path / "dump")
    assert_nothing_false(found, case)
    assert {"advantages", "aggregation"} <= set(found.undetermined), found.to_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["verl:dppo_tv", "verl:dppo_kl"])
def test_a_trust_region_of_probabilities_is_not_taken_for_a_clipped_ratio(name: str, tmp_path: Path) -> None:
    case = preset_case(name, Run(3, off_policy=0.7), clip_low=0.05, clip_high=0.05)
    found = explained(case, tmp_path / "dump")
    assert_nothing_false(found, case)
    clip = [statement for statement in found.statements if statement.subject == "clip"][-1]
    assert clip.evidence["clipped of positive advantage"] > 0
    assert REGIONS[case.loss_name] in clip.text


@pytest.mark.extended
def test_tokens_that_clip_cov_draws_are_no_wrong_mask(tmp_path: Path) -> None:
    case = preset_case("verl:clip_cov", Run(129, accumulation=4, off_policy=0.2))
    found = explained(case, tmp_path / "dump")
    assert_nothing_false(found, case)
    mask = found.about("mask")
    assert mask is not None
    assert mask.text.endswith("draws tokens by the covariance of advantage and log-prob (Clip-Cov)")
    (departure,) = explain_dump(tmp_path / "dump", preset="verl:token-mean").departures
    assert departure.subject == "mask"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("off_policy", [0.0, 0.4])
def test_tokens_of_low_entropy_are_no_wrong_mask(off_policy: float, tmp_path: Path) -> None:
    case = preset_case("trl:grpo", Run(2, accumulation=2, off_policy=off_policy), top_entropy_quantile=0.4)
    found = explained(replace(case, preset=""), tmp_path / "dump")
    assert_nothing_false(found, case)
    for subject in ("mask", "aggregation", "advantages"):
        assert found.about(subject) is not None, found.to_text()
    mask = found.about("mask")
    assert mask is not None
    assert mask.values == ("as expected", "keeps tokens of high entropy")


def test_a_constant_in_every_advantage_is_no_kl_of_another_size(tmp_path: Path) -> None:
    """Advantages that are divided and shifted by no known rule: k1 has the derivative of such a shift, too."""
    world = World(Run())
    for shift in (-0.1, 0.1):
        path = record(world, trl(), 1.3 * trl_advantages(world) + shift, tmp_path / f"{shift}")
        found = explain_dump(path)
        assert not found.departures, found.to_text()
        assert found.about("kl") is None
    kl = explain_dump(record(world, trl(), trl_advantages(world) - 0.1, tmp_path / "less")).about("kl")
    assert kl is not None
    assert kl.values[-1] == "none"
    assert "none, and advantages that are all less by 0.1" in kl.text


def test_the_factor_of_gpg_is_no_other_size(tmp_path: Path) -> None:
    """Rewards of 0 multiply the advantages of all samples."""
    case = preset_case("verl:gpg", Run(4, zeros=True))
    words = "reward minus the mean of the group, times samples over those of a reward other than 0 (GPG)"
    case = replace(case, advantages=words)
    found = explained(case, tmp_path / "dump")
    assert_nothing_false(found, case)
    assert found.about("advantages") is not None, found.to_text()


@pytest.mark.extended
def test_an_uncertain_temperature_is_no_entropy_bonus(tmp_path: Path) -> None:
    """A temperature that is off adds its share of the policy's gradient to the derivative by the entropy."""
    run = Run(5009, ranks=2, accumulation=4, off_policy=0.7, zeros=True)
    case = preset_case("trl:grpo", run)
    assert_nothing_false(explained(case, tmp_path / "dump"), case)


@pytest.mark.extended
@pytest.mark.parametrize("number", range(len(PRESETS)), ids=list(PRESETS))
def test_nothing_false_is_said_of_any_preset_off_and_on_policy(number: int, tmp_path: Path) -> None:
    """The bench has each preset either on policy or off: here it is the other way, on two ranks."""
    run = Run(200 + number, ranks=2, off_policy=(0.3, 0.0)[number % 2], tools=number % 3 == 0)
    case = preset_case(list(PRESETS)[number], run)
    assert_nothing_false(explained(case, tmp_path / "dump"), case)
