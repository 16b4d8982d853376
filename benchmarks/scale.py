"""Comparisons of dumps of 50 GB, and of 1, 4, 16 and 64 ranks of the same size each.

Memory: a pair of dumps of 64 ranks, 50 GB in all, in files with holes, so that they take hardly any space on the disk.
Each engine compares them in a new process that has done nothing else. Told are the largest memory that this process
ever had, the largest of one of its workers, and what all of them have together where pages that they share are counted
once, at the time when it was most. One value of one rank differs, and has to be found.

Time: dumps of small files with values, every rank with two microbatches and its shards of three parameters; one thread
in this process, so that nothing but the number of ranks changes. The ratio is that of the time of a rank to what it
takes among 4. ``REGRESS_BENCH_GB=1`` makes a quick run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Report
from benchmarks.timing import alternate, timed
from regress.compare.dumps.comparison import compare_dumps

sys.path.append(str(Path(__file__).parents[1] / "tests" / "scale"))

from made_dumps import Made, Sparse

ROUNDS = 5
GIGABYTES = float(os.environ.get("REGRESS_BENCH_GB", "50"))
RANKS = (1, 4, 16, 64)
LAYERS, KINDS, WIDTH = 32, 9, 4096
LIMIT = 500

MEASURE = """
import json, multiprocessing, re, sys, time
from pathlib import Path
from regress.compare.dumps.engines import engine_named
from regress.compare.dumps.comparison import compare_dumps

def kilobytes(process, file, key):
    try:
        found = re.search(key + r":\\s+(\\d+)", Path(f"/proc/{process}/{file}").read_text())
    except OSError:
        found = None
    return int(found[1]) if found else 0

peaks, together, done = {}, 0, 0

def look():
    global together
    workers = [child.pid for child in multiprocessing.active_children()]
    for process in workers:
        peaks[process] = kilobytes(process, "status", "VmHWM")
    shares = [kilobytes(process, "smaps_rollup", "Pss") for process in ["self", *workers]]
    together = max(together, sum(shares))

def advance(number):
    global done
    done += 1
    if done % 8 == 0:
        look()

if __name__ == "__main__":
    start = time.perf_counter()
    found = compare_dumps(*sys.argv[1:3], engine=engine_named(sys.argv[3]), advance=advance)
    print(json.dumps({
        "seconds": time.perf_counter() - start,
        "this": kilobytes("self", "status", "VmHWM") / 1024,
        "worker": max(peaks.values(), default=0) / 1024,
        "together": together / 1024,
        "verdicts": len(found.verdicts),
        "elements": found.compared,
        "worst": [verdict.worst.where for verdict in found.failed],
    }))
"""


def run() -> Report:
    """Measure memory, then time."""
    report = Report("scale", f"{GIGABYTES:g} GB on 64 ranks; 1 to 64 ranks of one size")
    with TemporaryDirectory(prefix="regress-bench-") as folder:
        _memory(report, Path(folder))
        _time(report, Path(folder))
    return report


def _memory(report: Report, folder: Path) -> None:
    rows = int(GIGABYTES * (1 << 30)) // (2 * LAYERS * KINDS * WIDTH * 4) // 64 * 64
    names = [f"layers.{layer}.{kind}.weight" for layer in range(LAYERS) for kind in range(KINDS)]
    params = dict.fromkeys(names, ("float32", (rows, WIDTH)))
    golden = Sparse(64, params).write(folder / "golden")
    actual = Sparse(64, params, {"layers.3.5.weight": {17: 0.5}}).write(folder / "actual")
    script = folder / "measure.py"
    script.write_text(MEASURE)
    for engine in ("local", "processes"):
        done = subprocess.run(
            [sys.executable, str(script), str(golden), str(actual), engine],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        if found["elements"] != rows * WIDTH * len(names):
            raise AssertionError(f"{engine}: {found['elements']} elements were compared")
        if found["worst"] != ["element [0, 17] of layers.3.5.weight"]:
            raise AssertionError(f"{engine}: {found['worst']}")
        report.rows[f"{GIGABYTES:g} GB, {engine}"] = {
            "wall s": round(found["seconds"], 1),
            "peak MB": round(found["this"]),
            "of a worker": round(found["worker"]) or "",
            "together": round(found["together"]),
        }
        report.goals[f"{engine}: MB of the largest process"] = (max(found["this"], found["worker"]), LIMIT)
        report.facts["verdicts"] = found["verdicts"]
    report.facts["bytes of the pair"] = 2 * rows * WIDTH * len(names) * 4


def _time(report: Report, folder: Path) -> None:
    pairs = {}
    for ranks in RANKS:
        params = {
            "embed.weight": (512 * ranks, 64),
            "mlp.weight": (256 * ranks, 64),
            "norm.weight": (64 * ranks,),
        }
        pairs[ranks] = [
            str(Made(ranks, 2 * ranks, params=params, noise=noise).write(folder / f"{ranks}-{noise}"))
            for noise in (0.0, 1e-8)
        ]
    sides = {
        f"{ranks} ranks": timed(lambda pair=pair: compare_dumps(*pair), ranks)
        for ranks, pair in pairs.items()
    }
    measured = alternate(sides, ROUNDS)
    report.add_times(measured, "4 ranks")
    report.goals["time of one of 64 ranks over one of 4"] = (measured.ratio("64 ranks", "4 ranks"), 1.5)
