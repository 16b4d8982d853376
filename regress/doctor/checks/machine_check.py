"""This machine against the one that the checkpoint was made on: determinism environment, packages, disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from typing import Any

from regress.doctor.check_context import CheckContext, mapping, whole
from regress.doctor.checks.weights_check import is_adapter
from regress.doctor.doctor_finding import Issue, issue, shown
from regress.dump.dump_manifest import DETERMINISM_VARIABLES, Provenance, environment
from regress.engine.run_provenance import settings
from regress.optional_packages import installed

DISTRIBUTION = "grpo-regress"


def check_environment(context: CheckContext) -> Iterator[Issue]:
    """Compare what can change a bit of the arithmetic: variables, device, threads, processor."""
    recorded = context.state.get("environment")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("variables"), dict):
        return
    then = {**_settings(recorded), "machine": recorded.get("machine"), "system": recorded.get("system")}
    now = _now(context, recorded)
    differing = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if not differing:
        return
    changes = ", ".join(
        f"{name} is {shown(now.get(name))} and was {shown(then.get(name))}" for name in differing[:4]
    )
    yield issue(
        "environment_mismatch",
        f"{changes} when {context.target.checkpoint} was made, so results may differ in their last bits; set it "
        "as it was where they must not",
        evidence={name: {"checkpoint": then.get(name), "now": now.get(name)} for name in differing},
    )


def _settings(found: Mapping[str, Any]) -> dict[str, Any]:
    whole_of_it = {"device": None, "threads": None, **found}
    return settings(Provenance(environment=whole_of_it, versions={}))


def _now(context: CheckContext, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a run that would start now, with the next configuration if there is one."""
    config = context.next.config
    device = str(recorded.get("device")) if config is None else config.device
    threads = recorded.get("threads") if config is None else config.threads
    found = environment(device, threads if isinstance(threads, int) else None)
    found["variables"] = {
        name: context.environ[name] for name in DETERMINISM_VARIABLES if name in context.environ
    }
    if config is not None:
        found["variables"] |= config.system_envs
    else:
        prefix = "system_envs."
        saved = {key.removeprefix(prefix): v for key, v in context.saved.items() if key.startswith(prefix)}
        found["variables"] |= saved
    return {**_settings(found), "machine": found["machine"], "system": found["system"]}


def check_dependencies(context: CheckContext) -> Iterator[Issue]:
    """Check that the packages that a run needs are installed, in the versions that the checkpoint was made with."""
    missing = [name for name in _required() if not installed(name)]
    if context.target.checkpoint is not None and is_adapter(context) and not installed("peft"):
        missing.append("peft")
    if missing:
        yield issue(
            "missing_dependency",
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and a run needs "
            f"{'it' if len(missing) == 1 else 'them'}; run pip install {' '.join(missing)}",
            command=f"pip install {' '.join(missing)}",
        )
    then, now = mapping(context.state.get("versions")), context.versions()
    differing = {
        name: (before, now.get(name))
        for name, before in sorted(then.items())
        if _comparable(name, before) != _comparable(name, now.get(name)) and name not in missing
    }
    if differing:
        changes = ", ".join(
            f"{name} is {shown(here)} and was {shown(was)}" for name, (was, here) in differing.items()
        )
        pins = " ".join(f"{name}=={was}" for name, (was, _) in differing.items() if name != "python")
        yield issue(
            "dependency_mismatch",
            f"{changes} when {context.target.checkpoint} was made, so results may differ; install the versions of then "
            "where they must not",
            evidence={name: {"checkpoint": was, "now": here} for name, (was, here) in differing.items()},
            command=f"pip install {pins}" if pins else None,
        )


def _comparable(name: str, version: Any) -> Any:
    """Return a version without what cannot change results: the patch release of Python."""
    if name == "python" and isinstance(version, str):
        return version.split(".")[:2]
    return version


@cache
def _required() -> list[str]:
    """Return the distributions that this package needs, without those of its extras."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from its source folder
        return []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def check_disk(context: CheckContext) -> Iterator[Issue]:
    """Compare free space with what the checkpoints to come will take."""
    if context.target.checkpoint is None:
        return
    each = size_of(context, context.target.checkpoint)
    free = context.free(context.target.root)
    coming = _coming(context)
    evidence = {"checkpoint_bytes": each, "free_bytes": free, "checkpoints_to_come": coming}
    if free < each:
        yield issue(
            "disk_full",
            f"{context.target.root} has {readable(free)} free, and one checkpoint takes {readable(each)}; free space "
            "there or choose another output_dir",
            evidence=evidence,
        )
    elif coming is not None and free < each * coming:
        yield issue(
            "disk_space",
            f"{context.target.root} has {readable(free)} free, and {coming} more checkpoints of {readable(each)} will "
            "be written; free space there or lower trainer.save_total_limit",
            evidence=evidence,
        )


def size_of(context: CheckContext, folder: str) -> int:
    """Return the bytes of all files below a folder."""
    return sum(context.tree.size(name) for name in context.tree.names(folder) if context.tree.is_file(name))


def _coming(context: CheckContext) -> int | None:
    """Return how many checkpoints more than now will lie on the disk at once; None where that is unknown."""
    steps, every, limit = (_setting(context, key) for key in _KEYS)
    if not every or steps is None or context.step is None:
        return None
    left = max(0, steps - context.step) // every
    if limit is None:
        return left
    kept = 1 + len(context.target.others)
    return min(left, max(0, limit - kept) + 1)  # one more than the limit until the oldest is removed


_KEYS = ("max_steps", "trainer.save_steps", "trainer.save_total_limit")


def _setting(context: CheckContext, key: str) -> int | None:
    if context.next.config is None:
        return whole(context.saved.get(key))
    value: Any = context.next.config
    for name in key.split("."):
        value = getattr(value, name, None)
    return whole(value)


def readable(size: int) -> str:
    """Return a number of bytes in the unit that people read."""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
