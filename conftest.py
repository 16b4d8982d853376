"""Root of the test configuration: pytest's own testing tools, the plugin if it is not installed, and the tests that run
by default.
"""

from __future__ import annotations

import gc
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
if "regress" not in entry_points(group="pytest11").names:  # a source tree that was not installed since
    pytest_plugins.append("regress.plugin")

EXTENDED, FAULTS, SYSTEMS = "extended", "faults", "systems"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Say what to install where the package is installed without what its tests need; extend the matrix."""
    if _is_extended(config) and config.getoption("--regress-matrix") is None:
        config.option.regress_matrix = "default"
    project = Path(__file__).resolve().with_name("pyproject.toml")
    if not project.is_file():  # a copy of this file, for tests of it
        return
    groups = tomllib.loads(project.read_text())["dependency-groups"]
    missing = [wanted for wanted in groups["test"] if not _is_installed(wanted)]
    if missing and not all(map(_is_installed, groups["browser"])):
        raise pytest.UsageError(
            f"the tests need what the package does not ({', '.join(map(_named, missing))}); run python -m pip install "
            + shlex.join(missing)
        )


def _named(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _is_installed(requirement: str) -> bool:
    try:
        distribution(_named(requirement))
    except PackageNotFoundError:
        return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--extended``: run the tests that only add more of the same kind."""
    parser.addoption("--extended", action="store_true", help="Run the tests marked extended, too.")
    parser.addoption(
        "--fuzz-inputs",
        type=int,
        default=None,
        metavar="N",
        help="Mutated inputs that tests/fuzz gives to the readers; by default 50.",
    )


def _is_extended(config: pytest.Config) -> bool:
    asked = config.getoption("-m")
    return config.getoption("--extended") or EXTENDED in asked or FAULTS in asked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect extended tests and those of installed systems, unless ``-m`` or an option asks for them."""
    _thin(items)
    away = [name for name in (EXTENDED, SYSTEMS) if name not in config.getoption("-m")]
    if EXTENDED in away and _is_extended(config):
        away.remove(EXTENDED)
    named = {argument for argument in config.args if "::" in argument}  # by its id, as a failure prints it
    kept, left = [], []
    for item in items:
        marked = any(item.get_closest_marker(name) for name in away)
        (left if marked and item.nodeid not in named else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _thin(items: list[pytest.Item]) -> None:
    """Run by default every n-th of the cases of a test marked ``one_in(n)``; the others are extended tests."""
    seen: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % marker.args[0]:
            item.add_marker(EXTENDED)
        seen[test] += 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector the tens of thousands of tests, which live as long as the session."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session", autouse=True)
def _no_summary_of_the_step() -> Iterator[None]:
    """Keep reports of tests out of the run that GitHub shows; once, as there are tens of thousands of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        yield
