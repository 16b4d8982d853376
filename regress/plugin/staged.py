"""New values of stored checks until the session ends, by worker and test; updates of golden cases lie beside them.

Nothing in the golden directory changes before the session ends: see `golden_update`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from regress.errors import GoldenError
from regress.golden.files import read_unstamped, write
from regress.golden.names import CHECKS


class TestStage:
    """New values of one run of a test; values staged by an earlier run of it are dropped.

    Args:
        root: folder that all processes of the session see.
        worker: name of this process among them.
        test: id of the test.
    """

    __test__ = False

    def __init__(self, root: Path, worker: str, test: str) -> None:
        self._folder = root / CHECKS / worker / _digest(test)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Stage the new file of a check; `path` is within the golden directory."""
        write(self._folder / path, chunks)

    def hold(self, path: str) -> None:
        """Note that a check was asked for and its golden is right."""
        write(self._folder / path, [])


def staged_checks(root: Path, failed: Collection[str]) -> dict[str, bytes]:
    """Return the new file of each check by its path within the golden directory, empty where the golden is right.

    Args:
        failed: ids of the tests whose values are dropped.

    Raises:
        GoldenError: if two workers ran the same test and differ.
    """
    dropped = {_digest(test) for test in failed}
    found: dict[str, bytes] = {}
    for folder in sorted((root / CHECKS).glob("*/*")):
        if folder.name in dropped:
            continue
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            path, data = file.relative_to(folder).as_posix(), read_unstamped(file)
            if found.setdefault(path, data) != data:
                raise GoldenError(
                    f"two workers ran the test of {path} and got different values: run it with -n 0"
                )
    return found


def _digest(test: str) -> str:
    return hashlib.sha256(test.encode("utf-8", "surrogatepass")).hexdigest()[:16]
