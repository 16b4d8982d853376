"""Workload of the benchmarks: a model of a size that a CPU trains, and trajectories of long-tailed lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config import Config, load_config
from regress.engine.grpo_trainer import Trainer
from regress.engine.model_loading import build_model
from regress.engine.optimizer import adamw, build_scheduler
from regress.engine.reference_policy import Reference
from regress.engine.rollout_worker import Prompt

PAD, EOS, FIRST = 0, 1, 2
"""Ids of the padding and the end token, and the first id of an ordinary token."""


@dataclass(frozen=True)
class Size:
    """Model and vocabulary, the minimum length of a prompt, and the lengths of completions (lognormal, clipped)."""

    name: str
    vocabulary: int
    model: Mapping[str, int]
    prompt: int
    median: int
    sigma: float
    shortest: int
    longest: int


TEN_MILLION = Size(
    name="10M",
    vocabulary=8192,
    model={
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
    },
    prompt=16,
    median=160,
    sigma=0.7,
    shortest=16,
    longest=512,
)
TINY = Size(name="tiny", vocabulary=64, model={}, prompt=4, median=8, sigma=0.5, shortest=2, longest=16)


def make_trajectories(size: Size, *, prompts: int, group_size: int, seed: int = 1) -> list[Trajectory]:
    """Make random tokens; prompts of 16 to 32 tokens (tiny: 4 to 8), rewards 0 or 1, both in every group.

    The longest completion has the maximal length, as in real rollouts where some are cut off. With 4 prompts of
    4 completions tokens fill 0.42 of a padded batch, and 0.54 of it if sorted into 4 microbatches: a mild tail.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(size.median), size.sigma, (prompts, group_size))).astype(int)
    lengths = lengths.clip(size.shortest, size.longest)
    lengths[lengths == lengths.max()] = size.longest
    trajectories = []
    for group in range(prompts):
        prompt = _tokens(rng, size, int(rng.integers(size.prompt, 2 * size.prompt + 1)))
        for run in range(group_size):
            completion = _tokens(rng, size, int(lengths[group, run]))
            trajectories.append(_trajectory(size, prompt, completion, group, run))
    return trajectories


def _tokens(rng: np.random.Generator, size: Size, count: int) -> list[int]:
    tokens: list[int] = rng.integers(FIRST, size.vocabulary, count).tolist()
    return tokens


def _trajectory(size: Size, prompt: list[int], completion: list[int], group: int, run: int) -> Trajectory:
    stopped = len(completion) < size.longest
    if stopped:
        completion = [*completion[:-1], EOS]
    return Trajectory(
        group_id=str(group),
        run_id=run,
        tokens=prompt + completion,
        loss_mask=[0] * len(prompt) + [1] * len(completion),
        reward=float(run % 2),
        prompt_length=len(prompt),
        finish_reason="stop" if stopped else "length",
    )


class RecordedWorker:
    """Serves the same trajectories at every step: a rollout that costs nothing."""

    def __init__(self, trajectories: list[Trajectory]) -> None:
        self._trajectories = trajectories

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the trajectories."""
        return self._trajectories


def make_trainer(
    size: Size, trajectories: list[Trajectory], overrides: Iterable[str] = (), *, steps: int = 1000
) -> Trainer:
    """Return the engine's own trainer on given trajectories, with seeded weights: the same for every call."""
    config = make_config(size, trajectories, overrides)
    model = build_model(config.model, seed=0, vocab_size=size.vocabulary, pad_id=PAD, eos_id=EOS)
    policy = LocalPolicy(model)
    opt = config.optimizer
    optimizer = adamw(policy.named_parameters(), opt.learning_rate, eps=opt.eps)
    return Trainer(
        config=config,
        policy=policy,
        reference=Reference(policy, config.reference) if config.algorithm.needs_reference else None,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, opt, updates=steps),
        worker=RecordedWorker(trajectories),
        prompts=lambda step: (),
        trajectory_meta=lambda step: {},
    )


def stepper(trainer: Trainer) -> Callable[[], dict[str, float]]:
    """Return a function that takes the trainer's next step and returns its metrics."""
    numbers = itertools.count()
    return lambda: trainer.step(next(numbers))


def make_config(size: Size, trajectories: list[Trajectory], overrides: Iterable[str]) -> Config:
    """Return the configuration of a run that would roll out these trajectories."""
    groups = len({trajectory.group_id for trajectory in trajectories})
    longest_prompt = max(trajectory.prompt_length for trajectory in trajectories)
    model = ", ".join(f"{key}: {value}" for key, value in size.model.items())
    given = [
        f"model.config={{{model}}}",
        f"data.prompts_per_step={groups}",
        f"data.group_size={len(trajectories) // groups}",
        f"data.max_prompt_length={longest_prompt}",
        f"data.max_completion_length={size.longest}",
        f"data.max_seq_length={longest_prompt + size.longest}",
    ]
    return load_config(overrides=[*given, *overrides], environ={}).config
