"""Keys of the configuration that may differ between a checkpoint and the run that goes on from it. Loads no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from regress.credential_redaction import redacted_tree
from regress.engine.config import flat
from regress.engine.config.config_schema import Config
from regress.errors import CheckpointError, ConfigError

FREE = (
    *("exp_name", "max_steps", "output_dir", "evaluation", "tracking", "parallel", "batching", "debug"),
    *("trainer.save_steps", "trainer.save_updates", "trainer.save_total_limit", "trainer.checkpoint_dir"),
    *("trainer.resume_from_checkpoint", "trainer.on_nonfinite", "rollout_mock.dump_dir"),
    *("rollout_mock.overwrite", "data.length_allocation_strategy"),
    *(
        f"service.{name}_service.{key}"
        for name in ("weaver", "tinker")
        for key in ("base_url", "api_key", "client", "timeout")
    ),
)
"""Keys, and sections, that decide how long and where a run works, but not what it computes."""
ON_DEMAND = (
    *("model", "tokenizer", "reference", "task", "data", "warm_start", "rollout_worker", "rollout_mock"),
    *("algorithm", "curriculum", "seed", "device", "threads", "system_envs", "service"),
)
"""Keys, and sections, that change what is computed, so each has to be named."""


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, with both values; None stands for a key that one side does not know."""
    names = [*now, *(name for name in before if name not in now)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def resolved(config: Config) -> dict[str, Any]:
    """Return the configuration as a checkpoint holds it: dotted keys and plain values, without credentials."""
    found: dict[str, Any] = redacted_tree(flat(config))
    return found


def is_free(key: str) -> bool:
    """Return True if a key may change without being named."""
    return _in(key, FREE)


def is_on_demand(key: str) -> bool:
    """Return True if a key may change if it is named."""
    return _in(key, ON_DEMAND)


def check_changes(before: Mapping[str, Any], config: Config, allowed: Collection[str], stated: str) -> None:
    """Refuse a configuration that a run cannot go on with.

    A key that the checkpoint does not know, because it is newer, counts as unchanged.

    Args:
        before: the checkpoint's configuration.
        allowed: keys, or sections, that may change: those that `is_on_demand` tells of.
        stated: name of the checkpoint, for errors.

    Raises:
        ConfigError: naming the first key, both values and the remedy; also for a key in ``allowed`` that is none.
    """
    now = resolved(config)
    for name in allowed:
        _check_allowed(name, now)
    for key, (old, new) in known_changes(before, now).items():
        if is_free(key):
            continue
        change = f"{stated} was written with {key}={_shown(old)}, and this run has {key}={_shown(new)}"
        if not is_on_demand(key):
            raise CheckpointError(
                f"{change}, which cannot change in the middle of a run; set {key}={_shown(old)}"
            )
        if not is_allowed(key, allowed):
            raise CheckpointError(f"""{change}, which changes what is computed; set {key}={_shown(old)}, or allow the
            change with --allow-change {key}""")


def known_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, with both values, without keys that are newer than the checkpoint."""
    changed = changed_keys(before, now)
    return {key: both for key, both in changed.items() if key in before or _replaces(key, before)}


def is_allowed(key: str, allowed: Collection[str]) -> bool:
    """Return True if a key is among those that may change, or in a section that is."""
    return _in(key, tuple(allowed))


def _replaces(key: str, before: Mapping[str, Any]) -> bool:
    """Return True for an entry of a mapping that the checkpoint holds with other entries, or as empty."""
    section = key.rpartition(".")[0]
    return any(name == section or name.rpartition(".")[0] == section for name in before) and _is_mapping(
        section
    )


def _is_mapping(section: str) -> bool:
    from regress.engine.config.config_schema import options

    leaf = options().get(section)
    return leaf is not None and leaf.kind is dict


def _check_allowed(name: str, now: Mapping[str, Any]) -> None:
    if not any(key == name or key.startswith(f"{name}.") for key in now):
        near = get_close_matches(name, now, n=1) or [ON_DEMAND[0]]
        raise ConfigError(f"--allow-change {name} names no key of the configuration; did you mean {near[0]}?")
    if is_free(name):
        raise ConfigError(
            f"--allow-change {name} is not needed: {name} may change at any time; leave it away"
        )
    if not is_on_demand(name):
        raise ConfigError(
            f"--allow-change {name} cannot be allowed in the middle of a run; keep its value, or start a new run"
        )


def _in(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
