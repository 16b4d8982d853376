"""Settings that a user applies to every variant: ``--set KEY=VALUE``, such as the user's own component."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from regress.compare.diagnosis.run_context import RunContext
from regress.engine.config.config_messages import shortened
from regress.engine.config.training_config import LOCAL
from regress.errors import ConfigError
from regress.replay.replay_plan import mesh_sizes
from regress.replay.variant import Variant

_OF_CASES = (
    "parallel.",
    "batching.",
    "trainer.",
    "debug.",
    "rollout_worker.",
    "rollout_mock.",
    "task.",
    "data.",
)
"""Sections that variants and cases decide, including what is recorded where."""
_OWN = ("parallel.wrapper", "parallel.timeout")
_PRECISION = "model.dtype"


def parse_settings(texts: Iterable[str], example: str) -> dict[str, Any]:
    """Return dotted key -> value of texts ``KEY=VALUE``; values are YAML.

    Raises:
        ConfigError: for a text of another form, with the example of a right one, or a key given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {text} is not a setting; write KEY=VALUE, such as {example}")
        if key in found:
            raise ConfigError(f"--set {key} is given twice; keep one")
        try:
            found[key] = yaml.safe_load(value)
            json.dumps(found[key])  # neither dates nor bytes nor what holds itself
        except (yaml.YAMLError, TypeError, ValueError, RecursionError):
            raise ConfigError(
                f"--set {shortened(text)}: the value is not valid YAML of text, numbers, lists and mappings; correct it"
            ) from None
    return found


def settings_of_variants(texts: Iterable[str]) -> dict[str, Any]:
    """Return settings for every variant; raise `ConfigError` for a key that variants and cases decide, too."""
    found = parse_settings(texts, "model.patch=my_kernels:apply")
    for key in found:
        if (key.startswith(_OF_CASES) and key not in _OWN) or key == _PRECISION:
            raise ConfigError(
                f"--set {key}: variants and cases decide it; write a variant of your own in [tool.regress.variants]"
            )
    return found


def with_settings(variant: Variant, settings: Mapping[str, Any]) -> Variant:
    """Return the variant with settings applied over the case, below the variant's own overrides."""
    before = None if variant.before is None else {**settings, **variant.before}
    return (
        replace(variant, overrides={**settings, **variant.overrides}, before=before) if settings else variant
    )


def conflict(variant: Variant, settings: Mapping[str, Any]) -> str | None:
    """Return the reason to leave out a variant under which settings would not take effect; None if they do.

    Args:
        variant: variant with or without the settings.
    """
    overrides = variant.overrides
    remote = LOCAL if overrides.get("trainer.type") == "remote" else {}
    for key, value in settings.items():
        if overrides.get(key, value) != value:
            return f"the variant decides {key} itself ({overrides[key]})"
        if why := next((why for part, why in remote.items() if f"{key}.".startswith(f"{part}.")), ""):
            return f"a remote trainer cannot have {key}: {why}"
    if settings.get("model.attention") is not None:
        if overrides.get("model.attn_implementation", "sdpa") != "sdpa":
            return f"the variant has an attention of its own ({overrides['model.attn_implementation']})"
        if mesh_sizes({}, overrides).get("cp", 1) > 1:
            return "context parallelism has an attention of its own"
    if settings.get("parallel.wrapper") is not None and overrides.get("parallel.data_parallel") != "ddp":
        return "the variant has no replicas under a wrapper (parallel.data_parallel=ddp)"
    return None


def options_text(settings: Mapping[str, Any], option: str = "--set") -> str:
    """Return the settings as command-line options, each with a space before it."""
    return "".join(f" {option} {shlex.quote(f'{key}={_text(value)}')}" for key, value in settings.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def scene_with(scene: RunContext, settings: Mapping[str, Any]) -> RunContext:
    """Return the run context with the settings added to the commands that repeat a replay."""
    if not settings:
        return scene
    commands = dict(scene.commands)
    for name, text in commands.items():
        commands[name] = text.replace(
            "regress replay ", f"regress replay{_escaped(options_text(settings))} ", 1
        )
        commands[name] = commands[name].replace(
            "pytest -k", f"pytest{_escaped(options_text(settings, '--regress-set'))} -k", 1
        )
    return replace(scene, commands=commands)


def _escaped(text: str) -> str:
    """Escape braces for `str.format`, which puts the quantity into commands."""
    return text.replace("{", "{{").replace("}", "}}")
