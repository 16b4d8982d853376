"""An earlier run in the output directory of a new one: two runs never mix."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from regress.dump.dump_location import children, location
from regress.dump.metrics_file import METRICS
from regress.engine import run_curriculum
from regress.engine.checkpoint.checkpoint_names import LATEST, parse_name
from regress.engine.config.config_schema import Config
from regress.engine.evaluation import TABLE
from regress.engine.run_files import FINAL, writing
from regress.engine.tracking import tracker_backup, tracker_state
from regress.errors import RegressError

Earlier = Literal["keep", "refuse", "replace"]
"""Choose the fate of an earlier run: keep its files and append metrics, refuse the new run, or replace it."""

_REPLACED = (METRICS, TABLE, run_curriculum.STATE, tracker_state.STATE, tracker_backup.FOLDER)
"""Files that a new run makes anew; ``final/`` stays until the new one is whole."""


def check_earlier(config: Config, earlier: Earlier) -> None:
    """Refuse a run that would mix with another, or replace the one that it goes on with.

    A run goes on from a checkpoint, or at its beginning where a kill came before the first one.

    Raises:
        RegressError: naming the directory, what was found there, and the ways out.
    """
    asked = config.trainer.resume_from_checkpoint
    if earlier == "replace" and asked is not None:
        raise RegressError(f"""--overwrite would replace the run that trainer.resume_from_checkpoint={asked} goes on
        with; leave one of them away""")
    if earlier != "refuse":
        return
    folder, saved = Path(config.output_dir), _checkpoints(config)
    found = [name for name in (METRICS, FINAL) if (folder / name).exists()]
    ended = FINAL in found and not saved and isinstance(location(config.trainer.checkpoint_dir), Path)
    goes_on = asked is not None and not (asked == LATEST and ended)
    if goes_on or not (found or saved):
        return
    named = ", ".join([*found, *(path.name for path in saved[-1:])])
    remedy = "go on with it (trainer.resume_from_checkpoint=latest), " if saved else ""
    raise RegressError(f"""output_dir={str(folder)!r} holds a run already ({named}), and two runs must not mix; replace
    it (--overwrite), {remedy}or choose another output_dir""")


def remove_earlier(config: Config) -> None:
    """Remove the files of an earlier run that the new one would mix with; those of anybody else stay.

    Raises:
        RegressError: if one of them cannot be removed.
    """
    folder = Path(config.output_dir)
    with writing(folder):
        for path in (*(folder / name for name in _REPLACED), *_checkpoints(config)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _checkpoints(config: Config) -> list[Path]:
    """Return the checkpoints beside a run on this machine; those in a store are looked at before one is written."""
    home = location(config.trainer.checkpoint_dir)
    if not isinstance(home, Path):
        return []
    return [path for path in children(home) if isinstance(path, Path) and parse_name(path.name) is not None]
