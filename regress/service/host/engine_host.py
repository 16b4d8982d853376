"""Host of the service on the engine: one on every rank, all of which make the same calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from regress.dump.dump_manifest import environment, package_versions
from regress.engine.config.config_schema import Config
from regress.engine.determinism_environment import configure_torch
from regress.engine.engine_ranks import World, raise_on_all_ranks
from regress.errors import CheckpointError, DumpError, NotFinite, RankError, RegressError, reason
from regress.service.host import host_saves
from regress.service.host.base_models import Base, offered, require_one_layout
from regress.service.host.request_dumps import Dumps, DumpSettings
from regress.service.host.request_passes import complete, run_pass
from regress.service.host.training_model import Model, check, optim_step
from regress.service.host.weight_samplers import Sampler, SamplingNet
from regress.service.service_api import (
    AdamParams,
    Array,
    Json,
    LoraSpec,
    ModelInfo,
    ModelSpec,
    OfferedModel,
    OptimResult,
    PassRequest,
    PassResult,
    SamplingRequest,
    SamplingResult,
    SaveKind,
    ServiceError,
)


@contextmanager
def service_errors() -> Iterator[None]:
    """Raise the engine's errors as `ServiceError`: those that another request helps against, and the others."""
    try:
        yield
    except ServiceError:
        raise
    except RankError as error:
        raise ServiceError(str(error), code="rank_failed", category="server") from error
    except NotFinite as error:
        raise ServiceError(str(error), code="not_finite") from error
    except CheckpointError as error:
        raise ServiceError(str(error), code="bad_save") from error
    except DumpError as error:
        raise ServiceError(str(error), code="dump_failed", category="server") from error
    except RegressError as error:
        raise ServiceError(str(error)) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ServiceError(
            f"the memory of the service does not suffice ({reason(error)}); send fewer or shorter datums in a request",
            code="out_of_memory",
            category="server",
        ) from error


T = TypeVar("T")


