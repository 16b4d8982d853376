"""A command that is ended by SIGTERM leaves nothing in the temporary directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, tempfile, time
import click
from regress import cli

@cli.main.command()
def wait():
    with tempfile.TemporaryDirectory(prefix="regress-"):
        print("there", flush=True)
        time.sleep(600)

cli.main(["wait"])
"""


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    env = {**{key: value for key, value in os.environ.items() if key != "RANK"}, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert [*tmp_path.glob("regress-*")]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not [*tmp_path.glob("regress-*")]
