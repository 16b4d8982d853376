"""`explain_dump` on a bench of trainers: it names what they do, says nothing false, and names what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from trainer_bench import LONGEST, Loss, Run, World, objective_advantages, preset, record, trl, trl_advantages

from regress import explain_dump
from regress.cli import main
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap
from regress.errors import CompareError, ConfigError
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


FAULTS: dict[str, tuple[Run, Loss, dict[str, Any], str, str]] = {
    "denominator of the microbatch": (
        Run(accumulation=2),
        trl(fault="denominator of the microbatch"),
        {},
        "aggregation",
        "tokens of each microbatch",
    ),
    "factor of ranks": (Run(ranks=2), trl(fault="factor of ranks"), {}, "scale", "the number of ranks"),
    "population deviation": (Run(), trl(), {"ddof": 0}, "advantages", "population deviation"),
    "mask off by one": (
        Run(accumulation=2),
        trl(fault="mask off by one"),
        {},
        "mask",
        "lacks 11 tokens in 11 samples, the last token of each",
    ),
    "mask shifted": (
        Run(),
        trl("grpo", fault="mask shifted"),
        {},
        "mask",
        "in addition 12 tokens in 12 samples, the token before the first of each",
    ),
    "shifted targets": (Run(shift=1), trl(), {}, "targets", "shifted by +1"),
    "missing temperature": (Run(sampled=0.7), trl(), {}, "temperature", "sampled at 0.7"),
    "KL detached": (
        Run(),
        trl(beta=0.05, fault="kl detached"),
        {},
        "detached",
        "no gradient: it is detached",
    ),
    "ratio not detached": (Run(), trl("cispo", fault="ratio not detached"), {}, "detached", "not detached"),
    "entropy on masked tokens": (
        Run(),
        trl(entropy_coef=0.05, fault="entropy on masked tokens"),
        {},
        "entropy",
        "40 tokens outside of the loss mask",
    ),
    "clip sides": (Run(off_policy=0.3), trl(fault="clip sides"), {}, "clip", "the wrong side"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    run, loss, scores, subject, words = FAULTS[name]
    world = World(run)
    found = explain_dump(record(world, loss, trl_advantages(world, **scores), tmp_path / "dump"))
    texts = [statement.text for statement in found.statements if statement.subject == subject]
    assert any(words in text for text in texts), found.to_text()
    if subject not in ("aggregation", "advantages"):  # these are what other trainers do on purpose
        assert {s.subject for s in found.departures} <= {subject, "mask"}, found.to_text()
        assert any(words in s.text for s in found.departures)
    else:
        assert not found.departures


@pytest.mark.parametrize(
    ("loss_type", "scale", "names"),
    [
        ("dapo", "group", {"trl:dapo", "trl:cispo"}),
        ("bnpo", "group", {"trl:bnpo"}),
        ("grpo", "group", {"trl:grpo"}),
    ],
    ids=["dapo", "bnpo", "grpo"],
)
def test_presets_with_the_same_gradients_are_named_and_no_others(
    loss_type: str, scale: str, names: set[str], tmp_path: Path
) -> None:
    world = World(Run(accumulation=2))
    found = explain_dump(record(world, trl(loss_type), trl_advantages(world, scale), tmp_path / "dump"))
    said = found.about("preset")
    assert said is not None, found.to_text()
    assert names <= set(said.values)
    others = {
        name for name in PRESETS if make_objective(name).eps != 1e-4 and make_objective(name).scale == "group"
    }
    assert not set(said.values) & others


def test_the_departure_from_an_expected_preset_is_the_field_that_differs(tmp_path: Path) -> None:
    world = World(Run(accumulation=2))
    path = record(world, trl(), trl_advantages(world, ddof=0), tmp_path / "dump")
    found = explain_dump(path, preset="trl:dapo")
    (departure,) = found.departures
    assert departure.values == ("trl:dapo", {"ddof": 0})
    assert "ddof 0 in place of 1" in departure.text
    said = explain_dump(path).about("preset")
    assert said is not None
    assert "the nearest preset" in said.text
    with pytest.raises(ConfigError, match="the nearest preset is 'trl:dapo'"):
        explain_dump(path, preset="trl:dap")


def test_another_size_is_no_preset(tmp_path: Path) -> None:
    """A constant factor without a name: its size under each weight, and presets only in proportion."""

    def loss(world: World, batch: Any, facts: dict[str, Any]) -> Tensor:
        return 0.2 * trl("dapo")(world, batch, facts)

    world = World(Run())
    found = explain_dump(record(world, loss, trl_advantages(world), tmp_path / "dump"))
    (departure,) = found.departures
    assert departure.subject == "scale"
    assert "0.2 x 1 / tokens of the whole update" in departure.text
    said = found.about("preset")
    assert said is not None
    assert said.values == ()
    assert "trl:dapo times 0.2" in said.text


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("dapo", "token-mean"), ("grpo", "seq-mean-token-mean")]
)
def test_groups_alone_tell_the_weights(loss_type: str, aggregation: str, tmp_path: Path) -> None:
    """Neither rewards nor advantages: samples with one prompt, whose centred advantages sum to 0."""
    world = World(Run(rewards=False, accumulation=2))
    found = explain_dump(record(world, trl(loss_type), trl_advantages(world), tmp_path / "dump"))
    weights = found.about("weights")
    assert weights is not None, found.to_text()
    assert set(weights.values) & {aggregation} or loss_type == "dapo"
    assert ("seq-mean-token-mean" in weights.values) == (loss_type == "grpo")
    denominator = found.about("aggregation")
    assert denominator is not None, found.to_text()
    assert f"{aggregation}/global" in denominator.values
    assert found.about("advantages") is None
    assert "tap_trajectories" in found.undetermined["advantages"]


def test_advantages_that_are_not_centred_tell_nothing_without_rewards(tmp_path: Path) -> None:
    world = World(Run(rewards=False))
    found = explain_dump(record(world, trl(), world.rewards, tmp_path / "dump"))
    assert found.about("weights") is None
    assert found.about("aggregation") is None


def test_recorded_advantages_need_no_rewards_and_get_the_name_of_their_rule_with_them(tmp_path: Path) -> None:
    for rewards in (False, True):
        world = World(Run(rewards=rewards, advantages=True, accumulation=2))
        found = explain_dump(record(world, trl(), trl_advantages(world), tmp_path / str(rewards)))
        advantages, aggregation = found.about("advantages"), found.about("aggregation")
        assert advantages is not None, found.to_text()
        assert aggregation is not None
        assert "token-mean/global" in aggregation.values
        assert advantages.text.startswith("as recorded")
        assert ("deviation of the group (sample deviation)" in advantages.text) == rewards


def test_noise_makes_an_explanation_silent_and_not_wrong(tmp_path: Path) -> None:
    """Gradients in bfloat16: what is said holds, what cannot be told is not said."""
    world = World(Run(accumulation=2, coarse=True))
    found = explain_dump(record(world, trl("dapo"), trl_advantages(world), tmp_path / "dump"))
    said = {statement.subject: statement for statement in found.statements}
    if "aggregation" in said:
        assert "token-mean/global" in said["aggregation"].values
    if "entropy" in said:
        assert said["entropy"].values == ("none",)
    assert not found.departures


def test_a_dump_without_token_gradients_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path / "dump", options={"loss": True})), at(step=0):
        tap("loss", loss=1.0)
    with pytest.raises(CompareError, match=r"has no token gradients.*token_gradient=True"):
        explain_dump(tmp_path / "dump")


def test_a_second_bound_of_bad_tokens_is_no_wrong_side(tmp_path: Path) -> None:
    """TRL's delta cuts high ratios of negative advantages: a design, not a fault."""
    objective = make_objective("trl:dapo", delta=1.25, clip_low=0.99)
    world = World(Run(off_policy=0.3))
    found = explain_dump(record(world, preset(objective), trl_advantages(world), tmp_path / "dump"))
    assert not found.departures, found.to_text()


