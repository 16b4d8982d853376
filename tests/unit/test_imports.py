"""The rooms of the house: who may import whom, and what must start without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Container
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2] / "regress"

FREE = {
    "regress",
    "choice",
    "errors",
    "extras",
    "lazy",
    "redaction",
    "project",
    "trust",
    "printed",
    "progress",
    "inputs",
    "schema",
    "plugins",
}
"""Modules that everybody may import."""
ALLOWED: dict[str, set[str]] = {
    "project": set(),
    "trust": set(),
    "layout": set(),
    "dump": {"layout"},
    "capture": {"dump", "layout", "grpo"},
    "grpo": set(),
    "live": {"capture", "dump"},
    "tasks": set(),
    "golden": {"dump", "layout"},
    "interop": {"compare", "report", "golden", "dump", "layout"},
    "compare": {"golden", "dump", "layout"},
    "report": {"compare", "golden", "dump", "layout"},
    "explain": {"compare", "dump", "layout", "grpo"},
    "engine": {"grpo", "tasks", "dump", "layout"},
    "parallel": {"engine", "grpo", "dump", "layout"},
    "replay": {
        "parallel",
        "engine",
        "golden",
        "compare",
        "report",
        "grpo",
        "tasks",
        "dump",
        "layout",
    },
    "systems": {
        "oracle",
        "replay",
        "explain",
        "capture",
        "parallel",
        "golden",
        "compare",
        "report",
        "dump",
        "layout",
    },
    "oracle": {
        "capture",
        "replay",
        "engine",
        "explain",
        "golden",
        "compare",
        "report",
        "grpo",
        "dump",
        "layout",
    },
    "doctor": {"engine", "dump"},
    "service": {
        "replay",
        "interop",
        "parallel",
        "engine",
        "golden",
        "compare",
        "report",
        "grpo",
        "tasks",
        "dump",
        "layout",
    },
    "tracking": {"engine"},
    "plugin": {"replay", "parallel", "engine", "golden", "compare", "report", "dump", "layout"},
    "__main__": {"cli"},
    "command_group": set(),
    "cli": {
        "command_group",
        "engine",
        "golden",
        "compare",
        "report",
        "dump",
    },
}
ON_THE_CORE = {"service", "systems", "doctor", "interop"}
"""Rooms that stand on the core; `regress/plugins.py` knows of them."""
TORCH_FREE = [
    "regress",
    "regress.errors",
    "regress.trust",
    "regress.cli",
    "regress.layout",
    "regress.dump",
    "regress.dump.manifest",
    "regress.dump.metric_table",
    "regress.dump.metrics_file",
    "regress.interop.nexrl",
    "regress.golden",
    "regress.golden.store",
    "regress.golden.signal",
    "regress.golden.commands",
    "regress.golden.review",
    "regress.golden.verify",
    "regress.compare",
    "regress.compare.alignment.canonical",
    "regress.compare.updates.single_dump",
    "regress.compare.diagnosis.rules.table",
    "regress.compare.dumps.engines",
    "regress.compare.dumps.engines.cluster",
    "regress.compare.dumps.engines.processes",
    "regress.compare.updates.bitwise_reference",
    "regress.compare.verdicts.overrides",
    "regress.compare.dumps.session",
    "regress.compare.verdicts.verdict",
    "regress.compare.verdicts.sequence",
    "regress.plugin",
    "regress.report.calibration",
    "regress.report.headroom",
    "regress.report.model",
    "regress.report.text",
    "regress.report.write",
    "regress.oracle",
    "regress.oracle.commands",
    "regress.grpo.objective",
    "regress.grpo.presets",
    "regress.tasks.curriculum",
    "regress.tasks.dataset",
    "regress.tasks.files",
    "regress.tasks.rewards",
    "regress.parallel.launch.forkserver",
    "regress.parallel.launch.pool",
    "regress.parallel.launch.launchers",
    "regress.replay.cache",
    "regress.replay.engine_replayer",
    "regress.replay.foreign",
    "regress.replay.judge",
    "regress.replay.matrix",
    "regress.replay.pool",
    "regress.replay.run",
    "regress.replay.session",
    "regress.replay.table",
    "regress.replay.variants",
    "regress.engine.config.compose",
    "regress.engine.config.show",
    "regress.engine.environment",
    "regress.doctor.commands",
    "regress.doctor.run",
    "regress.systems.adapters.trainer",
    "regress.systems.commands",
    "regress.systems.environments",
    "regress.systems.exported",
    "regress.systems.host",
    "regress.systems.launch",
    "regress.systems.page",
    "regress.systems.protocol",
    "regress.systems.registry",
    "regress.systems.run",
    "regress.service.api",
    "regress.service.commands",
    "regress.service.replay.replayer",
    "regress.service.core.service",
]


@cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Imports of a module, wherever in the file, for type checkers only as well."""
    found, left = [], list[ast.AST]([ast.parse(path.read_text())])
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for name in (
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "cases",
        ):  # of statements, where imports stand
            below = getattr(node, name, None)
            left += below if isinstance(below, list) else []
    return found


