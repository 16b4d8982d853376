"""The next run's configuration against the one that the checkpoint was made with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from regress.doctor.check_context import CheckContext
from regress.doctor.doctor_finding import Issue, clean, issue, shown
from regress.engine.checkpoint.configuration_changes import (
    is_allowed,
    is_free,
    is_on_demand,
    known_changes,
    resolved,
)
from regress.errors import ConfigError, RegressError
from regress.import_trust import require_allowed

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
"""Beginnings of keys by type of finding."""
RANKS, REST, FREE = "world_size_mismatch", "config_mismatch", "config_changed"
_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_configuration(context: CheckContext) -> Iterator[Issue]:
    """Compare every key; those that a resume may change are of low severity."""
    if context.next.error is not None:
        yield issue("config_instantiation_error", context.next.error)
        context.unchecked.append("configuration against the checkpoint's: the configuration breaks a rule")
        return
    if context.next.config is None:
        context.unchecked.append(
            "configuration against the checkpoint's: none was given; add --config-name NAME or the KEY=VALUE of the "
            "next run"
        )
        return
    now = resolved(context.next.config)
    yield from _check_code(now)
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for key, values in (known_changes(context.saved, now) if context.saved else {}).items():
        found.setdefault(_kind(key, context.next.allowed), {})[key] = values
    for kind, keys in found.items():
        yield _finding(context, kind, keys)


def _check_code(now: Mapping[str, Any]) -> Iterator[Issue]:
    """Check that the code which keys name as ``module:function`` may be imported and is there; none of it runs."""
    for key, value in now.items():
        if not isinstance(value, str) or not _CODE.fullmatch(value) or "dir" in key.rpartition(".")[2]:
            continue
        module = value.partition(":")[0]
        try:
            require_allowed(module, f"{key}={value}")
            there = find_spec(module.partition(".")[0]) is not None
        except (ConfigError, ValueError, ImportError) as error:
            yield issue("config_import_error", _sentence(error))
            continue
        if not there:
            yield issue(
                "config_import_error",
                f"{key}={value} names a module that cannot be found; install it, or run where it lies",
            )


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, RegressError) else clean(f"{error}; correct the name")


def _kind(key: str, allowed: frozenset[str]) -> str:
    if key.startswith("parallel."):
        return RANKS
    if is_free(key) or (is_on_demand(key) and is_allowed(key, allowed)):
        return FREE
    return next((kind for kind, starts in KINDS.items() if key.startswith(starts)), REST)


def _finding(context: CheckContext, kind: str, keys: Mapping[str, tuple[Any, Any]]) -> Issue:
    changes = [f"{key} is {shown(now)} and was {shown(then)}" for key, (then, now) in keys.items()]
    more = f" (and {len(changes) - 3} more keys)" if len(changes) > 3 else ""
    free = kind in (RANKS, FREE)
    first = next(iter(keys))
    remedy = "a resume may change this"
    if not free:
        remedy = "set it as it was"
        remedy += f", or allow it with --allow-change {first}" if is_on_demand(first) else ""
    return issue(
        kind,
        f"{', '.join(changes[:3])}{more} when {context.target.checkpoint} was made; {remedy}",
        evidence={key: {"checkpoint": then, "now": now} for key, (then, now) in keys.items()},
        command=None if free else " ".join(f"{key}={then}" for key, (then, _) in keys.items()),
    )
