"""Models and tokenizers by their name on the Hugging Face hub: from the cache of this machine, or downloaded.

Imports neither torch nor the hub's client before a name has to be looked up.
"""

from __future__ import annotations

import re
from pathlib import Path

from regress.errors import ConfigError, reason
from regress.hub_cache import hub_cache, offline_variable
from regress.untrusted_files import parse_json, read_bytes

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_DESCRIBING = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""Files of which a model, an adapter or a tokenizer has at least one."""
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def is_on_hub(text: str) -> bool:
    """Return True for what is written as a name on the hub with its owner; nothing is looked up."""
    return "/" in text and _NAME.fullmatch(text) is not None and not text.endswith((".yaml", ".yml"))


def local_folder(named: str | Path, key: str, *, weights: bool = True) -> Path:
    """Return the directory that a path names, or of the model of that name on the hub, which is downloaded if need be.

    What the cache holds is used as it is. A name without an owner is looked for in the cache alone, because a directory
    that is misspelt looks the same.

    Args:
        named: path, or name such as ``Qwen/Qwen2.5-3B-Instruct``; a path that exists comes first.
        key: configuration key that gives it.
        weights: a tokenizer needs none.

    Raises:
        ConfigError: if the cache does not hold all of the model, and it cannot be downloaded.
    """
    path = Path(named)
    if path.exists() or not _NAME.fullmatch(str(named)):
        return path
    found = cached_folder(named)
    lacks = None if found == path else _lacking(found, weights)
    if found != path and lacks is None:
        return found
    return _downloaded(str(named), key, lacks, weights) if is_on_hub(str(named)) else path


def cached_folder(named: str | Path) -> Path:
    """Return the directory in the hub's cache of the model of a name; the path itself if it exists, or none does."""
    path = Path(named)
    if path.exists() or not _NAME.fullmatch(str(named)):
        return path
    from huggingface_hub import try_to_load_from_cache

    for file in _DESCRIBING:
        found = try_to_load_from_cache(str(named), file, cache_dir=hub_cache())
        if isinstance(found, str):
            return Path(found).parent
    return path


def _lacking(folder: Path, weights: bool) -> str | None:
    """Return a file that a model in the cache lacks, because a download was cut off or asked for less."""
    if not weights:
        return None if (folder / "tokenizer_config.json").exists() else "tokenizer_config.json"
    for index in sorted(folder.glob("*.index.json")):
        try:
            shards = set(parse_json(read_bytes(index), finite=False)["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return index.name
        return next((str(name) for name in sorted(shards) if not (folder / name).exists()), None)
    return None if any((folder / name).exists() for name in _WEIGHTS) else _WEIGHTS[0]


def _downloaded(name: str, key: str, lacks: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    offline = offline_variable()
    why = f"{offline} is set"
    if offline is None:
        try:
            folder = Path(snapshot_download(name, cache_dir=hub_cache(), allow_patterns=_FILES))
            if weights and _lacking(folder, weights) is not None:  # an old one, without safetensors
                snapshot_download(name, cache_dir=hub_cache(), allow_patterns=["pytorch_model*"])
            return folder
        except (
            Exception
        ) as error:  # the hub's client raises its own errors, those of its transport and of files
            why = reason(error)
    holds = "no model of this name" if lacks is None else f"only a part of it (no {lacks})"
    raise ConfigError(f"""{key}={name!r}: there is no such directory, the hub's cache ({hub_cache()}) holds {holds}, and
    it cannot be downloaded ({why}); run hf download {name} where there is a network, or give a directory written by
    save_pretrained""")
