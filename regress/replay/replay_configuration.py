"""Configuration of a replay: the case's own, its files, the variant's overrides, and a dump of everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from regress.engine.config import Config, load_config
from regress.engine.config.rollout_config import DumpOptions
from regress.errors import ConfigError
from regress.golden.golden_case import GoldenCase
from regress.optional_packages import install, missing
from regress.replay.rollout_judge import SAMPLED
from regress.replay.variant import Precision, Variant


def unmet(case: GoldenCase, variant: Variant) -> str | None:
    """Return why a case cannot be replayed under a variant with what is installed here; None if it can."""
    return next((f"it {why}" for extra in _extras(case, variant) if (why := missing(extra))), None)


def unusable_tracker(variant: Variant) -> str | None:
    """Return why a tracker that a variant opens cannot be used here; None if each can."""
    trackers = variant.overrides.get("tracking.trackers")
    if not trackers:
        return None
    from regress.engine.tracking.tracker_availability import unusable

    found = ((name, unusable(name)) for name in trackers)
    return next((f"{name} {why}; run {install(name)}" for name, why in found if why), None)


def _extras(case: GoldenCase, variant: Variant) -> Iterator[str]:
    from regress.engine.adapters.adapter_settings import is_adapter

    model = overlaid(case.config, variant.overrides).get("model") or {}
    if is_adapter(case.folder / "model") or (model.get("lora") or {}).get("r"):
        yield "lora"


NOT_JUDGED = ("old_log_probs", "ref_log_probs")
"""Record types that repeat, for the whole rollout, values that ``is_loss_debug`` records for each update."""


def case_config(case: GoldenCase, steps: int, *, sampled: bool = False) -> dict[str, Any]:
    """Return dotted key -> value of a case's engine configuration, which reads its weights and recorded rollouts.

    Args:
        sampled: the rollouts are sampled, as the case's configuration says.
    """
    folder = case.folder.resolve()
    files: dict[str, Any] = {"model.path": str(folder / "model"), "max_steps": steps}
    if not sampled:
        files |= {
            "rollout_worker.type": "mock",
            "rollout_worker.need_llm_inference": False,
            "rollout_worker.trajectory_load_path": str(folder / "trajectories"),
            "rollout_worker.allow_environment_mismatch": True,  # other processors and thread counts are under test
        }
    if (folder / "reference").is_dir():
        files["reference.path"] = str(folder / "reference")
    if (folder / "optimizer.safetensors").is_file():
        files["optimizer.state_path"] = str(folder / "optimizer.safetensors")
    return files


def dump_everything(folder: Path) -> dict[str, Any]:
    """Return the configuration that records every judged type."""
    options = {spec.name: spec.name not in NOT_JUDGED for spec in fields(DumpOptions)}
    return {
        "output_dir": str(folder),
        "debug.enable_data_dump": True,
        "debug.dump_dir": str(folder / "dump"),
        "debug.dump_fsync": False,  # it is judged at once, and made again after a power failure
        **{f"debug.dump_options.{name}": value for name, value in options.items()},
    }


def replay_config(
    case: GoldenCase,
    variant: Variant,
    precision: Precision,
    steps: int,
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Build the engine's configuration of one replay, and write it as ``config.yaml`` into ``folder``.

    ``regress train --config-path FOLDER/config.yaml`` repeats the replay by hand.

    Args:
        overrides: configuration specific to this machine, such as the device.

    Raises:
        ConfigError: if the case's configuration and the variant's overrides do not fit each other or the engine.
    """
    sampled = case.sampled and precision in SAMPLED
    layers: tuple[Mapping[str, Any], ...] = (
        case_config(case, steps, sampled=sampled),
        dump_everything(folder),
        precision.overrides,
        variant.overrides,
        overrides or {},
    )
    return compose(case.config, {key: value for layer in layers for key, value in layer.items()}, folder)


def compose(config: Mapping[str, Any], overrides: Mapping[str, Any], folder: Path) -> Config:
    """Compose a nested configuration with overrides by dotted key, through the engine's own loader and checks."""
    path = folder / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(overlaid(config, overrides), sort_keys=True))
    return load_config(config_path=str(path), environ={}).config


def overlaid(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the values of dotted keys put into their places; neither argument is changed.

    Raises:
        ConfigError: if what holds the key is not a section.
    """
    result = {
        key: overlaid(value, {}) if isinstance(value, Mapping) else value for key, value in config.items()
    }
    for key, value in overrides.items():
        head, _, rest = key.partition(".")
        section = result.get(head)
        if rest and not isinstance(section, Mapping | None):
            raise ConfigError(f"{head} is {section!r}, but has to hold the key {rest}; write a mapping there")
        result[head] = overlaid(section or {}, {rest: value}) if rest else value
    return result
