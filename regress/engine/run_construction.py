"""Construction of a run's parts from its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from regress.dump.dump_continuation import ContinuationPoint, Position, StartingPlace
from regress.dump.dump_location import Location, location
from regress.dump.dump_manifest import MANIFEST, Provenance
from regress.dump.module_selection import matching_modules, matching_parameters, record_modules
from regress.dump.recorder import Recorder
from regress.dump.taps import recording
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.compiled_blocks import blocks_of
from regress.engine.config.config_schema import Config
from regress.engine.configured_worker import make_worker, policy_sampler
from regress.engine.data_components import DataComponents, make_material
from regress.engine.engine_ranks import SingleProcess, World, raise_on_all_ranks
from regress.engine.evaluation import TABLE, Evaluation
from regress.engine.grpo_trainer import Trainer
from regress.engine.optimizer import adamw, build_scheduler
from regress.engine.prompt_tokens import Prompts
from regress.engine.recorded_optimizer_state import load_state
from regress.engine.reference_policy import Reference
from regress.engine.rollout_worker import RecordingWorker
from regress.engine.run_models import build_policy, build_reference
from regress.engine.run_provenance import provenance, trajectory_meta
from regress.engine.tokenizer import fingerprint
from regress.engine.user_components import own_loss, own_optimizer
from regress.engine.warm_start import warm_start
from regress.errors import ConfigError
from regress.tasks.curriculum import Curriculum

Progress = Callable[[str, int], Callable[[], None]]
"""Function ``progress(name, total)``: opens a progress bar and returns the function that advances it."""


class Stateful(Protocol):
    """Part of a run with a state of its own, which checkpoints hold as JSON."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as values of JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned."""


class Dumping(Protocol):
    """Writer of a dump that a later process can continue."""

    @property
    def folder(self) -> Location | None: ...

    def position(self, place: ContinuationPoint) -> Position:
        """Return what is written that lies before a place in the run."""


