"""Run whose model lies in a training service: other parts of the engine's run, and saves that the service keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from regress.engine import run_log, training_run
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.configured_worker import make_worker, sampling_settings
from regress.engine.data_components import make_material
from regress.engine.earlier_run import Earlier
from regress.engine.engine_ranks import SingleProcess, World
from regress.engine.optimizer import build_scheduler
from regress.engine.rollout_worker import RecordingWorker, RolloutWorker
from regress.engine.run_construction import (
    Dumping,
    Places,
    Progress,
    RemoteParts,
    Run,
    assembled,
    rollout_recorder,
    step_meta,
)
from regress.engine.run_models import reference_model
from regress.engine.run_provenance import provenance
from regress.engine.tokenizer import fingerprint
from regress.engine.user_components import own_loss
from regress.errors import CheckpointError, ConfigError
from regress.service.client.remote_api_dumps import RemoteDumps
from regress.service.client.remote_policy import RemotePolicy
from regress.service.client.remote_rollouts import (
    CurrentSampler,
    LocalReference,
    Reference,
    ServiceReference,
    ServiceRolloutWorker,
)
from regress.service.client.remote_trainer import RemoteAdamW, RemoteTrainer
from regress.service.client.service_backend import RemoteModel, RemoteSampler
from regress.service.client.service_connection import connect
from regress.service.service_api import ServiceError


class ServiceState:
    """Saves of a run's model in its service, and the weights that its reference samples from.

    Attributes:
        model: the model that is trained.
    """

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self._reference: str | None = None
        self._sampler: RemoteSampler | None = None

    def reference(self) -> RemoteSampler:
        """Return the sampler of the weights before the first update, which are exported when first asked for."""
        if self._reference is None:
            self._reference = self.model.export("reference")
        if self._sampler is None:
            self._sampler = self.model.sampler(self._reference)
        return self._sampler

    def save(self, name: str) -> dict[str, Any]:
        """Save weights and optimizer in the service, and return where they are, for a checkpoint of the run."""
        return {**self._saved(name, optimizer=True), "reference": self._reference}

    def finish(self) -> dict[str, Any]:
        """Save the final weights in the service, and return where they are."""
        return self._saved("final", optimizer=False)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` has returned.

        Raises:
            CheckpointError: if it is of another protocol or base model.
            ServiceError: if the service does not have it.
        """
        opened = self.model.opened
        for name, now in (("wire", self.model.wire), ("base_model", opened.base_model)):
            if saved.get(name) != now:
                raise CheckpointError(f"""the weights of the checkpoint lie in a service, saved with
                {name}={saved.get(name)!r}, and this run has {name}={now!r}; go on with the service that saved them""")
        try:
            self.model.load(str(saved["path"]))
        except ServiceError as error:
            raise ServiceError(
                f"""the service does not give back the save {str(saved["path"]).rpartition("/")[2]} of the model
                {saved.get("model_id")} ({error}); go on with the service, its state directory and the API key that
                saved it""",
                code=error.code,
                category=error.category,
            ) from error
        reference = saved.get("reference")
        self._reference, self._sampler = None if reference is None else str(reference), None

    def _saved(self, name: str, *, optimizer: bool) -> dict[str, Any]:
        path = self.model.save(name, optimizer=optimizer)
        opened = self.model.opened
        facts = {"wire": self.model.wire, "model_id": opened.model_id, "base_model": opened.base_model}
        return {**facts, "path": path}


Connect = Callable[[Config], RemoteModel]


def train(
    config: Config,
    console: Console,
    *,
    allow_change: Sequence[str] = (),
    stop_after: int | None = None,
    before_resume: Callable[[], None] | None = None,
    earlier: Earlier = "keep",
    connect: Connect = connect,
) -> training_run.RunResult:
    """Train in the service that a configuration with ``trainer.type=remote`` names.

    Args:
        before_resume: called on the first rank before a run that goes on is opened.
        earlier: what becomes of another run in ``output_dir``.
        connect: creates the model in the service.

    Raises:
        RegressError: whatever a user can mend, in one sentence.
    """
    return training_run.train(
        config,
        console,
        allow_change=allow_change,
        stop_after=stop_after,
        builder=partial(build, connect=connect),
        before_resume=before_resume,
        earlier=earlier,
    )


