"""Runs jobs on forked ranks: ``python ranks.py MODULE WORLD_SIZE FOLDER NAME...``.

``MODULE`` is a file beside this one with a mapping ``JOBS`` of functions that return what JSON can hold. Ranks are
forked before anything is computed, so that they inherit no thread and no process group; each leaves what its jobs
returned in ``FOLDER/rank<r>.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

ROOT = Path(__file__).parents[3]


def results(
    module: str, world_size: int, names: Iterable[str], factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return the results of the jobs, rank by rank; they run once, whichever xdist workers ask."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / f"{module}-{world_size}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            _start(module, world_size, names, folder)
    done = [folder / f"rank{rank}.json" for rank in range(world_size)]
    assert all(path.exists() for path in done), (folder / "log").read_text()
    return [json.loads(path.read_text()) for path in done]


def _start(module: str, world_size: int, names: Iterable[str], folder: Path) -> None:
    command = [sys.executable, __file__, module, str(world_size), str(folder), *names]
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        subprocess.run(command, env=os.environ | quiet, stdout=log, stderr=log, timeout=240, check=False)


def main(module: str, world_size: int, folder: Path, names: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    jobs = importlib.import_module(module).JOBS
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(_run_rank(rank, world_size, folder, {name: jobs[name] for name in names}))
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def _run_rank(rank: int, world_size: int, folder: Path, jobs: dict[str, Any]) -> int:
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        done = {name: job() for name, job in jobs.items()}
        dist.barrier()
        (folder / f"rank{rank}.json").write_text(json.dumps(done))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
