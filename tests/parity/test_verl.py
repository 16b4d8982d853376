"""The ``verl:*`` presets against the released verl: its reward, advantage and actor-loss functions.

The path of a batch is that of verl's trainer: ``apply_kl_penalty`` where the KL is in the reward,
``compute_advantage``, ``compute_rollout_correction_weights``, then the actor's ``ppo_loss`` for each
microbatch with the global denominators that the workers compute. Log-probs and entropies come from verl's
own functions over a padded batch (prompts left, responses right).
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from parity_world import (
    GROUP_SIZE,
    GROUPS,
    MAX_COMPLETION_LENGTH,
    PAD,
    Outcome,
    Sample,
    World,
    assert_parity,
    gradients,
    our_step,
)
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils
from verl.utils import torch_functional as verl_functional
from verl.utils.model import compute_position_id_with_mask
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from regress.grpo.loss_aggregation import token_weights
from regress.grpo.objective_presets import PRESETS, make_objective
from regress.grpo.token_losses import token_loss

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = GROUPS * GROUP_SIZE


@dataclass(frozen=True)
class Verl:
    """Settings of a verl user: ``algorithm.*`` and ``actor_rollout_ref.actor.*``."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    kl_in_reward: float = 0.0
    rollout_is: str | None = None
    rollout_is_threshold: str | float = 2.0
    local_denominators: bool = False
    loss_mode: str = "vanilla"
    actor: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    f"verl:{mode}": {"actor": {"loss_agg_mode": mode}}
    for mode in (
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    )
} | {
    "verl:dr_grpo": {
        "norm_adv_by_std_in_grpo": False,
        "actor": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    },
    "verl:gspo": {
        "loss_mode": "gspo",
        "actor": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    },
    "verl:cispo": {"loss_mode": "cispo"},
    "verl:rloo": {"adv_estimator": "rloo"},
    "verl:reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus"},
    "verl:reinforce_plus_plus_baseline": {"adv_estimator": "reinforce_plus_plus_baseline"},
}


@dataclass(frozen=True)
class Case:
    """One comparison: the preset, and the same change in verl's words and in ours."""

    preset: str
    name: str
    on_policy: bool = False
    accumulation: int = 2
    tools: bool = False
    empty_rows: bool = False
    temperature: float = 1.0
    verl: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        policy = "on" if self.on_policy else "off"
        tools = "-tools" if self.tools else ""
        return f"{self.preset}-{self.name}-{policy}-x{self.accumulation}-t{self.temperature}{tools}"

    @property
    def settings(self) -> Verl:
        base: dict[str, Any] = SETTINGS[self.preset] | self.verl
        return Verl(**(base | {"actor": base.get("actor", {}) | self.actor}))


def matrix() -> list[Case]:
    cases = []
    wide = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.02}
    for preset in SETTINGS:
        for on_policy in (True, False):
            for accumulation in (1, 2):
                shared: dict[str, Any] = {"on_policy": on_policy, "accumulation": accumulation}
                cases += [
                    Case(preset, "default", **shared),
                    Case(
                        preset,
                        "kl-entropy",
                        temperature=0.7,
                        tools=True,
                        actor=kl,
                        ours={"kl_coef": 0.1, "entropy_coef": 0.02},
                        **shared,
                    ),
                    Case(
                        preset,
                        "clip-empty",
                        temperature=1.5,
                        empty_rows=True,
                        actor=wide,
                        ours={"clip_low": 0.1, "clip_high": 0.28, "mask_truncated_completions": True},
                        **shared,
                    ),
                ]
    return cases + variations()


