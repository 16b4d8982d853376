"""Reader of a ``.wandb`` file: a 7-byte header, then blocks of 32 KiB of a LevelDB log that hold protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def chunks(data: bytes) -> Iterator[bytes]:
    """Return each record of a log; the first block's first 7 bytes are the file's own header."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        parts = (b"" if kind in (FULL, FIRST) else parts) + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield parts


def records_of(folder: Path) -> Iterator[Any]:
    """Return the records of all segments below a folder, in the order in which they were begun."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # offline, finish() returns before wandb's own process has written everything
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        for chunk in chunks(path.read_bytes()):
            record = Record()
            record.ParseFromString(chunk)
            yield record


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the history of a run."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records_of(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def axes_of(folder: Path) -> dict[str, str]:
    """Return the axis that each metric is defined to be drawn over."""
    return {
        record.metric.name: record.metric.step_metric
        for record in records_of(folder)
        if record.WhichOneof("record_type") == "metric"
    }
