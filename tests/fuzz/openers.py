"""Functions of the package that read files, found in its source; which of them read what others may have written.

A new function that opens a file is either reached by a target of the fuzzer on its whole seed, or listed in `OWN` with
the reason why nobody else's file gets there. A test compares both with the source.
"""

from __future__ import annotations

import ast
import contextlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from regress.errors import RegressError
from tests.fuzz.targets import TARGETS, seed_of

ROOT = Path(__file__).parents[2] / "regress"
CALLS = {
    *(
        "read_text",
        "read_bytes",
        "open",
        "safe_open",
        "load_file",
        "map_file",
        "memmap",
        "open_file",
        "opened",
    ),
    *("parse_json", "loads", "safe_load", "ParquetFile"),
}
"""Names of functions that open or parse."""

OWN: Mapping[str, str] = {
    "dump/command_outputs.py _opened": "writes",
    "engine/model_hub.py _lacking": "a cache of the hub; tests/unit/engine",
    "engine/tokenizer.py _is_generic": "one value of a file that transformers reads; anything else is no",
    "parallel/launch/cluster_launchers.py _rank": "the kernel's",
    "parallel/launch/job_standstill.py _fields": "the kernel's",
    "plugin/worker_rows.py failed_row": "text of a worker of this session",
    "replay/case_recording.py _holds": "text that this process has just made of a case that was opened",
    "replay/case_recording.py draft": "a case that was opened before",
    "replay/case_recording.py with_seed": "a case that was opened before",
    "replay/interprocess_lock.py _holders": "the kernel's",
    "replay/job_spread.py _count": "appends",
    "replay/case_traits.py _read": "files of a case, whose checksums were verified before",
    "replay/case_traits.py _tensor_names": "files of a case, whose checksums were verified before",
    "replay/temporary_workspace.py __init__": "a folder, for its lock",
    "report/mode_comparison.py modes_of": "no file",
    "capture/recording.py _digest": "hashes what this process has just written",
    "report/html_pages.py html": "files of this package",
    "doctor/examined_checkpoint.py _write": "bytes of a store, written to a folder of this process",
    "doctor/checks/leftover_files.py _writes": "the kernel's",
    "parallel/launch/cluster_launchers.py _descendants": "the kernel's",
    "parallel/launch/cluster_launchers.py __init__": "a log that this process begins",
    "parallel/launch/cluster_launchers.py error": "a log of this process",
    "parallel/launch/rank_pool.py _logs": "logs that this process begins",
    "parallel/launch/forked_rank.py _prepare_process": "the null device",
    "parallel/launch/forked_rank.py _run": "a job that the pool of this machine has sent",
    "parallel/distributed_ranks.py _heard": "an error that a rank of this run has stored",
    "engine/checkpoint/checkpoint_writer.py upload": "files that this process has just written",
    "engine/tracking/tracker_queue.py _run": "opens a connection",
    "engine/tracking/metrics_replay.py _send": "opens a connection",
    "engine/tracking/tracker_backends.py open": "opens a connection",
    "engine/tokenizer.py fingerprint": "text of a tokenizer that transformers has loaded",
    "replay/extra_settings.py parse_settings": "words of the command line",
    "plugin/worker_rows.py foreign_row": "text of a worker of this session",
    "plugin/worker_rows.py received_call": "text of a worker of this session",
    "plugin/worker_rows.py update_row": "text of a worker of this session",
    "replay/replay_cache.py _shared_outcome": "a file of a worker of this session",
    "replay/replay_cache.py _download": "a dump of this session, in a store",
    "replay/drift_update.py read_staged": "a file of a worker of this session",
    "replay/token_value_tables.py _read": "a file of a worker of this session",
    "replay/case_recipe.py _take_inputs": "a file that this process has just written",
    "replay/temporary_workspace.py _remove_unless_locked": "a folder, for its lock",
    "report/github_summary.py append_step_summary": "appends",
    "service/client/remote_api_dumps.py _continued": "compares bytes, whatever they are",
    "service/core/rank_executor.py _read": "a log of this process",
    "service/host/base_models.py _for_older_clients": "a file that this process has just written",
    "service/host/request_dumps.py _append": "appends",
    "service/host/host_saves.py stamp": "a save that was checked before",
    "systems/cell_host.py main": "a job that the calling process has written",
    "systems/cell_launch.py run_jobs": "logs and jobs of this process",
    "systems/rebatched_case.py recut": "an export that this process has just made",
    "systems/system_environments.py _opened": "marks of an environment that this program installed, checked by shape",
    "capture/forward_hooks.py _after_decoder": "no file",
    "capture/softmax_forwards.py _embedded": "no file",
    "check/resume_check.py _steps": "a log that the script of this check has written",
    "check/step_log/sitecustomize.py after": "appends",
    "compare/dumps/golden_source.py _extracted": "an archive that git has just made",
    "golden/golden_files.py converted": "only where a file is not what was recorded: by mutated inputs",
    "compare/dumps/token_columns.py columns": "pieces of a file that was checked when it was opened",
    "compare/dumps/token_columns.py aligned": "pieces of a file that was checked when it was opened",
    "dump/mapped_arrays.py open": "pieces of a file that was checked when it was opened",
    "doctor/checks/leftover_files.py _reason_to_keep_file": "only where something is left over: by mutated inputs",
    "doctor/checkpoint_repair.py digest": "hashes bytes, whatever they are",
    "doctor/checks/checkpoint_files_check.py _value": "only where a state cannot be read: by mutated inputs",
    "engine/checkpoint/trainer_state.py local_copy": "copies bytes, whatever they are",
    "parallel/pipeline_parallel.py forward_backward": "no file",
    "plugin/replay_suite.py cases": "no file",
    "plugin/replay_suite.py parts": "no file",
    "replay/tolerance_validation.py _with_seed": "a case that was verified before",
    "service/host/engine_host.py create_from": "a save that was checked before",
    "service/host/engine_host.py _opened": "a save that was checked before",
    "service/host/host_saves.py load": "a save that was checked before",
    "systems/optimizer_warmup.py put_state": "an export that this process has just made",
}
"""File and function -> why no input of the fuzzer gets there."""


def openers() -> dict[str, tuple[str, int, int]]:
    """Return the functions that open or parse: ``file function`` -> path, first and last line."""
    found: dict[str, tuple[str, int, int]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _opens(node):
                name = f"{path.relative_to(ROOT).as_posix()} {node.name}"
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                found[name] = (str(path), first, node.end_lineno or node.lineno)
    return found


def _opens(function: ast.FunctionDef) -> bool:
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue  # a function inside is one of its own
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in CALLS:
                return True
        waiting += ast.iter_child_nodes(node)
    return False


def entered_by_targets(folder: Path) -> set[tuple[str, int]]:
    """Return path and first line of the functions that targets enter on whole seeds, of which a folder takes copies."""
    nothing = folder / "nothing"
    nothing.mkdir()
    with Seen() as seen:
        for kind, chosen in TARGETS.items():
            for target in chosen:
                shutil.rmtree(folder / kind, ignore_errors=True)
                shutil.copytree(seed_of(kind), folder / kind)
                with contextlib.suppress(RegressError):  # some refuse what another command would take
                    target(folder / kind, nothing if kind in ("requests", "tasks") else seed_of(kind))
    return seen.found


class Seen:
    """Functions of the package that are entered inside of a ``with`` block, in all threads."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int]] = set()

    def __enter__(self) -> Seen:
        import threading

        sys.setprofile(self._enter)
        threading.setprofile(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        import threading

        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            self.found.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
