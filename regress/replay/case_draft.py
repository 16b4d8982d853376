"""Draft of a golden case: its inputs are made in a temporary folder, and lie in the case only once it is recorded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from regress.errors import RegressError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_files import CASE_FILE, input_files

TRIES, HOPELESS = 40, 8
"""Seeds that are tried for a case in which some faults could not show; fewer, if none of so many had a signal."""

_SEED = re.compile(r"^(?P<before>(?P<indent> +)seed: *)[^\s#]+", re.MULTILINE)
_CONFIG = re.compile(r"^config: *\n", re.MULTILINE)


def seeds_of(case: GoldenCase) -> list[int]:
    """Return the seeds that its inputs are made with until it has every signal, its own first.

    A case that takes the inputs of another has those whatever its seed.
    """
    own = case.config.get("seed", 0)
    if not isinstance(own, int) or "inputs_of" in case.recipe:
        return [own] if isinstance(own, int) else [0]
    return [own, *(seed for seed in range(1, TRIES + 1) if seed != own)][:TRIES]


@contextmanager
def draft(case: GoldenCase, root: Path, seed: int) -> Iterator[GoldenStore]:
    """Yield a golden directory below ``root`` that holds a copy of a case, without its recording, under a seed.

    What an error says of the draft's folders it says of the case's.
    """
    folder = root / case.name
    for name in input_files(case.folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(case.folder / name, folder / name)
    other = case.recipe.get("inputs_of")
    if isinstance(other, str) and other and (source := case.folder.parent / other).is_dir():
        (root / other).symlink_to(source.absolute())
    if case.config.get("seed", 0) != seed:
        path = folder / CASE_FILE
        path.write_text(with_seed(path.read_text(encoding="utf-8"), seed), encoding="utf-8")
    try:
        yield GoldenStore(root)
    except RegressError as error:
        own = str(case.folder.parent)
        texts = (str(one).replace(str(root.resolve()), own).replace(str(root), own) for one in error.args)
        error.args = tuple(texts)
        raise


def with_seed(text: str, seed: int) -> str:
    """Return a ``case.yaml`` with another seed and all else as it is written there, comments too."""
    tree: dict[str, Any] = yaml.safe_load(text)
    seeded = {**tree, "config": {**tree.get("config", {}), "seed": seed}}
    for found in (
        _SEED.sub(rf"\g<before>{seed}", text, count=1),
        _CONFIG.sub(f"config:\n  seed: {seed}\n", text, count=1),
    ):
        if _holds(found, seeded):
            return found
    return str(yaml.safe_dump(seeded, sort_keys=False))


def _holds(text: str, content: Mapping[str, Any]) -> bool:
    try:
        return bool(yaml.safe_load(text) == content)
    except yaml.YAMLError:
        return False
