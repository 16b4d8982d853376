"""This machine against the one that the checkpoint was made on: determinism environment, packages, disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from regress.doctor.checks.weights import is_adapter
from regress.doctor.issue import Issue, shown
from regress.doctor.scene import Scene, mapping, whole
from regress.doctor.types import issue
from regress.dump.manifest import DETERMINISM_VARIABLES, Provenance, environment
from regress.engine.provenance import settings

DISTRIBUTION = "grpo-regress"


def check_environment(scene: Scene) -> Iterator[Issue]:
    """Compare what can change a bit of the arithmetic: variables, device, threads, processor."""
    recorded = scene.state.get("environment")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("variables"), dict):
        return
    then = {**_settings(recorded), "machine": recorded.get("machine"), "system": recorded.get("system")}
    now = _now(scene, recorded)
    differing = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if not differing:
        return
    told = ", ".join(
        f"{name} is {shown(now.get(name))} and was {shown(then.get(name))}" for name in differing[:4]
    )
    yield issue(
        "environment_mismatch",
        f"{told} when {scene.target.checkpoint} was made, so results may differ in their last bits; set it as it was "
        "where they must not",
        evidence={name: {"checkpoint": then.get(name), "now": now.get(name)} for name in differing},
    )


def _settings(found: Mapping[str, Any]) -> dict[str, Any]:
    whole_of_it = {"device": None, "threads": None, **found}
    return settings(Provenance(environment=whole_of_it, versions={}))


def _now(scene: Scene, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a run that would start now, with the next configuration if there is one."""
    config = scene.next.config
    device = str(recorded.get("device")) if config is None else config.device
    threads = recorded.get("threads") if config is None else config.threads
    found = environment(device, threads if isinstance(threads, int) else None)
    found["variables"] = {
        name: scene.environ[name] for name in DETERMINISM_VARIABLES if name in scene.environ
    }
    if config is not None:
        found["variables"] |= config.system_envs
    else:
        prefix = "system_envs."
        saved = {key.removeprefix(prefix): v for key, v in scene.saved.items() if key.startswith(prefix)}
        found["variables"] |= saved
    return {**_settings(found), "machine": found["machine"], "system": found["system"]}


def check_dependencies(scene: Scene) -> Iterator[Issue]:
    """Check that the packages that a run needs are installed, in the versions that the checkpoint was made with."""
    missing = [name for name in _required() if not _installed(name)]
    if scene.target.checkpoint is not None and is_adapter(scene) and not _installed("peft"):
        missing.append("peft")
    if missing:
        yield issue(
            "missing_dependency",
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and a run needs "
            f"{'it' if len(missing) == 1 else 'them'}; run pip install {' '.join(missing)}",
            command=f"pip install {' '.join(missing)}",
        )
    then, now = mapping(scene.state.get("versions")), scene.versions()
    differing = {
        name: (told, now.get(name))
        for name, told in sorted(then.items())
        if _comparable(name, told) != _comparable(name, now.get(name)) and name not in missing
    }
    if differing:
        told = ", ".join(
            f"{name} is {shown(here)} and was {shown(was)}" for name, (was, here) in differing.items()
        )
        pins = " ".join(f"{name}=={was}" for name, (was, _) in differing.items() if name != "python")
        yield issue(
            "dependency_mismatch",
            f"{told} when {scene.target.checkpoint} was made, so results may differ; install the versions of then "
            "where they must not",
            evidence={name: {"checkpoint": was, "now": here} for name, (was, here) in differing.items()},
            command=f"pip install {pins}" if pins else None,
        )


def _comparable(name: str, version: Any) -> Any:
    """Return a version without what cannot change results: the patch release of Python."""
    if name == "python" and isinstance(version, str):
        return version.split(".")[:2]
    return version


def _required() -> list[str]:
    """Return the distributions that this package needs, without those of its extras."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from its source folder
        return []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_disk(scene: Scene) -> Iterator[Issue]:
    """Compare free space with what the checkpoints to come will take."""
    if scene.target.checkpoint is None:
        return
    each = size_of(scene, scene.target.checkpoint)
    free = scene.free(scene.target.root)
    coming = _coming(scene)
    evidence = {"checkpoint_bytes": each, "free_bytes": free, "checkpoints_to_come": coming}
    if free < each:
        yield issue(
            "disk_full",
            f"{scene.target.root} has {readable(free)} free, and one checkpoint takes {readable(each)}; free space "
            "there or choose another output_dir",
            evidence=evidence,
        )
    elif coming is not None and free < each * coming:
        yield issue(
            "disk_space",
            f"{scene.target.root} has {readable(free)} free, and {coming} more checkpoints of {readable(each)} will be "
            "written; free space there or lower trainer.save_total_limit",
            evidence=evidence,
        )


def size_of(scene: Scene, folder: str) -> int:
    """Return the bytes of all files below a folder."""
    return sum(scene.tree.size(name) for name in scene.tree.names(folder) if scene.tree.is_file(name))


def _coming(scene: Scene) -> int | None:
    """Return how many checkpoints more than now will lie on the disk at once; None where that is unknown."""
    steps, every, limit = (_setting(scene, key) for key in _KEYS)
    if not every or steps is None or scene.step is None:
        return None
    left = max(0, steps - scene.step) // every
    if limit is None:
        return left
    kept = 1 + len(scene.target.others)
    return min(left, max(0, limit - kept) + 1)  # one more than the limit until the oldest is removed


_KEYS = ("max_steps", "trainer.save_steps", "trainer.save_total_limit")


def _setting(scene: Scene, key: str) -> int | None:
    if scene.next.config is None:
        return whole(scene.saved.get(key))
    value: Any = scene.next.config
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
