"""Base models that the service offers: each is the engine's configuration of a run, by a name."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from regress.engine.checkpoint.weights import copied_weights, load_weights
from regress.engine.config.schema import Config
from regress.engine.config.task_rules import without_task
from regress.engine.material import Material, make_material, tokenizer_path
from regress.engine.policies import build_policy
from regress.engine.policy import LocalPolicy
from regress.engine.prompts import NoPrompts
from regress.engine.rehearsal import rehearse
from regress.engine.tokenizer import load_tokenizer
from regress.engine.warm_start import warm_start
from regress.engine.world import SingleProcess, World, raise_on_all_ranks
from regress.errors import ConfigError
from regress.layout import BatchPlan
from regress.service.api import OfferedModel

_UNUSED = {
    "optimizer.factory": "clients send the settings of AdamW",
    "optimizer.state_path": "a model starts with a fresh optimizer",
    "reference.path": "the service has no reference model",
}


def offered(name: str, config: Config, folder: Path | None) -> OfferedModel:
    """Return what clients are told of a base model; ``folder`` is that of its tokenizer."""
    return OfferedModel(name, str(folder or ""), config.data.max_seq_length)


class Base:
    """A base model: what new models are built from, the same on every rank.

    A model starts with the weights that a run of the configuration has before its first rollout: those of a checkpoint
    or of the seed, and after the warm start, if there is one.

    Args:
        folder: where the tokenizer is saved, for clients.

    Attributes:
        config: the engine's configuration: model, tokenizer, dtype, ``parallel``, ``batching``, lengths.

    Raises:
        ConfigError: for a setting that the service cannot follow.
    """

    def __init__(self, name: str, config: Config, world: World, folder: Path) -> None:
        self.name, self.config, self._world = name, config, world
        self._refuse()
        self._material = raise_on_all_ranks(world, lambda: _material(config))
        self.tokenizer: PreTrainedTokenizerBase = self._material.tokenizer
        self.folder = folder
        if world.main:
            self.tokenizer.save_pretrained(folder)
        self._start: dict[str, Tensor] | None = None

    @property
    def plan(self) -> BatchPlan:
        """Plan of the microbatches of a request: one datum each, unless the configuration says otherwise."""
        chosen = self.config.batching
        values = {name: getattr(chosen, name) for name in BatchPlan.__dataclass_fields__}
        if chosen.micro_batch_size is None and chosen.max_tokens_per_microbatch is None:
            values["micro_batch_size"] = 1
        return BatchPlan(**values)

    def policy(self) -> LocalPolicy:
        """Return a new model, trained in full; all ranks call this together."""
        policy = build_policy(self.config, self.tokenizer, self._world)
        if self.config.warm_start.steps:
            if self._start is None:
                self._warm_up(policy)
            load_weights(policy, self.start())
        rehearse(policy, self._world)
        return policy

    def start(self) -> Mapping[str, Tensor]:
        """Return the weights that every model begins with, whole; all ranks call this together."""
        if self._start is None:
            policy = build_policy(self.config, self.tokenizer, self._world)
            if self.config.warm_start.steps:
                self._warm_up(policy)
            else:
                self._start = copied_weights(policy.whole_model())
        assert self._start is not None
        return self._start

    def local(self) -> LocalPolicy:
        """Return a model that is whole in this process, to sample from."""
        config = deepcopy(self.config)
        config.model.compile = None
        return build_policy(config, self.tokenizer, SingleProcess())

    def _warm_up(self, policy: LocalPolicy) -> None:
        parallel = self.config.parallel
        stages = 1 if parallel.pp == 1 else parallel.pp * parallel.pp_stages_per_rank
        examples = self._material.prompts.demonstrations
        warm_start(policy, examples, self.config.warm_start, lambda: None, self._world, stages=stages)
        self._start = copied_weights(policy.whole_model())

    def _refuse(self) -> None:
        keys = {
            "optimizer.factory": self.config.optimizer.factory,
            "optimizer.state_path": self.config.optimizer.state_path,
            "reference.path": self.config.reference.path,
        }
        for key, value in keys.items():
            if value is not None:
                raise ConfigError(
                    f"{key}={value!r} cannot be followed for the offered model {self.name!r}: {_UNUSED[key]}; set it "
                    "to null"
                )


def _material(config: Config) -> Material:
    """Return the tokenizer of a configuration, and the prompts of its warm start, if it has one."""
    path = tokenizer_path(config)
    if config.warm_start.steps or (path is None and not without_task(config)):
        return make_material(config)
    if path is None:
        raise ConfigError(
            f"model.path={config.model.path!r} brings no tokenizer; set tokenizer.path to that of the model"
        )
    return Material(load_tokenizer(path, chat=False), NoPrompts())


def require_one_layout(bases: Mapping[str, Config]) -> None:
    """Refuse configurations that ask for different ranks: one service has one set of them.

    Raises:
        ConfigError: naming two models.
    """
    first, *others = bases
    for name in others:
        if bases[name].parallel != bases[first].parallel:
            raise ConfigError(
                f"the offered models {first!r} and {name!r} have different parallel.*, and a service has one set of "
                "ranks; make them equal, or start two services"
            )
