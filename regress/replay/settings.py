"""Configuration that a user lays over every variant: ``--set KEY=VALUE``, such as a component of one's own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from regress.compare.diagnosis.scene import Scene
from regress.errors import ConfigError
from regress.replay.size import mesh_sizes
from regress.replay.variants import Variant

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
"""Sections that variants and cases decide, as they decide what is recorded where."""
_OWN = ("parallel.wrapper", "parallel.timeout")
_PRECISION = "model.dtype"


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Dotted key -> value of texts ``KEY=VALUE``; values are YAML.

    Raises:
        ConfigError: for a text of another form, a key given twice, or one that is not the user's to set.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ConfigError(
                f"--set {text} is no setting; write KEY=VALUE, such as model.patch=my_kernels:apply"
            )
        if key in found:
            raise ConfigError(f"--set {key} is given twice; keep one")
        if (key.startswith(_OF_CASES) and key not in _OWN) or key == _PRECISION:
            raise ConfigError(
                f"--set {key}: variants and cases decide it; write a variant of your own in [tool.regress.variants]"
            )
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {text}: the value is no YAML; correct it") from None
    return found


def with_settings(variant: Variant, settings: Mapping[str, Any]) -> Variant:
    """The variant with settings laid over the case, under its own overrides."""
    return replace(variant, overrides={**settings, **variant.overrides}) if settings else variant


def conflict(variant: Variant, settings: Mapping[str, Any]) -> str | None:
    """Why settings would not be in force under a variant, as a reason to leave it out; None if they are.

    Args:
        variant: with or without the settings laid under it.
    """
    overrides = variant.overrides
    for key, value in settings.items():
        if overrides.get(key, value) != value:
            return f"the variant decides {key} itself ({overrides[key]})"
    if settings.get("model.attention") is not None:
        if overrides.get("model.attn_implementation", "sdpa") != "sdpa":
            return f"the variant has an attention of its own ({overrides['model.attn_implementation']})"
        if mesh_sizes({}, overrides).get("cp", 1) > 1:
            return "context parallelism has an attention of its own"
    if settings.get("parallel.wrapper") is not None and overrides.get("parallel.data_parallel") != "ddp":
        return "the variant has no replicas under a wrapper (parallel.data_parallel=ddp)"
    return None


def told(settings: Mapping[str, Any], option: str = "--set") -> str:
    """The options that say the same on a command line, each with a space before it."""
    return "".join(f" {option} {shlex.quote(f'{key}={_text(value)}')}" for key, value in settings.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def scene_with(scene: Scene, settings: Mapping[str, Any]) -> Scene:
    """The scene with settings in the commands that repeat a replay."""
    if not settings:
        return scene
    commands = dict(scene.commands)
    for name, text in commands.items():
        commands[name] = text.replace("regress replay ", f"regress replay{_escaped(told(settings))} ", 1)
        commands[name] = commands[name].replace(
            "pytest -k", f"pytest{_escaped(told(settings, '--regress-set'))} -k", 1
        )
    return replace(scene, commands=commands)


def _escaped(text: str) -> str:
    """For `str.format`, by which commands get their quantity."""
    return text.replace("{", "{{").replace("}", "}}")
