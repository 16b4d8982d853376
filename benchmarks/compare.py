"""The full set of measures of pairs of files, against ``torch.testing.assert_close``, ``numpy.allclose`` and reading.

Timed: 2 GB of float32 pairs and as many pairs in bfloat16, each in two files that are warm in the page cache, and
20,000 small files; one thread, and two beside it. All sides but ``readinto`` map the files and get arrays. ``readinto``
reads the same bytes into memory that is there already; ``readinto, 256 KB`` reads them into a piece of memory that
stays in the processor's cache. The pairs differ as rounding makes them differ, within the tolerance of the other sides,
so that none stops early. Equal pairs, of which we have less to do, are told beside; ``numpy`` is ours without the extra
``fast``.

Before anything is timed, maximum, count, worst element and a quantile of the first rows are those of the naive
computation, and the other sides accept them. Start-up is a new process that compares two small arrays.
``REGRESS_BENCH_GB=0.2`` makes a quick run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import ml_dtypes
import numpy as np
import torch

from benchmarks.report import Report
from benchmarks.timing import Measured, alternate, timed
from regress.compare.metrics import striped_measures
from regress.compare.metrics.striped_measures import measure
from regress.dump.mapped_arrays import Region
from regress.dump.numpy_arrays import Array, to_torch

ROUNDS = 5
GIGABYTES = float(os.environ.get("REGRESS_BENCH_GB", "2"))
SMALL_FILES = max(int(10_000 * GIGABYTES) // 2 * 2, 2)
SMALL_SHAPE = (32, 64)
BLOCK = 1 << 22
RTOL, ATOL = 0.1, 1e-5
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
START_UP = {
    "ours": "from regress.compare.metrics.striped_measures import measure; measure(x, y)",
    "allclose": "np.allclose(x, y)",
    "assert_close": "import torch; torch.testing.assert_close(torch.from_numpy(x), torch.from_numpy(y))",
}


@dataclass(frozen=True)
class Pair:
    """Two files that hold one tensor each."""

    actual: Region
    golden: Region

    @property
    def regions(self) -> tuple[Region, Region]:
        """Both regions, actual and golden."""
        return self.actual, self.golden


Compare = Callable[[Array, Array], object]


def run() -> Report:
    """Time large pairs of both dtypes, equal ones, small files, and start-up."""
    report = Report("compare", f"{GIGABYTES:g} GB of pairs and {SMALL_FILES} small files")
    with TemporaryDirectory(prefix="regress-bench-") as folder:
        for name, dtype in DTYPES.items():
            _large(report, Path(folder), name, dtype)
        _small(report, Path(folder))
    _start_up(report)
    return report


def _large(report: Report, folder: Path, name: str, dtype: np.dtype) -> None:
    elements = int(GIGABYTES * (1 << 30)) // 8  # as many in every dtype
    pair = _write(folder / name, dtype, (elements // 1024, 1024))
    _require_right(pair)
    buffer = bytearray(pair.actual.path.stat().st_size)
    works = {
        "readinto": lambda: _read(pair, memoryview(buffer)),
        "readinto, 256 KB": lambda: _read(pair, memoryview(buffer)[: 1 << 18]),
        "ours": lambda: _ours(1)(*_open(pair)),
        "ours, 2 threads": lambda: _ours(2)(*_open(pair)),
        "ours, rows of 1024": lambda: _ours(1, 1024)(*_open(pair)),
        "ours, equal": lambda: _ours(1)(*_open(replace(pair, actual=pair.golden))),
        "numpy": lambda: _chunks(*_open(pair)),
        "numpy, equal": lambda: _chunks(*_open(replace(pair, actual=pair.golden))),
        "allclose": lambda: _allclose(*_open(pair)),
        "assert_close": lambda: _assert_close(*_open(pair)),
    }
    measured = alternate({side: timed(work) for side, work in works.items()}, ROUNDS)
    _tell(report, measured, f"{name}: ", 2 * len(buffer))
    report.goals |= {
        f"{name}, ours over assert_close": (measured.ratio("ours", "assert_close"), 0.1),
        f"{name}, ours over allclose": (measured.ratio("ours", "allclose"), 0.5),
        f"{name}, ours over readinto": (measured.ratio("ours", "readinto"), 1 / 0.6),
        f"{name}, two threads over one": (measured.ratio("ours, 2 threads", "ours"), 1.0),
    }
    for region in pair.regions:
        region.path.unlink()


def _small(report: Report, folder: Path) -> None:
    pairs = [
        _write(folder / f"small{index}", DTYPES["float32"], SMALL_SHAPE) for index in range(SMALL_FILES // 2)
    ]
    buffer = bytearray(pairs[0].actual.path.stat().st_size)

    def each(compare: Compare) -> Callable[[], None]:
        return lambda: [compare(*_open(pair)) for pair in pairs] and None

    works = {
        "readinto": lambda: [_read(pair, memoryview(buffer)) for pair in pairs] and None,
        "ours": each(_ours(1)),
        "allclose": each(_allclose),
        "assert_close": each(_assert_close),
    }
    measured = alternate({side: timed(work) for side, work in works.items()}, ROUNDS)
    _tell(report, measured, "small files: ", SMALL_FILES * len(buffer))
    for side in works:
        report.rows[f"small files: {side}"]["us a pair"] = round(measured.wall(side) / len(pairs) * 1e6, 1)


def _start_up(report: Report) -> None:
    begin = "import numpy as np; x, y = np.ones((2, 9), np.float32); "

    def start(code: str) -> Callable[[], None]:
        return lambda: subprocess.run([sys.executable, "-c", begin + code], check=True) and None

    measured = alternate({side: timed(start(code)) for side, code in START_UP.items()}, ROUNDS)
    report.add_times(measured, "allclose", "start-up: ")
    for side in START_UP:
        del report.rows[f"start-up: {side}"]["CPU ratio"]  # of this process, which only waits


def _tell(report: Report, measured: Measured, prefix: str, size: int) -> None:
    report.add_times(measured, "readinto", prefix)
    for side in measured.rounds[0]:
        report.rows[prefix + side]["GB/s"] = round(size / measured.wall(side) / 1e9, 2)


def _write(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> Pair:
    """Write golden values and the same with rounding: relative errors of a few units of the dtype's precision."""
    regions = tuple(
        Region(path.with_name(f"{path.name}-{side}"), 0, dtype, shape) for side in ("actual", "golden")
    )
    with regions[0].path.open("wb") as actual, regions[1].path.open("wb") as golden:
        for values, changed in _blocks(dtype, int(np.prod(shape))):
            golden.write(values.view(np.uint8).data)
            actual.write(changed.view(np.uint8).data)
    return Pair(*regions)


