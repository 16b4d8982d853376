"""Readers that mutated inputs are given to: what a user's command does with them, without starting a process.

A target may return, or raise one of our errors with one sentence. Everything else is a defect.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.read_others import (
    adapter,
    checks,
    continued,
    doctor,
    doctor_repairs,
    explained,
    history,
    open_whatever,
    oracle,
    outcome,
    planted,
    project,
    report,
    results,
    resumed,
    resumed_metrics,
    settings,
    state,
    tasks,
    tracked,
    trusts_a_count,
    update,
    wire,
)
from tests.fuzz.read_recordings import (
    check,
    compare_actual,
    compare_golden,
    compare_itself,
    compare_some,
    diff,
    exported,
    golden,
    golden_side,
    replayed,
    show,
    systems,
    verify,
)
from tests.fuzz.seeds import CORPUS

Target = Callable[[Path, Path], None]
"""Function of the mutated folder, and of the one that is whole."""


OWN: tuple[Target, ...] = (
    compare_actual,
    compare_golden,
    compare_itself,
    compare_some,
    show,
    check,
    diff,
    verify,
    replayed,
    explained,
    oracle,
)
COMPARED: tuple[Target, ...] = (compare_actual, compare_golden, compare_itself)

TARGETS: dict[str, tuple[Target, ...]] = {
    "own_safetensors": OWN,
    "own_old": OWN,
    "own_pt": OWN,
    "own_jsonl": OWN,
    "nexrl_pt": (*COMPARED, show, replayed),
    "nexrl_jsonl": (*COMPARED, show, replayed),
    "nexrl_weaver": (*COMPARED, check),
    "nexrl_remote": COMPARED,
    "service": (*COMPARED, check, show),
    "bare_safetensors": COMPARED,
    "bare_pt": COMPARED,
    "bare_sharded": COMPARED,
    "golden": (golden, golden_side),
    "exported": (exported, systems),
    "checkpoint": (doctor, resumed),
    "metrics": (report, resumed_metrics),
    "outcome": (outcome,),
    "project": (project,),
    "tasks": (tasks,),
    "settings": (settings,),
    "tracking": (tracked, doctor),
    "adapter": (adapter,),
    "results": (results, history, checks),
    "state": (state,),
    "requests": (wire,),
    "update": (update,),
    "continued": (continued,),
    "resumable": (resumed, doctor_repairs),
}
"""Kind of a seed -> what reads it."""


PLANTED: dict[str, tuple[Target, ...]] = {
    "planted_traceback": (planted("_clause", lambda error: error.position),),
    "planted_hang": (planted("open_file", open_whatever),),
    "planted_memory": (trusts_a_count,),
}
"""Readers with a bug, by which the search itself is tested; all read the seed ``metrics``."""


def seed_of(kind: str) -> Path:
    """Return the folder of the seed of a kind."""
    return CORPUS / ("metrics" if kind in PLANTED else kind)


def seeds() -> dict[str, dict[str, bytes]]:
    """Return the files of every seed."""
    return {
        kind: {
            path.relative_to(seed_of(kind)).as_posix(): path.read_bytes()
            for path in sorted(seed_of(kind).rglob("*"))
            if path.is_file()
        }
        for kind in (*TARGETS, *PLANTED)
    }


def run(target: Target, path: Path, kind: str) -> Any:
    """Run a target; return None, or the sentence that it refused the input with."""
    from regress.errors import RegressError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target(path, seed_of(kind))
        except RegressError as error:
            return str(error)
    return None
