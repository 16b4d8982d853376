"""Environments of systems: a Python each, with exact pins, beside the packages that all of them share.

An environment is a folder of the cache, made on demand. It sees the packages of the calling Python (torch, numpy,
regress itself), and before them its own, which are installed without their dependencies: the adapter names every
one. What the calling Python has in the very version that is asked for is not installed again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from filelock import FileLock

from regress.errors import SystemsError, reason
from regress.json_schema import conform
from regress.systems.protocol import SystemUnderTest
from regress.untrusted_files import parse_json, read_bytes

VARIABLE = "REGRESS_SYSTEMS"
"""Variable that names the folder of environments; by default one in the user's cache."""
READY = "installed.json"
"""File of a complete environment, written last."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)")


@dataclass(frozen=True)
class Environment:
    """Python in which a system runs.

    Attributes:
        python: interpreter.
        folder: folder of the environment; None: that of the calling Python.
        variables: to be set for its processes.
        installed: requirements that were installed into it.
    """

    python: Path
    folder: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    installed: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int:
        """Bytes of its own files."""
        if self.folder is None:
            return 0
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if not path.is_dir())

    @cached_property
    def stamp(self) -> str:
        """Hash of the versions of all packages in it, and of the main ones that it shares."""
        own = [] if self.folder is None else sorted(path.name for path in self.folder.rglob("*.dist-info"))
        shared = [f"{name}=={_version(name)}" for name in ("torch", "transformers", "accelerate", "trl")]
        return sha256(json.dumps([own, shared, sys.version]).encode()).hexdigest()[:16]


def root() -> Path:
    """Return the folder of all environments."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "regress" / "systems"


def shared_size() -> int:
    """Return the bytes of the packages of the calling Python, which all environments share."""
    folders = {folder for folder in _shared() if any(folder.glob("*.dist-info"))}
    return sum(path.lstat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def lacking(requirements: Sequence[str]) -> list[str]:
    """Return the pins that the calling Python does not have in this very version.

    Raises:
        SystemsError: for a requirement that is not an exact pin.
    """
    return [pin for pin in requirements if _present(*_parts(pin)) is False]


def _parts(pin: str) -> tuple[str, str]:
    match = _PIN.fullmatch(pin)
    if match is None:
        raise SystemsError(f"the requirement {pin!r} is not an exact pin: write NAME==VERSION")
    return match[1], match[2]


def _present(name: str, number: str) -> bool:
    try:
        return version(name) == number
    except PackageNotFoundError:
        return False


def environment_of(system: SystemUnderTest, *, newest: bool = False) -> Environment:
    """Return the installed environment of a system; the calling Python where nothing has to be installed.

    Raises:
        SystemsError: if it is not installed.
    """
    requirements = _wanted(system, newest)
    if not requirements:
        return Environment(Path(sys.executable))
    folder = _folder(system.name, requirements, newest)
    if not (folder / READY).is_file():
        raise SystemsError(f"""{system.name} is not installed: run regress systems install
        {system.name}{" --newest" if newest else ""}""")
    return _opened(folder)


def install(system: SystemUnderTest, *, newest: bool = False, again: bool = False) -> Environment:
    """Install the environment of a system, unless it is there.

    Args:
        newest: the newest releases in place of the pins.
        again: remove it first, if it is there.

    Raises:
        SystemsError: if a package cannot be installed.
    """
    requirements = _wanted(system, newest)
    if not requirements:
        return Environment(Path(sys.executable))
    folder = _folder(system.name, requirements, newest)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if again or not (folder / READY).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _make(folder, requirements, system)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return _opened(folder)


def _wanted(system: SystemUnderTest, newest: bool) -> list[str]:
    if newest:
        return [_parts(pin)[0] for pin in system.requirements]
    return lacking(system.requirements)


def _folder(name: str, requirements: Sequence[str], newest: bool) -> Path:
    """Return the folder of an environment, named after what is in it and what it shares."""
    packages = [f"{name}=={_version(name)}" for name in ("torch", "transformers")]
    shared = [sys.version, str(Path(sys.executable).absolute()), *packages]
    stamp = sha256(json.dumps([sorted(requirements), shared]).encode()).hexdigest()[:12]
    return root() / f"{name}-{'newest-' if newest else ''}{stamp}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


class _Ready(TypedDict):
    installed: list[str]


def _opened(folder: Path) -> Environment:
    try:
        found = parse_json(read_bytes(folder / READY))
        conform(found, _Ready, "it")
    except (OSError, ValueError) as error:
        raise SystemsError(
            f"{folder / READY} is damaged ({reason(error)}); delete {folder}, and install the environment again"
        ) from error
    return Environment(folder / "bin" / "python", folder, _variables(folder), tuple(found["installed"]))


def _variables(folder: Path) -> dict[str, str]:
    """Return the variables of an environment: its programs first, and caches of its own."""
    return {
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


_IMPORT = """\
import sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
"""


def _make(folder: Path, requirements: Sequence[str], system: SystemUnderTest) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], f"a Python at {folder} cannot be made")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    site.mkdir(parents=True, exist_ok=True)
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in _shared()))
    tool = (
        ["uv", "pip"] if shutil.which("uv") else [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    )
    target = ["--python", str(folder / "bin" / "python")]
    command = (
        [*tool, "install", *target, "--no-deps", *requirements]
        if tool[0] == "uv"
        else [
            *tool,
            *target,
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--ignore-installed",
            *requirements,
        ]
    )
    _run(command, f"{', '.join(requirements)} cannot be installed")
    variables = {**os.environ, **_variables(folder), **system.environ}
    python = str(folder / "bin" / "python")
    if system.builds:
        _run([python, "-c", system.builds], f"{system.name} cannot compile what it needs", variables)
    _run(
        [python, "-c", _IMPORT, *system.modules],
        f"{system.name} is installed and cannot be imported",
        variables,
    )
    (folder / READY).write_text(json.dumps({"installed": list(requirements)}, indent=1) + "\n")


def _shared() -> list[Path]:
    """Return the folders of packages of the calling Python, and that of this package."""
    folders = [path.absolute() for path in map(Path, sys.path) if path.is_dir()]
    own = Path(__file__).absolute().parents[2]
    found = [path for path in folders if path == own or any(path.glob("*.dist-info"))]
    return list(dict.fromkeys([*found, own]))


def _run(command: Sequence[str], what: str, variables: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        tail = " / ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise SystemsError(
            f"{what} ({tail}): correct the pins of the adapter, or the access to packages and compilers"
        )
