"""Order of a queue: nothing runs after a later number, nothing runs twice, nothing waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.service.core.operation_queue import OperationQueue
from regress.service.core.operations import PendingOperation
from regress.service.service_api import ServiceError

AHEAD = 30


def operation(number: int | None) -> PendingOperation:
    return PendingOperation(f"op-{number}", "model", "work", number, "digest")


def drained(queue: OperationQueue) -> list[int | None]:
    """Numbers of the operations that can run, in their order."""
    found = []
    while (taken := queue.take()) is not None:
        found.append(taken.seq)
    return found


@given(st.permutations(range(1, 9)), st.data())
def test_any_order_of_arrival_runs_as_numbered(order: list[int], data: st.DataObject) -> None:
    queue = OperationQueue("model")
    ran: list[int | None] = []
    for number in order:
        queue.add(operation(number))
        if data.draw(st.booleans()):  # the worker may look at any time
            ran += drained(queue)
    assert ran + drained(queue) == [*range(1, 9)]


@given(st.lists(st.one_of(st.none(), st.integers(1, 8)), max_size=16))
def test_one_without_number_runs_behind_all_that_came_before_it(arrivals: list[int | None]) -> None:
    """Against the definition: sorted by number, those without one by the highest number before them."""
    queue = OperationQueue("model")
    expected: list[tuple[int, int, int | None]] = []
    seen: set[int] = set()
    for index, number in enumerate(arrivals):
        if number in seen:
            continue
        queue.add(operation(number))
        if number is None:
            expected.append((max(seen, default=0), 1 + index, None))
        else:
            seen.add(number)
            expected.append((number, 0, number))
    whole = 0
    while whole + 1 in seen:
        whole += 1
    assert drained(queue) == [
        number for after, _, number in sorted(expected, key=lambda e: e[:2]) if after <= whole
    ]


@given(st.lists(st.one_of(st.just("give up"), st.just("run"), st.integers(1, 12)), max_size=40))
def test_holes_that_are_given_up_never_let_an_earlier_number_run_later(events: list[str | int]) -> None:
    queue = OperationQueue("model")
    ran: list[int] = []
    failed: list[int | None] = []
    known: set[int] = set()
    for event in events:
        if event == "run":
            ran += [number for number in drained(queue) if number is not None]
        elif event == "give up":
            if len(queue) and not queue.ready():
                failed += [given.seq for given in queue.give_up()[1]]
                assert len(queue) == 0
        elif int(event) not in known:
            try:
                queue.check(int(event), AHEAD)
            except ServiceError:
                assert any(number > int(event) for number in ran), "refused although no later one has run"
                continue
            known.add(int(event))
            queue.add(operation(int(event)))
    ran += [number for number in drained(queue) if number is not None]
    assert ran == sorted(set(ran))
    assert not set(ran) & set(failed)
    for _ in range(2):  # whoever goes on waits for the holes of before once more at most
        if len(queue):
            queue.give_up()
        following = queue.highest + 1
        queue.add(operation(following))
        last = drained(queue)
    assert last == [following], "the queue hangs"


def test_a_number_that_was_given_up_restores_the_order_behind_it() -> None:
    queue = OperationQueue("model")
    queue.add(operation(20))  # nobody's: 1 to 19 are to come
    queue.give_up()
    queue.add(operation(1))
    assert drained(queue) == [1]
    queue.add(operation(3))
    assert drained(queue) == [], "3 ran before 2"
    queue.add(operation(2))
    assert drained(queue) == [2, 3]


def test_numbers_far_ahead_and_spent_ones() -> None:
    queue = OperationQueue("model")
    with pytest.raises(
        ServiceError, match="seq_id 32 is too far ahead: the next operation of model is that of seq_id 1"
    ):
        queue.check(32, AHEAD)
    queue.add(operation(2))
    queue.spend(1)
    assert drained(queue) == [2]
    with pytest.raises(ServiceError, match="seq_id 1 arrived after a later operation of model had run"):
        queue.check(1, AHEAD)


def test_the_clock_of_a_hole_starts_anew_with_each_hole() -> None:
    queue = OperationQueue("model")
    queue.add(operation(2))
    assert queue.hole(10.0) == 0.0
    assert queue.hole(15.0) == 5.0
    queue.add(operation(4))
    queue.add(operation(1))
    assert drained(queue) == [1, 2]
    assert queue.hole(20.0) == 0.0
    assert queue.hole(21.0) == 1.0
    queue.add(operation(3))
    assert queue.hole(99.0) == 0.0
