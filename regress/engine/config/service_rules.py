"""Settings that a remote trainer cannot have; see `regress.engine.config.rules`.

Weights, gradients and the state of the optimizer lie in the service, and its protocols carry numbers in float32, no
temperature of the policy that is trained, and no loss of the entropies of tokens beside a coefficient.
"""

from __future__ import annotations

from regress.engine.config.leaves import leaves
from regress.engine.config.rollout_rules import Rule
from regress.engine.config.schema import Config
from regress.engine.config.text import in_yaml

_LOCAL = {
    "parallel": "the ranks of the service are its own; give regress serve the section parallel",
    "warm_start": "a warm start is made before the service begins; let the service begin with the warm model",
    "optimizer.factory": "the service has an optimizer of its own",
    "optimizer.implementation": "the service has an optimizer of its own",
    "optimizer.state_path": "the state of the optimizer lies in the service; give it to regress serve",
    "debug.dump_options": (
        "tensors of the training are those of the service; set WEAVER_DEBUG_DUMP_ENABLED=1 there, and "
        "debug.remote_api_dump_options here"
    ),
    "model.compile": "the service computes; give it to regress serve",
    "trainer.resampling": "its clients weigh tokens, not samples",
    "model.router_coef": "its protocols have no such loss",
    "model.patch": "the service computes; give it to regress serve",
}
"""Sections and keys that mean nothing, or another thing, where a service trains."""


def _changed(c: Config, prefix: str) -> tuple[str, object] | None:
    for key, leaf in leaves().items():
        if key == prefix or key.startswith(f"{prefix}."):
            found: object = c
            for name in leaf.path:
                found = getattr(found, name)
            if found != leaf.default and key not in ("warm_start.batch_size", "warm_start.learning_rate"):
                return key, found
    return None


def _local_only(c: Config) -> str | None:
    if c.trainer.type != "remote":
        return None
    for prefix, why in _LOCAL.items():
        found = _changed(c, prefix)
        if found is not None:
            key, default = found[0], in_yaml(leaves()[found[0]].default)
            return (
                f"{key}={in_yaml(found[1])} cannot be had with trainer.type=remote: {why}; set {key}={default} or "
                "trainer.type=local."
            )
    return None


def _nonfinite(c: Config) -> str | None:
    if c.trainer.type != "remote" or c.trainer.on_nonfinite == "stop":
        return None
    return (
        "trainer.on_nonfinite=skip would have to drop gradients that the service of trainer.type=remote has added up, "
        "for which its protocols have no call; set trainer.on_nonfinite=stop."
    )


def _temperature(c: Config) -> str | None:
    if c.trainer.type != "remote" or c.rollout_worker.temperature == 1.0:
        return None
    found = {
        "algorithm.old_log_probs": ("sampler", "recompute"),
        "algorithm.sampler_correction": (None, "none"),
    }
    for key, (wrong, right) in found.items():
        value = getattr(c.algorithm, key.partition(".")[2])
        if value == wrong or (wrong is None and value != right):
            return (
                f"{key}={value} compares log-probs of the sampler at rollout_worker.temperature="
                f"{c.rollout_worker.temperature:g} with those of the policy, which the protocols of "
                f"trainer.type=remote compute at 1; set {key}={right} or rollout_worker.temperature=1."
            )
    return None


def _entropy(c: Config) -> str | None:
    if c.trainer.type != "remote" or c.algorithm.entropy_coef == 0.0:
        return None
    if c.service.train_service.backend == "tinker":
        return (
            f"algorithm.entropy_coef={c.algorithm.entropy_coef:g} has no place in Tinker's protocol, whose losses are "
            "functions of log-probs alone; set algorithm.entropy_coef=0 or service.train_service.backend=weaver."
        )
    return None


def _reference(c: Config) -> str | None:
    if c.trainer.type != "remote" or c.reference.sync_every_n_steps is None:
        return None
    return (
        f"reference.sync_every_n_steps={c.reference.sync_every_n_steps} mixes weights, which lie in the service of "
        "trainer.type=remote; set reference.sync_every_n_steps=null."
    )


def _remote_dumps(c: Config) -> str | None:
    chosen = [name for name, on in vars(c.debug.remote_api_dump_options).items() if on]
    if c.trainer.type != "remote":
        if not chosen:
            return None
        return (
            f"debug.remote_api_dump_options.{chosen[0]}=true has nothing to write with trainer.type=local; set "
            "trainer.type=remote, or use debug.dump_options."
        )
    if c.debug.enable_data_dump and not chosen:
        names = ", ".join(vars(c.debug.remote_api_dump_options))
        return (
            "debug.enable_data_dump=true dumps nothing with trainer.type=remote while every one of "
            f"debug.remote_api_dump_options is false; set at least one of {names} to true."
        )
    return None


SERVICE_RULES: tuple[Rule, ...] = (
    _local_only,
    _nonfinite,
    _temperature,
    _entropy,
    _reference,
    _remote_dumps,
)