def _blocks(dtype: np.dtype, elements: int) -> Iterator[tuple[Array, Array]]:
    rng = np.random.default_rng(0)
    size = min(BLOCK, elements)
    values = rng.standard_normal(size, np.float32)
    noise = 1 + float(ml_dtypes.finfo(dtype).eps) * rng.standard_normal(size, np.float32)
    for start in range(0, elements, BLOCK):
        scaled = values[: elements - start] * np.float32(1 + start / elements)
        yield scaled.astype(dtype), (scaled * noise[: scaled.size]).astype(dtype)


def _open(pair: Pair) -> tuple[Array, Array]:
    return pair.actual.open(), pair.golden.open()


def _ours(threads: int, row: int | None = None) -> Compare:
    return lambda actual, golden: measure(actual, golden, _bound(golden), row=row, threads=threads)


def _chunks(actual: Array, golden: Array) -> None:
    """Measure without compiled loops, as where the extra ``fast`` is not installed."""
    with mock.patch.object(striped_measures, "_compiles", return_value=False):
        _ours(1)(actual, golden)


def _bound(golden: Array) -> float:
    """Return a tolerance that few elements exceed."""
    return 16 * float(ml_dtypes.finfo(golden.dtype).eps)


def _allclose(actual: Array, golden: Array) -> None:
    if not np.allclose(actual, golden, rtol=RTOL, atol=ATOL):
        raise AssertionError("numpy.allclose found a difference")


def _assert_close(actual: Array, golden: Array) -> None:
    torch.testing.assert_close(_tensor(actual), _tensor(golden), rtol=RTOL, atol=ATOL)


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor on the same memory, without the copy that torch makes of read-only memory."""
    bits = torch.frombuffer(memoryview(array.view(np.uint8).reshape(-1)), dtype=torch.uint8)
    return bits.view(getattr(torch, array.dtype.name)).view(array.shape)


def _read(pair: Pair, buffer: memoryview) -> None:
    for region in pair.regions:
        with region.path.open("rb", buffering=0) as file:
            while file.readinto(buffer):  # type: ignore[attr-defined]  # a raw file
                pass


def _require_right(pair: Pair) -> None:
    """Raise unless the timed results are right on the first rows, compared with the naive computation."""
    actual, golden = (array[:2048] for array in _open(pair))
    bound = _bound(golden)
    found = measure(actual, golden, bound)
    error = np.abs(actual.astype(np.float64) - golden.astype(np.float64)).reshape(-1)
    expected = error.max(), int((error > bound).sum()), int(error.argmax())
    if (found.max_error, found.over, found.worst) != expected:
        raise AssertionError(f"measured {found}, but expected {expected}")
    exact = float(np.quantile(error, 0.99, method="inverted_cdf"))
    if not exact <= found.quantiles["p99"] <= 2 * exact:
        raise AssertionError(f"measured {found.quantiles}, but p99 is {exact}")
    _allclose(actual, golden)
    _assert_close(actual, golden)
    if not torch.equal(to_torch(actual), _tensor(actual)):
        raise AssertionError("the sides compare other tensors")
