"""Provenance of a golden: place and software of its recording, and the part of it that can change a result."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regress.dump.jsontext import Json, dumps, plain
from regress.dump.manifest import environment, package_versions

_ARITHMETIC = ("torch", "transformers", "accelerate")
"""Packages that compute compared values; the others only transport them."""
_SUPERSEDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the number of threads in force is recorded too


def collect(
    config: Mapping[str, Any],
    *,
    device: str = "cpu",
    threads: int | None = None,
    processor: str | None = None,
    source: Path | None = None,
    golden: Path | None = None,
) -> dict[str, Json]:
    """Collect the provenance of a recording as plain JSON; it does not depend on the time.

    Args:
        config: the whole configuration; only its hash is kept.
        threads: number of CPU threads in use.
        processor: instruction set in use, as torch names it (`AVX2`).
        source: folder whose git revision is recorded; not given: the current one.
        golden: golden directory, whose own changes do not make the source dirty.
    """
    found = environment(device, threads)
    found["variables"] = {k: v for k, v in found["variables"].items() if k not in _SUPERSEDED}
    return {
        "config_sha256": hashlib.sha256(dumps(plain(config, "config")).encode()).hexdigest(),
        "versions": dict(package_versions()),
        "environment": {**found, "processor": processor},
        "source": _source(source or Path.cwd(), golden),
    }


def _source(folder: Path, golden: Path | None) -> dict[str, Json]:
    """Return the git revision of a folder, and True if the folder differs from it; both None outside of git."""
    exclude = [] if golden is None else [f":(exclude,top){_within(folder, golden)}"]
    revision = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ":/", *exclude) if revision else None
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _within(folder: Path, golden: Path) -> str:
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not golden.absolute().is_relative_to(top):
        return ".no-such-folder"
    return golden.absolute().relative_to(top).as_posix()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference that can change arithmetic: `recorded with torch 2.12, now 2.13`.

    Source revision and configuration are left out: goldens exist to compare across their changes.
    """
    return list(_differences(then, now))


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for package in _ARITHMETIC:
        before, after = (found.get("versions", {}).get(package) for found in (then, now))
        if before != after:
            yield f"recorded with {package} {before or '(not installed)'}, now {after or '(not installed)'}"
    old, new = then.get("environment", {}), now.get("environment", {})
    for key in ("device", "threads", "processor", "machine", "system"):
        if old.get(key) != new.get(key):
            yield f"recorded with {key} {_shown(old.get(key))}, now {_shown(new.get(key))}"
    before, after = old.get("variables", {}), new.get("variables", {})
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"recorded with {name} {before.get(name, '(not set)')}, now {after.get(name, '(not set)')}"


def told(now: Mapping[str, Any]) -> dict[str, str]:
    """Return the result of `collect` as lines for a reader; unknown facts get no line."""
    found, source = now.get("environment", {}), now.get("source", {})
    threads = found.get("threads")
    machine = (
        *(found.get(key) for key in ("system", "machine", "processor", "device")),
        None if threads is None else f"{threads} thread{'s' * (threads > 1)}",
    )
    changed = " with changes" if source.get("dirty") else ""
    lines = {
        "versions": ", ".join(f"{name} {version}" for name, version in now.get("versions", {}).items()),
        "machine": ", ".join(str(part) for part in machine if part is not None),
        "variables": ", ".join(f"{name}={value}" for name, value in found.get("variables", {}).items()),
        "source": f"{source['revision'][:12]}{changed}" if source.get("revision") else "",
    }
    return {name: line for name, line in lines.items() if line}


def _shown(value: object) -> str:
    return "(not known)" if value is None else str(value)
