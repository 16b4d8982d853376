"""Modules that must start without torch; contracts in pyproject.toml, for import-linter, say who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

DOOR = Path(__file__).parents[2] / "regress" / "__init__.py"

TORCH_FREE = [
    "regress",
    "regress.errors",
    "regress.import_trust",
    "regress.cli",
    "regress.layout",
    "regress.dump",
    "regress.dump.dump_manifest",
    "regress.dump.metrics_file",
    "regress.interop.nexrl_dumps",
    "regress.golden",
    "regress.golden.golden_directory",
    "regress.golden.commands",
    "regress.golden.golden_verification",
    "regress.compare",
    "regress.compare.alignment.canonical_tensors",
    "regress.compare.single_dump_checks",
    "regress.compare.diagnosis.rules.rule_table",
    "regress.compare.dumps.engines",
    "regress.compare.dumps.engines.ray_cluster",
    "regress.compare.dumps.engines.process_pool",
    "regress.compare.update_judge",
    "regress.compare.verdicts.tolerance_overrides",
    "regress.compare.dumps.comparison",
    "regress.compare.verdicts.verdict",
    "regress.compare.verdicts.verdict_sequence",
    "regress.plugin",
    "regress.report.calibration_report",
    "regress.report.headroom",
    "regress.report.report_model",
    "regress.report.verdict_text",
    "regress.report.report_files",
    "regress.oracle",
    "regress.oracle.commands",
    "regress.grpo.objective",
    "regress.grpo.objective_presets",
    "regress.tasks.curriculum",
    "regress.tasks.problem_split",
    "regress.tasks.data_files",
    "regress.tasks.reward_functions",
    "regress.parallel.launch.forkserver",
    "regress.parallel.launch.rank_pool",
    "regress.parallel.launch.cluster_launchers",
    "regress.replay.replay_cache",
    "regress.replay.engine_replayer",
    "regress.replay.user_trainer_replays",
    "regress.replay.replay_judge",
    "regress.replay.test_matrix",
    "regress.replay.replay_pool",
    "regress.replay.case_run",
    "regress.replay.command_replays",
    "regress.replay.variant_table",
    "regress.replay.variant",
    "regress.engine.config.config_loading",
    "regress.engine.config.command_flags",
    "regress.engine.determinism_environment",
    "regress.doctor.commands",
    "regress.doctor.doctor_verbs",
    "regress.systems.adapters.transformers_trainer",
    "regress.systems.commands",
    "regress.systems.system_environments",
    "regress.systems.exported",
    "regress.systems.cell_host",
    "regress.systems.cell_launch",
    "regress.systems.conformance_page",
    "regress.systems.protocol",
    "regress.systems.system_registry",
    "regress.systems.conformance_run",
    "regress.service.service_api",
    "regress.service.commands",
    "regress.service.replay.remote_replayer",
    "regress.service.core.training_service",
]


def test_the_door_imports_nothing_of_ours_but_what_loads_it_later() -> None:
    body = [node for node in ast.parse(DOOR.read_text()).body if not isinstance(node, ast.If)]
    nodes = [node for top in body for node in ast.walk(top) if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in nodes if node.module and node.module.startswith("regress")}
    assert ours <= {"regress.lazy_imports"}


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


def test_modules_load_without_torch(subtests: pytest.Subtests) -> None:
    """Each loads in a process without what others of ours import."""
    command = [sys.executable, "-c", HEAVY, *TORCH_FREE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    found = {module: heavy for module, *heavy in map(str.split, done.stdout.splitlines())}
    for module in TORCH_FREE:
        with subtests.test(module):
            assert module in found, f"{module} cannot be imported"
            assert not found[module]