class EngineHost:
    """Models of the service and their steps; see `regress.service.service_api.Host`.

    Args:
        configs: what is offered: by name the engine's configuration of a run (``model``, ``tokenizer``, dtype,
            ``parallel``, ``batching``, lengths).
        world: the ranks, as `regress.parallel.distributed_ranks.opened_world` gives them for one of the configurations.
        folder: directory of the service, for the tokenizers that clients load and, by default, dumps.
        environ: its ``WEAVER_DEBUG_DUMP_*`` turn dumps on.

    Raises:
        ConfigError: if one of the models cannot be offered.
    """

    def __init__(
        self,
        configs: Mapping[str, Config],
        world: World,
        folder: Path,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        require_one_layout(configs)
        configure_torch(next(iter(configs.values())).threads)
        disable_progress_bar()
        self._world = world
        self._dumps = Dumps(DumpSettings.of(environ, folder / "debug_dump"), world)
        self._bases = {
            name: Base(name, config, world, folder / "tokenizers" / f"{index:03d}")
            for index, (name, config) in enumerate(configs.items())
        }
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._nets: dict[tuple[str, LoraSpec | None], SamplingNet] = {}

    def offered(self) -> list[OfferedModel]:
        """Return the base models that clients may create."""
        return [offered(name, base.config, base.folder) for name, base in self._bases.items()]

    def create(self, model_id: str, spec: ModelSpec) -> ModelInfo:
        """Create a model of a base model; it is that of the base until its first step."""
        with service_errors():
            if model_id in self._models:
                raise ServiceError(f"the model {model_id} exists already; take another number", code="exists")
            model = Model.made(model_id, spec, self._base(spec.base_model), self._dumps)
            self._models[model_id] = model
            return self._info(model)

    def create_from(self, model_id: str, saved: str, *, optimizer: bool) -> ModelInfo:
        """Create a model of a save."""
        with service_errors():
            _, found = host_saves.opened(Path(saved), self._world)
            self.create(model_id, host_saves.spec_of(found))
            try:
                host_saves.load(self._models[model_id], Path(saved), self._world, optimizer=optimizer)
            except BaseException:
                del self._models[model_id]
                raise
            return self._info(self._models[model_id])

    def close(self, model_id: str) -> None:
        """Drop a model."""
        self._model(model_id)
        del self._models[model_id]

    def run_pass(self, model_id: str, request: PassRequest, where: Json) -> PassResult:
        """Run forward passes, and unless told otherwise add the gradients of a backward pass."""
        with service_errors():
            return run_pass(self._model(model_id), request, where, self._world)

    def optim_step(self, model_id: str, params: AdamParams, where: Json) -> OptimResult:
        """Make a step of AdamW from the gradients since the last one."""
        with service_errors():
            model = self._model(model_id)
            check(params)
            complete(model, self._world)
            return optim_step(model, params, where, self._world)

    def save(self, model_id: str, folder: str, kind: SaveKind) -> int:
        """Write a checkpoint of the engine into a folder that does not exist yet, or nothing."""
        with service_errors():
            model = self._model(model_id)
            host_saves.save(model, Path(folder), kind, self._world)
            return model.step

    def load(self, model_id: str, folder: str, *, optimizer: bool) -> int:
        """Put a save into a model; gradients since the last step are dropped."""
        with service_errors():
            model = self._model(model_id)
            host_saves.load(model, Path(folder), self._world, optimizer=optimizer)
            return model.step

    def pending_gradients(self, model_id: str) -> int:
        """Return the number of passes whose gradients no step has used."""
        return self._model(model_id).pending

    def open_sampler(self, sampler_id: str, folder: str | None, base_model: str | None) -> None:
        """Open a sampler of a save, or of a base model."""
        with service_errors():
            self._samplers[sampler_id] = self._opened(folder, base_model)

    def close_sampler(self, sampler_id: str) -> None:
        """Drop a sampler."""
        self._sampler(sampler_id)
        del self._samplers[sampler_id]

    def sample(self, sampler_id: str, request: SamplingRequest) -> SamplingResult:
        """Draw completions on the first rank; all ranks return them."""
        with service_errors():
            sampler = self._sampler(sampler_id)
            return self._by_first(lambda: sampler.sample(request))

    def prompt_logprobs(self, sampler_id: str, *prompts: Array) -> Array:
        """Score the tokens of prompts on the first rank; all ranks return the scores."""
        with service_errors():
            sampler = self._sampler(sampler_id)
            return self._by_first(lambda: sampler.prompt_log_probs(*prompts))

    def fingerprint(self) -> Json:
        """Return versions, threads, dtype, device and determinism settings."""
        config = next(iter(self._bases.values())).config
        return {
            **environment(config.device, torch.get_num_threads()),
            "versions": package_versions(),
            "mesh": dict(self._world.plan.mesh.sizes),
            "dtypes": {name: base.config.model.dtype for name, base in self._bases.items()},
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def _base(self, name: str) -> Base:
        if name not in self._bases:
            raise ServiceError(
                f"base_model={name!r} is not offered; choose one of {', '.join(self._bases)}",
                code="not_found",
            )
        return self._bases[name]

    def _model(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise ServiceError(f"there is no model {model_id}; create it first", code="not_found")
        return self._models[model_id]

    def _sampler(self, sampler_id: str) -> Sampler:
        if sampler_id not in self._samplers:
            raise ServiceError(f"there is no sampler {sampler_id}; create it first", code="not_found")
        return self._samplers[sampler_id]

    def _info(self, model: Model) -> ModelInfo:
        architecture = type(model.policy.architecture).__name__
        return ModelInfo(
            model.id,
            model.base.name,
            str(model.base.folder),
            architecture,
            model.spec.lora,
            model.step,
            self.fingerprint(),
        )

    def _opened(self, folder: str | None, base_model: str | None) -> Sampler:
        if (folder is None) == (base_model is None):
            raise ServiceError("a sampler is of a save or of a base model; give one of the two")
        if folder is None:
            base = self._base(str(base_model))
            base.start()  # on all ranks together; later only the first one asks
            return Sampler(base, self._net(base, None), f"base {base.name}", base.start, 0)
        place = Path(folder)
        state, found = host_saves.opened(place, self._world)
        spec = host_saves.spec_of(found)
        base = self._base(spec.base_model)
        net = self._net(base, spec.lora)
        host_saves.require_base(base, found, place)
        expected = raise_on_all_ranks(self._world, lambda: host_saves.stamp(place))

        def read() -> dict[str, Tensor]:
            return host_saves.sampled_weights(net.policy.architecture, place, expected)

        raise_on_all_ranks(self._world, lambda: net.with_weights(expected, read))
        return Sampler(base, net, expected, read, state.step)

    def _net(self, base: Base, lora: LoraSpec | None) -> SamplingNet:
        key = base.name, None if lora is None else replace(lora, seed=None)  # the weights are the sampler's
        if key not in self._nets:
            self._nets[key] = SamplingNet(base.local(key[1]))
        return self._nets[key]

    def _by_first(self, work: Callable[[], T]) -> T:
        """Return the first rank's result on all of them, or raise its error."""

        def own() -> T | None:
            return work() if self._world.main else None

        result: T = self._world.gather(raise_on_all_ranks(self._world, own))[0]
        return result
