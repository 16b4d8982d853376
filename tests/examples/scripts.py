"""Scripts that ranks run; a module of its own, because ranks import it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from torch import distributed


def run_script(folder: Path, command: list[str]) -> None:
    """Run a script as users start it: in its folder, and in no process group."""
    distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.chdir(folder)
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).absolute().parent))
    runpy.run_path(command[0], run_name="__main__")
