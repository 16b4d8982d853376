"""A run killed at any moment leaves whole files and nothing that claims to be complete."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regress.dump import DumpReader, read, read_trajectories
from regress.dump.dump_files import TEMPORARY
from regress.dump.dump_manifest import MANIFEST
from regress.errors import DumpError

_RUN = """
import sys, numpy as np
from regress.dump import Recorder, Trajectory, at, recording, tap, tap_trajectories
with recording(Recorder(sys.argv[1], options={"loss": True, "trajectory": True}, format=sys.argv[2])):
    print("ready", flush=True)
    for step in range(10**6):
        with at(step=step):
            tap_trajectories([Trajectory("g", run, [1, 2, 3], [0, 1, 1], 0.5, 1) for run in range(4)])
            tap("loss", x=np.full(3000, step))
"""


@pytest.mark.parametrize("format", ["safetensors", pytest.param("jsonl", marks=pytest.mark.extended)])
def test_kill(tmp_path: Path, format: str) -> None:
    rng = random.Random(format)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", _RUN, str(folder), format], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as output:
            output.readline()
            time.sleep(rng.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
            process.wait()
        whole = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(TEMPORARY)]
        for path in whole:
            record = read(path)
            if record.type == "loss":
                assert (record.tensors["x"] == record.step).all()
        assert not (folder / MANIFEST).exists()
        with pytest.raises(DumpError, match="not a complete dump"):
            DumpReader(folder)
        if (folder / "trajectory").exists() and whole:
            with pytest.raises(DumpError, match=r"was interrupted: record again, or give .*trajectory"):
                read_trajectories(folder)
            steps = read_trajectories(folder / "trajectory")
            assert list(steps) == list(range(len(steps)))
