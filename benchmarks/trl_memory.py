"""Peak memory of one side of `benchmarks.trl`, in a process of its own: `python -m benchmarks.trl_memory SIDE`.

Linux only: the peak is the high-water mark of the process's resident memory (`VmHWM`), set back before the steps.
`ru_maxrss` would not do: a child process starts with that of its parent.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import trl
from benchmarks.workload import TEN_MILLION, make_trajectories, stepper

STEPS = 2  # the second holds the optimizer's state beside the activations


def main(name: str) -> None:
    """Print the memory, in MiB, before the steps (imports, weights), its peak, and what the steps add."""
    torch.set_num_threads(1)
    trajectories = make_trajectories(TEN_MILLION, prompts=trl.PROMPTS, group_size=trl.GROUP_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        step: Callable[[], object]
        if name in trl.OURS:
            step = stepper(trl.make_ours(TEN_MILLION, trajectories, trl.OURS[name]))
        else:
            step = trl.make_theirs(TEN_MILLION, trajectories, Path(folder), trl.THEIRS[name]).step
        before = _reset_peak()
        for _ in range(STEPS):
            step()
    peak = _status("VmHWM")
    print(json.dumps({"before MiB": before, "peak MiB": peak, "steps MiB": peak - before}))


def _reset_peak() -> int:
    """Reset the high-water mark; return the memory held now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main(sys.argv[1])