def imported_rooms(path: Path) -> set[str]:
    """Rooms of this package that a module imports, wherever in the file."""
    rooms = set()
    for node in imports_of(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "regress" else [base]
        rooms |= {name.split(".")[1] for name in names if name.startswith("regress.")}
    return rooms


def _imported_at_run_time(path: Path) -> list[str]:
    """Modules of this package that the door imports outside of ``if TYPE_CHECKING``."""
    body = [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.If)]
    nodes = [node for top in body for node in ast.walk(top) if isinstance(node, ast.ImportFrom)]
    found = [node.module for node in nodes if node.module and node.module.startswith("regress")]
    return [module for module in found if module != "regress.lazy"]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_the_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        assert not _imported_at_run_time(path)
        return
    if room in (
        "choice",
        "errors",
        "lazy",
        "redaction",
        "printed",
        "progress",
        "inputs",
        "schema",
        "extras",
        "plugins",
    ):
        assert imported_rooms(path) <= {"redaction", "printed", "errors"}
        return
    assert room in ALLOWED, f"{path} lies in no room; name it in the architecture first"
    forbidden = imported_rooms(path) - ALLOWED[room] - FREE - {room, "__version__"}
    assert not forbidden, f"{path} imports {sorted(forbidden)}, which {room} may not know"


def test_the_core_may_import_nothing_that_stands_on_it() -> None:
    told = {room: rooms & ON_THE_CORE for room, rooms in ALLOWED.items() if room not in ON_THE_CORE}
    assert not {room: rooms for room, rooms in told.items() if rooms}


HEAVY = """
import importlib, os, sys, traceback

def child(action):
    if os.fork() == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.wait()

def heavy():
    return sorted({"torch", "transformers", "pandas"} & sys.modules.keys())

def report(module):
    importlib.import_module(module)
    print(module, *heavy(), flush=True)

def others_of(modules):
    for module in modules:
        importlib.import_module(module)
    others = [] if heavy() else [name for name in sys.modules if name.partition(".")[0] != "regress"]
    os.write(writer, " ".join(others).encode())

reader, writer = os.pipe()
child(lambda: others_of(sys.argv[1:]))
os.close(writer)
for name in open(reader).read().split():  # light packages, imported once rather than in each child
    try:
        importlib.import_module(name)
    except ImportError:
        pass
assert not heavy()
for module in sys.argv[1:]:
    child(lambda: report(module))
"""


@pytest.fixture(scope="session")
def heavy_imports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Module -> the heavy packages that it imports, each in a process without what others of ours import.

    Found once, whichever xdist workers ask.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    told = shared / "heavy-imports"
    with FileLock(f"{told}.lock"):
        if not told.exists():
            command = [sys.executable, "-c", HEAVY, *TORCH_FREE]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
            told.write_text(done.stdout)
    return {module: found for module, *found in map(str.split, told.read_text().splitlines())}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_loads_without_torch(module: str, heavy_imports: dict[str, list[str]]) -> None:
    assert module in heavy_imports, f"{module} cannot be imported"
    assert not heavy_imports[module]


def test_no_file_imports_itself_through_others() -> None:
    """A circle between files makes it a matter of luck which of them can be imported first."""
    modules = {_dotted(path): path for path in ROOT.rglob("*.py")}
    imports = {name: _imported_modules(path, modules) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"these files import one another: {' -> '.join(error.args[1])}")


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path: Path, known: Container[str]) -> set[str]:
    """Modules of this package that a file imports, wherever in it, for type checkers only as well."""
    found: set[str] = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inner}
    return {name for name in found if name in known and name != "regress"}
