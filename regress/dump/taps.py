"""Instrumentation of a trainer: `tap` records a value, `at` sets the coordinates, `recording` sets the recorder.

    with recording(Recorder("dump", options={"loss": True})):
        for step in range(3):
            with at(step=step, rank=0, micro=0):
                tap("loss", loss=loss, meta={"tokens": 57})

Coordinates and recorder are context variables: they nest, and each thread or task has its own. Taps at the
same coordinates add to one record, which is written when their innermost `at` ends; a tensor name used twice
there is an error, never an overwrite. Without a recorder a tap does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from regress.dump.coordinates import FIELDS, Coordinates
from regress.dump.record import Record
from regress.dump.recorder import Collector, Recorder
from regress.dump.trajectory import Trajectory, to_record
from regress.errors import DumpError

_recorder: ContextVar[Collector | None] = ContextVar("regress_recorder", default=None)
_where: ContextVar[Coordinates | None] = ContextVar("regress_where", default=None)
_watcher: ContextVar[Callable[[str, Coordinates], None] | None] = ContextVar("regress_watcher", default=None)


class Layout(Protocol):
    """Mapping of a local tensor to canonical coordinates, such as `regress.layout.TokenLayout`."""

    def to_json(self) -> dict[str, Any]: ...


def tap(
    type: str,
    tensors: Mapping[str, Any] | None = None,
    /,
    *,
    layout: Layout | None = None,
    meta: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """Record tensors (torch, numpy or numbers; copied at once) by name under the current coordinates.

    `layout` is stored as `meta["layout"]`. A type that is not wanted costs one look-up. Raises `DumpError`
    outside of `at(step=...)`, for a tensor tapped twice, and for an earlier failure of the writer.
    """
    recorder = _recorder.get()
    if recorder is None:
        return
    _check_tapped(type, tensors, layout, meta)
    where = _here(type)
    if recorder.wanted(type, where.step):
        recorder.add(type, where, {**(tensors or {}), **named}, _info(meta, layout))
        if (watcher := _watcher.get()) is not None:
            watcher(type, where)


def _check_tapped(type: object, tensors: object, layout: object, meta: object) -> None:
    """Refuse arguments of a tap that are none."""
    if not isinstance(type, str):
        raise DumpError(f"tap({type!r}) names no type of record: give a text such as 'forward_data' first")
    for name, value in (("tensors", tensors), ("meta", meta)):
        if value is not None and not isinstance(value, Mapping):
            raise DumpError(f"tap({type!r}) has {name} that are not a mapping of names: give a dict")
    if layout is not None and not hasattr(layout, "to_json"):
        raise DumpError(f"tap({type!r}) has a layout that is none: give a TokenLayout or a ShardLayout")


@dataclass(frozen=True)
class BoundTap:
    """Tap that keeps the recorder and the coordinates of the place where it was made.

    For values that arise elsewhere, such as gradients in a backward pass, whose threads have no context
    variables. A call records one whole record.
    """

    recorder: Collector
    type: str
    where: Coordinates
    watcher: Callable[[str, Coordinates], None] | None

    def __call__(
        self,
        tensors: Mapping[str, Any],
        *,
        layout: Layout | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Record tensors as `tap` does; raises `DumpError` for a second record at the same coordinates."""
        self.recorder.put(Record.of(self.type, self.where, tensors, _info(meta, layout)))
        if self.watcher is not None:
            self.watcher(self.type, self.where)


def bound(type: str) -> BoundTap | None:
    """Return a tap of this type that is bound to the current coordinates; None where it would not be kept.

    Raises `DumpError` outside of `at(step=...)`.
    """
    recorder = _recorder.get()
    if recorder is None:
        return None
    where = _here(type)
    return BoundTap(recorder, type, where, _watcher.get()) if recorder.wanted(type, where.step) else None


def _info(meta: Mapping[str, Any] | None, layout: Layout | None) -> dict[str, Any]:
    return {**(meta or {}), **({} if layout is None else {"layout": layout.to_json()})}


