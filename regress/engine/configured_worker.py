"""Rollout worker of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from regress.dump.dump_location import Location, location
from regress.dump.dump_manifest import Provenance, read_manifest
from regress.dump.recorded_trajectories import refuse_pickles
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.dialogue_rollouts import Dialogue
from regress.engine.dynamic_sampling import FilteredRollouts, ReplayedGroups
from regress.engine.engine_ranks import World
from regress.engine.evaluation import due
from regress.engine.mock_rollouts import Expectations, Foreign, MockRolloutWorker
from regress.engine.prompt_tokens import Prompts
from regress.engine.rollout_worker import (
    SAMPLES,
    TRAIN,
    VAL,
    HFRolloutWorker,
    RolloutWorker,
    SharedRollouts,
    SplitRollouts,
)
from regress.engine.run_provenance import settings
from regress.engine.sampling import SamplingParams
from regress.tasks.reward_functions import make_rewards


def make_worker(
    config: Config,
    prompts: Prompts,
    origin: Provenance,
    *,
    vocabulary: int,
    sampler: Callable[[], RolloutWorker],
) -> RolloutWorker:
    """Return a sampler, or a replay, as the configuration asks.

    Args:
        vocabulary: tokens that the model knows.
        sampler: makes the sampler, if there is to be one.

    Raises:
        ReplayError: if a recording does not fit the run.
    """
    mock, chosen = config.rollout_mock, config.rollout_worker
    if chosen.type == "mock":
        paths = {TRAIN: location(str(chosen.trajectory_load_path))}
        recorded = _replay(config, paths, prompts, origin, vocabulary)
        if not chosen.need_llm_inference:
            return recorded
        return SplitRollouts(recorded, sampler())
    if mock.enable and mock.mode == "mock":
        refuse_pickles(location(mock.dump_dir))
        read_manifest(location(mock.dump_dir))  # refuses a recording that was interrupted
        evaluated = [VAL, *([SAMPLES] if config.evaluation.samples_per_prompt else [])]
        splits = [TRAIN, *(evaluated if config.evaluation.every_n_steps else [])]
        paths = {split: location(mock.dump_dir) / split for split in splits}
        return _replay(config, paths, prompts, origin, vocabulary)
    return FilteredRollouts(sampler(), prompts, config) if config.data.filter_groups else sampler()


def policy_sampler(
    config: Config,
    policy: LocalPolicy,
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue | None,
    world: World,
) -> RolloutWorker:
    """Return a worker that samples from the policy."""
    # the policy's architecture has its weights after each call of whole_model
    worker = HFRolloutWorker(policy.architecture, **sampling_settings(config, tokenizer, dialogue))
    return SharedRollouts(worker, policy, world) if world.plan.mesh.world_size > 1 else worker


def sampling_settings(
    config: Config, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue | None
) -> dict[str, Any]:
    """Return the arguments of `regress.engine.rollout_worker.SampledRollouts`, whoever samples."""
    chosen = config.rollout_worker
    params = SamplingParams(
        max_new_tokens=config.data.max_completion_length,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
    )
    return {
        "tokenizer": tokenizer,
        "params": params,
        "score": make_rewards(config.task.rewards, may_miss=config.algorithm.missing_rewards == "exclude"),
        "batch_size": chosen.batch_size,
        "seed": config.seed,
        "dialogue": dialogue,
        "samples": (
            replace(params, temperature=_samples_temperature(config)),
            config.seed if config.evaluation.seed is None else config.evaluation.seed,
        ),
    }


def _samples_temperature(config: Config) -> float:
    chosen = config.evaluation.temperature
    return config.rollout_worker.temperature if chosen is None else chosen


def _replay(
    config: Config, paths: dict[str, Location], prompts: Prompts, origin: Provenance, vocabulary: int
) -> RolloutWorker:
    """Return a mock worker that has served every rollout of the run once, so that nothing is refused later."""
    chosen, objective = config.rollout_worker, config.algorithm
    expect = Expectations(
        tokenizer=origin.tokenizer["fingerprint"],
        temperature=chosen.temperature,
        max_completion_length=config.data.max_completion_length,
        vocabulary=vocabulary,
        log_probs=objective.old_log_probs == "sampler" or objective.sampler_correction != "none",
        finish_reasons=objective.mask_truncated_completions,
        environment=None if chosen.allow_environment_mismatch else settings(origin),
        samples_temperature=_samples_temperature(config),
        foreign=Foreign(config) if not config.has_task else None,
        stages=tuple(stage.name for stage in config.curriculum.read_stages())
        if config.curriculum.enable
        else (),
    )
    recorded = MockRolloutWorker(paths, chosen.trajectory_format, expect)
    if config.curriculum.enable:
        prompts.follow(recorded.place)
    worker: RolloutWorker = recorded
    if config.data.filter_groups:
        worker = ReplayedGroups(recorded, prompts, config)
    for step in range(config.max_steps):
        worker.rollout(step, prompts.train(step), TRAIN)
    for step in range(config.max_steps + 1):
        if VAL in paths and due(config, step):
            worker.rollout(step, prompts.evaluation(), VAL)
        if SAMPLES in paths and due(config, step):
            count = config.evaluation.samples_per_prompt
            worker.rollout(step, [replace(p, group_size=count) for p in prompts.evaluation()], SAMPLES)
    recorded.announce = True
    return worker
