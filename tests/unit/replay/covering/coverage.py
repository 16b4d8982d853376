"""Settings that no case or variant exercises: single ones, and pairs that are read together.

A setting is a key of a section with a value other than its default: each choice of a key that has choices, any other
value of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import lru_cache
from itertools import combinations
from typing import Any

from regress.engine.config.batching_config import BatchingConfig, ParallelConfig
from regress.engine.config.config_schema import options
from regress.engine.config.model_config import ReferenceConfig
from regress.engine.config.training_config import AlgorithmConfig, OptimizerConfig
from regress.grpo.objective_catalogue import CATALOGUE, REJECTIONS
from regress.replay.replay_plan import section_values
from tests.unit.replay.covering.traced import Reads

CLASSES: Mapping[str, type] = {
    "algorithm": AlgorithmConfig,
    "batching": BatchingConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "reference": ReferenceConfig,
}
"""Sections whose keys change what is computed, or how."""

OTHER = "*"
"""Any value other than the default, of a key without choices."""


@dataclass(frozen=True, order=True)
class Setting:
    """A key with a value other than its default."""

    key: str
    value: str = OTHER

    def __str__(self) -> str:
        return self.key if self.value == OTHER else f"{self.key}={self.value}"


Alike = tuple[Setting, ...]
"""Settings of one key, of which one stands for all."""

Pair = tuple[Alike, Alike]


def shown(alike: Alike) -> str:
    """Return settings as text."""
    return str(alike[0]) if len(alike) == 1 else alike[0].key


def _specs() -> Iterator[tuple[str, Field[Any]]]:
    for name, kind in CLASSES.items():
        for spec in fields(kind):
            yield f"{name}.{spec.name}", spec


def default_of(spec: Field[Any]) -> Any:
    """Return the default of a field."""
    return spec.default if spec.default_factory is MISSING else spec.default_factory()


@lru_cache(maxsize=1)
def universe() -> Mapping[str, tuple[Setting, ...]]:
    """Return the settings of every key."""
    found: dict[str, tuple[Setting, ...]] = {}
    for key, spec in _specs():
        choices = [str(choice) for choice in options()[key].bounds.choices if choice != spec.default]
        if key == "algorithm.rejection":
            choices = list(REJECTIONS)
        if key == "algorithm.preset":
            continue  # it names values of other keys
        found[key] = tuple(Setting(key, choice) for choice in choices) or (Setting(key),)
    return found


def settings_of(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> frozenset[Setting]:
    """Return the settings of a configuration with the overrides of a variant."""
    found: set[Setting] = set()
    for name in CLASSES:
        values = section_values(config, overrides, name)
        for key, spec in _specs():
            own = key.removeprefix(f"{name}.")
            if key in universe() and own in values and values[own] != default_of(spec):
                found |= _settings(key, values[own])
    return frozenset(found)


def _settings(key: str, value: Any) -> set[Setting]:
    if key == "algorithm.rejection":
        return {Setting(key, part.strip().partition(":")[0]) for part in str(value).split(",")}
    choices = universe()[key]
    return {Setting(key, str(value))} if Setting(key, str(value)) in choices else {Setting(key)}


def pairs(reads: Reads) -> dict[Pair, str]:
    """Return the pairs of settings that are read together, with the function, or the entry that declares it.

    Of a key with choices any stands for all where a function reads it; a part of the objective is one beside each
    field that its entry in the catalogue says it reads.
    """
    found: dict[Pair, str] = {}
    for kind, parts in CATALOGUE.items():
        for name, part in parts.items():
            own = Setting(f"algorithm.{kind}", name)
            for other in (f"algorithm.{name}" for name in part.reads if own in universe()[own.key]):
                found[(own,), universe()[other]] = f"{kind}={name}"
    for function, keys in sorted(reads.items()):
        for first, second in combinations(sorted(keys & universe().keys()), 2):
            found.setdefault((universe()[first], universe()[second]), function)
    return found


@dataclass(frozen=True)
class Missing:
    """Settings and pairs that nothing exercises; pairs with a function that reads both."""

    settings: tuple[Setting, ...]
    pairs: Mapping[Pair, str]


def missing(exercised: Iterable[frozenset[Setting]], reads: Reads) -> Missing:
    """Return what none of these sets of settings, each of one replay, has."""
    sets = set(exercised)
    single = {setting for found in sets for setting in found}
    wanted = [setting for each in universe().values() for setting in each]
    return Missing(
        tuple(setting for setting in wanted if setting not in single),
        {pair: name for pair, name in pairs(reads).items() if not any(has(found, pair) for found in sets)},
    )


def has(settings: frozenset[Setting], pair: Pair) -> bool:
    """Return True if a pair is among the settings of one replay."""
    return all(not settings.isdisjoint(alike) for alike in pair)