def test_an_explanation_is_plain_json_also_where_a_bound_is_open(tmp_path: Path) -> None:
    world = World(Run(off_policy=0.02))  # nothing is clipped, so that nothing bounds the clip range
    found = explain_dump(record(world, trl(), trl_advantages(world), tmp_path / "dump"))
    clip = found.about("clip")
    assert clip is not None, found.to_text()
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["statements"]


def test_the_command_prints_and_writes_the_explanation(tmp_path: Path) -> None:
    world = World(Run())
    record(world, trl(), trl_advantages(world), tmp_path / "dump")
    run = CliRunner().invoke(main, ["explain", str(tmp_path / "dump"), "--output", str(tmp_path / "e.json")])
    assert run.exit_code == 0, run.output
    assert "logits are divided by 1" in run.output
    told = json.loads((tmp_path / "e.json").read_text())
    assert {s["subject"] for s in told["statements"]} >= {"temperature", "mask", "aggregation", "advantages"}
    record(World(Run()), trl(fault="mask shifted"), trl_advantages(world), tmp_path / "wrong")
    assert CliRunner().invoke(main, ["explain", str(tmp_path / "wrong")]).exit_code == 1
    none = CliRunner().invoke(main, ["explain", str(tmp_path / "none")])
    assert none.exit_code == 2
    assert len(none.output.strip().splitlines()) == 1


