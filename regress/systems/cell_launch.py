"""Cells of a system, run by its own Python in processes that are gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regress.errors import SystemsError
from regress.systems.cell_host import MARK
from regress.systems.cell_worker import Job

TIMEOUT = 300.0
"""Seconds that one cell may take."""


@dataclass(frozen=True)
class Outcome:
    """Results of the ranks of a cell.

    Attributes:
        error: why there is no dump, in one sentence; empty if there is one. ``notes`` are the traceback and output.
        facts, missing: proof of the layout, of the first rank; what any rank lacks.
        versions: of the system and what it runs on.
    """

    error: str = ""
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def run_jobs(
    python: Path,
    jobs: Sequence[tuple[Job, int]],
    folder: Path,
    *,
    modules: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    on_outcome: Callable[[int, Outcome], None] = lambda *_: None,
) -> list[Outcome]:
    """Run jobs one after another, each on its number of ranks, and return their outcomes in order.

    Args:
        python: interpreter of the environment.
        folder: for the list of jobs and the logs of ranks.
        modules: imported once, before ranks are forked.
        environ: variables of the processes besides those of this one.
        on_outcome: called with the number and the outcome of each job when it is done.

    Raises:
        SystemsError: if the process that runs them dies; its output is reported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {**asdict(job), "ranks": ranks, "log": str(folder / f"log{number}")}
        for number, (job, ranks) in enumerate(jobs)
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps({"modules": list(modules), "timeout": timeout, "jobs": rows}))
    outcomes: list[Outcome] = []
    with (folder / "host.log").open("wb") as log:
        process = subprocess.Popen(
            [str(python), "-m", "regress.systems.cell_host", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_paths(jobs), **(environ or {})},
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    outcomes.append(_outcome(json.loads(line.removeprefix(MARK))))
                    on_outcome(len(outcomes) - 1, outcomes[-1])
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    if code or len(outcomes) != len(jobs):
        tail = (folder / "host.log").read_text(errors="replace").strip().splitlines()[-8:]
        raise SystemsError(f"""{python} ended with exit code {code} after {len(outcomes)} of {len(jobs)} cells
        ({" / ".join(tail) or "it printed nothing"}): see {folder}""")
    return outcomes


def _paths(jobs: Sequence[tuple[Job, int]]) -> dict[str, str]:
    """Return the PYTHONPATH with the folders of adapters and plants."""
    own = dict.fromkeys(path for job, _ in jobs for path in job.paths)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*own, *([before] if before else [])])} if own else {}


def _outcome(row: Mapping[str, Any]) -> Outcome:
    if "error" in row:
        return Outcome(error=row["error"], notes=tuple(row["notes"]))
    ranks = row["ranks"]
    missing = [f"rank {number}: {one['missing']}" for number, one in enumerate(ranks) if one["missing"]]
    if len(missing) == len(ranks):
        missing = [ranks[0]["missing"]]
    return Outcome(facts=ranks[0]["facts"], missing="; ".join(missing), versions=ranks[0]["versions"])
