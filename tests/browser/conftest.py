"""A headless Chromium, from wherever there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

sys.path.append(str(Path(__file__).parents[1] / "unit" / "report"))  # makers of runs

HOW = (
    "no Chromium was found: run tox run -e browser, or set REGRESS_CHROMIUM to the path of one, or run playwright "
    "install chromium"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PACKAGE = "@sparticuz/chromium@153.0.0"
"""A Chromium in a package of npm; where it needs libraries that a machine lacks, it brings them."""

PATIENCE = 240
"""Seconds that npm has; it waits long for a registry that does not answer."""

_UNPACK = "import('@sparticuz/chromium').then(async m => console.log(await m.default.executablePath()))"


def executable(playwright: Any, folder: Path) -> tuple[str, dict[str, str]] | None:
    """Path of a Chromium, and environment variables that it needs."""
    found = os.environ.get("REGRESS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    own = Path(playwright.chromium.executable_path)
    if found is None and own.exists():
        found = str(own)
    if found is not None:
        return found, {}
    modules = os.environ.get("REGRESS_CHROMIUM_NPM")
    return None if not modules or not shutil.which("npm") else from_npm(Path(modules), folder)


def from_npm(modules: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """The package's Chromium, unpacked into a folder; raises `SubprocessError` if npm cannot have it."""
    if not (modules / "node_modules" / "@sparticuz" / "chromium").is_dir():
        flags = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(modules))
        subprocess.run(["npm", "install", *flags, PACKAGE], check=True, capture_output=True, timeout=PATIENCE)
    environment = os.environ | {"TMPDIR": str(folder), "AWS_LAMBDA_JS_RUNTIME": "nodejs20.x"}
    done = subprocess.run(
        ["node", "-e", _UNPACK], cwd=modules, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip(), {"LD_LIBRARY_PATH": str(folder / "al2023" / "lib")}


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: run tox run -e browser"
    )
    with api.sync_playwright() as playwright:
        found = executable(playwright, tmp_path_factory.mktemp("chromium"))
        if found is None:
            pytest.skip(HOW)
        path, environment = found
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], env=os.environ | environment
        )
        yield launched
        launched.close()