@pytest.mark.parametrize("seed", [0, 13])
def test_ratios_of_whole_samples_are_clipped_by_themselves(seed: int, tmp_path: Path) -> None:
    """The derivative of a product of ratios has the number of tokens as a factor, and the clip does not."""
    case = next(case for case in CASES if case.name == "trl:rloo")
    found = explained(replace(case, run=replace(case.run, seed=seed, off_policy=0.1)), tmp_path / "dump")
    assert_nothing_false(found, case)
    clip = found.about("clip")
    assert clip is not None
    assert clip.evidence["clipped of positive advantage"] > 0


@pytest.mark.parametrize("rewards", [True, False])
def test_tokens_of_no_advantage_are_no_evidence_about_the_mask(rewards: bool, tmp_path: Path) -> None:
    """A group of equal rewards keeps what rounding leaves of its advantages, at some of its tokens."""
    world = World(Run(rewards=rewards))
    right = trl("grpo")

    def rounded(world: World, batch: Any, facts: dict[str, Any]) -> Any:
        value = right(world, batch, facts)
        odd = (torch.arange(batch.log_probs.shape[1]) % 2).to(batch.log_probs.dtype)
        idle = torch.tensor([float(s // 4 == 1) for s in batch.samples], dtype=odd.dtype)
        return value + 1e-7 * (batch.log_probs * batch.mask * odd * idle[:, None]).sum()

    found = explain_dump(record(world, rounded, trl_advantages(world), tmp_path / "dump"))
    mask = found.about("mask")
    assert mask is not None
    assert not mask.departure, found.to_text()


def test_unknown_weights_are_not_explained_away(tmp_path: Path) -> None:
    """Weights that follow no known rule: nothing is said of them, least of all something near."""

    def loss(world: World, batch: Any, facts: dict[str, Any]) -> Tensor:
        place = batch.mask.cumsum(1)
        token = -batch.advantages[:, None] * batch.log_probs * batch.mask / (1 + 0.1 * place)
        return token.sum() / world.mask.sum()

    world = World(Run())
    found = explain_dump(record(world, loss, trl_advantages(world), tmp_path / "dump"))
    assert found.about("aggregation") is None
    assert found.about("advantages") is None
    assert "no known combination" in found.undetermined["aggregation"]


def test_objective_advantages_are_those_of_the_trainer() -> None:
    world = World(Run())
    assert objective_advantages(world, make_objective("dapo")).shape == (int(world.mask.sum()),)