def variations() -> list[Case]:
    cases = [
        Case("verl:token-mean", f"kl-{kind}", actor=actor, ours={"kl_coef": 0.1, "kl_estimator": kind})
        for kind in ("k1", "k2", "k3")
        for actor in [{"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind}]
    ]
    in_reward = {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
    cases += [
        Case(f"verl:{preset}", "kl-in-reward", tools=True, verl={"kl_in_reward": 0.1}, ours=in_reward)
        for preset in ("token-mean", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ]
    for level in ("token", "sequence"):
        for rule, threshold, bounds in (
            ("truncate", 1.5, {"correction_max": 1.5}),
            ("mask", "0.4_1.5", {"correction_min": 0.4, "correction_max": 1.5}),
        ):
            for preset in ("verl:token-mean", "verl:gspo"):
                verl = {"rollout_is": level, "rollout_is_threshold": threshold}
                ours: dict[str, Any] = {"sampler_correction": f"{level}_{rule}"} | bounds
                cases.append(Case(preset, f"{level}_{rule}", tools=True, verl=verl, ours=ours))
    local: dict[str, Any] = {
        "accumulation": 1,
        "empty_rows": True,
        "verl": {"local_denominators": True},
        "ours": {"count_empty_rows": False, "mask_truncated_completions": True},
    }
    cases += [
        Case(f"verl:seq-mean-token-{mode}", "empty-rows-not-counted", **local)
        for mode in ("mean", "sum", "sum-norm")
    ]
    scale = {"loss_scale_factor": 7}
    cases.append(Case("verl:dr_grpo", "scale-factor", actor=scale, ours={"norm_length": 7}))
    dual = {"clip_ratio_c": 1.1}
    return [*cases, Case("verl:token-mean", "dual-clip", actor=dual, ours={"dual_clip": 1.1})]


CASES = matrix()


def test_every_preset_is_compared() -> None:
    # the others are compared function by function, in test_verl_losses.py and test_verl_advantages.py
    assert {case.preset for case in CASES} == set(SETTINGS) <= set(PRESETS)
    assert len({case.id for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_verl(world: World, case: Case) -> None:
    samples = world.tools if case.tools else world.plain
    each = SAMPLES // case.accumulation
    microbatches = [list(range(start, start + each)) for start in range(0, SAMPLES, each)]
    ours, losses = our_step(
        world,
        samples,
        make_objective(case.preset, **case.ours),
        on_policy=case.on_policy,
        microbatches=microbatches,
        temperature=case.temperature,
    )
    if case.name == "dual-clip":
        assert any(loss.dual_clipped_K.any() for loss in losses), (
            "a comparison without dual clip shows nothing"
        )
    if case.name == "clip-empty" and not case.on_policy:
        assert any(loss.clipped_high_K.any() for loss in losses), (
            "a comparison without clipping shows nothing"
        )
    assert_parity(case.id, ours, verl_step(world, samples, case, microbatches))


def test_single_sample_groups_keep_their_raw_score(world: World) -> None:
    """The rule of verl for groups of one, which the batches above do not have."""
    alone = [world.plain[0], world.plain[4], *world.plain[8:10]]
    for preset in ("verl:token-mean", "verl:dr_grpo", "verl:rloo", "verl:reinforce_plus_plus_baseline"):
        case = Case(preset, "single", accumulation=1)
        ours, _ = our_step(world, alone, make_objective(preset), on_policy=False, microbatches=[[0, 1, 2, 3]])
        assert_parity(case.id, ours, verl_step(world, alone, case, [[0, 1, 2, 3]]))


@pytest.mark.parametrize("preset", SETTINGS)
def test_clamps_at_extreme_log_ratios(preset: str) -> None:
    """Far-off log-probs, in float64, straight into both losses: the constants no ordinary batch touches."""
    generator = torch.Generator().manual_seed(5)
    shape = (6, 5)
    old = -5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    # exp(800) is infinite: without the clamp of the log-ratio its gradient would not be a number
    gap = torch.tensor([-800.0, -30.0, -12.0, -1.0, 0.0, 1.2, 12.0, 30.0, 800.0], dtype=torch.float64)
    log_ratio = gap[torch.randint(0, len(gap), shape, generator=generator)]
    log_ratio[0], log_ratio[1] = 12.0, -30.0  # whole sequences beyond the sequence-level clamp
    reference_gap = gap[torch.randint(0, len(gap), shape, generator=generator)]
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages[0] = -1.0
    mask = torch.arange(5) < torch.tensor([5, 5, 4, 1, 2, 3])[:, None]
    objective = make_objective(preset, kl_coef=0.1)

    theirs = (old + log_ratio).requires_grad_()
    batch = {
        "prompts": torch.ones(6, 1).long(),
        "responses": torch.ones(shape).long(),
        "attention_mask": torch.ones(6, 6).long(),
        "response_mask": mask.long(),
        "old_log_probs": old,
        "advantages": advantages,
        "ref_log_prob": theirs.detach() + reference_gap,
    }
    micro = TensorDict(batch, batch_size=[6])
    tensordict_utils.assign_non_tensor(
        micro, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=6
    )
    flat = torch.cat([theirs, torch.zeros(6, 1)], dim=1).flatten()
    their_loss, _ = ppo_loss(
        make_actor(Case(preset, "", actor={"use_kl_loss": True, "kl_loss_coef": 0.1})),
        {"log_probs": flat},
        micro,
    )

    ours = (old + log_ratio).requires_grad_()
    sequence = torch.arange(6).repeat_interleave(mask.sum(1))
    weights = token_weights(sequence, 6, objective, max_completion_length=5)
    loss = token_loss(
        ours[mask],
        old[mask],
        advantages[mask],
        sequence,
        6,
        objective,
        ref_log_probs_K=batch["ref_log_prob"][mask],
    )
    our_loss = (weights * loss.loss_K).sum()
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-7, atol=0)
    (gradient,) = torch.autograd.grad(our_loss, ours)
    (expected,) = torch.autograd.grad(their_loss, theirs)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=0)


def verl_step(world: World, samples: list[Sample], case: Case, microbatches: list[list[int]]) -> Outcome:
    """Return the outcome of one mini-batch of verl."""
    settings = case.settings
    batch = padded(samples, case)
    with torch.no_grad():
        old = responses(batch, *forward(world.old, batch, case.temperature))[0]
        ref = responses(batch, *forward(world.reference, batch, case.temperature))[0]
    batch |= {"old_log_probs": old, "ref_log_prob": ref}
    data = DataProto.from_dict(
        tensors=batch, non_tensors={"uid": np.array([str(sample.group) for sample in samples], dtype=object)}
    )
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    if settings.kl_in_reward:
        data, _ = apply_kl_penalty(data, FixedKLController(settings.kl_in_reward), kl_penalty="kl")
    data = compute_advantage(
        data,
        adv_estimator=settings.adv_estimator,
        norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo,
        config=AlgoConfig(),
    )
    batch["advantages"] = data.batch["advantages"]
    if settings.rollout_is is not None:
        noise = torch.zeros_like(old)
        for row, sample in enumerate(samples):
            noise[row, : len(sample.completion)] = torch.tensor(sample.sampler_noise)
        batch["rollout_is_weights"], _ = compute_rollout_correction_weights(
            -noise, batch["response_mask"], settings.rollout_is, settings.rollout_is_threshold
        )
    model = deepcopy(world.old if case.on_policy else world.new)
    actor = make_actor(case)
    total = 0.0
    for members in microbatches:
        part = {name: values[members] for name, values in batch.items()}
        log_probs, entropy = forward(model, part, case.temperature)
        micro = TensorDict(part, batch_size=[len(members)])
        tensordict_utils.assign_non_tensor(
            micro,
            dp_size=1,
            batch_num_tokens=None if settings.local_denominators else int(batch["response_mask"].sum()),
            global_batch_size=None if settings.local_denominators else len(samples),
        )
        loss, _ = ppo_loss(actor, {"log_probs": log_probs, "entropy": entropy}, micro)
        loss.backward()
        total += float(loss)
    mask = batch["response_mask"].bool()
    return Outcome(
        [batch["advantages"][row][mask[row]] for row in range(len(samples))], total, gradients(model)
    )


def make_actor(case: Case) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=GROUP_SIZE,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=case.settings.loss_mode),
        **case.settings.actor,
    )


def padded(samples: list[Sample], case: Case) -> dict[str, Tensor]:
    """verl's batch: prompts padded on the left, responses on the right up to the maximal length."""
    longest = max(len(sample.prompt) for sample in samples)
    rows: dict[str, list[Tensor]] = {
        name: [] for name in ("prompts", "responses", "attention_mask", "response_mask", "token_level_scores")
    }
    for sample in samples:
        left, right = longest - len(sample.prompt), MAX_COMPLETION_LENGTH - len(sample.completion)
        keep = not (case.empty_rows and sample.truncated)
        scores = torch.zeros(MAX_COMPLETION_LENGTH)
        scores[len(sample.completion) - 1] = sample.reward
        valid = [0] * left + [1] * (len(sample.prompt) + len(sample.completion)) + [0] * right
        rows["prompts"].append(torch.tensor([PAD] * left + list(sample.prompt)))
        rows["responses"].append(torch.tensor(list(sample.completion) + [PAD] * right))
        rows["attention_mask"].append(torch.tensor(valid))
        rows["response_mask"].append(torch.tensor(list(sample.model_tokens) + [0] * right) * keep)
        rows["token_level_scores"].append(scores)
    return {name: torch.stack(values) for name, values in rows.items()}


def forward(model: Any, batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of the next token, and entropy, at every valid token of the unpadded sequences, as in verl."""
    ids = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    mask = batch["attention_mask"]
    positions = compute_position_id_with_mask(mask)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits / temperature
    labels = torch.roll(ids, shifts=-1, dims=1)
    log_probs = verl_functional.logprobs_from_logits(logits, labels)
    entropy = verl_functional.entropy_from_logits(logits)
    return log_probs[mask.bool()], entropy[mask.bool()]


def responses(batch: dict[str, Tensor], log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """The response part of unpadded outputs, [B, R], as verl hands old and reference log-probs around."""
    data = TensorDict(dict(batch), batch_size=[len(batch["prompts"])])
    return no_padding_2_padding(log_probs, data), no_padding_2_padding(entropy, data)
