"""From the arguments of the command to what is examined."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from regress.doctor.check_context import CheckContext, Next
from regress.doctor.target import find_target
from regress.engine.config import load_config
from regress.errors import ConfigError, DoctorError


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
        paths = _told_output_dir(overrides)
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


def _told_output_dir(overrides: Sequence[str]) -> list[str]:
    """Return the output directory of a configuration that breaks a rule, where an override names it."""
    found = [text.partition("=")[2] for text in overrides if text.startswith("output_dir=")]
    return found[-1:]
