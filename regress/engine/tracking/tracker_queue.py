"""Way of the rows to one tracker: a bounded queue and a thread, so that no tracker can stop or slow the training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from regress.dump.metrics_file import SEQUENCE, STEP, UPDATE, Row
from regress.engine.tracking.tracker_backends import Backend
from regress.engine.tracking.tracker_backup import FOLDER, Backup
from regress.errors import reason


@dataclass
class Delivery:
    """State of the delivery to one tracker, as ``wandb_sync_state.json`` holds it.

    Attributes:
        state: waiting, open, failed (it could not be opened), abandoned (it did not answer at the end) or finished.
        acknowledged: greatest ``sequence`` that the tracker has taken; -1: none.
        step: rollout step of that row.
        update: its optimizer update, or that of the last row that had one.
        sent: rows taken in this process.
        backed_up: rows that went to the backup in this process.
        lost: rows that the backup could not take either; ``metrics.jsonl`` has them.
        error: first failure, in one line.
    """

    run_id: str
    state: str = "waiting"
    acknowledged: int = -1
    step: int | None = None
    update: int | None = None
    sent: int = 0
    backed_up: int = 0
    lost: int = 0
    error: str | None = None


class Channel:
    """Queue and thread of one tracker. Its thread starts with the first row."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        delivery: Delivery,
        *,
        size: int,
        backup: Backup,
        warn: Callable[[str], None],
        changed: Callable[[bool], None],
    ) -> None:
        """Prepare the channel.

        Args:
            size: rows that wait, at most; more go to the backup.
            warn: called with one sentence, at the first failure.
            changed: called when the delivery has changed, with whether that is urgent.
        """
        self.name = name
        self._backend = backend
        self._delivery = delivery
        self._size = size
        self._backup = backup
        self._warn = warn
        self._changed = changed
        self._rows: deque[Row] = deque()
        self._sending: Row | None = None
        self._closing = self._gone = False
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, row: Row) -> None:
        """Hand a row over; never waits for the tracker."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
                self._thread.start()
            if len(self._rows) < self._size:
                self._rows.append(row)
                self._lock.notify()
                return
        self._keep([row], f"is slower than the training: {self._size} rows wait for it")

    def delivery(self) -> dict[str, object]:
        """Return the state of the delivery as plain values, with the number of rows that wait."""
        with self._lock:
            waiting = len(self._rows) + (self._sending is not None)
            return {**asdict(self._delivery), "waiting": waiting}

    def close(self) -> None:
        """Ask the thread to deliver what waits, and to end."""
        with self._lock:
            self._closing = True
            self._lock.notify()

    def join(self, deadline: float) -> None:
        """Wait for the thread until ``deadline`` (of `time.monotonic`), then keep what it has not delivered."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        with self._lock:
            self._gone = True
            rows = [row for row in (self._sending, *self._rows) if row is not None]
            self._rows.clear()
            self._delivery.state = "abandoned"
        self._keep(rows, "did not answer by the end of the run (tracking.finish_timeout)")
        with suppress(Exception):
            self._backend.abandon()

    def _run(self) -> None:
        try:
            self._backend.open()
        except BaseException as error:  # a tracker may even call sys.exit: nothing of it reaches the training
            self._fail_to_open(error)
            return
        with self._lock:
            if not self._gone:
                self._delivery.state = "open"
        self._changed(True)
        while (row := self._next()) is not None:
            self._send(row)
        try:
            self._backend.close()
        except BaseException as error:
            self._keep([], f"failed when it was closed ({reason(error)})")
        with self._lock:
            if not self._gone:
                self._delivery.state = "finished"

    def _next(self) -> Row | None:
        """Return the next row, or ``None`` at the end; waits for one."""
        with self._lock:
            self._sending = None
            while not self._rows and not self._closing and not self._gone:
                self._lock.wait()
            if self._gone or not self._rows:
                return None
            self._sending = self._rows.popleft()
            return self._sending

    def _send(self, row: Row) -> None:
        try:
            self._backend.send(dict(row))
        except BaseException as error:
            if not self._gone:
                self._keep([row], f"failed ({reason(error)})")
            return
        with self._lock:
            delivery = self._delivery
            delivery.sent += 1
            if row[SEQUENCE] > delivery.acknowledged:
                delivery.acknowledged, delivery.step = row[SEQUENCE], row[STEP]
                delivery.update = row.get(UPDATE, delivery.update)
        self._changed(False)

    def _fail_to_open(self, error: BaseException) -> None:
        """Give every row to the backup, those to come as well."""
        with self._lock:
            if not self._gone:
                self._delivery.state = "failed"
        why = f"could not be opened ({reason(error)})"
        self._keep([], why)
        while (row := self._next()) is not None:
            self._keep([row], why)

    def _keep(self, rows: list[Row], why: str) -> None:
        """Write rows to the backup, and warn at the first failure."""
        lost = 0
        for row in rows:
            try:
                self._backup.add(self.name, [row])
            except Exception:  # a full disk, a damaged file: metrics.jsonl has the row
                lost += 1
        with self._lock:
            self._delivery.backed_up += len(rows) - lost
            self._delivery.lost += lost
            first = self._delivery.error is None
            self._delivery.error = self._delivery.error or why
        self._changed(first)
        if first:
            self._warn(
                f"tracker {self.name} {why}; training goes on, metrics.jsonl has every value, and what "
                f"{self.name} does not take goes to {FOLDER}/ (regress track replay sends it later)"
            )
