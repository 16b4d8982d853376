"""Contradictory settings of an adapter; see `regress.engine.config.rules`."""

from dataclasses import fields

from regress.engine.adapters.settings import is_adapter
from regress.engine.config.leaves import leaves
from regress.engine.config.rollout_rules import Rule
from regress.engine.config.schema import Config
from regress.engine.config.text import in_yaml


def uses_adapter(c: Config) -> bool:
    """Return True if an adapter is trained: a new one, or that of ``model.path``."""
    return c.model.lora.r is not None or is_adapter(c.model.path)


def _in_service(c: Config) -> bool:
    """Return True if a service trains an adapter."""
    if c.trainer.type != "remote":
        return False
    weaver = c.service.train_service.backend == "weaver"
    return (
        c.service.weaver_service.training_mode == "lora" if weaver else c.service.tinker_service.lora_rank > 0
    )


def _without_rank(c: Config) -> str | None:
    if uses_adapter(c):
        return None
    for spec in fields(c.model.lora):
        value, default = getattr(c.model.lora, spec.name), leaves()[f"model.lora.{spec.name}"].default
        if value != default and spec.name != "base_path":
            return (
                f"model.lora.{spec.name}={in_yaml(value)} means nothing with model.lora.r=null, which trains all "
                f"parameters; set model.lora.r to the rank of the adapters, or leave model.lora.{spec.name} away."
            )
    return None


def _dropout(c: Config) -> str | None:
    if not c.model.lora.dropout:
        return None
    return (
        f"model.lora.dropout={c.model.lora.dropout:g} would draw other values in the sampler and in every pass of the "
        "trainer, so that ratios differ from 1 although the policy has not changed; set model.lora.dropout=0."
    )


def _target_modules(c: Config) -> str | None:
    names = c.model.lora.target_modules
    if "all-linear" not in names or len(names) == 1:
        return None
    return (
        f"model.lora.target_modules={in_yaml(names)} names all-linear beside other modules; give all-linear alone, or "
        "the names of the modules."
    )


def _patterns(c: Config) -> str | None:
    for key, lowest in (("rank_pattern", 1), ("alpha_pattern", 0)):
        for name, given in getattr(c.model.lora, key).items():
            wanted = int if key == "rank_pattern" else (int, float)
            if isinstance(given, bool) or not isinstance(given, wanted) or given < lowest:
                kind = "a whole number from 1" if key == "rank_pattern" else "a number"
                return f"model.lora.{key}.{name}={in_yaml(given)} has to be {kind}; correct it."
    return None


def _plan_of_transformers(c: Config) -> str | None:
    if not uses_adapter(c) or c.parallel.tp == 1 or c.parallel.tp_implementation == "torch":
        return None
    return (
        "parallel.tp_implementation=transformers has no plan for the adapters of model.lora; set "
        "parallel.tp_implementation=torch."
    )


def _reference(c: Config) -> str | None:
    reference = c.reference
    if not reference.without_adapter:
        return None
    if not c.algorithm.needs_reference:
        return (
            "reference.without_adapter=true finds no reference model while algorithm.kl_coef=0; give algorithm.kl_coef "
            "a value or set reference.without_adapter=false."
        )
    if not uses_adapter(c) and not _in_service(c):
        return (
            "reference.without_adapter=true finds no adapter while model.lora.r=null; set reference.without_adapter="
            "false, or model.lora.r to a rank."
        )
    for key, value in (("path", reference.path), ("sync_every_n_steps", reference.sync_every_n_steps)):
        if value is not None:
            return (
                f"reference.without_adapter=true and reference.{key}={value} both decide what the reference is; set "
                f"reference.{key}=null or reference.without_adapter=false."
            )
    if c.model.lora.bias != "none":
        return (
            f"reference.without_adapter=true cannot take trained biases (model.lora.bias={c.model.lora.bias}) out of "
            "the base model; give its directory as reference.path, or set model.lora.bias=none."
        )
    return None


def _synchronized(c: Config) -> str | None:
    reference = c.reference
    if reference.sync_every_n_steps is None or not uses_adapter(c):
        return None
    if reference.path is not None:
        return (
            f"reference.sync_every_n_steps={reference.sync_every_n_steps} copies the policy's adapter, which the model "
            f"in reference.path={reference.path} does not have; set one of them to null."
        )
    if reference.mixup_alpha != 1.0:
        return (
            f"reference.mixup_alpha={reference.mixup_alpha:g} mixes weights, and the product of mixed factors of an "
            "adapter is no mixture of their products; set reference.mixup_alpha=1."
        )
    return None


ADAPTER_RULES: tuple[Rule, ...] = (
    *(_without_rank, _dropout, _target_modules, _patterns),
    *(_plan_of_transformers, _reference, _synchronized),
)
