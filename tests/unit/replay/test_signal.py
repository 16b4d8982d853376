"""A case in which everything can fail passes; take one signal away, and exactly that is missed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regress.dump.trajectory import Trajectory
from regress.errors import GoldenError
from regress.layout import TokenFrame
from regress.replay.signal import check_signal, require_signal

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
        self.claims = ["tool_tokens", "kl"]
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
        (fill("ratio", 1.3, lambda r: r > 1.28), []),
        (fill("ratio", 1.27, lambda r: r > 1.28), ["positive", "negative"]),
        (
            lambda world: [truth.pop("ratio") for truth in world.truth.values()],
            ["ratio and advantages are not recorded at every update"],
        ),
        (
            fill("advantages", 1.0),
            [
                "no token with a negative advantage has a ratio above the clip range (1.28)",
                "no token with a negative advantage has a ratio below the clip range (0.8)",
                "no token with a negative advantage has a ratio within the clip range",
            ],
        ),
        (set_("dual_clip", 3.0), []),
        (set_("dual_clip", 4.0), ["no token with a negative advantage has a ratio above dual_clip (4)"]),
        (set_("delta", 4.0), ["no token with a negative advantage has a ratio above delta (4)"]),
        (fill("sampler_weights", 1.9, lambda w: w == 2), ["no sampler weight is cut to 2"]),
        (set_("sampler_correction", "sequence_mask"), ["no sampler weight is masked"]),
        (
            lambda world: [truth.pop("sampler_weights") for truth in world.truth.values()],
            ["sampler weights are not recorded at every update"],
        ),
        (fill("kl", 0.0), ["the KL from the reference is nowhere above 0"]),
        (fill("ref_log_probs", -1.0), ["the reference model agrees with the policy"]),
        (
            lambda world: [truth.pop("ref_log_probs") for truth in world.truth.values()],
            ["log-probs of policy and reference are not recorded at every update"],
        ),
        (dead_parameter, ["the gradient of b.weight is zero at every update"]),
        (idle_update, ["every gradient at step_000001 is zero, so its loss could be anything"]),
        (no_gradients, ["no gradients are recorded at step_000001"]),
        (
            lambda world: world.claims.append("speed"),
            [
                "the claim 'speed' cannot be checked (claims are tool_tokens, kl, sampler_correction, entropy, "
            ],
        ),
        (
            lambda world: [world.claims.append("entropy"), *(t.pop("entropy") for t in world.truth.values())],
            ["entropy"],
        ),
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
    for values in world.each("ratio"):
        values[5:7] = 1.0
    assert world.missing() == ["no completion has masked tool tokens between sampled ones"]
    for found in world.trajectories.values():
        found[0].loss_mask[-1] = 0
    assert world.missing() == ["no completion has masked tool tokens between sampled ones"]
    world.claims.remove("tool_tokens")
    assert world.missing() == []


def test_on_policy(world: World) -> None:
    fill("ratio", 1.0)(world)
    assert world.missing()[0] == "every importance ratio is 1, so the updates are on-policy"


def test_bounds_as_the_objective_reads_them(world: World) -> None:
    world.objective.update(clip_bounds="absolute", clip_low=0.0, clip_high=1.4, loss="cispo")
    assert world.missing() == []
    world.objective["clip_high"] = 5.0
    assert [m.rpartition(" has ")[2] for m in world.missing()] == ["a ratio above the clip range (5)"] * 2
    world.objective.update(loss="importance_sampling")
    assert world.missing() == [], "a loss that does not clip needs ratios on both sides of 1"


def test_no_kl_no_question(world: World) -> None:
    fill("ref_log_probs", -1.0)(world)
    fill("kl", 0.0)(world)
    world.objective["kl_coef"] = 0.0
    assert len(world.missing()) == 2, "the claim asks for it"
    world.claims.remove("kl")
    assert world.missing() == []


def test_kl_in_the_reward_is_no_token_quantity(world: World) -> None:
    world.objective["kl_placement"] = "reward"
    for truth in world.truth.values():
        del truth["kl"]
    assert world.missing() == []


def test_truncated_completions_outside_of_the_loss(world: World) -> None:
    """Their tokens have a ratio of 0 in the truth, which is not a ratio below the clip range."""
    for values in world.each("ratio"):
        values[values == 0.7] = 0.0
    missing = world.missing()
    assert [m.rpartition(" has ")[2] for m in missing] == ["a ratio below the clip range (0.8)"] * 2


def test_the_refusal_lists_all(world: World) -> None:
    two_updates(world)
    dead_parameter(world)
    with pytest.raises(GoldenError) as caught:
        require_signal("tiny", **vars(world))
    assert str(caught.value) == (
        "case 'tiny' cannot become golden, because some faults could not show in it: it has 2 optimizer updates, and "
        "needs at least 3; the gradient of b.weight is zero at every update: change its recipe or its configuration"
    )
