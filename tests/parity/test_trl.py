"""The ``trl:*`` presets against the released TRL: its own trainers, run step by step on given completions.

``GRPOTrainer`` and ``RLOOTrainer`` are built as a user builds them, from a model on disk. Only the
sampling is replaced: the recorded completions are handed to the trainer, which pads, masks, scores,
shuffles, splits and back-propagates them itself (``training_step``). Off-policy steps are second
iterations over the same rollouts (``num_iterations=2``), with the policy's weights exchanged in between.

What the presets do not reproduce: ``steps_per_generation`` unequal to the accumulation steps, where
``dapo`` and ``cispo`` divide by the mean token count of the mini-batches of a rollout batch. A completion
without loss tokens adds the constant ``-A / B`` to the loss that ``RLOOTrainer`` reports, and no gradient.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from parity_world import (
    GROUP_SIZE,
    GROUPS,
    MAX_COMPLETION_LENGTH,
    PAD,
    Outcome,
    Sample,
    World,
    assert_parity,
    completion_log_probs,
    gradients,
    our_step,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from regress.grpo.objective_presets import PRESETS, make_objective
from regress.grpo.preset_recipes import RECIPES

pytestmark = pytest.mark.filterwarnings("ignore")

# what a user writes in TRL for each preset
SETTINGS: dict[str, dict[str, Any]] = {
    name: dict(recipe.settings) for name, recipe in RECIPES.items() if name.startswith("trl:")
}


@dataclass(frozen=True)
class Case:
    """One comparison: the preset, and the same change in TRL's words and in ours."""

    preset: str
    name: str
    on_policy: bool = True
    accumulation: int = 1
    tools: bool = False
    temperature: float = 1.0
    trl: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        policy = "on" if self.on_policy else "off"
        tools = "-tools" if self.tools else ""
        return f"{self.preset}-{self.name}-{policy}-x{self.accumulation}-t{self.temperature}{tools}"


