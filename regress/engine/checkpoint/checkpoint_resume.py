"""Going on from a checkpoint: finding and verifying it, and putting its state into a run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from regress.dump.dump_continuation import ContinuationPoint, Position, StartingPlace
from regress.dump.dump_location import Location, address, location
from regress.engine.checkpoint.checkpoint_names import LATEST, latest
from regress.engine.checkpoint.checkpoint_tensors import (
    load_weights,
    load_whole,
    optimizer_of,
    read_weights,
    reference_of,
    unfinished_of,
)
from regress.engine.checkpoint.configuration_changes import check_changes
from regress.engine.checkpoint.run_snapshot import FINGERPRINT, REMOTE
from regress.engine.checkpoint.trainer_state import CheckpointState, local_copy, parse_state, read_state
from regress.engine.checkpoint.unfinished_step import restored
from regress.engine.config.config_schema import Config
from regress.engine.engine_ranks import World, raise_on_all_ranks
from regress.engine.grpo_trainer import UnfinishedStep
from regress.engine.run_construction import Run
from regress.engine.tokenizer import fingerprint
from regress.engine.warmup_backward import rehearse
from regress.errors import CheckpointError, ConfigError


def open_checkpoint(
    config: Config, world: World, allowed: Sequence[str], resources: ExitStack
) -> CheckpointState | None:
    """Return the verified state of the checkpoint that the configuration goes on from; None to start anew.

    Args:
        allowed: keys that may differ although they change what is computed.
        resources: keeps the copy of a checkpoint in a store until the run ends.

    Raises:
        CheckpointError: on every rank, if it is missing, damaged, or one that this configuration cannot go on from.
        ConfigError: for a key in ``allowed`` that is none, or that is given without a checkpoint.
    """
    asked = config.trainer.resume_from_checkpoint
    if asked is None:
        if allowed:
            raise ConfigError(f"""--allow-change {allowed[0]} has a meaning only for a run that goes on; set
            trainer.resume_from_checkpoint, or leave it away""")
        return None
    chosen = raise_on_all_ranks(world, lambda: _chosen(config, asked) if world.main else None)
    place: str | None = world.gather(chosen)[0]
    if place is None:
        return None
    state = raise_on_all_ranks(world, lambda: _read(location(place), world.main, resources))
    raise_on_all_ranks(world, lambda: _check(config, state, allowed))
    return state


def _chosen(config: Config, asked: str) -> str | None:
    if asked != LATEST:
        return asked
    found = latest(config.trainer.checkpoint_dir)
    return None if found is None else address(found)


def _read(place: Location, verifies: bool, resources: ExitStack) -> CheckpointState:
    if not isinstance(place, Path):
        place = local_copy(
            place, Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="regress-resume-")))
        )
    return read_state(place) if verifies else parse_state(place)


def _check(config: Config, state: CheckpointState, allowed: Sequence[str]) -> None:
    name = state.path.name
    check_changes(state.config, config, allowed, name)
    if state.step > config.max_steps or (state.step == config.max_steps and state.updates_in_step):
        raise CheckpointError(
            f"max_steps={config.max_steps} is less than the steps that {name} has made ({state.step}); raise max_steps"
        )


def dump_places(config: Config, state: CheckpointState | None) -> dict[str, StartingPlace] | None:
    """Return the place at which each of the run's dumps is continued, by section; None if the run starts anew.

    A dump in another directory than the checkpoint's is a new one.
    """
    if state is None:
        return None
    directories = {"debug": config.debug.dump_dir, "rollout_mock": config.rollout_mock.dump_dir}
    return {
        section: StartingPlace(
            ContinuationPoint(state.step, state.updates_in_step),
            Position(known.files, known.digest),
            state.path.name,
        )
        for section, known in state.dumps.items()
        if section in directories and known.directory == str(location(directories[section]))
    }


def restore(run: Run, state: CheckpointState) -> UnfinishedStep | None:
    """Put a checkpoint's state into a run that was built for it; return its unfinished step, if it has one.

    All ranks call this together.

    Raises:
        CheckpointError: on every rank, if it is the state of another model, tokenizer or optimizer.
    """
    trainer, world = run.trainer, run.trainer.world
    raise_on_all_ranks(world, lambda: _check_tokenizer(run, state))
    if run.remote is not None:
        run.remote.restore(_saved_remotely(state))
    else:
        _restore_tensors(run, state)
    trainer.updates = state.update
    _restore_scheduler(run, state)
    for part, found in run.parts.items():
        if part in state.parts:
            found.load_state_dict(state.parts[part])
    if not state.updates_in_step:
        return None
    return raise_on_all_ranks(
        world, lambda: restored(trainer, unfinished_of(state), state.outcomes, state.path.name)
    )


def _restore_tensors(run: Run, state: CheckpointState) -> None:
    """Put the weights and the states of optimizer and reference into a run; all ranks call this together."""
    trainer, world, name = run.trainer, run.trainer.world, state.path.name
    folder = Path(str(state.path))
    weights = raise_on_all_ranks(world, lambda: read_weights(trainer.policy.architecture, folder, name))
    rehearse(trainer.policy, world)
    load_weights(trainer.policy, weights)
    raise_on_all_ranks(
        world,
        lambda: load_whole(trainer.optimizer, trainer.policy, optimizer_of(state), state.optimizer, name),
    )
    if state.has_reference:
        raise_on_all_ranks(world, lambda: _restore_reference(run, state))


def _saved_remotely(state: CheckpointState) -> Mapping[str, Any]:
    """Return what a checkpoint tells of the save in a service.

    Raises:
        CheckpointError: if it tells of none.
    """
    found = state.parts.get(REMOTE)
    if not isinstance(found, Mapping) or not isinstance(found.get("path"), str):
        raise CheckpointError(f"""{state.path} does not say where a service keeps its weights, so a run with
        trainer.type=remote cannot go on from it; resume from a checkpoint of such a run""")
    return found


def _check_tokenizer(run: Run, state: CheckpointState) -> None:
    if state.parts.get(FINGERPRINT) != fingerprint(run.tokenizer):
        raise CheckpointError(
            f"{state.path.name} was written with another tokenizer; give the one in {state.path} as tokenizer.path"
        )


def _restore_reference(run: Run, state: CheckpointState) -> None:
    reference, found = run.trainer.reference, reference_of(state)
    if reference is None:
        return
    if {name: tuple(value.shape) for name, value in found.items()} != reference.shapes():
        raise CheckpointError(
            f"{state.path} does not hold the reference model of this run; resume from another checkpoint"
        )
    reference.load(found)


def _restore_scheduler(run: Run, state: CheckpointState) -> None:
    """Go on at the same update of the schedule, which a new ``max_steps`` may have stretched."""
    scheduler: Any = run.trainer.scheduler  # a LambdaLR; torch annotates no lr_lambdas on its base
    made = int(state.scheduler["updates"])
    scheduler.last_epoch = made
    scheduler._step_count = made + 1
    rates = [
        base * function(made) for base, function in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
