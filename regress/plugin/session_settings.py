"""Settings of a pytest session."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from regress.errors import DumpError, GoldenError
from regress.plugin.pytest_options import EXTENTS, TIERS

MODES = ("drifted", "all", "force")


@dataclass(frozen=True)
class UpdateRequest:
    """Modes of `--update-golden`.

    Attributes:
        all: rewrite whatever differs in any byte, not only what drifted beyond its tolerance.
        force: even under CI.
    """

    all: bool = False
    force: bool = False

    def __str__(self) -> str:
        """Return the mode for people: `updating what drifted beyond its tolerance`."""
        return f"updating {'all that differs' if self.all else 'what drifted beyond its tolerance'}"


@dataclass(frozen=True)
class Settings:
    """Options and ini keys, checked; `config.stash[SETTINGS]` holds it.

    Attributes:
        golden_dir: absolute path of the goldens, which need not exist.
        update: modes of writing goldens; None to compare with them.
        tier: replays to run, one of `TIERS`.
        matrix: on which cases, one of `EXTENTS`.
        tolerance_scale: factor on every tolerance.
        report: absolute path of the folder for reports; None: there are none.
        keep_dumps: absolute path where dumps of replays stay; None: they are removed.
    """

    golden_dir: Path
    update: UpdateRequest | None
    tier: str
    matrix: str
    tolerance_scale: float
    report: Path | None
    keep_dumps: Path | None


SETTINGS = pytest.StashKey[Settings]()


def read_settings(config: pytest.Config) -> Settings:
    """Read and check everything; raises `pytest.UsageError` naming key, value and allowed values."""
    settings = Settings(
        golden_dir=_golden_dir(config),
        update=_update(config.getoption("--update-golden")),
        tier=_tier(config),
        matrix=_matrix(config),
        tolerance_scale=_scale(config),
        report=_folder(config, "--regress-report", "regress_report"),
        keep_dumps=_folder(config, "--regress-keep-dumps", "regress_keep_dumps"),
    )
    if settings.keep_dumps is not None and settings.keep_dumps.is_relative_to(settings.golden_dir):
        raise pytest.UsageError(
            f"dumps cannot be kept in {settings.keep_dumps}, because that is of the golden directory "
            f"{settings.golden_dir}: choose another folder"
        )
    if settings.update is not None and not settings.update.force and (found := continuous_integration()):
        raise pytest.UsageError(
            f"--update-golden is refused where CI is set (CI={found}), because somebody has to look at a golden before "
            "it counts: update on your own machine, or say --update-golden=force"
        )
    return settings


def continuous_integration() -> str | None:
    """Return the value of the environment variable CI if it is true, else None."""
    value = os.environ.get("CI", "")
    return value if value.lower() not in ("", "0", "false", "no") else None


def _update(text: str | None) -> UpdateRequest | None:
    if text is None:
        return None
    modes = [mode.strip() for mode in text.split(",")]
    for mode in modes:
        if mode == "review":
            raise pytest.UsageError(
                f"--update-golden={text}: nothing waits for review beside the goldens any more; update, then look at "
                "git diff golden, and take back with git restore golden what is wrong"
            )
        if mode not in MODES:
            raise pytest.UsageError(
                f"--update-golden={text}: {mode!r} is not a mode; allowed are {', '.join(MODES)}, separated by commas"
            )
    if {"drifted", "all"} <= set(modes):
        raise pytest.UsageError(f"--update-golden={text}: drifted and all exclude each other; choose one")
    return UpdateRequest(all="all" in modes, force="force" in modes)


def _tier(config: pytest.Config) -> str:
    value, origin = _given(config, "--regress-tier", "regress_tier")
    if value not in TIERS:
        raise pytest.UsageError(f"{origin} is not a tier; allowed are {', '.join(TIERS)}")
    return value


def _matrix(config: pytest.Config) -> str:
    value, origin = _given(config, "--regress-matrix", "regress_matrix")
    if value not in ("auto", *EXTENTS):
        raise pytest.UsageError(f"{origin} is not an extent; allowed are auto, {', '.join(EXTENTS)}")
    if value == "auto":
        chosen = config.getoption("keyword") or any("::" in argument for argument in config.args)
        return "default" if chosen else "reduced"
    return value


def _scale(config: pytest.Config) -> float:
    value, origin = _given(config, "--regress-tolerance-scale", "regress_tolerance_scale")
    try:
        scale = float(value)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise pytest.UsageError(f"{origin} is not a factor; allowed are numbers above 0, such as 2 or 0.5")
    return scale


def _golden_dir(config: pytest.Config) -> Path:
    """Return the golden directory; in a project that has none and writes none, that of installed cases."""
    option, key = "--golden-dir", "regress_golden_dir"
    found = _folder(config, option, key)
    if found is None:
        raise pytest.UsageError(f"{key} is empty; allowed are paths of folders, such as golden")
    from regress.golden.golden_directory import installed_cases

    reads = config.getoption("--update-golden") is None and config.getoption(option) is None
    return installed_cases() or found if reads and not found.is_dir() else found


def _on_hub(address: str, config: pytest.Config) -> Path:
    from regress.golden.hub_goldens import hub_directory, refuse_writing

    try:
        found = hub_directory(address)
        if config.getoption("--update-golden") is not None:
            refuse_writing(found)
    except GoldenError as error:
        raise pytest.UsageError(str(error)) from None
    return found


def _folder(config: pytest.Config, option: str, key: str) -> Path | None:
    """Return a folder as an absolute path: options are relative to the invocation folder, ini keys to their file."""
    value, origin = _given(config, option, key)
    given = config.getoption(option) is not None
    if not value.strip():
        if given:
            raise pytest.UsageError(f"{option} is empty; allowed are paths of folders")
        return None
    if option == "--golden-dir" and value.startswith("hf://"):
        return _on_hub(value, config)
    ini = config.rootpath if config.inipath is None else config.inipath.parent
    from regress.dump.dump_location import local_folder  # none of it where no folder is given

    try:
        path = (config.invocation_params.dir if given else ini) / local_folder(value)
    except DumpError as error:
        raise pytest.UsageError(f"{option if given else key}: {error}") from None
    if path.exists() and not path.is_dir():
        raise pytest.UsageError(f"{origin} is a file; allowed are paths of folders")
    return Path(
        os.path.normpath(path.absolute())
    )  # ".." without following links: messages name what was written


def _given(config: pytest.Config, option: str, key: str) -> tuple[str, str]:
    """Return the value from the command line or the ini file, and its spelling there."""
    chosen: Any = config.getoption(option)
    if chosen is not None:
        return str(chosen), f"{option}={chosen}"
    value = config.getini(key)  # a text: pytest itself refuses other types of TOML
    return value, f"{key}={value}"
