"""Records and dumps that the tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from regress.dump.coordinates import Coordinates
from regress.dump.dump_files import write_atomically
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, to_record

Make = Callable[..., Any]


def _trajectory(index: int = 0, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "group_id": "g0",
        "run_id": index,
        "tokens": [5, 6, 7, 8 + index],
        "loss_mask": [0, 0, 1, 1],
        "reward": 0.1 + index,
        "prompt_length": 2,
        "log_probs": np.array([0.0, 0.0, -0.3, -1.7], np.float32),
        "finish_reason": "stop",
        "rewards": {"exact_match": 0.1 + index},
        "task_id": "t",
        "prompt": "ab",
        "response": "cd",
        "ground_truth": "cd",
        "temperature": 0.7,
    }
    return Trajectory(**{**fields, **changes})


def _records() -> list[Record]:
    rng = np.random.default_rng(0)
    place = Coordinates(3, update=1, epoch=0, mini_batch=1, rank=0, micro=2)
    tensors = {
        "log_probs": rng.standard_normal((3, 5)).astype(np.float32),
        "response_mask": rng.random((3, 5)) < 0.5,
        "input_ids": rng.integers(0, 99, (3, 6)),
    }
    meta = {"layout": {"shape": [3, 5]}, "tokens": 9, "scale": 0.1}
    loss = {"loss": np.float32(0.3), "pg_loss": np.float32(0.2)}
    return [
        to_record([_trajectory(i) for i in range(3)], 3, {"mode": "train"}),
        Record.of("forward_data", place, tensors, meta),
        Record.of("loss", place, loss, {"metrics": {"ratio": 1.0}}),
        Record.of("param", Coordinates(3, rank=0), {"a.weight": rng.standard_normal((4, 3))}),
    ]


def _write(folder: Path, record: Record, format: str) -> Path:
    path = folder / record.type / f"{record.where.stem}.{format}"
    write_atomically(path, FORMATS[format].encode(record))
    return path


def _content(record: Record) -> list[Any]:
    """A record down to its bytes, found without the checksum under test."""
    head = record.head()
    tensors = [(name, a.dtype.name, a.shape, a.tobytes()) for name, a in record.tensors.items()]
    return [json.dumps(head, sort_keys=True), tensors]


@pytest.fixture(scope="session")
def make_trajectory() -> Make:
    return _trajectory


@pytest.fixture(scope="session")
def make_records() -> Make:
    return _records


@pytest.fixture(scope="session")
def write_record() -> Make:
    return _write


@pytest.fixture(scope="session")
def content() -> Make:
    return _content


@pytest.fixture(params=sorted(FORMATS))
def format_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Brittle(MemoryFileSystem):
    """`brittle://run`: a store in memory that tells what it was asked for, and fails where a test says.

    Attributes:
        calls: operation and path, in their order.
        fails_at: index of the call that fails.
        error: how.
        moment: whether the call did nothing, half of it or all of it before.
    """

    protocol = "brittle"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    calls: list[tuple[str, str]] = []
    fails_at: int | None = None
    error: Exception = OSError()
    moment = "before"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("brittle://")))

    @classmethod
    def fresh(
        cls, fails_at: int | None = None, error: Exception | None = None, moment: str = "before"
    ) -> None:
        """An empty store."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.expect(fails_at, error, moment)

    @classmethod
    def expect(
        cls, fails_at: int | None = None, error: Exception | None = None, moment: str = "before"
    ) -> None:
        """Keep what is stored, and count calls from here."""
        cls.calls.clear()
        cls.fails_at, cls.error, cls.moment = fails_at, error or OSError(), moment

    def _asked(self, operation: str, path: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((operation, path))
        do = getattr(MemoryFileSystem, operation)
        if len(self.calls) - 1 != self.fails_at:
            return do(self, path, *args, **kwargs)
        if self.moment == "after":
            with suppress(FileNotFoundError):
                do(self, path, *args, **kwargs)
        elif self.moment == "half" and operation == "pipe_file":
            do(self, path, args[0][: len(args[0]) // 2])
        raise self.error

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self._asked("ls", path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._asked("info", path, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        store, path = (
            self.store,
            self._strip_protocol(path),
        )  # not by open(), which asks for info() on its way
        self.calls.append(("cat_file", path))
        if len(self.calls) - 1 == self.fails_at:
            raise self.error
        if path not in store:
            raise FileNotFoundError(path)
        return store[path].getvalue()

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        return self._asked("pipe_file", path, value, **kwargs)

    def rm_file(self, path: str) -> Any:
        return self._asked("rm_file", path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> Any:
        return self._asked("rm", path, recursive=recursive, maxdepth=maxdepth)


@pytest.fixture
def brittle() -> Iterator[type[Brittle]]:
    """The store class behind `brittle://`, empty."""
    fsspec.register_implementation("brittle", Brittle, clobber=True)
    Brittle.fresh()
    yield Brittle
    Brittle.fresh()


@pytest.fixture
def memory() -> Iterator[dict[str, Any]]:
    """Provide the files under `memory://`, none at first."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
