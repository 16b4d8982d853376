"""Provenance of a golden: place and software of its recording, and the part of it that can change a result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from regress.dump.canonical_json import Json, dumps, plain
from regress.dump.dump_manifest import environment, package_versions

_ARITHMETIC = ("torch", "transformers", "accelerate")
"""Packages that compute compared values; the others only transport them."""
_SUPERSEDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the number of threads in force is recorded too


def collect(
    config: Mapping[str, Any],
    *,
    device: str = "cpu",
    threads: int | None = None,
    processor: str | None = None,
) -> dict[str, Json]:
    """Collect the provenance of a recording as plain JSON; it does not depend on the time.

    Args:
        config: the whole configuration; only its hash is kept.
        threads: number of CPU threads in use.
        processor: instruction set in use, as torch names it (`AVX2`).
    """
    found = environment(device, threads)
    found["variables"] = {k: v for k, v in found["variables"].items() if k not in _SUPERSEDED}
    return {
        "config_sha256": hashlib.sha256(dumps(plain(config, "config")).encode()).hexdigest(),
        "versions": dict(package_versions()),
        "environment": {**found, "processor": processor},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference that can change arithmetic: `recorded with torch 2.12, now 2.13`.

    The configuration is left out: goldens exist to compare across its changes.
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


def environment_lines(now: Mapping[str, Any]) -> dict[str, str]:
    """Return the result of `collect` as lines for a reader; unknown facts get no line."""
    found = now.get("environment", {})
    threads = found.get("threads")
    machine = (
        *(found.get(key) for key in ("system", "machine", "processor", "device")),
        None if threads is None else f"{threads} thread{'s' * (threads > 1)}",
    )
    lines = {
        "versions": ", ".join(f"{name} {version}" for name, version in now.get("versions", {}).items()),
        "machine": ", ".join(str(part) for part in machine if part is not None),
        "variables": ", ".join(f"{name}={value}" for name, value in found.get("variables", {}).items()),
    }
    return {name: line for name, line in lines.items() if line}


def _shown(value: object) -> str:
    return "(not known)" if value is None else str(value)
