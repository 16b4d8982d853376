"""Which trackers a run has, and which run of a tracker it goes on in."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regress.engine.config.config_schema import Config
from regress.engine.tracking import tracker_availability
from regress.engine.tracking.metrics_log import open_log
from regress.engine.tracking.run_identity import Wishes, find_target
from regress.errors import ConfigError

MakeConfig = Callable[..., Config]


def test_an_unknown_tracker_is_answered_with_the_nearest(config: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match="accelerate knows no tracker 'tensorbord'; did you mean tensorboard"
    ):
        open_log(config("tracking.trackers=[tensorbord]"), main=True, warn=print)


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = importlib.import_module

    def load(name: str) -> Any:
        if name in names:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found(name)

    monkeypatch.setattr(tracker_availability.importlib, "import_module", load)


def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch, "wandb")
    with pytest.raises(ConfigError, match=r"wandb is not installed .* pip install 'wandb>="):
        open_log(config("tracking.trackers=[wandb]"), main=True, warn=print)


BOARD = ("torch.utils.tensorboard", "tensorboardX")


@pytest.mark.parametrize(
    ("gone", "login", "chosen", "warning"),
    [
        ((), True, ["wandb"], None),
        ((), False, ["tensorboard"], "wandb has no login .*; metrics go to tensorboard instead"),
        (("wandb",), True, ["tensorboard"], "wandb is not installed .*; metrics go to tensorboard instead"),
        (("wandb", *BOARD), True, [], "wandb is not .* and tensorboard is not .* metrics.jsonl alone"),
    ],
)
def test_automatic_trackers_fall_back_with_one_warning(
    gone: tuple[str, ...],
    login: bool,
    chosen: list[str],
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.import_module

    def load(name: str) -> Any:
        if name in gone:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return None if name in ("wandb", *BOARD) else found(name)

    monkeypatch.setattr(tracker_availability.importlib, "import_module", load)
    monkeypatch.setattr(tracker_availability, "has_wandb_login", lambda: login)
    warnings: list[str] = []
    assert tracker_availability.chosen_trackers(None, warnings.append) == chosen
    assert len(warnings) == (warning is not None)
    assert warning is None or re.search(warning, warnings[0])


def test_a_login_of_wandb_is_found_without_asking_wandb(tmp_path: Path) -> None:
    nothing = {"NETRC": str(tmp_path / "netrc")}
    (tmp_path / "netrc").write_text("machine example.org login user password 0\n")
    assert not tracker_availability.has_wandb_login(nothing)
    assert tracker_availability.has_wandb_login({**nothing, "WANDB_MODE": "offline"})
    assert tracker_availability.has_wandb_login({**nothing, "WANDB_API_KEY": "0" * 40})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert tracker_availability.has_wandb_login(nothing)


@pytest.mark.parametrize(
    ("keys", "environ", "known", "found", "mode"),
    [
        ({"force_new_run": True, "run_id": "key"}, {"WANDB_RUN_ID": "env"}, "checkpoint", None, "never"),
        ({"run_id": "key"}, {"WANDB_RUN_ID": "env"}, "checkpoint", "key", "allow"),
        ({}, {"WANDB_RUN_ID": "env", "WANDB_RESUME": "must"}, "checkpoint", "env", "must"),
        ({}, {}, "checkpoint", "checkpoint", "allow"),
        ({}, {}, None, None, "allow"),
    ],
)
def test_the_run_id_comes_from_the_first_that_gives_one(
    keys: dict[str, Any],
    environ: dict[str, str],
    known: str | None,
    found: str | None,
    mode: str,
    tmp_path: Path,
) -> None:
    wishes = Wishes(name="run", output_dir=tmp_path, **keys)
    target = find_target(wishes, known_id=known, segment=1, step=3, update=6, environ=environ)
    assert target.resume_mode == mode
    if found is None:
        assert target.run_id not in ("key", "env", "checkpoint")
        assert len(target.run_id) == 21
    else:
        assert target.run_id == found


def test_a_mode_that_wandb_does_not_know_is_refused(tmp_path: Path) -> None:
    wishes = Wishes(name="run", output_dir=tmp_path)
    with pytest.raises(ConfigError, match="WANDB_RESUME='maybe' must be one of allow, must, never, auto"):
        find_target(wishes, known_id=None, segment=0, step=0, update=0, environ={"WANDB_RESUME": "maybe"})
