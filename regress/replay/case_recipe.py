"""Inputs of a golden case, made from its recipe: weights, reference, warm optimizer state, off-policy rollouts.

The policy is trained for a few steps first, so that the optimizer's state is a real one: the first step of a cold
AdamW is ill-conditioned (the update of an element is its sign). Its weights before that training are the reference;
its weights ``lag`` updates earlier sample the recorded rollouts, which makes them off-policy as a stale rollout
worker does.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regress.dump.coordinates import Coordinates
from regress.dump.dump_files import write_atomically
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, from_record, to_record
from regress.engine.adapters.model_files import save_model
from regress.engine.rollout_worker import TRAIN, Prompt
from regress.engine.run_construction import Run, build
from regress.errors import ConfigError
from regress.golden.golden_case import GREEDY, GoldenCase
from regress.replay.case_run import FORMAT, no_progress, torch_settings, write_rollouts
from regress.replay.replay_configuration import compose
from regress.replay.replay_plan import section_values

REPEATED, EQUAL, LONE, UNTOLD = "repeated_prompt", "equal_rewards", "lone_sample", "untold_temperature"

MISHAPS: Mapping[str, str] = {
    REPEATED: "the second group of a step has the prompt of the first",
    EQUAL: "the samples of the first group have the same reward, whose mean is another number",
    LONE: "the first group of a step has only its longest sample",
    UNTOLD: "nobody says at which temperature the samples were drawn",
}


REWARD = 0.1
"""Reward of three equal samples whose mean is 0.10000000000000002."""


def asked(prompts: Sequence[Prompt], mishaps: Collection[str]) -> list[Prompt]:
    """Return the prompts of a step as they are asked for."""
    found = list(prompts)
    if REPEATED in mishaps:
        found[1] = replace(found[0], group_id=found[1].group_id)
    return found


def returned(trajectories: Sequence[Trajectory], mishaps: Collection[str]) -> list[Trajectory]:
    """Return the samples of a step as they come back."""
    found = list(trajectories)
    if EQUAL in mishaps:
        first = found[0].group_id
        found = [_rewarded(one, REWARD) if one.group_id == first else one for one in found]
    if UNTOLD in mishaps:
        found = [replace(one, temperature=None) for one in found]
    if LONE in mishaps:
        group = [one for one in found if one.group_id == found[0].group_id]
        lone = max(group, key=lambda one: len(one.tokens))
        found = [one for one in found if one.group_id != lone.group_id or one is lone]
    return found


def _rewarded(sample: Trajectory, reward: float) -> Trajectory:
    return replace(sample, reward=reward, rewards=dict.fromkeys(sample.rewards, reward))


@dataclass(frozen=True)
class Recipe:
    """Settings that inputs are made with.

    Attributes:
        model: section ``model`` of the configuration that builds the initial weights.
        overrides: further configuration while the inputs are made, by dotted key, such as the learning rate.
        warm_steps: training steps before the recorded ones.
        lag: updates by which the policy that sampled the recorded rollouts is older.
        steps: recorded rollouts.
        rollouts: what happens to each of them, see `regress.replay.case_recipe`.
        inputs_of: case beside it whose inputs are taken, with its first ``steps`` rollouts; None: they are made.
    """

    model: Mapping[str, Any]
    overrides: Mapping[str, Any]
    warm_steps: int = 8
    lag: int = 2
    steps: int = 3
    rollouts: Sequence[str] = ()
    inputs_of: str | None = None

    @classmethod
    def of(cls, case: GoldenCase) -> Recipe:
        """Return the recipe of ``case.yaml``; raises `ConfigError` for an invalid one."""
        given: dict[str, Any] = {"overrides": {}, **case.recipe}
        known = [spec.name for spec in fields(cls)]
        for key in given.keys() - set(known):
            raise _unfollowable(case, f"{key!r} is not a key of it", f"use {', '.join(known)}")
        if "inputs_of" in given:
            given.setdefault("model", {})
        if "model" not in given:
            raise _unfollowable(case, "it has no model", "say in model how the initial weights are made")
        recipe = cls(**given)
        recipe._check(case)
        return recipe

    def _check(self, case: GoldenCase) -> None:
        if not isinstance(self.rollouts, Sequence) or not {*self.rollouts} <= MISHAPS.keys():
            raise _unfollowable(
                case, f"rollouts is {self.rollouts!r}", f"write a list of {', '.join(MISHAPS)}"
            )
        for key in ("model", "overrides"):
            if not isinstance(getattr(self, key), Mapping):
                raise _unfollowable(case, f"{key} is {getattr(self, key)!r}", "write a mapping")
        bounds = {"warm_steps": (1, math.inf), "lag": (0, self.warm_steps), "steps": (1, math.inf)}
        for key, (low, high) in bounds.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                limit = f" up to warm_steps ({high})" if high < math.inf else ""
                raise _unfollowable(case, f"{key} is {value!r}", f"write a whole number from {low}{limit}")


def _unfollowable(case: GoldenCase, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"{case.folder / 'case.yaml'}: the recipe cannot be followed, as {rule}; {remedy}")


def has_inputs(case: GoldenCase) -> bool:
    """Return True if a case has weights to start from, made by its recipe or placed there by hand."""
    return (case.folder / "model").is_dir()


def remove_inputs(case: GoldenCase) -> None:
    """Remove the files that `make_inputs` writes."""
    for folder in ("model", "reference", "trajectories", GREEDY):
        shutil.rmtree(case.folder / folder, ignore_errors=True)
    (case.folder / "optimizer.safetensors").unlink(missing_ok=True)


def make_inputs(case: GoldenCase, workspace: Path) -> None:
    """Write ``model/``, ``reference/``, ``optimizer.safetensors`` and ``trajectories/`` of a case."""
    recipe = Recipe.of(case)
    if recipe.inputs_of is not None:
        _take_inputs(case, recipe)
        return
    overrides = {f"model.{key}": value for key, value in recipe.model.items()}
    overrides |= {"max_steps": recipe.warm_steps, "output_dir": str(workspace), **recipe.overrides}
    config = compose(case.config, overrides, workspace)
    with torch_settings(config.threads), ExitStack() as resources:
        run = build(config, resources, no_progress)
        reference = _weights(run)
        stale = reference
        for step in range(recipe.warm_steps):
            if step == recipe.warm_steps - recipe.lag:
                stale = _weights(run)
            run.trainer.step(step)
        if recipe.lag == 0:
            stale = _weights(run)
        _save_model(run, case.folder / "model", tokenizer=True)
        _save_optimizer(run, case.folder / "optimizer.safetensors")
        if not case.sampled:
            _load(run, stale)
            _save_rollouts(run, case.folder / "trajectories", recipe)
        shutil.rmtree(case.folder / "reference", ignore_errors=True)
        if run.trainer.reference is not None and not config.reference.without_adapter:
            _load(run, reference)
            _save_model(run, case.folder / "reference", tokenizer=False)


def _take_inputs(case: GoldenCase, recipe: Recipe) -> None:
    """Copy the inputs of the case that the recipe names, of its rollouts as many as the recipe says."""
    other = case.folder.parent / str(recipe.inputs_of)
    if not (other / "model").is_dir():
        raise _unfollowable(case, f"{other} has no inputs to take", "record that case first")
    remove_inputs(case)
    for name in ("model", "reference"):
        if (other / name).is_dir() and (name == "model" or _needs_reference(case)):
            shutil.copytree(other / name, case.folder / name)
    shutil.copyfile(other / "optimizer.safetensors", case.folder / "optimizer.safetensors")
    (case.folder / "trajectories").mkdir()
    for path in sorted((other / "trajectories").iterdir())[: recipe.steps]:
        (record,) = FORMAT.decode(path.read_bytes())
        meta = {key: value for key, value in record.meta.items() if key != "samples"}
        taken = to_record(returned(from_record(record), recipe.rollouts), record.step, meta)
        write_atomically(case.folder / "trajectories" / path.name, FORMAT.encode(taken))


def _needs_reference(case: GoldenCase) -> bool:
    return bool(section_values(case.config, {}, "algorithm").get("kl_coef", 0.0))


def _weights(run: Run) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in run.trainer.policy.named_parameters()}


@torch.no_grad()
def _load(run: Run, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in run.trainer.policy.named_parameters():
        parameter.copy_(weights[name])


def _save_model(run: Run, folder: Path, *, tokenizer: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    save_model(run.trainer.policy.model, folder, portable=True)
    for path in folder.rglob("*.*"):
        path.chmod(0o644)  # weights are written for the owner alone
    if tokenizer:
        run.tokenizer.save_pretrained(folder)


def _save_optimizer(run: Run, path: Path) -> None:
    state = run.trainer.optimizer.state
    tensors = {
        f"{name}/{key}": value
        for name, parameter in run.trainer.policy.named_parameters()
        for key, value in state[parameter].items()
    }
    write_atomically(path, FORMAT.encode(Record.of("optimizer", Coordinates(0), tensors)))


def _save_rollouts(run: Run, folder: Path, recipe: Recipe) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    trainer = run.trainer
    for step in range(recipe.steps):
        trajectories = trainer.worker.rollout(step, asked(trainer.prompts(step), recipe.rollouts), TRAIN)
        trajectories = returned(trajectories, recipe.rollouts)
        write_rollouts(folder, to_record(trajectories, step, trainer.trajectory_meta(step)))