def build(
    config: Config,
    resources: ExitStack,
    progress: Progress,
    world: World | None = None,
    *,
    resumed: Places | None = None,
    connect: Connect = connect,
) -> Run:
    """Build the parts of a run, with the model created in the service before all that depends on it.

    A run that goes on from a checkpoint (``resumed`` is not None) continues its dumps.
    """
    world = world or SingleProcess()
    dumps = RemoteDumps(config, (resumed or {}).get("debug"))
    model = connect(config)
    resources.callback(model.close)
    material = make_material(_with_tokenizer(config, model))
    tokenizer, prompts = material.tokenizer, material.prompts
    origin = provenance(config, fingerprint(tokenizer), world.plan.mesh)
    made: list[RemoteTrainer] = []
    current = CurrentSampler(model, lambda: made[0].updates if made else 0)
    worker: RolloutWorker = make_worker(
        config,
        prompts,
        origin,
        vocabulary=len(tokenizer),
        sampler=lambda: ServiceRolloutWorker(
            current, **sampling_settings(config, tokenizer, material.dialogue)
        ),
    )
    meta = step_meta(origin, prompts)
    recorders: dict[str, Dumping] = {} if dumps.folder is None else {"debug": dumps}
    if config.rollout_mock.enable and config.rollout_mock.mode == "dump":
        rollouts = rollout_recorder(config, origin, world, (resumed or {}).get("rollout_mock"))
        worker = resources.enter_context(RecordingWorker(worker, rollouts, meta, world))
        recorders["rollout_mock"] = rollouts
    run_log.sampled_hotter(config.rollout_worker.temperature)
    policy, optimizer = RemotePolicy(model), RemoteAdamW(config.optimizer)
    scheduler: LRScheduler = build_scheduler(
        optimizer, config.optimizer, updates=config.max_steps * config.updates_per_rollout
    )
    state = ServiceState(model)
    trainer = RemoteTrainer(
        config=config,
        policy=policy,
        reference=_reference(config, state, tokenizer, world),
        optimizer=optimizer,
        scheduler=scheduler,
        worker=worker,
        prompts=prompts.train,
        trajectory_meta=meta,
        world=world,
        token_loss=own_loss(config.algorithm.loss_function),
        dumps=dumps,
    )
    made.append(trainer)
    remote = RemoteParts(dumps.folder, state.finish, state.save, state.restore)
    return replace(assembled(trainer, material, None, recorders, resources), remote=remote)


def _with_tokenizer(config: Config, model: RemoteModel) -> Config:
    """Return the configuration with the tokenizer of the service's model, if none is configured.

    Raises:
        ConfigError: if the service tells none that this machine has.
    """
    if config.tokenizer.path is not None:
        return config
    tokenizer = model.opened.tokenizer
    if tokenizer is None or not Path(tokenizer).is_dir():
        raise ConfigError(f"""tokenizer.path=null leaves the tokenizer to the service, which tells {tokenizer!r} for its
        model {model.opened.base_model}, no folder of this machine; set tokenizer.path""")
    return replace(config, tokenizer=replace(config.tokenizer, path=tokenizer))


def _reference(
    config: Config, state: ServiceState, tokenizer: PreTrainedTokenizerBase, world: World
) -> Reference | None:
    """Return the reference of the KL term: the model of ``reference.path`` here, or weights that the service keeps."""
    if not config.algorithm.needs_reference:
        return None
    if config.reference.path is not None:
        frozen = reference_model(config, tokenizer).requires_grad_(False)
        policy: LocalPolicy = world.policy(frozen, log_prob_chunk_size=config.batching.log_prob_chunk_size)
        return LocalReference(policy)
    if config.reference.without_adapter:
        return ServiceReference(lambda: state.model.sampler(None))
    state.reference()  # the weights as they are before the first update
    return ServiceReference(state.reference)
