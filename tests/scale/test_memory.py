"""However large the tensors are and however many files there are, a comparison stays below 500 MB of memory.

Dumps are files with holes, so that they take no space; what is measured is the largest memory that a process of its own
had at any time, mapped files included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from made_dumps import Entry, Sparse, finish, sparse_file

from regress.dump.coordinates import Coordinates
from regress.layout import Segment, TokenLayout

LIMIT = 500 << 20
LIMITS = {250: 384 << 20}
"""MB of tensors -> limit of the smaller ones. Of either size, a comparison takes 284 to 297 MB at most, and the limit
leaves room for no more than 0.4 times a tensor.
"""
CODE = """
import json, re, sys
from pathlib import Path
from regress.compare.dumps.comparison import compare_dumps

found = compare_dumps(*sys.argv[1:])
kilobytes = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
worst = [verdict.worst.where for verdict in found.failed]
print(json.dumps({"peak": kilobytes << 10, "code": found.exit_code, "elements": found.compared, "worst": worst}))
"""


@dataclass(frozen=True)
class Outcome:
    """Result of a comparison, and its peak memory."""

    peak: int
    code: int
    elements: int
    worst: list[str]


def compared(golden: Path, actual: Path) -> Outcome:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", CODE, str(golden), str(actual)]
    done = subprocess.run(arguments, env=environ, capture_output=True, text=True, check=True)
    return Outcome(**json.loads(done.stdout))


def megabytes(dtype: str, size: int) -> int:
    """Elements that take so many MB."""
    return (size << 20) // {"float32": 4, "bfloat16": 2}[dtype]


SIZES = [250, *(pytest.param(size, marks=pytest.mark.extended) for size in (550, 4000))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(1, 3), *(pytest.param(*ranks, marks=pytest.mark.extended) for ranks in ((1, 1), (3, 1)))],
)
def test_one_dimension(tmp_path: Path, size: int, ours: int, theirs: int) -> None:
    """A flat parameter, which has as many rows as elements."""
    count = megabytes("float32", size)
    params = {"flat": ("float32", (count,))}
    golden = Sparse(ours, params, {"flat": {5: 1.0}}).write(tmp_path / "golden")
    actual = Sparse(theirs, params, {"flat": {5: 1.0, 6: 0.25}}).write(tmp_path / "actual")
    found = compared(golden, actual)
    assert (found.code, found.elements) == (1, count)
    assert found.worst == ["element [6] of flat"]
    assert found.peak < LIMITS.get(size, LIMIT)


@pytest.mark.extended
@pytest.mark.parametrize("size", SIZES)
def test_several_updates(tmp_path: Path, size: int) -> None:
    """The weights that an update begins with are known of some elements of a large parameter."""
    count = megabytes("float32", size)
    params = {"flat": ("float32", (count,))}
    golden = Sparse(1, params, {"flat": {5: 1.0}}, updates=2).write(tmp_path / "golden")
    actual = Sparse(2, params, {"flat": {5: 1.0, 6: 0.25}}, updates=2).write(tmp_path / "actual")
    found = compared(golden, actual)
    assert (found.code, found.elements) == (1, 2 * count)
    assert found.worst == ["element [6] of flat"] * 2
    assert found.peak < LIMITS.get(size, LIMIT)


@pytest.mark.extended
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.extended)])
def test_two_dimensions_one_of_them_long(tmp_path: Path, size: int, dtype: str) -> None:
    count = megabytes(dtype, size) // 3
    params = {"wide": (dtype, (3, count))}
    golden = Sparse(2, params, {"wide": {7: 2.0}}).write(tmp_path / "golden")
    actual = Sparse(3, params, {"wide": {7: 2.0, 2 * count + 9: -1.0}}).write(tmp_path / "actual")
    found = compared(golden, actual)
    assert (found.code, found.elements) == (1, 3 * count)
    assert found.worst == ["element [2, 9] of wide"]
    assert found.peak < LIMITS.get(size, LIMIT)


@pytest.mark.extended
@pytest.mark.parametrize("size", SIZES)
def test_values_of_tokens_under_another_padding(tmp_path: Path, size: int) -> None:
    rows, columns, padding = 4, 2048, 500
    width = megabytes("float32", size) // rows // columns
    paths = []
    for side, column, value in (("right", 0, 1.0), ("left", padding, 1.5)):
        where = Coordinates(0, update=0, rank=0, micro=0)
        segments = tuple(Segment(row, 0, columns - padding, row, column) for row in range(rows))
        layout = TokenLayout((rows, columns), segments)
        meta = {"layout": layout.to_json(), "samples": [["g", row] for row in range(rows)]}
        name = f"activations/{where.stem}.safetensors"
        tensors = {"layer": ("float32", (rows, columns, width))}
        values = {"layer": {column * width + 3: value}}
        stamp = sparse_file(tmp_path / side / name, "activations", where, tensors, meta, values)
        finish(tmp_path / side, {name: Entry("activations", where, stamp)}, 1)
        paths.append(tmp_path / side)
    found = compared(*paths)
    assert (found.code, found.elements) == (1, rows * (columns - padding) * width)
    assert found.worst == ["sample g/0, position 0, element [3]"]
    assert found.peak < LIMITS.get(size, LIMIT)


@pytest.mark.extended
def test_many_files_of_many_tensors(tmp_path: Path) -> None:
    """A model of 32 layers on 64 ranks: what is kept of each tensor adds up."""
    params = {f"layers.{i}.{j}.weight": ("bfloat16", (1024, 4096)) for i in range(32) for j in range(9)}
    dumps = [Sparse(64, params).write(tmp_path / name) for name in ("golden", "actual")]
    found = compared(*dumps)
    assert (found.code, found.elements) == (0, 32 * 9 * 1024 * 4096)
    assert found.peak < LIMIT
