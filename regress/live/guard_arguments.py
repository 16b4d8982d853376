"""Arguments of `guard` that are not valid, each refused by one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from torch import distributed

from regress.errors import GuardError
from regress.live.sampler_mismatch import TOLERANCE
from regress.live.violation import CHECKS


def chosen_checks(checks: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of the rules to check; raise `GuardError` for what is not a list of them."""
    if checks is None:
        return (*CHECKS,)
    if isinstance(checks, str) or not isinstance(checks, Iterable):
        raise GuardError(
            f"guard(checks={checks!r}) is not a list of rules: choose one of {', '.join(CHECKS)}"
        )
    chosen = (*checks,)
    for name in chosen:
        _known(name, CHECKS)
    return chosen


def refuse_options(
    action: Any, sampler_dtype: Any, centered: Any, group_size: Any, data_rank: Any, replica_group: Any
) -> None:
    """Raise `GuardError` for an option of another type, or out of its range; see `guard`."""
    if not isinstance(action, str) or action not in ("raise", "warn"):
        raise GuardError(f"guard(action={action!r}) is neither 'raise' nor 'warn'")
    if sampler_dtype is not None:
        _known(sampler_dtype, TOLERANCE)
    if not isinstance(centered, bool):
        raise GuardError(f"guard(centered={centered!r}) is neither True nor False")
    for name, value, least in (("group_size", group_size, 1), ("data_rank", data_rank, 0)):
        if value is not None and not (_whole(value) and value >= least):
            raise GuardError(f"guard({name}={value!r}) is not a whole number from {least}: give one, or None")
    if replica_group is not None and not _process_group(replica_group):
        raise GuardError(
            f"guard(replica_group={replica_group!r}) is not a process group: give one of torch.distributed, or None"
        )


def _known(name: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or name not in known:
        raise GuardError(f"guard knows no {name!r}: choose one of {', '.join(known)}")


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _process_group(value: Any) -> bool:
    return distributed.is_available() and isinstance(value, distributed.ProcessGroup)
