"""Order of the operations of one model: by sequence number, whatever order they arrive in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from regress.service.core.operations import PendingOperation
from regress.service.service_api import ServiceError


class OperationQueue:
    """Queue of one model or sampler.

    Operations run as 1, 2, 3, ...; one without a number runs behind everything that was accepted before it. A number
    that has not arrived is a hole, for which later ones wait. When a hole is given up, those that wait are to fail; the
    missing numbers may still arrive until a later one has run. Nothing ever runs after a later number.

    Attributes:
        next: the lowest number that may still run.
        closing: True once nothing is accepted any more.
    """

    def __init__(self, id: str) -> None:
        self.id = id
        self.next = 1
        self.closing = False
        self._waiting: dict[int, PendingOperation] = {}
        self._unnumbered: deque[tuple[int, PendingOperation]] = (
            deque()
        )  # behind which number, of those accepted before
        self._spent: set[int] = set()
        self._skipped: set[int] = set()
        self._highest = 0
        self._blocked: tuple[int, float] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unnumbered)

    @property
    def waiting(self) -> list[PendingOperation]:
        """Operations that wait, in their order as far as it is known."""
        numbered = [((number, 0), pending) for number, pending in self._waiting.items()]
        others = [((after, 1 + index), pending) for index, (after, pending) in enumerate(self._unnumbered)]
        return [pending for _, pending in sorted(numbered + others, key=lambda item: item[0])]

    @property
    def highest(self) -> int:
        """The highest number that was accepted."""
        return self._highest

    def awaited(self, number: int | None) -> bool:
        """Return True if operations that were accepted wait for this number."""
        return number is not None and number < self._highest

    def check(self, number: int, ahead: int) -> None:
        """Raise `ServiceError` if a number cannot be accepted: it is too far ahead, or a later one has run."""
        if number in self._spent:
            raise ServiceError(
                f"""seq_id {number} of {self.id} was used for a request that is no longer remembered; give each request
                a number of its own""",
                code="late",
            )
        if number < self.next:
            raise ServiceError(
                f"""seq_id {number} arrived after a later operation of {self.id} had run; number requests 1, 2, 3, ...,
                the next one {self.next} or higher""",
                code="late",
            )
        if number > max(self.next, self._highest) + ahead:
            raise ServiceError(
                f"""seq_id {number} is too far ahead: the next operation of {self.id} is that of seq_id {self.next};
                number requests 1, 2, 3, ...""",
                code="invalid_seq_id",
            )

    def add(self, pending: PendingOperation) -> None:
        """Queue an operation, which `check` has let pass."""
        if pending.seq is None:
            self._unnumbered.append((self._highest, pending))
        else:
            self._note(pending.seq)
            self._waiting[pending.seq] = pending

    def spend(self, number: int) -> None:
        """Use a number for an operation that does not run."""
        self._note(number)
        if number >= self.next:
            self._spent.add(number)

    def go_on(self, forgotten: int, numbers: Iterable[int]) -> None:
        """Go on behind what an earlier service has executed or failed.

        Args:
            forgotten: the highest number whose operation is not remembered.
            numbers: those whose operations are, in their order.
        """
        self.next = forgotten + 1
        self._highest = forgotten
        for number in numbers:
            self.spend(number)
            if number == self.next:
                self._spent.discard(number)
                self.next += 1

    def discard(self, pending: PendingOperation) -> None:
        """Take an operation that waits out of the queue; its number is spent."""
        if pending.seq is None:
            self._unnumbered = deque(item for item in self._unnumbered if item[1] is not pending)
        else:
            del self._waiting[pending.seq]
            self._spent.add(pending.seq)

    def ready(self) -> bool:
        """Return True if an operation can run."""
        return self._head() is not None

    def take(self) -> PendingOperation | None:
        """Return the next operation, no longer waiting, or None if there is none or it has not arrived."""
        pending = self._head()
        if pending is None:
            return None
        if pending.seq is None:
            self._unnumbered.popleft()
        else:
            del self._waiting[pending.seq]
            self.next = pending.seq + 1
            self._spent = {number for number in self._spent if number >= self.next}
            self._skipped = {number for number in self._skipped if number >= self.next}
        return pending

    def hole(self, now: float) -> float:
        """Return for how long operations have waited for one that has not arrived, 0 if none does, s."""
        if not len(self) or self.ready():
            self._blocked = None
            return 0.0
        missing = self._reached()
        if self._blocked is None or self._blocked[0] != missing:
            self._blocked = (missing, now)
        return now - self._blocked[1]

    def give_up(self) -> tuple[int, list[PendingOperation]]:
        """Return the first missing number and the operations that waited for it, which are no longer waiting."""
        missing, waiting = self._reached(), self.waiting
        numbers = set(self._waiting)
        self._skipped |= set(range(missing, self._highest + 1)) - numbers - self._spent
        self._spent |= numbers
        self._waiting.clear()
        self._unnumbered.clear()
        return missing, waiting

    def _head(self) -> PendingOperation | None:
        number = self._reached()
        if self._unnumbered and self._unnumbered[0][0] < number:
            return self._unnumbered[0][1]
        return self._waiting.get(number)

    def _reached(self) -> int:
        """Return the first number that is not done with."""
        number = self.next
        while number in self._spent or number in self._skipped:
            number += 1
        return number

    def _note(self, number: int) -> None:
        self._highest = max(self._highest, number)
        if number in self._skipped:  # numbers are in use again, so those that follow are waited for
            self._skipped = {other for other in self._skipped if other < number}
