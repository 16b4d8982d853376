"""Settings of an adapter, from section ``model.lora`` or from the ``adapter_config.json`` of a directory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regress.engine.config.model_config import LoraConfig as Section
from regress.engine.model_hub import cached_folder, local_folder
from regress.errors import ConfigError, NotInstalled, reason
from regress.optional_packages import install
from regress.untrusted_files import parse_json, read_bytes

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"

KEYS: Mapping[str, str] = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "layers_to_transform": "layers_to_transform",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "bias": "bias",
    "use_rslora": "use_rslora",
    "init_lora_weights": "init_lora_weights",
}
"""Key of section ``model.lora`` -> the same in peft's configuration."""

_HARMLESS = frozenset(
    {
        *("base_model_name_or_path", "revision", "inference_mode", "peft_type", "task_type", "peft_version"),
        *(
            "auto_mapping",
            "fan_in_fan_out",
            "runtime_config",
            "megatron_core",
            "loftq_config",
            "exclude_modules",
        ),
        *("layers_pattern", "qalora_group_size", "target_parameters"),
    }
)
"""Keys of ``adapter_config.json`` that change nothing here, or are taken as they are."""


def require_peft(stated: str) -> None:
    """Raise `NotInstalled` if peft is not installed; ``stated`` is the key and value that need it."""
    try:
        import peft  # noqa: F401  # only whether it can be imported counts
    except ImportError as error:
        raise NotInstalled(
            f"{stated} needs peft, which is not installed ({reason(error)}); run {install('lora')}"
        ) from error


def is_adapter(path: str | Path | None) -> bool:
    """Return True if a directory holds an adapter, and not a whole model."""
    return path is not None and (cached_folder(path) / CONFIG).is_file()


def of_section(section: Section) -> LoraConfig:
    """Return peft's configuration of a new adapter."""
    require_peft(f"model.lora.r={section.r}")
    from peft import LoraConfig

    assert section.r is not None
    every = section.target_modules == ["all-linear"]
    init: Any = {"kaiming": True, "random": False}.get(section.init_lora_weights, section.init_lora_weights)
    bias: Any = section.bias  # the schema has the choices
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=_whole(section.alpha),
        lora_dropout=section.dropout,
        target_modules="all-linear" if every else section.target_modules or None,
        layers_to_transform=section.layers_to_transform or None,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        bias=bias,
        use_rslora=section.use_rslora,
        init_lora_weights=init,
    )


def of_directory(path: Path, key: str) -> LoraConfig:
    """Return peft's configuration of the adapter in a directory, with its dropout 0, as in every model here.

    Raises:
        ConfigError: if it cannot be read, is not a LoRA adapter, or uses what is not supported.
    """
    stated = f"{key}={str(path)!r}"
    require_peft(stated)
    from peft import LoraConfig

    try:
        tree = parse_json(read_bytes(path / CONFIG), finite=False)
        kind = tree.get("peft_type") if isinstance(tree, dict) else None
        if kind != "LORA":
            raise ConfigError(f"""{stated}: its {CONFIG} is of the type {kind!r}, and only LORA is supported; give
            another adapter, or merge it into its model""")
        _require_known(tree, stated)
        names = (*KEYS.values(), "exclude_modules", "layers_pattern", "target_parameters")
        chosen = {name: tree[name] for name in names if name in tree}
        config = LoraConfig(task_type="CAUSAL_LM", **chosen)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{stated}: its {CONFIG} cannot be read ({reason(error)}); give a directory that peft has written"
        ) from error
    config.lora_dropout = 0.0
    return config


def base_of(path: Path, given: str | None, key: str) -> Path:
    """Return the directory of the model under the adapter in a directory.

    ``given`` is ``model.lora.base_path``; without it a relative path of ``adapter_config.json`` starts in the
    adapter's own directory, and ``base/`` there takes the place of a directory that is gone.

    Raises:
        ConfigError: if there is no such directory, nor a model of this name on the hub.
    """
    if given is not None:
        return local_folder(given, "model.lora.base_path")
    try:
        named = parse_json(read_bytes(path / CONFIG), finite=False).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{key}={str(path)!r}: its {CONFIG} cannot be read ({reason(error)}); correct it"
        ) from error
    candidates = [path / named] if isinstance(named, str) and named else []
    for folder in (*candidates, path / BASE):
        if folder.is_dir():
            return folder
    with suppress(ConfigError):
        found = local_folder(str(named), key)
        if found != Path(str(named)):
            return found
    raise ConfigError(f"""{key}={str(path)!r}: the model under this adapter, {named!r} in its {CONFIG}, is not a
    directory here, and the Hugging Face hub does not give it; set model.lora.base_path to its directory""")


def require_same(section: Section, found: LoraConfig, path: Path) -> None:
    """Refuse a section that describes another adapter than the one that is loaded.

    Raises:
        ConfigError: naming the key that differs.
    """
    if section.r is None:
        return
    asked = of_section(section)
    for key, name in KEYS.items():
        if key in ("dropout", "init_lora_weights"):  # those of the start
            continue
        if key == "target_modules" and section.target_modules in ([], ["all-linear"]):  # the names are peft's
            continue
        own, other = getattr(asked, name), getattr(found, name)
        if own != other:
            raise ConfigError(f"""model.lora.{key}={getattr(section, key)} is not that of the adapter in
            model.path={str(path)!r} ({_setting_text(other)}); leave section model.lora away, or give model.path the
            base model for a new adapter""")


def _require_known(tree: Mapping[str, Any], stated: str) -> None:
    from peft import LoraConfig

    plain = LoraConfig()
    for name, value in tree.items():
        if name in _HARMLESS or name in KEYS.values():
            continue
        default = getattr(plain, name, None)
        if value != default and value not in (None, False, [], {}):
            raise ConfigError(f"""{stated}: its {CONFIG} sets {" ".join(name.split())}={value!r}, which is not
            supported; give a plain LoRA adapter, or merge it into its model""")


def _whole(value: float) -> Any:
    """Return a whole number as peft writes it; peft's annotation leaves other numbers out, its code does not."""
    return int(value) if value == int(value) else value


def _setting_text(value: Any) -> str:
    return ", ".join(sorted(value)) if isinstance(value, set) else str(value)