def tap_trajectories(
    trajectories: Sequence[Trajectory], *, meta: Mapping[str, Any] | None = None, folder: str | None = None
) -> None:
    """Record the trajectories of a step as one whole record, if "trajectory" is wanted.

    `folder` replaces the default folder `trajectory`, for instance by `train` or `val`.
    """
    recorder = _recorder.get()
    if recorder is None:
        return
    given: object = trajectories
    if not isinstance(given, list | tuple) or not all(isinstance(one, Trajectory) for one in given):
        raise DumpError("tap_trajectories takes trajectories only: give a list of regress.Trajectory")
    where = _here("trajectory")
    if recorder.wanted("trajectory", where.step):
        place = {key: value for key, value in vars(where).items() if key != "step"}
        recorder.put(to_record(trajectories, where.step, meta, **place), folder)


@contextmanager
def watching(watcher: Callable[[str, Coordinates], None]) -> Iterator[None]:
    """Send `watcher` type and coordinates of every value that is recorded inside, so that it knows a run's
    progress.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def active_recorder() -> Collector | None:
    """Return the recorder that receives taps here, or None."""
    return _recorder.get()


def wanted(type: str) -> bool:
    """Return True if a tap of this type would be kept here; ask before computing a value only for a tap."""
    recorder, where = _recorder.get(), _where.get()
    return recorder is not None and where is not None and recorder.wanted(type, where.step)


def failure() -> DumpError | None:
    """Return the error that keeps this process from recording, if its recorder does not raise it by itself."""
    recorder = _recorder.get()
    return None if recorder is None else recorder.failure


def current() -> Coordinates | None:
    """Return the current coordinates; None outside of `at`."""
    return _where.get()


def _here(type: str) -> Coordinates:
    where = _where.get()
    if where is None:
        raise DumpError(f"tap({type!r}) does not know its step: enclose it in at(step=...)")
    return where


@contextmanager
def at(**coordinates: int | None) -> Iterator[Coordinates | None]:
    """Set some of `step, update, epoch, mini_batch, rank, micro` for the taps inside; inherit the others.

    Outside of any step, and without giving one, it does nothing. Yields the coordinates, if any.
    """
    for name, value in coordinates.items():
        _check_coordinate(name, value)
    outer = _where.get()
    if outer is None and coordinates.get("step") is None:
        yield None
        return
    changed: dict[str, Any] = coordinates
    where = replace(outer or Coordinates(0), **changed)
    token = _where.set(where)
    try:
        yield where
    except BaseException:
        _where.reset(token)
        with suppress(DumpError):  # the error of the block matters more; this one is reported later
            _flush(where, outer)
        raise
    _where.reset(token)
    _flush(where, outer)


def _check_coordinate(name: str, value: object) -> None:
    if name not in FIELDS:
        raise DumpError(f"at({name}=...) is not a coordinate: give some of {', '.join(FIELDS)}")
    if name == "step" and type(value) is int:
        return  # negative ones are those of other systems
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise DumpError(f"at({name}={value!r}) is not a number: give a whole one, counted from 0")


def _flush(where: Coordinates, outer: Coordinates | None) -> None:
    recorder = _recorder.get()
    if recorder is not None and where != outer:
        recorder.flush(where)


@contextmanager
def receiving(collector: Collector | None) -> Iterator[None]:
    """Make `collector` receive the taps inside, or nobody; it is not closed."""
    token = _recorder.set(collector)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make `recorder` receive the taps inside; a normal end completes the dump, an exception leaves it
    without manifest.
    """
    token = _recorder.set(recorder)
    try:
        yield recorder
    except BaseException as error:
        _recorder.reset(token)
        _abandon(recorder, error)
        raise
    _recorder.reset(token)
    recorder.close()


def _abandon(recorder: Recorder, error: BaseException) -> None:
    """Keep the files already recorded; a failure to write them must not hide the error that ended the run.

    A disk that is full for the run is full for its dump, too, which is not worth a second sentence.
    """
    try:
        recorder.close(complete=False)
    except DumpError as failure:
        why = getattr(failure.__cause__, "strerror", None)
        if failure is not error and not (why and why in str(error)):
            error.add_note(str(failure))
