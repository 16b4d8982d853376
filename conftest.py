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
from typing import Any

import pytest

pytest_plugins = ["pytester"]
if "regress" not in entry_points(group="pytest11").names:  # a source tree that was not installed since
    pytest_plugins.append("regress.plugin")

EXTENDED, FAULTS, SYSTEMS = "extended", "faults", "systems"


def pytest_configure(config: pytest.Config) -> None:
    """Say what to install where the package is installed without what its tests need."""
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect extended tests and those of installed systems, unless ``-m`` or an option asks for them."""
    _thin(items)
    _leave_replays(items)
    asked = config.getoption("-m")
    away = [name for name in (EXTENDED, SYSTEMS) if name not in asked]
    if EXTENDED in away and (config.getoption("--extended") or FAULTS in asked):
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


def _leave_replays(items: list[pytest.Item]) -> None:
    """Make extended tests of the replays that show little which others do not."""
    for item in items:
        parameters = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        replay = getattr(parameters.get("regress_record"), "replay", None)
        if replay is not None and _adds_little(replay):
            item.add_marker(EXTENDED)


def _adds_little(replay: Any) -> bool:
    """Return True for combinations of what other variants show one by one, and for some in a further precision.

    What any case meets because a project may have no other shows here on the cases that it is most telling for. Wrong
    dtypes and collectives show in float64 at 1e-12. Float32 and bfloat16 add how errors of rounding grow, which
    one case in one process shows. Wires round to float32 anyway; compiling for another dtype takes half a minute.
    That ranks compute the same bytes twice shows with as few of them as there can be.
    """
    variant, precision = replay.variant, str(replay.precision)
    rank = variant.rank(replay.case)
    if rank is not None and variant.cases[rank] == "@any":
        return True
    if variant.combines or (precision == "bitwise" and replay.world_size > 2):
        return True
    if precision == str(variant.precisions[0]) or precision not in ("float32", "bfloat16"):
        return False
    is_first = rank == 0
    is_compiled = variant.overrides.get("model.compile") == "inductor"
    return replay.world_size > 1 or not is_first or is_compiled or variant.trainer != "local"


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
