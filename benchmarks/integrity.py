"""Comparison of two dumps with and without the verification of their bytes.

Timed: parameters of two dumps that differ by rounding, in files that are warm in the page cache, by one process. Dumps
of earlier releases have no checksums of chunks, so that each of their files is hashed as a whole.
``REGRESS_BENCH_GB=0.2`` makes a quick run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.report import Report
from benchmarks.timing import alternate, timed
from regress.compare.dumps.comparison import compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.verdicts.tolerance import Tolerance
from regress.dump.chunk_checksums import file_sums
from regress.dump.coordinates import Coordinates
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, Provenance, write_manifest
from regress.dump.formats import safetensors_format
from regress.dump.record import Record

ROUNDS = 5
GIGABYTES = float(os.environ.get("REGRESS_BENCH_GB", "2"))
TENSORS = 8


def run() -> Report:
    """Time dumps of both releases."""
    report = Report("integrity", f"{GIGABYTES:g} GB of parameters in two dumps")
    with TemporaryDirectory(prefix="regress-bench-") as made:
        folder = Path(made)
        for side, noise in (("golden", 0.0), ("actual", 1e-7)):
            for release in ("new", "old"):
                _write(folder / release / side, noise, sums=release == "new")
        works = {
            "not verified": _compared(folder / "new", verify=False),
            "verified by chunks": _compared(folder / "new", verify=True),
            "verified by hashes": _compared(folder / "old", verify=True),
        }
        measured = alternate({name: timed(work) for name, work in works.items()}, ROUNDS)
        report.add_times(measured, "not verified")
        report.goals["verified by chunks over not verified"] = (
            measured.ratio("verified by chunks", "not verified"),
            1.3,
        )
    return report


def _compared(folder: Path, *, verify: bool) -> Callable[[], object]:
    options = Options(bounds=Bounds(given=Tolerance(1e-5)), verify=verify)
    return lambda: compare_dumps(str(folder / "golden"), str(folder / "actual"), options)


def _write(folder: Path, noise: float, *, sums: bool) -> None:
    rng = np.random.default_rng(0)
    size = int(GIGABYTES * (1 << 30)) // (2 * 4 * TENSORS)
    values = rng.standard_normal((size // 1024, 1024), np.float32)
    tensors = {f"layers.{index}.weight": values * np.float32(1 + index + noise) for index in range(TENSORS)}
    record = Record("param", 0, tensors, rank=0)
    name = f"param/{record.where.stem}.safetensors"
    stamp = write_atomically(folder / name, safetensors_format.encode(record))
    entry = Entry("param", Coordinates(0, rank=0), stamp, file_sums(folder / name) if sums else "")
    write_manifest(folder, Manifest(Provenance(), "safetensors", {name: entry}))
