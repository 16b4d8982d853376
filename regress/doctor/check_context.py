"""Everything that the checks look at: what the command names, files, the next configuration, this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from regress.doctor.doctor_finding import Issue, Severity, clean, issue
from regress.doctor.examined_checkpoint import Target, find_target
from regress.doctor.safe_tree import Commit, Tree, Unreadable, Unsafe, read_manifest
from regress.dump.dump_manifest import package_versions
from regress.engine.checkpoint.checkpoint_names import STATE, TRAINER_STATE
from regress.engine.config import Config, load_config
from regress.errors import ConfigError, DoctorError


def unsafe(context: CheckContext, name: str, error: Unsafe) -> Issue:
    """Return the finding for a file of the run; a run can go on with a link, but not with a pipe."""
    found = issue(
        "unsafe_path",
        f"{clean(name)} {error}, so it is not read here; put the file itself there, or move it away",
        path=name,
    )
    link = (context.tree.root / name).is_symlink()
    return replace(found, severity=Severity.MEDIUM) if link else found


def gathered(
    arguments: Sequence[str],
    *,
    checkpoint: str | None = None,
    project_root: str = ".",
    config_path: str | None = None,
    config_name: str | None = None,
    flags: Mapping[str, str] | None = None,
    allowed: Collection[str] = (),
    deep: bool = True,
) -> CheckContext:
    """Return what is to be examined.

    Args:
        arguments: at most one path, and the ``KEY=VALUE`` of the next run.
        checkpoint: the path, where it is given as an option.
        flags: aliases of keys that were given.
        allowed: keys whose change is accepted.

    Raises:
        DoctorError: if there are two paths, or nothing to examine.
    """
    paths = [argument for argument in arguments if _is_path(argument)]
    overrides = [argument for argument in arguments if not _is_path(argument)]
    paths += [] if checkpoint is None else [checkpoint]
    if len(paths) > 1:
        raise DoctorError(
            f"{' and '.join(paths)} are {len(paths)} paths; name one checkpoint or output directory"
        )
    next_run = _next(config_path, config_name, overrides, flags or {}, frozenset(allowed))
    output_dir = None if next_run.config is None else next_run.config.trainer.checkpoint_dir
    if next_run.error is not None and not paths:
        paths = _overridden_output_dir(overrides)
    target = find_target(paths[0] if paths else None, output_dir, project_root, whole=deep)
    root = Path(project_root).expanduser().absolute()
    return CheckContext(target, next_run, project_root=root, deep=deep)


def _is_path(argument: str) -> bool:
    return ("=" not in argument and not argument.startswith("~")) or Path(argument).exists()


def _next(
    config_path: str | None,
    config_name: str | None,
    overrides: Sequence[str],
    flags: Mapping[str, str],
    allowed: frozenset[str],
) -> Next:
    if config_path is None and config_name is None and not overrides and not flags:
        return Next(allowed=allowed)
    try:
        config = load_config(config_path, config_name, overrides, flags=flags).config
    except ConfigError as error:
        return Next(error=str(error), allowed=allowed)
    return Next(config, allowed=allowed)


def _overridden_output_dir(overrides: Sequence[str]) -> list[str]:
    """Return the output directory of a configuration that breaks a rule, where an override names it."""
    found = [text.partition("=")[2] for text in overrides if text.startswith("output_dir=")]
    return found[-1:]


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
