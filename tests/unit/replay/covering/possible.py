"""Which settings can be chosen together at all, by the rules of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from functools import lru_cache
from typing import Any

from regress.engine.config.config_messages import DEFAULT, Origin
from regress.engine.config.config_schema import Config, conflicts, options
from regress.errors import ConfigError
from tests.unit.replay.covering.coverage import CLASSES, OTHER, Setting, default_of, universe

EXAMPLES: Mapping[str, Any] = {
    "algorithm.clip_high": 1.5,
    "batching.pad_to_length": 256,
    "batching.max_tokens_per_microbatch": 512,
}
"""Values that stand beside more than half of the default, or a small number, would."""

DEPTH = 3
"""Refusals that are followed one after the other."""


def example(setting: Setting, spec: Field[Any]) -> Any:
    """Return a value of a setting that can stand beside most others."""
    if setting.key == "algorithm.rejection":
        return f"{setting.value if setting.value != OTHER else 'token_k2'}:1.5"
    if setting.value != OTHER:
        return setting.value
    default: Any = default_of(spec)
    if setting.key in EXAMPLES:
        return EXAMPLES[setting.key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, list):
        return [value / 2 for value in default]
    lower = spec.name.endswith(("_min", "_low"))
    if default is None:
        kind = str(spec.type)
        return "package.module:name" if "str" in kind else 4 if "int" in kind else 0.5 if lower else 2.0
    if isinstance(default, int):
        least = options()[setting.key].bounds.least
        return default - 1 if least is not None and default > least else default + 1
    return default / 2 if default else 0.5 if lower else 0.6


@lru_cache(maxsize=1)
def _specs() -> Mapping[str, Field[Any]]:
    return {f"{name}.{spec.name}": spec for name, kind in CLASSES.items() for spec in fields(kind)}


def refusal(settings: Iterable[Setting]) -> str | None:
    """Return the sentence that refuses these settings together, all else by default; None if they are possible."""
    values: dict[str, dict[str, Any]] = {name: {} for name in CLASSES}
    for setting in settings:
        name, _, own = setting.key.partition(".")
        values[name][own] = example(setting, _specs()[setting.key])
    try:
        config = Config(**{name: CLASSES[name](**own) for name, own in values.items()})
    except ConfigError as error:
        return str(error)
    sentences = conflicts(config, lambda path: Origin(DEFAULT))
    return next(
        (sentence for sentence in sentences if "model.lora." not in sentence), None
    )  # an adapter mends it


def forbidden(settings: Sequence[Setting]) -> str | None:
    """Return the sentence that refuses settings in every company; None if some other settings make them possible.

    Company is any setting of their sections, and then what refusals ask for: settings of the keys that one names, then
    of those that the next one names.
    """
    sentence = refusal(settings)
    if sentence is None:
        return None
    sections = {setting.key.partition(".")[0] for setting in settings}
    company = [key for key in universe() if key.partition(".")[0] in sections or key in _named(sentence)]
    return _unmendable(tuple(settings), sentence, company, DEPTH)


def _unmendable(
    settings: tuple[Setting, ...], sentence: str, company: Sequence[str], depth: int
) -> str | None:
    """Return a sentence that no further settings, of the keys of the company first, mend; None if some do."""
    taken = {setting.key for setting in settings}
    for choice in (choice for key in company if key not in taken for choice in universe()[key]):
        found = refusal((*settings, choice))
        if found is None:
            return None
        if not depth or (found == sentence and depth < DEPTH):
            continue
        if _unmendable((*settings, choice), found, _named(found), depth - 1) is None:
            return None
    return sentence


def _named(sentence: str) -> list[str]:
    """Return the keys that a sentence names."""
    words = set(re.findall(r"[a-z_]+", sentence))
    return [key for key in universe() if key.partition(".")[2] in words]