def both(trl: str, ours: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {trl: value}, {ours: value}


def matrix() -> list[Case]:
    cases = []
    wide = {"epsilon": 0.1, "epsilon_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.28}
    cap = {"epsilon_high": 1.1}, {"clip_high": 1.1}
    for preset in SETTINGS:
        kl = both("beta", "kl_coef", 0.1)
        clip = cap if preset == "trl:cispo" else wide
        rloo = preset == "trl:rloo"  # knows neither tools nor a temperature-free shortcut
        for on_policy in (True, False):
            for accumulation in (1, 2):
                shared: dict[str, Any] = {"on_policy": on_policy, "accumulation": accumulation}
                cases += [
                    Case(preset, "default", **shared),
                    Case(preset, "kl", temperature=0.7, tools=not rloo, trl=kl[0], ours=kl[1], **shared),
                    Case(preset, "clip", temperature=1.5, trl=clip[0], ours=clip[1], **shared),
                ]
    return cases + variations()


def variations() -> list[Case]:
    off: dict[str, Any] = {"on_policy": False, "accumulation": 2, "tools": True}
    cases = []
    for preset in ("trl:dapo", "trl:grpo", "trl:dr_grpo", "trl:bnpo", "trl:gspo"):
        truncated = both("mask_truncated_completions", "mask_truncated_completions", True)
        cases.append(Case(preset, "mask_truncated", trl=truncated[0], ours=truncated[1], **off))
    for name, (trl, ours) in {
        "delta": both("delta", "delta", 1.25),
        "batch_scale": both("scale_rewards", "scale", "batch"),
        "kl_uncorrected": (
            {"beta": 0.1, "use_bias_correction_kl": False},
            {"kl_coef": 0.1, "kl_bias_correction": False},
        ),
    }.items():
        cases.append(Case("trl:dapo", name, trl=trl, ours=ours, **off))
    correction = {"kl_coef": 0.1, "correction_min": 0.4, "correction_max": 1.5}
    sampler = {
        "beta": 0.1,
        "vllm_importance_sampling_clip_min": 0.4,
        "vllm_importance_sampling_clip_max": 1.5,
    }
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for preset in ("trl:dapo", "trl:gspo", *(("trl:vespo",) if mode.startswith("token") else ())):
            trl = sampler | {"vllm_importance_sampling_mode": mode}
            cases.append(Case(preset, mode, trl=trl, ours=correction | {"sampler_correction": mode}, **off))
    entropy = both("entropy_coef", "entropy_coef", 0.05)
    top = {"entropy_coef": 0.05, "top_entropy_quantile": 0.4}
    for preset in SETTINGS:
        if preset != "trl:rloo":
            cases.append(Case(preset, "entropy", trl=entropy[0], ours=entropy[1], **off))
            cases.append(Case(preset, "top-entropy", trl=top, ours=top, **off))
    far = both("off_policy_mask_threshold", "off_policy_threshold", 0.01)
    cases.append(Case("trl:dapo", "off-policy", trl=far[0], ours=far[1], **off))
    return cases


CASES = matrix()


def test_every_preset_is_compared() -> None:
    assert {case.preset for case in CASES} == {name for name in PRESETS if name.startswith("trl:")}
    assert len({case.id for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_trl(world: World, tmp_path: Path, case: Case) -> None:
    samples = world.tools if case.tools else world.plain
    theirs, microbatches = trl_step(world, samples, tmp_path, case)
    objective = make_objective(case.preset, **case.ours)
    ours, losses = our_step(
        world,
        samples,
        objective,
        on_policy=case.on_policy,
        microbatches=microbatches,
        temperature=case.temperature,
    )
    if not case.on_policy and case.name == "clip" and objective.loss in ("ppo_clip", "cispo"):
        assert any(loss.clipped_high_K.any() for loss in losses), (
            "a comparison without clipping shows nothing"
        )
    assert_parity(case.id, ours, theirs)


def trl_step(
    world: World, samples: list[Sample], directory: Path, case: Case
) -> tuple[Outcome, list[list[int]]]:
    """Return the outcome of one accumulated step of TRL, and the samples of each of its microbatches."""
    trainer = make_trainer(world, samples, directory, case)
    prompts = [{"prompt": f"w{2 + sample.group}"} for sample in samples]
    trainer.model.load_state_dict(world.old.state_dict())
    trainer.model.train()
    loss = math.nan
    for weights in (world.old,) if case.on_policy else (world.old, world.new):
        trainer.model.load_state_dict(weights.state_dict())
        trainer.model.zero_grad()
        steps = range(case.accumulation)
        loss = sum(float(trainer.training_step(trainer.model, prompts, None)) for _ in steps)
    names = {sample.prompt + sample.completion: index for index, sample in enumerate(samples)}
    microbatches, advantages = [], [torch.empty(0)] * len(samples)
    for buffered in trainer._buffered_inputs:
        members = []
        for row in range(len(buffered["advantages"])):
            ids = torch.cat([buffered["prompt_ids"][row], buffered["completion_ids"][row]])
            members.append(names[tuple(ids[ids != PAD].tolist())])
            mask = (
                buffered["completion_mask"][row] * buffered.get("tool_mask", buffered["completion_mask"])[row]
            )
            advantages[members[-1]] = buffered["advantages"][row].repeat(int(mask.sum()))
        microbatches.append(members)
    return Outcome(advantages, loss, gradients(trainer.model)), microbatches


def make_trainer(world: World, samples: list[Sample], directory: Path, case: Case) -> Any:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output: dict[str, Any] = {
            "prompt_ids": [list(sample.prompt) for sample in samples],
            "completion_ids": [list(sample.completion) for sample in samples],
            "logprobs": sampler_log_probs(world, samples, case.temperature),
        }
        if case.tools:
            output["env_mask"] = [list(sample.model_tokens) for sample in samples]
        return output

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert [tuple(ids) for ids in completion_ids] == [sample.completion for sample in samples]
        return [sample.reward for sample in samples]

    settings: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": GROUPS * GROUP_SIZE // case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "num_generations": GROUP_SIZE,
        "num_iterations": 1 if case.on_policy else 2,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "temperature": case.temperature,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "model_init_kwargs": {"dtype": "auto"},
        "report_to": "none",
    }
    settings |= SETTINGS[case.preset] | case.trl
    built: dict[str, Any] = {
        "model": str(world.path),
        "reward_funcs": [reward],
        "train_dataset": Dataset.from_dict({"prompt": ["w2"] * GROUPS}),
    }
    trainer: Any
    if case.preset == "trl:rloo":
        trainer = RLOOTrainer(args=RLOOConfig(**settings), **built)
        trainer._tokenize_prompts = lambda prompts: ([list(s.prompt) for s in samples], None, {})
        trainer._generate_single_turn = lambda *_: [list(s.completion) for s in samples]
    else:
        trainer = GRPOTrainer(args=GRPOConfig(**settings), rollout_func=rollout, **built)
        if "vllm_importance_sampling_mode" in case.trl:
            trainer.use_vllm = True  # no server is asked: completions come from `rollout`
            trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = case.accumulation
    return trainer


def sampler_log_probs(world: World, samples: list[Sample], temperature: float) -> list[list[float]]:
    """The old policy's log-probs with noise, as a rollout engine with other kernels would report them."""
    with torch.no_grad():
        flat = completion_log_probs(world.old, samples, temperature)[0]
    flat += torch.tensor([value for sample in samples for value in sample.sampler_noise])
    return [part.tolist() for part in flat.split([len(sample.completion) for sample in samples])]
