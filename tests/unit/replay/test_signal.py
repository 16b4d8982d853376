"""A case in which everything can fail passes; take one signal away, and exactly that is missed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from regress.dump.trajectory import Trajectory
from regress.errors import GoldenError
from regress.golden.golden_case import GoldenCase
from regress.grpo.policy_losses import LOSSES
from regress.layout import TokenFrame
from regress.replay.case_signal import check_signal, require_signal
from regress.replay.case_truth import require_case_signal
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE
from tests.as_subtests import as_subtests
from tests.golden_cases import cases
from tests.unit.compare.diagnosis.synthetic_update import counterfactuals_of, made, objective_of

PROMPT = 2
OBJECTIVE: dict[str, Any] = {
    "loss": "ppo_clip",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "clip_bounds": "offset",
    "delta": None,
    "dual_clip": None,
    "kl_coef": 0.1,
    "kl_placement": "loss",
    "entropy_coef": 0.0,
    "sampler_correction": "token_truncate",
    "correction_min": 0.5,
    "correction_max": 2.0,
}
MASKS = {  # completions of the four samples of a step: two groups of two
    ("varied", 0): [1, 1, 1, 0, 0, 1],
    ("varied", 1): [1, 1, 1, 1],
    ("flat", 0): [1],
    ("flat", 1): [1, 1],
}
ADVANTAGES = {("varied", 0): 1.0, ("varied", 1): -1.0, ("flat", 0): 0.0, ("flat", 1): 0.0}
RATIOS = {("varied", 0): [0.7, 1.1, 1.5, 0, 0, 1.0], ("varied", 1): [0.7, 0.9, 1.5, 3.5]}
WEIGHTS = {("varied", 0): [0.5, 1.1, 2.0, 0, 0, 1.0]}


def sample(key: tuple[str, int]) -> Trajectory:
    mask = [0] * PROMPT + MASKS[key]
    reward = float(ADVANTAGES[key] > 0)
    reason = "length" if key == ("varied", 1) else "stop"
    return Trajectory(*key, [7] * len(mask), mask, reward, PROMPT, finish_reason=reason)


def flat(values: dict[tuple[str, int], Any], default: float) -> Any:
    """A token quantity over the frame, 0 on prompts and tool tokens."""
    rows = [
        np.broadcast_to(values.get(key, default), len(mask)) * np.array(mask) for key, mask in MASKS.items()
    ]
    return np.concatenate([np.concatenate([np.zeros(PROMPT), row]) for row in rows])


class World:
    """A recording with every signal, to be spoiled."""

    def __init__(self) -> None:
        frame = TokenFrame(tuple(MASKS), tuple(PROMPT + len(mask) for mask in MASKS.values()))
        self.frames = {f"step_{step:06d}": frame for step in range(3)}
        self.trajectories = {step: [sample(key) for key in MASKS] for step in range(3)}
        self.config: dict[str, Any] = {"algorithm": dict(OBJECTIVE)}
        self.claims = ["tool_tokens"]
        quantities = {
            "ratio": flat(RATIOS, 1.0),
            "advantages": flat(ADVANTAGES, 0.0),
            "sampler_weights": flat(WEIGHTS, 1.0),
            "log_probs": flat({}, -1.0),
            "ref_log_probs": flat({}, -1.5),
            "kl": flat({}, 0.1),
            "entropy": flat({}, 0.9),
        }
        tensors: dict[str, Any] = {name: {name: values} for name, values in quantities.items()}
        tensors["gradient"] = {"a.weight": np.ones(3), "b.weight": np.ones((2, 2))}
        self.formulas: dict[str, Any] = {}
        self.truth = {where: copy.deepcopy(tensors) for where in self.frames}

    @property
    def objective(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["algorithm"]
        return found

    def missing(self) -> list[str]:
        return check_signal(**vars(self))

    def each(self, quantity: str) -> list[Any]:
        return [truth[quantity][quantity] for truth in self.truth.values()]


@pytest.fixture
def world() -> World:
    return World()


def test_a_case_with_every_signal(world: World) -> None:
    assert world.missing() == []
    require_signal("x", **vars(world))


def fill(quantity: str, value: float, at: Callable[[Any], Any] = lambda values: values != 0) -> Any:
    def spoil(world: World) -> None:
        for values in world.each(quantity):
            values[at(values)] = value

    return spoil


def set_(key: str, value: Any) -> Any:
    return lambda world: world.objective.update({key: value})


def each_sample(change: Callable[[Trajectory], None]) -> Any:
    def spoil(world: World) -> None:
        for found in world.trajectories.values():
            for trajectory in found:
                change(trajectory)

    return spoil


def equal_lengths(world: World) -> None:
    frame = world.frames["step_000001"]
    keep = [1, 1]
    world.frames["step_000001"] = frame.select(keep)
    size = world.frames["step_000001"].size
    for quantity, tensors in world.truth["step_000001"].items():
        if quantity != "gradient":
            tensors[quantity] = tensors[quantity][:size]


def two_updates(world: World) -> None:
    for mapping in (world.frames, world.truth):
        del mapping["step_000002"]


def longer(world: World) -> None:
    """The completions of one token, the second turn of a conversation among them, get another one."""
    for found in world.trajectories.values():
        found[0].loss_mask[-2] = found[2].loss_mask[-2] = 1


def dead_parameter(world: World) -> None:
    for truth in world.truth.values():
        truth["gradient"]["b.weight"][:] = 0


def idle_update(world: World) -> None:
    """Groups of equal rewards alone."""
    for values in world.truth["step_000001"]["gradient"].values():
        values[:] = 0


def no_policy_loss(world: World) -> None:
    world.truth["step_000001"]["policy_loss"] = {"policy_loss": flat({}, 0.0)}


def no_gradients(world: World) -> None:
    del world.truth["step_000001"]["gradient"]


def unmask_tool(trajectory: Trajectory) -> None:
    trajectory.loss_mask[PROMPT:] = [1] * len(trajectory.loss_mask[PROMPT:])


@pytest.mark.parametrize(
    ("spoil", "missing"),
    [
        (two_updates, ["it has 2 optimizer updates, and needs at least 3"]),
        (equal_lengths, ["all samples of step_000001 are of equal length"]),
        (longer, ["no completion has just one token"]),
        (
            each_sample(lambda t: setattr(t, "finish_reason", "stop")),
            ["no completion is truncated (finish_reason 'length')"],
        ),
        (
            each_sample(lambda t: setattr(t, "reward", float(t.run_id))),
            ["no step has a group of equal rewards beside one of different rewards"],
        ),
        (
            each_sample(lambda t: setattr(t, "reward", 1.0)),
            ["no step has a group of equal rewards beside one of different rewards"],
        ),
        (no_policy_loss, ["every policy loss at step_000001 is zero"]),
        (dead_parameter, ["the gradient of b.weight is zero at every update"]),
        (idle_update, ["every gradient at step_000001 is zero, so its loss could be anything"]),
        (no_gradients, ["no gradients are recorded at step_000001"]),
        (
            lambda world: world.claims.append("speed"),
            [
                "the claim 'speed' cannot be checked (claims are tool_tokens, kl, sampler_correction, entropy, "
            ],
        ),
        (lambda world: world.claims.append("entropy"), ["no value depends on algorithm.entropy_coef (0.0)"]),
    ],
)
def test_a_signal_less(world: World, spoil: Callable[[World], object], missing: list[str]) -> None:
    spoil(world)
    found = world.missing()
    assert len(found) == len(missing), found
    for sentence, expected in zip(found, missing, strict=True):
        assert expected in sentence


def test_tool_tokens(world: World) -> None:
    """Without the claim nobody asks; masked tokens at the end of a completion are none."""
    each_sample(unmask_tool)(world)
    assert world.missing() == ["no completion has masked tool tokens between sampled ones"]
    for found in world.trajectories.values():
        found[0].loss_mask[-1] = 0
    assert world.missing() == ["no completion has masked tool tokens between sampled ones"]
    world.claims.remove("tool_tokens")
    assert world.missing() == []


def asked(truth: Mapping[str, Any], **section: Any) -> list[str]:
    """Return what is said of an update that an objective made."""
    objective = objective_of(**section)
    config = {"algorithm": asdict(objective)}
    world = World()
    formulas = {"step_000000": counterfactuals_of(objective, truth).formulas}
    return check_signal(**{**vars(world), "claims": [], "config": config, "formulas": formulas})


def unshown(truth: Mapping[str, Any], **section: Any) -> list[str]:
    """Return the settings of an objective on which no value of an update depends that was made by it."""
    says = "no value depends on algorithm."
    found = [sentence for sentence in asked(truth, **section) if sentence.startswith(says)]
    return [sentence.removeprefix(says).partition(" ")[0] for sentence in found]


@pytest.mark.extended
@as_subtests("loss", [*LOSSES])
def test_every_setting_of_a_loss_shows_in_random_values(loss: str) -> None:
    section = {"loss": loss, **CLOSE, **OWN.get(loss, {})}
    assert unshown(made(objective_of(**section)), **section) == []


CLOSE = {"clip_low": 0.05, "clip_high": 0.06}
OWN: dict[str, dict[str, Any]] = {
    "ppo_clip": {"dual_clip": 1.2},
    "clip_cov": {
        "clip_low": 0.5,
        "clip_high": 0.3,
        "cov_fraction": 0.08,
        "cov_low": 0.01,
        "cov_high": 0.4,
        "cov_seed": 3,
    },
    "kl_cov": {"cov_fraction": 0.2},
    "dppo_tv": {"delta": 1.05, "clip_low": 0.01, "clip_high": 0.01},
    "dppo_kl": {"delta": 1.05, "clip_low": 0.001, "clip_high": 0.001},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("section", "missing"),
    [
        ({"clip_low": 0.999}, ["clip_low"]),
        ({"clip_high": 50.0}, ["clip_high"]),
        ({"dual_clip": 60.0}, ["dual_clip"]),
        ({"delta": 60.0}, ["delta"]),
        ({"kl_clamp": 60.0}, ["kl_clamp"]),
        ({"loss": "cispo", "clip_low": 1.0}, ["clip_low"]),
        ({"loss": "importance_sampling", "clip_low": 0.999}, []),
        ({"old_log_probs": "current", "clip_low": 0.999}, []),
        ({"advantage": "constant", "clip_low": 0.1}, []),
        ({"log_ratio_max": 40.0}, ["log_ratio_max"]),
        ({"sampler_correction": "token_truncate", "correction_max": 60.0}, ["correction_max"]),
        ({"sampler_correction": "token_truncate", "correction_max": 1.05}, []),
    ],
)
def test_a_setting_that_shows_nowhere(section: dict[str, Any], missing: list[str]) -> None:
    section = {**CLOSE, **section}
    assert unshown(made(objective_of(**section)), **section) == missing


def test_a_loss_that_one_of_its_branches_would_give() -> None:
    """Where no ratio is far from 1, the clipped loss is the other one."""
    section = {"clip_low": 0.99, "clip_high": 50.0}
    truth = made(objective_of(**section))
    assert [sentence for sentence in asked(truth, **section) if "another one" in sentence] == [
        f"no policy loss would be another one with {other}" for other in OTHERS
    ]
    assert not any("another one" in sentence for sentence in asked(made(objective_of(**CLOSE)), **CLOSE))


BRANCH = "`(ratio * t.advantages).minimum(clipped * t.advantages) of ppo_clip`"
OTHERS = (
    f"a maximum in place of {BRANCH}",
    f"the first part of {BRANCH} alone",
    f"the second part of {BRANCH} alone",
)


def test_what_was_made_otherwise_tells_of_no_setting() -> None:
    truth = made(objective_of(**CLOSE))
    for quantity in (
        "ratio",
        "policy_loss",
        "token_loss",
        "token_gradient",
        "entropy_gradient",
        "kl",
        "entropy_loss",
    ):
        truth[quantity][quantity] = truth[quantity][quantity] * 1.1
    assert unshown(truth, clip_low=0.999, clip_high=50.0) == []


@pytest.mark.one_in(25)
@pytest.mark.parametrize(
    "case",
    [case for case in cases() if not case.sampled],
    ids=lambda case: case.name,
)
def test_every_golden_case_shows_what_it_is_there_for(case: GoldenCase) -> None:
    updates = Replay(case, BASE, Precision.FLOAT64).plan
    require_case_signal(case, {update.where: {**case.truth(update.where)} for update in updates})


def test_the_refusal_lists_all(world: World) -> None:
    two_updates(world)
    dead_parameter(world)
    with pytest.raises(GoldenError) as caught:
        require_signal("tiny", **vars(world))
    assert str(caught.value) == (
        "case 'tiny' cannot become golden, because some faults could not show in it: it has 2 optimizer updates, and "
        "needs at least 3; the gradient of b.weight is zero at every update: change its recipe or its configuration"
    )
