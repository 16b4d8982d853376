"""Base models that the service offers: each is the engine's configuration of a run, by a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from regress.dump.numpy_arrays import to_numpy
from regress.engine.adapters.adapter_settings import is_adapter, of_directory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.checkpoint.checkpoint_tensors import copied_weights, load_weights, save_weights
from regress.engine.config.config_schema import Config
from regress.engine.config.model_config import LoraConfig
from regress.engine.data_components import DataComponents, make_material, tokenizer_path
from regress.engine.engine_ranks import SingleProcess, World, raise_on_all_ranks
from regress.engine.model_hub import local_folder
from regress.engine.prompt_tokens import NoPrompts
from regress.engine.run_models import build_policy
from regress.engine.tokenizer import load_tokenizer
from regress.engine.warm_start import warm_start
from regress.engine.warmup_backward import rehearse
from regress.errors import ConfigError
from regress.layout import BatchPlan
from regress.service.service_api import LoraSpec, OfferedModel, ServiceError


def target_modules(model: PreTrainedModel, lora: LoraSpec) -> list[str]:
    """Return the ends of the names of the linear layers that are adapted: those of attention, MLP and output.

    Routers of experts are left out.

    Raises:
        ServiceError: if a part is asked for that has no linear layers, such as fused experts, or nothing at all.
    """
    head = model.get_output_embeddings()
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        owner, _, leaf = name.rpartition(".")
        parent = owner.rpartition(".")[2]
        if module is head:
            found["train_unembed"].append(name)
        elif "attn" in parent:
            found["train_attn"].append(f"{parent}.{leaf}")
        elif "mlp" in owner and leaf != "gate":
            found["train_mlp"].append(f"{parent}.{leaf}")
    names: list[str] = []
    for part, modules in found.items():
        if not getattr(lora, part):
            continue
        if not modules:
            raise ServiceError(
                f"lora_config.{part}=true finds no linear layers in {type(model).__name__}; set it to false"
            )
        names += dict.fromkeys(modules)
    if not names:
        raise ServiceError("lora_config trains nothing; set train_attn, train_mlp or train_unembed to true")
    return names


def require_rank(lora: LoraSpec | None, config: Config, name: str) -> None:
    """Refuse another rank than that of the adapter which is offered.

    Raises:
        ServiceError: naming both.
    """
    offered = of_directory(local_folder(str(config.model.path), "model.path"), "model.path").r
    if lora is None or lora.rank != offered:
        asked = "full parameters" if lora is None else f"rank {lora.rank}"
        raise ServiceError(
            f"base_model={name!r} is an adapter of rank {offered}, and {asked} is asked for; create it with this rank"
        )


_UNUSED = {
    "model.router_coef": "its protocols have no such loss",
    "optimizer.factory": "clients send the settings of AdamW",
    "reference.path": "the service has no reference model",
}


def offered(name: str, config: Config, folder: Path | None) -> OfferedModel:
    """Return the description of a base model for clients; ``folder`` is that of its tokenizer."""
    return OfferedModel(name, str(folder or ""), config.data.max_seq_length)


TOKENS = 8192
"""Tokens of a microbatch, unless the configuration says how large one is."""


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
            _for_older_clients(folder / "tokenizer_config.json")
        self._start: dict[str, Tensor] | None = None
        self._architecture: PreTrainedModel | None = None
        self._is_saved = False
        self._digest: str | None = None

    @property
    def plan(self) -> BatchPlan:
        """Plan of the microbatches of a request: of at most `TOKENS`, unless the configuration says otherwise."""
        chosen = self.config.batching
        values = {name: getattr(chosen, name) for name in BatchPlan.__dataclass_fields__}
        if chosen.micro_batch_size is None and chosen.max_tokens_per_microbatch is None:
            values["max_tokens_per_microbatch"] = max(TOKENS, self.config.data.max_seq_length)
        return BatchPlan(**values)

    def policy(self, lora: LoraSpec | None = None) -> LocalPolicy:
        """Return a new model, trained in full or with an adapter; all ranks call this together.

        Raises:
            ConfigError: if the model cannot be adapted so.
        """
        if is_adapter(self.config.model.path):
            require_rank(lora, self.config, self.name)
        policy = build_policy(self._adapted(lora), self.tokenizer, self._world)
        if lora is None and self.config.warm_start.steps:
            if self._start is None:
                self._warm_up(policy)
            load_weights(policy, self.start())
        rehearse(policy, self._world)
        return policy

    def start(self) -> Mapping[str, Tensor]:
        """Return the weights that every model begins with, whole; all ranks call this together."""
        if self._start is None:
            policy = build_policy(self._base_config(), self.tokenizer, self._world)
            if self.config.warm_start.steps:
                self._warm_up(policy)
            else:
                self._start = copied_weights(policy.whole_model())
        assert self._start is not None
        return self._start

    def digest(self) -> str:
        """Return a sha256 of the weights of `start`; all ranks call this together."""
        if self._digest is None:
            found = hashlib.sha256()
            for name, value in sorted(self.start().items()):
                found.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
                found.update(to_numpy(value.contiguous(), name).tobytes())
            self._digest = found.hexdigest()
        return self._digest

    def local(self, lora: LoraSpec | None = None) -> LocalPolicy:
        """Return a model that is whole in this process, to sample from; all ranks call this together."""
        config = self._adapted(lora)
        config.model.compile = None
        return build_policy(config, self.tokenizer, SingleProcess())

    def _adapted(self, lora: LoraSpec | None) -> Config:
        """Return the configuration of a model with an adapter on this base, or of the base itself.

        A base that is made from a seed is saved first, since the adapter has a seed of its own.
        """
        config = deepcopy(self.config)
        if is_adapter(config.model.path):
            return config
        section = config.model.lora
        if lora is None:
            config.model.lora = LoraConfig()
            return config
        section.r = lora.rank
        config.seed = config.seed if lora.seed is None else lora.seed % 2**32
        if config.model.path is None or config.warm_start.steps:
            config.model.path, config.model.config = str(self._saved()), {}
        if not section.target_modules:
            section.target_modules = target_modules(self._plain(), lora)
        return config

    def _base_config(self) -> Config:
        config = deepcopy(self.config)
        if not is_adapter(config.model.path):
            config.model.lora = LoraConfig()
        return config

    def _saved(self) -> Path:
        """Return the folder of this base's weights, written on first use; all ranks call this together."""
        folder = self.folder.with_name(f"{self.folder.name}-weights")
        if not self._is_saved:
            start, model = self.start(), self._plain()
            raise_on_all_ranks(
                self._world, lambda: save_weights(model, start, folder) if self._world.main else None
            )
            self._is_saved = True
        return folder

    def _plain(self) -> PreTrainedModel:
        """Return this base's model, for its architecture."""
        if self._architecture is None:
            self._architecture = build_policy(self._base_config(), self.tokenizer, SingleProcess()).model
        return self._architecture

    def _warm_up(self, policy: LocalPolicy) -> None:
        parallel = self.config.parallel
        stages = 1 if parallel.pp == 1 else parallel.pp * parallel.pp_stages_per_rank
        examples = self._material.prompts.demonstrations
        warm_start(policy, examples, self.config.warm_start, lambda: None, self._world, stages=stages)
        self._start = copied_weights(policy.whole_model())

    def _refuse(self) -> None:
        keys = {
            "optimizer.factory": self.config.optimizer.factory,
            "reference.path": self.config.reference.path,
            "model.router_coef": self.config.model.router_coef or None,
        }
        for key, value in keys.items():
            if value is not None:
                raise ConfigError(f"""{key}={value!r} cannot be followed for the offered model {self.name!r}:
                {_UNUSED[key]}; set it to {"0" if key == "model.router_coef" else "null"}""")


def _material(config: Config) -> DataComponents:
    """Return the tokenizer of a configuration, and the prompts of its warm start, if it has one."""
    path = tokenizer_path(config)
    if config.warm_start.steps or (path is None and config.has_task):
        return make_material(config)
    if path is None:
        raise ConfigError(
            f"model.path={config.model.path!r} brings no tokenizer; set tokenizer.path to that of the model"
        )
    return DataComponents(load_tokenizer(path, chat=False), NoPrompts())


def require_one_layout(bases: Mapping[str, Config]) -> None:
    """Refuse configurations that ask for different ranks: one service has one set of them.

    Raises:
        ConfigError: naming two models.
    """
    first, *others = bases
    for name in others:
        if bases[name].parallel != bases[first].parallel:
            raise ConfigError(f"""the offered models {first!r} and {name!r} have different parallel.*, and a service has
            one set of ranks; make them equal, or start two services""")


def _for_older_clients(path: Path) -> None:
    """Write a tokenizer's settings so that transformers 4, which clients of older SDKs have, reads them, too."""
    settings = json.loads(path.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
