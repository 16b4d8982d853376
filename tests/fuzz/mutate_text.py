"""Mutations of JSON, YAML and other texts."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from random import Random
from typing import Any

NAMES = (
    "\x1b[2J\x1b]0;title\x07",
    "\u202egnp.exe",
    "\ud800",
    "a" * 5000,
    "",
    "../../etc/passwd",
    "\0",
    "ünï",
    "a\nb",
)
"""Texts that a name should not be."""

RAW = {
    "@@digits@@": "9" * 5000,
    "@@long@@": "1" + "0" * 30,
    "@@huge@@": "1e999",
    "@@nan@@": "NaN",
    "@@inf@@": "-Infinity",
    "@@deep@@": "[" * 20_000 + "]" * 20_000,
    "@@deeper@@": '{"a":' * 300 + "1" + "}" * 300,
    "@@many@@": "[" + "[]," * 3_000_000 + "[]]",
    "@@surrogate@@": '"\\ud800"',
}
"""Texts in place of a JSON value that no writer makes."""

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 0.5, -0.0, 1e308),
    *({}, [], [[]], {"a": 1}, [0], [-1, 2], [["g0", 0]], "x", "0", "NaN", "float32", "safetensors"),
    *({"$float": "NaN"}, {"$float": 5}, [None] * 50, "s" * 3000),
)


def json_lines(data: bytes, random: Random) -> bytes:
    """Mutate the value of one of the lines, or the one value of the file."""
    try:
        return _json(data, random)
    except ValueError:
        lines = data.split(b"\n")
        at = random.randrange(len(lines))
        try:
            lines[at] = _json(lines[at], random)
        except ValueError:
            return text_(data, random)
        if random.random() < 0.1:
            lines.insert(at, lines[at])
        return b"\n".join(lines)


def _json(data: bytes, random: Random) -> bytes:
    tree = json.loads(data)
    text = json.dumps(changed(tree, random), allow_nan=True)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    if random.random() < 0.05:
        text = re.sub(r'("(\w+)": )', r"\1 0, \1", text, count=1)  # a key twice
    return text.encode("utf-8", "surrogatepass")


def changed(tree: Any, random: Random) -> Any:
    """Return a tree with one place of it changed."""
    places = [*_places(tree, ())]
    path = random.choice(places)
    if not path:
        return _value(tree, random)
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    action = random.random()
    if action < 0.12:
        del holder[last]
    elif action < 0.2 and isinstance(holder, dict):
        holder[random.choice(NAMES)] = holder.pop(last)
    elif action < 0.27:
        other = random.choice(places)
        holder[last] = deepcopy(_at(tree, other))
    elif action < 0.3 and isinstance(holder, list):
        holder.extend(holder[:50])
    else:
        holder[last] = _value(holder[last], random)
    return tree


def _value(old: Any, random: Random) -> Any:
    chance = random.random()
    if chance < 0.15:
        return random.choice([mark for mark in RAW if mark != "@@many@@" or random.random() < 0.02])
    if chance < 0.3:
        return random.choice(NAMES)
    if isinstance(old, bool) or chance < 0.7:
        return random.choice(_VALUES)
    if isinstance(old, int):
        return random.choice((old + 1, old - 1, -old, old * 2, old + 2**40, float(old), str(old), [old]))
    if isinstance(old, float):
        return random.choice((old * 2, -old, int(old) if math.isfinite(old) else 0, str(old), 1e300))
    if isinstance(old, str):
        return random.choice((old + "x", old[:-1], old.upper(), [old], {old: old}, 7))
    if isinstance(old, list):
        return random.choice(
            (old[:-1], [*old, *old], old[::-1], [old], dict(enumerate(map(str, old))), len(old))
        )
    return random.choice(([old], [*old] if isinstance(old, dict) else old, {}, None))


def _places(tree: Any, path: tuple[Any, ...]) -> Any:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:30]) if isinstance(tree, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def text_(data: bytes, random: Random) -> bytes:
    """Mutate YAML, TOML or another text: words and values are exchanged."""
    text = data.decode("utf-8", "replace")
    words = [match.span() for match in re.finditer(r"[\w.\"'-]+|[\[\]{}:=]", text)]
    if not words or random.random() < 0.1:
        deep = (
            "[" * 5000,
            "a: " + "[" * 3000 + "]" * 3000,
            "{a: &a [*a, *a]}",
            "!!python/object:os.system x",
            "\x1b[2J",
        )
        return random.choice(deep).encode() + data
    start, stop = random.choice(words)
    pieces = (
        "5",
        "[1, 2]",
        "{}",
        '"x"',
        "''",
        "null",
        "true",
        "9" * 5000,
        "1e999",
        "nan",
        "]",
        "=",
        "\ufeff",
        "\u202e",
    )
    return (text[:start] + random.choice(pieces) + text[stop:]).encode("utf-8", "surrogatepass")