@dataclass(frozen=True)
class RemoteParts:
    """Parts of a run whose model lies in a service.

    Attributes:
        dump_dir: directory of what the client dumps; None if it dumps nothing.
        finish: saves the final weights there, and returns what says where they are, as JSON.
        save: saves weights and optimizer there under a name, and returns what `restore` needs, as JSON.
        restore: goes on from what `save` has returned.
    """

    dump_dir: Location | None
    finish: Callable[[], Mapping[str, Any]]
    save: Callable[[str], Mapping[str, Any]]
    restore: Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """Run that is ready to train.

    Attributes:
        curriculum: ``None`` without one.
        recorder: ``None`` when nothing is dumped.
        recorders: every writer of a dump, by the section of the configuration that asks for it.
        parts: what else has a state that a checkpoint keeps, by name.
        remote: what a run has whose model lies in a service.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    trainer: Trainer
    evaluation: Evaluation
    curriculum: Curriculum | None
    recorder: Recorder | None
    recorders: Mapping[str, Dumping] = field(default_factory=dict)
    parts: dict[str, Stateful] = field(default_factory=dict)
    remote: RemoteParts | None = None


Places = Mapping[str, StartingPlace]
"""Section of the configuration that asks for a dump -> where an earlier process has left it."""


def build(
    config: Config,
    resources: ExitStack,
    progress: Progress,
    world: World | None = None,
    *,
    resumed: Places | None = None,
) -> Run:
    """Build data, tokenizer, rollout worker, model, optional warm start, reference and optimizer.

    A run that goes on from a checkpoint (``resumed`` is not None) leaves the warm start and ``optimizer.state_path``
    out, since what they decide is in the checkpoint, and continues its dumps.

    Everything that can be refused (an unwritable dump directory, a recording that does not match) is refused
    before anything is computed. ``resources`` closes everything that the run leaves open. ``world`` defaults
    to this process alone.
    """
    world = world or SingleProcess()
    components = raise_on_all_ranks(world, lambda: make_material(config))
    tokenizer, prompts = components.tokenizer, components.prompts
    origin = provenance(config, fingerprint(tokenizer), world.plan.mesh)
    policy = build_policy(config, tokenizer, world)
    frozen = raise_on_all_ranks(world, lambda: build_reference(config, tokenizer, policy))
    optimizer = raise_on_all_ranks(world, lambda: _optimizer(config, policy, fresh=resumed is None))
    vocabulary = policy.architecture.config.vocab_size
    sampler = partial(policy_sampler, config, policy, tokenizer, components.dialogue, world)
    made = partial(make_worker, config, prompts, origin, vocabulary=vocabulary, sampler=sampler)
    worker = raise_on_all_ranks(world, made)
    meta = step_meta(origin, prompts)
    recorders: dict[str, Recorder] = {}
    if config.rollout_mock.enable and config.rollout_mock.mode == "dump":
        rollouts = rollout_recorder(config, origin, world, (resumed or {}).get("rollout_mock"))
        worker = resources.enter_context(RecordingWorker(worker, rollouts, meta, world))
        recorders["rollout_mock"] = rollouts
    recorder = None
    if config.debug.enable_data_dump:
        recorder = recorded(config, policy, origin, world, resources, (resumed or {}).get("debug"))
        recorders["debug"] = recorder
    if config.warm_start.steps and resumed is None:
        _warm_start(config, policy, prompts, progress, world)
    needed = config.algorithm.needs_reference
    reference = Reference(policy, config.reference, frozen, world) if needed else None
    updates = config.max_steps * config.updates_per_rollout
    trainer = Trainer(
        config=config,
        world=world,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.optimizer, updates=updates),
        worker=worker,
        prompts=prompts.train,
        trajectory_meta=meta,
        token_loss=raise_on_all_ranks(world, lambda: own_loss(config.algorithm.loss_function)),
    )
    return assembled(trainer, components, recorder, recorders, resources)


def _warm_start(
    config: Config, policy: LocalPolicy, prompts: Prompts, progress: Progress, world: World
) -> None:
    advance = progress("warm start", config.warm_start.steps)
    stages = 1 if config.parallel.pp == 1 else config.parallel.pp * config.parallel.pp_stages_per_rank
    warm_start(policy, prompts.demonstrations, config.warm_start, advance, world, stages=stages)


def recorded(
    config: Config,
    policy: LocalPolicy,
    origin: Provenance,
    world: World,
    resources: ExitStack,
    start: StartingPlace | None = None,
) -> Recorder:
    """Record what the run taps, and the outputs of modules if they are asked for, until ``resources`` close."""
    recorder = _recorder(config, policy, origin, world, start)
    resources.enter_context(recording(recorder))
    if config.debug.dump_options.activations:
        pattern = config.debug.target_module_pattern
        found = {name: module for name, module in policy.modules().items() if re.search(pattern, name)}
        policy.recorded_modules = frozenset(found)
        resources.enter_context(record_modules(found, policy.output_shard))
    return recorder


def assembled(
    trainer: Trainer,
    components: DataComponents,
    recorder: Recorder | None,
    recorders: Mapping[str, Dumping],
    resources: ExitStack,
) -> Run:
    """Return the run of a trainer, with its evaluation and what a checkpoint keeps of its parts."""
    config, prompts, curriculum = trainer.config, components.prompts, components.curriculum
    table = Path(config.output_dir) / TABLE if trainer.world.main else None
    evaluation = Evaluation(config, trainer.worker, prompts.evaluation(), table)
    resources.callback(evaluation.close)
    parts: dict[str, Stateful] = {"evaluation": evaluation}
    if curriculum is not None:
        parts["curriculum"] = curriculum
    if trainer.coefficients.adaptive:
        parts["coefficients"] = trainer.coefficients
    return Run(
        config,
        components.tokenizer,
        prompts,
        trainer,
        evaluation,
        curriculum,
        recorder,
        recorders=recorders,
        parts=parts,
    )


def _half_done(config: Config, folder: str) -> bool:
    """Return True if a killed run that had no checkpoint yet has left an incomplete dump, which is made again."""
    again = config.trainer.resume_from_checkpoint is not None
    return again and not (location(folder) / MANIFEST).exists()


def step_meta(origin: Provenance, prompts: Prompts) -> Callable[[int], Mapping[str, Any]]:
    """Return the function that gives the metadata of a step's rollout: with a curriculum, also the step's stage."""
    constant = trajectory_meta(origin)

    def of_step(step: int) -> Mapping[str, Any]:
        place = prompts.place(step)
        return constant if place is None else {**constant, "curriculum": vars(place)}

    return of_step


def rollout_recorder(
    config: Config, origin: Provenance, world: World, start: StartingPlace | None
) -> Recorder:
    """Return the recorder of whole rollouts."""
    folder = config.rollout_mock.dump_dir
    return Recorder(
        folder,
        options={},
        provenance=origin,
        overwrite=config.rollout_mock.overwrite or _half_done(config, folder),
        overwrite_key="rollout_mock.overwrite=true",
        start=start,
        rank=world.rank,
        gather=world.gather,
    )


def _recorder(
    config: Config, policy: LocalPolicy, origin: Provenance, world: World, start: StartingPlace | None
) -> Recorder:
    """Return the recorder after checking that the patterns match something: it may remove an earlier dump."""
    debug = config.debug
    options = debug.dump_options
    if options.param or options.gradient or options.optimizer:
        matching_parameters(trained_parameters(policy.architecture), debug.target_param_pattern)
    if options.activations:
        found = matching_modules(policy.architecture, debug.target_module_pattern)
        if config.model.compile is not None:
            _require_outside(found, blocks_of(policy.model), config)
    return Recorder(
        debug.dump_dir,
        options=vars(debug.dump_options),
        format=debug.dump_format,
        every_n_steps=debug.dump_every_n_steps,
        provenance=origin,
        overwrite=debug.overwrite or _half_done(config, debug.dump_dir),
        overwrite_key="debug.overwrite=true",
        start=start,
        rank=world.rank,
        gather=world.gather,
        fsync=debug.dump_fsync,
    )


def _require_outside(found: Iterable[str], blocks: Iterable[str], config: Config) -> None:
    """Refuse modules inside a compiled block, which exist only as parts of one function."""
    inside = [name for name in found for block in blocks if name.startswith(f"{block}.")]
    if inside:
        raise ConfigError(f"""debug.target_module_pattern names {inside[0]}, which does not run by itself under
        model.compile={config.model.compile}; name whole blocks, or set model.compile=null""")


def _optimizer(config: Config, policy: LocalPolicy, *, fresh: bool) -> Optimizer:
    chosen = config.optimizer
    optimizer: Optimizer
    if chosen.factory is not None:
        optimizer = own_optimizer(list(policy.named_parameters()), chosen.factory, chosen)
    else:
        optimizer = adamw(
            policy.named_parameters(),
            chosen.learning_rate,
            betas=(chosen.betas[0], chosen.betas[1]),
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            implementation=chosen.implementation,
        )
    if chosen.state_path is not None and fresh:
        load_state(optimizer, policy, chosen.state_path)
    return optimizer
