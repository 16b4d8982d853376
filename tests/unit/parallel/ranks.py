"""Runs the cases of `cases.py` on forked ranks: ``python ranks.py WORLD_SIZE FOLDER CASE...``.

Forks before anything is computed, so that no thread and no process group is inherited. Each rank leaves
``FOLDER/rank<r>.json``: by case, by name, a number; or an error's text.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parent)]

import cases


def main() -> int:
    world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(run_rank(rank, world_size, folder, sys.argv[3:]))
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def run_rank(rank: int, world_size: int, folder: Path, names: list[str]) -> int:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results: dict[str, object] = {}
    try:
        for name in names:
            results[name] = cases.CASES[name].run()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
