"""Settings of a case without any effect: the golden values would be the same without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from regress.errors import ConfigError
from regress.golden.case import GoldenCase
from regress.replay.coverage import CLASSES, default_of, section_values
from regress.replay.run import replay
from regress.replay.truth import Truth, canonical, flat
from regress.replay.variants import Precision, Variant

VALUES = ("algorithm", "optimizer", "reference")
"""Sections whose settings change values; those of the others change how values are computed."""

ELSEWHERE = ("optimizer.implementation", "optimizer.factory", "optimizer.state_path", "reference.path")
"""Keys of these sections that say how or from what."""


def without_effect(case: GoldenCase, truth: Truth, workspace: Path) -> list[str]:
    """Return the keys that a case sets, by itself or by a preset, although nothing changes with them.

    A key is tried with its default and, where rules refuse that beside the rest, with its other choices.

    Args:
        truth: golden values of the case.
    """
    return [key for key, others in _settings(case) if _same(case, truth, key, others, workspace)]


def _settings(case: GoldenCase) -> Iterator[tuple[str, list[Any]]]:
    """Yield each key with a value other than its default, and its other values."""
    for name in VALUES:
        values = section_values(case.config, {}, name)
        for spec in fields(CLASSES[name]):
            key, default = f"{name}.{spec.name}", default_of(spec)
            if key in ELSEWHERE or values.get(spec.name, default) == default:
                continue
            choices = spec.metadata.get("choices", ())
            yield key, [default, *(c for c in choices if c not in (default, values[spec.name]))]


def _same(case: GoldenCase, truth: Truth, key: str, others: list[Any], workspace: Path) -> bool:
    for number, value in enumerate(others):
        changed = Variant("changed", f"{key} is something else", {key: value})
        folder = workspace / "effects" / f"{key}{number}"
        try:
            dump = replay(case, changed, Precision.FLOAT64, folder)
        except ConfigError:
            continue
        return _equal(truth, canonical(case, dump))
    return False  # nothing else is possible beside the rest


def _equal(first: Truth, second: Truth) -> bool:
    one, other = flat(first), flat(second)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
