"""What messages about the configuration show: where a value comes from, values as YAML, and the nearest valid name."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml

DEFAULT, PRESET, FILE, ENVIRONMENT, COMMAND_LINE = "default", "preset", "file", "environment", "command line"
LONGEST = 80
"""Most characters of a value in a sentence, and of an unknown name that is compared with the valid ones."""


@dataclass(frozen=True)
class Origin:
    """Layer that decided a value, and its preset, ``path:line``, variable or override."""

    layer: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()

    @property
    def author(self) -> str:
        """Return the file without its line, or the layer."""
        return str(self).rpartition(":")[0] if self.layer == FILE else self.layer


def absolute(path: Path) -> Path:
    """Return the path without ``..``, links kept: a linked file inherits from its neighbors where the link is."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def shown_path(path: Path) -> str:
    """Return the path relative to the working directory if the file lies below it, else absolute."""
    path, here = absolute(path), Path.cwd()
    shown = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return shown if shown.isprintable() else repr(shown)


def in_yaml(value: Any) -> str:
    """Return one line of YAML that reads back as ``value``: ``null``, ``true``, ``[0.9, 0.999]``, ``'007'``."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    return str(yaml.safe_dump(value, width=math.inf, **options)).rstrip("\n").removesuffix("\n...")


def shortened(value: Any) -> str:
    """Return a value for a sentence: text as it is, anything else in YAML, cut when long."""
    plain = isinstance(value, str) and value.isprintable() and value.strip() != ""
    text = value if plain else in_yaml(value)
    text = text if text.isprintable() else repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of another library's exception."""
    return (str(error) or type(error).__name__).splitlines()[0]


def nearest_keys(unknown: str, valid: Iterable[str]) -> list[str]:
    """Return the valid dotted keys nearest to the beginning of ``unknown``; several only if they are equally near.

    Distance counts edits of the full key, so that one wrong character always leads back to the intended key;
    a name in the wrong section and an abbreviation (``lr``, ``grad``) cost two edits. `difflib` decides when more than
    three candidates are left that differ by more than one character.
    """
    given = unknown[:LONGEST]
    distances = {key: _key_distance(given, key) for key in valid}
    least = min(distances.values())
    ties = [key for key, distance in distances.items() if distance == least]
    if len(ties) <= 3 or least == 1:
        return ties
    return [max(ties, key=lambda key: SequenceMatcher(None, given, key).ratio())]


def nearest(unknown: str, valid: Iterable[str]) -> str:
    """Return the one valid name nearest to the beginning of ``unknown``."""
    given = unknown[:LONGEST]
    return min(valid, key=lambda name: (_distance(given, name), -SequenceMatcher(None, given, name).ratio()))


def edits(a: str, b: str) -> int:
    """Count the insertions, deletions, replacements and swaps of neighbors that turn ``a`` into ``b``."""
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        before, above = above, row
    return above[-1]


def _key_distance(unknown: str, key: str) -> int:
    section, _, name = key.rpartition(".")
    unknown_section, _, unknown_name = unknown.rpartition(".")
    misplaced = min(2, edits(unknown_section, section))
    return min(edits(unknown, key), misplaced + _distance(unknown_name, name))


def _distance(unknown: str, name: str) -> int:
    initials = "".join(word[0] for word in name.split("_") if word)
    abbreviates = unknown == initials or (len(unknown) > 2 and name.startswith(unknown))
    return min(edits(unknown, name), 2 if abbreviates else len(name) + len(unknown))
