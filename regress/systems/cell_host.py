"""Process of a system's environment that runs its cells: ``python -m regress.systems.cell_host JOBS.json``.

It imports the system once and forks the ranks of each cell from that, one cell after another. A line of JSON on its
standard output tells the result of each, as soon as it is there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from regress.errors import RegressError
from regress.parallel.launch.rank_pool import RankPool
from regress.systems.cell_worker import Job, run_rank

MARK = "regress-result "
"""Begin of a line with a result."""


def main(path: str) -> None:
    """Run the jobs of a file: ``{"modules": [...], "timeout": s, "jobs": [{"ranks": n, "log": ..., **Job}]}``."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    work = json.loads(Path(path).read_text())
    with RankPool(tuple(work["modules"])) as pool:
        for number, one in enumerate(work["jobs"]):
            ranks, log = int(one.pop("ranks")), Path(one.pop("log"))
            result = _run(
                pool, Job(**{**one, "paths": tuple(one["paths"])}), ranks, log, float(work["timeout"])
            )
            print(MARK + json.dumps({"number": number, **result}), flush=True)


def _end_with_the_caller() -> None:
    """End as soon as the caller is gone, however it ended; the ranks end with this process."""
    while os.read(0, 1):  # not by sys.stdin, whose lock the end of the interpreter needs
        pass
    os._exit(1)


def _run(pool: RankPool, job: Job, ranks: int, log: Path, timeout: float) -> dict[str, Any]:
    log.mkdir(parents=True, exist_ok=True)
    what = f"{job.system} {job.cell['layout']['name']}"
    try:
        found = pool.run(run_rank, {"job": job}, ranks, timeout=timeout, folder=log, what=what)
    except RegressError as error:
        return {"error": str(error), "notes": [str(note) for note in getattr(error, "__notes__", ())]}
    return {"ranks": found}


if __name__ == "__main__":
    main(sys.argv[1])
