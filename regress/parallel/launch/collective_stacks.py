"""Collectives that ranks wait in, read from their stacks: Python's tracebacks, and those that faulthandler prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')
_LAST_FIRST = "most recent call first"
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_TORCH = "/torch/"
_COLLECTIVES = frozenset(
    (
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_object_list", "barrier"),
        *("all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_tensor", "gather"),
        *("reduce_scatter", "reduce_scatter_tensor", "gather_object", "scatter", "scatter_object_list"),
        *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
        *("monitored_barrier", "new_group", "wait_tensor"),
    )
)


@dataclass(frozen=True)
class Waiting:
    """Place of a rank in its program.

    Attributes:
        collective: name of the collective that it waits in; "" where it is in none.
        caller: innermost function outside of torch, with file and line.
    """

    collective: str
    caller: str


def waiting(printed: str) -> Waiting | None:
    """Return where a rank is by the last stack in a text, of its main thread; None without a stack."""
    frames = _frames(printed)
    outside = next((frame for frame in frames if _TORCH not in frame[0]), None)
    if outside is None:
        return None
    inner = frames[: frames.index(outside)]
    names = [
        function for file, _, function in inner if function in _COLLECTIVES and "torch/distributed" in file
    ]
    file, line, function = outside
    return Waiting(names[-1] if names else "", f"{function}, {PurePath(file).name}:{line}")


def described(places: Mapping[int, Waiting]) -> str:
    """Return which ranks wait in which collective, and which do not, as a clause; empty if none waits in one."""
    groups: dict[str, list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        chosen = groups if place.collective else elsewhere
        words = f"{place.collective} ({place.caller})" if place.collective else place.caller
        chosen.setdefault(words, []).append(rank)
    if not groups:
        return ""
    lines = [f"{_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {words}" for words, ranks in groups.items()]
    lines += [
        f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {words}"
        for words, ranks in elsewhere.items()
    ]
    return "; ".join(lines)


def _frames(printed: str) -> list[tuple[str, int, str]]:
    """Return the frames ``(file, line, function)`` of the last stack, the innermost first."""
    start = printed.rfind(_LAST_FIRST)
    if start < 0:
        found = [_frame(match) for match in _FRAME.finditer(printed)]
        return found[::-1]
    stacks = _THREAD.split(printed)  # the main thread is printed last
    return [_frame(match) for match in _FRAME.finditer(stacks[-1])]


def _frame(match: re.Match[str]) -> tuple[str, int, str]:
    return match["file"], int(match["line"]), match["function"]


def _ranks(numbers: list[int]) -> str:
    listed = [str(number) for number in numbers]
    if len(listed) < 2:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"
