"""Everything that the checks look at: the files, the next run's configuration, and this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from regress.doctor.commit import Commit, read_manifest
from regress.doctor.target import Target
from regress.doctor.tree import Tree, Unreadable
from regress.dump.manifest import package_versions
from regress.engine.checkpoint.names import STATE, TRAINER_STATE
from regress.engine.config import Config


@dataclass(frozen=True)
class Next:
    """Configuration with which the run is to continue.

    Attributes:
        config: None where none was given, or where it breaks a rule.
        error: the sentence of the rule that it breaks.
        allowed: keys whose change `--allow-change` accepts.
    """

    config: Config | None = None
    error: str | None = None
    allowed: frozenset[str] = frozenset()


@dataclass
class CheckContext:
    """Files and facts that all checks share.

    Attributes:
        deep: files are read as a whole: hashes, and finite weights.
        claimed: paths, relative to the output directory, of which a check has told what is wrong.
        unchecked: sentences about what could not be checked, and why.
    """

    target: Target
    next: Next = field(default_factory=Next)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    project_root: Path = field(default_factory=Path.cwd)
    deep: bool = True
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    versions: Callable[[], Mapping[str, str]] = package_versions
    claimed: set[str] = field(default_factory=set)
    unchecked: list[str] = field(default_factory=list)

    @cached_property
    def tree(self) -> Tree:
        """Files of the output directory."""
        return Tree(self.target.root)

    @cached_property
    def commit(self) -> Commit | None:
        """Manifest of the checkpoint, or None where it cannot be read."""
        if self.target.checkpoint is None:
            return None
        try:
            return read_manifest(self.tree, self.target.checkpoint)
        except Unreadable:
            return None

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """Content of regress_state.json; empty where it cannot be read."""
        return self.object_of(STATE)

    @cached_property
    def trainer_state(self) -> Mapping[str, Any]:
        """Content of trainer_state.json; empty where it cannot be read."""
        return self.object_of(TRAINER_STATE)

    @cached_property
    def foreign(self) -> bool:
        """The checkpoint is another trainer's: nothing in it is of this tool."""
        if self.target.checkpoint is None:
            return False
        ours = (STATE, "manifest.json", "state")
        return not any(self.tree.exists(self.target.file(name)) for name in ours)

    @property
    def step(self) -> int | None:
        """Completed rollout steps of the checkpoint, as its own state tells."""
        return whole(self.state.get("step"))

    @property
    def update(self) -> int | None:
        """Completed optimizer updates of the checkpoint, as its own state tells."""
        return whole(self.state.get("update"))

    @property
    def saved(self) -> Mapping[str, Any]:
        """Configuration that the checkpoint was made with, by dotted key; empty where it is unknown."""
        return mapping(self.state.get("config"))

    def part(self, name: str) -> Mapping[str, Any]:
        """Return the state of one part of the run in the checkpoint; empty where there is none."""
        return mapping(mapping(self.state.get("parts")).get(name))

    def has(self, name: str) -> bool:
        """Return True if the checkpoint holds a file of this name, or its manifest lists it."""
        return self.tree.exists(self.target.file(name)) or (
            self.commit is not None and name in self.commit.files
        )

    def object_of(self, name: str) -> Mapping[str, Any]:
        """Return the content of a JSON object of the checkpoint; empty where it cannot be read."""
        if self.target.checkpoint is None:
            return {}
        try:
            return self.tree.object(self.target.file(name))
        except Unreadable:
            return {}


def whole(value: Any) -> int | None:
    """Return a value that is a whole number of at least 0, None for anything else."""
    if isinstance(value, float) and value.is_integer():  # Hugging Face and others write 100.0
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value that is a JSON object, an empty one for anything else."""
    return value if isinstance(value, dict) else {}
