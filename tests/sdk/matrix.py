"""The SDKs that are tested, each in an environment of its own: ``python tests/sdk/matrix.py [NAME ...]``.

This Python has the service; every client's environment has its SDK beside pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"  # as in constraints.txt: the one that is chosen otherwise brings CUDA along
CLIENTS = {
    "weaver-1.4.0": ("nex-weaver==1.4.0", TORCH),
    "weaver-1.10.0": ("nex-weaver==1.10.0", TORCH),
    "weaver-1.19.2": ("nex-weaver==1.19.2", TORCH),
    "tinker-0.18.2": ("tinker==0.18.2",),
    "tinker-0.24.1": ("tinker==0.24.1",),
    "tinker-0.30.4": ("tinker==0.30.4",),
    "tinker-0.38.0": ("tinker==0.38.0",),
}


def client(name: str, folder: Path) -> Path:
    """Return the Python of an SDK's environment, which is made if it is not there."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "pytest", *CLIENTS[name]], check=True)
    return python


def main() -> int:
    """Run the tests with every SDK that is named, or all; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument(
        "--clients", type=Path, default=Path("outputs/sdk"), help="folder of the environments"
    )
    parser.add_argument(
        "--select",
        default="",
        help="as pytest's -k: calls, datums, training, or 'training and 0' for one seed",
    )
    options = parser.parse_args()
    unknown = {*options.names} - {*CLIENTS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(CLIENTS)}")
    with tempfile.TemporaryDirectory() as self_hosted:  # one self-hosted training of a seed serves all SDKs
        failed = _failed(options, {"SDK_SERVICE_PYTHON": sys.executable, "SDK_SELF_HOSTED": self_hosted})
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _failed(options: argparse.Namespace, settings: dict[str, str]) -> list[str]:
    """Run the tests with one SDK after the other; returns the names of those that failed."""
    failed = []
    for name in options.names or CLIENTS:
        print(f"== {name}", flush=True)
        command = [
            str(client(name, options.clients)),
            "-m",
            "pytest",
            "-c",
            str(HERE / "pytest.ini"),
            "-q",
            "-rP",
        ]
        command += [f"--rootdir={HERE}", str(HERE), "-k", options.select]
        if subprocess.run(command, env={**os.environ, **settings}, check=False).returncode:
            failed.append(name)
    return failed


if __name__ == "__main__":
    sys.exit(main())
