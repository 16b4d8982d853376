"""``algorithm.old_log_probs``: ``current`` saves a forward pass and changes nothing else; what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regress.dump.dump_reader import read
from regress.dump.recorder import Recorder
from regress.dump.taps import recording
from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config import load_config
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import Microbatch
from regress.engine.model_loading import build_model
from regress.engine.optimizer import adamw, build_scheduler
from regress.engine.rollout_worker import Prompt
from regress.errors import ConfigError, ReplayError

VOCABULARY = 32
TINY = "model.config={hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, head_dim: 8}"
SIZES = ("data.prompts_per_step=2", "data.group_size=3", "batching.micro_batch_size=2", TINY)


class Fixed:
    """A worker that knows its trajectories."""

    def __init__(self, trajectories: list[Trajectory]) -> None:
        self._trajectories = trajectories

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        return self._trajectories


class CountingPolicy(LocalPolicy):
    """Counts the forward passes that are not trained on."""

    evaluated = 0

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        self.evaluated += len(microbatches)
        return super().log_probs(microbatches)


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(2):
        for run, length in enumerate((2, 5, 3)):
            tokens = rng.integers(2, VOCABULARY, 3 + length).tolist()
            mask = [0] * 3 + [1] * length
            samples.append(Trajectory(str(group), run, tokens, mask, reward=float(run), prompt_length=3))
    return samples


def make_trainer(*overrides: str) -> Trainer:
    config = load_config(overrides=[*SIZES, *overrides], environ={}).config
    model = build_model(config.model, seed=0, vocab_size=VOCABULARY, pad_id=0, eos_id=1)
    policy = CountingPolicy(model)
    optimizer = adamw(policy.named_parameters(), 1e-2)
    return Trainer(
        config=config,
        policy=policy,
        reference=None,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.optimizer, updates=10),
        worker=Fixed(trajectories()),
        prompts=lambda step: (),
        trajectory_meta=lambda step: {},
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_current_is_recompute_without_the_second_forward(layout: str) -> None:
    trainers = [
        make_trainer(f"algorithm.old_log_probs={how}", f"batching.layout={layout}")
        for how in ("recompute", "current")
    ]
    outcomes = [[trainer.step(step) for step in range(2)] for trainer in trainers]
    assert outcomes[0] == outcomes[1]
    for ours, theirs in zip(*(trainer.policy.model.parameters() for trainer in trainers), strict=True):
        assert torch.equal(ours, theirs)
    counts = [trainer.policy.evaluated for trainer in trainers if isinstance(trainer.policy, CountingPolicy)]
    assert counts == [6, 0]


def test_current_log_probs_are_dumped_as_they_were_used(tmp_path: Path) -> None:
    trainer = make_trainer("algorithm.old_log_probs=current", "batching.micro_batch_size=null")
    with recording(Recorder(tmp_path, options={"is_loss_debug": True})):
        trainer.step(0)
    tensors = read(next(tmp_path.glob("is_loss_debug/*"))).tensors
    assert tensors["log_probs"].any()
    assert np.array_equal(tensors["old_log_probs"], tensors["log_probs"])
    assert np.array_equal(tensors["prob_ratio"], tensors["effective_valid"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.epochs=2",),
        ("trainer.mini_batch_size=3",),
    ],
)
def test_several_updates_of_a_rollout_are_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"makes every ratio 1, but a rollout gets 2 updates .* set .*=recompute"
    ):
        load_config(overrides=[*SIZES, "algorithm.old_log_probs=current", *overrides], environ={})


def test_a_dump_of_log_probs_that_nobody_computes_is_refused() -> None:
    wanted = ("debug.enable_data_dump=true", "debug.dump_options.old_log_probs=true")
    with pytest.raises(ConfigError, match="finds no log-probs from before the update"):
        load_config(overrides=[*SIZES, "algorithm.old_log_probs=current", *wanted], environ={})


def test_sampler_log_probs_are_never_replaced_by_others() -> None:
    trainer = make_trainer("algorithm.old_log_probs=sampler")
    with pytest.raises(
        ReplayError, match="needs the sampler's log-probs, but some of the trajectories have none"
    ):
        trainer.step(0)
    full = [replace(t, log_probs=np.full(len(t.tokens), -1.0, np.float32)) for t in trajectories()]
    trainer.worker = Fixed(full)
    assert trainer.step(0)["training_step/ratio/max"] != 1.0
