"""The next run's configuration against the one that the checkpoint was made with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regress.doctor.issue import Issue, shown
from regress.doctor.scene import Scene
from regress.doctor.types import issue
from regress.engine.config import flat
from regress.engine.config.schema import Config
from regress.redaction import redacted_tree

ABSENT = "absent"
MAY_CHANGE = (
    *("max_steps", "output_dir", "exp_name", "trainer.save_", "trainer.resume_from_checkpoint"),
    *("evaluation.", "tracking.", "debug.", "batching.", "parallel."),
)
"""Beginnings of the keys that a resume may change."""
RANKS = ("parallel.",)
KINDS = {
    "length_config_mismatch": ("data.max_", "data.length_"),
    "model_config_mismatch": ("model.",),
    "tokenizer_config_mismatch": ("tokenizer.",),
    "optimizer_config_mismatch": ("optimizer.",),
    "objective_config_mismatch": ("algorithm.", "reference.", "trainer."),
    "data_config_mismatch": (
        "data.",
        "task.",
        "rollout_worker.",
        "rollout_mock.",
        "curriculum.",
        "warm_start.",
    ),
    "seed_mismatch": ("seed",),
}
OF_ENVIRONMENT = ("device", "threads", "system_envs")
"""Keys that the comparison of determinism environments covers."""


def check_configuration(scene: Scene) -> Iterator[Issue]:
    """Compare every key; those that a resume may change are of low severity."""
    if scene.next.error is not None:
        yield issue("config_instantiation_error", scene.next.error)
        scene.unchecked.append("configuration against the checkpoint's: the configuration breaks a rule")
        return
    if scene.next.config is None:
        scene.unchecked.append(
            "configuration against the checkpoint's: none was given; add --config-name NAME or the KEY=VALUE of the "
            "next run"
        )
        return
    if not scene.saved:
        return
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for key, values in differences(scene.saved, scene.next.config).items():
        if not key.startswith(OF_ENVIRONMENT):
            found.setdefault(_kind(key, scene.next.allowed), {})[key] = values
    for kind, keys in found.items():
        yield _finding(scene, kind, keys)


def differences(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return (then, now) of each key that differs; a key that one side does not know counts with its default."""
    now: Mapping[str, Any] = redacted_tree(flat(config))
    default: Mapping[str, Any] = flat(Config())
    found = {}
    for key in sorted({*saved, *now}):
        then, here = saved.get(key, default.get(key, ABSENT)), now.get(key, default.get(key, ABSENT))
        if then != here or (isinstance(then, bool) is not isinstance(here, bool)):
            found[key] = (then, here)
    return found


def _kind(key: str, allowed: frozenset[str]) -> str:
    if key.startswith(RANKS):
        return "world_size_mismatch"
    if key.startswith(MAY_CHANGE) or key in allowed:
        return "config_changed"
    for kind, beginnings in KINDS.items():
        if key.startswith(beginnings):
            return kind
    return "config_mismatch"


def _finding(scene: Scene, kind: str, keys: Mapping[str, tuple[Any, Any]]) -> Issue:
    told = [f"{key} is {shown(now)} and was {shown(then)}" for key, (then, now) in keys.items()]
    more = f" (and {len(told) - 3} more keys)" if len(told) > 3 else ""
    allowed = kind in ("world_size_mismatch", "config_changed")
    first = next(iter(keys))
    remedy = (
        "a resume may change this"
        if allowed
        else f"set it as it was, or allow it with --allow-change {first}"
    )
    return issue(
        kind,
        f"{', '.join(told[:3])}{more} when {scene.target.checkpoint} was made; {remedy}",
        evidence={key: {"checkpoint": then, "now": now} for key, (then, now) in keys.items()},
        command=None if allowed else " ".join(f"{key}={then}" for key, (then, _) in keys.items()),
    )
