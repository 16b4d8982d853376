"""Weights from before the first update, kept as a Hugging Face checkpoint inside of the dump."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from regress.capture.model_structure import Anatomy, whole
from regress.capture.trainer_ranks import World
from regress.errors import CaptureError

FOLDER = "initial_weights"
"""Folder of the checkpoint within the dump, which is not a record type."""


def write_initial_weights(anatomy: Anatomy, world: World, folder: Any) -> dict[str, str]:
    """Write the model as it is now; all ranks call this together, and the first one writes.

    Returns:
        The folder within the dump, and the SHA-256 of its files by name, for the manifest.

    Raises:
        CaptureError: if the model is none of transformers, has an adapter, or has no weights yet.
    """
    root = anatomy.root
    save = getattr(root, "save_pretrained", None)
    if not callable(save) or not hasattr(root, "config"):
        raise CaptureError(f"""initial_weights=True keeps a checkpoint of transformers, and {type(root).__name__} is not
        a model of it: keep your own, and give it to regress oracle as --model""")
    if getattr(root, "peft_config", None) or getattr(root, "_hf_peft_config_loaded", False):
        raise CaptureError(f"""initial_weights=True keeps all weights of a model, and {type(root).__name__} trains an
        adapter (LoRA): merge it, or record without initial_weights""")
    if not isinstance(folder, Path):
        raise CaptureError(
            f"initial_weights=True writes into a folder of this machine, not {folder}: give one"
        )
    weights = {name: _held(name, parameter) for name, parameter in anatomy.parameters()}
    target = folder / FOLDER
    if world.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        save(target, state_dict=weights)
    found = {} if world.rank else {path.name: _digest(path) for path in sorted(target.iterdir())}
    return {key: value for own in world.gather(found) for key, value in own.items()}


def _held(name: str, parameter: Tensor) -> Tensor:
    if parameter.is_meta:
        raise CaptureError(f"""initial_weights=True finds no weights yet: {name} is on the meta device; enter
        record(...) after they are loaded""")
    found: Tensor = whole(parameter.detach())
    return found.cpu()


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
