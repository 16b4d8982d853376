"""Mutations of a folder of files that know the structure of what is in them, drawn from a numbered stream of chance.

A mutated manifest, header or line gets the checksum that belongs to its new content most of the time: otherwise nothing
behind the check of the checksum would ever be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from regress.dump import manifest as dumped
from regress.dump.formats import jsonl
from regress.dump.jsontext import dumps
from regress.dump.sums import ChunkSums
from regress.golden import sealed

Files = dict[str, "bytes | Special"]


@dataclass(frozen=True)
class Special:
    """Something that is no ordinary file: ``fifo``, ``loop``, ``zero``, ``folder``, ``socket``, ``gone``, ``hole``."""

    kind: str
    data: bytes = b""


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


def mutate(seed: Files, random: Random) -> Files:
    """Return a seed with one to three mutations."""
    files = dict(seed)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        names = [name for name, data in files.items() if isinstance(data, bytes)]
        if not names:
            break
        name = random.choice(names)
        data = files[name]
        assert isinstance(data, bytes)
        if random.random() < 0.04:
            files[name] = Special(
                random.choice(("fifo", "loop", "zero", "folder", "socket", "gone", "hole")), data
            )
        elif random.random() < 0.3:
            files[name] = random.choice(BYTES)(data, random)
        else:
            try:
                files[name] = _structured(name, data, random)
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                RecursionError,
            ):  # an earlier mutation broke it
                files[name] = _flip(data, random)
    if random.random() < 0.85:
        _reseal(files, seed)
    return files


def _structured(name: str, data: bytes, random: Random) -> bytes:
    if name.endswith((".json", ".jsonl")):
        return _json_lines(data, random)
    if name.endswith(".safetensors") and data[8:9] == b"{":
        return _safetensors(data, random)
    if data[:4] == b"PK\x03\x04":
        return _archive(data, random)
    return _text(data, random)


# ---- bytes


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\0"
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 3, 20))):
        found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


def _truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _extend(data: bytes, random: Random) -> bytes:
    return data + random.choice((b"\0" * 9, random.randbytes(100), data, b"}" * 5, b"\n"))


def _splice(data: bytes, random: Random) -> bytes:
    if not data:
        return data
    start, stop = sorted(random.randrange(len(data) + 1) for _ in range(2))
    at = random.randrange(len(data) + 1)
    piece = random.choice((data[start:stop], b"", random.randbytes(8), b"\xff" * 8, b"\0" * 8))
    return data[:at] + piece + data[at + random.choice((0, len(piece), 1)) :]


def _head(data: bytes, random: Random) -> bytes:
    value = random.choice((0, 1, 7, 2**31, 2**40, 2**63, 2**64 - 1, len(data), len(data) - 8))
    return struct.pack("<Q", value) + data[8:]


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _flip, _truncate, _extend, _splice, _head)

# ---- JSON


def _json_lines(data: bytes, random: Random) -> bytes:
    """Mutate the value of one of the lines, or the one value of the file."""
    try:
        return _json(data, random)
    except ValueError:
        lines = data.split(b"\n")
        at = random.randrange(len(lines))
        try:
            lines[at] = _json(lines[at], random)
        except ValueError:
            return _text(data, random)
        if random.random() < 0.1:
            lines.insert(at, lines[at])
        return b"\n".join(lines)


def _json(data: bytes, random: Random) -> bytes:
    tree = json.loads(data)
    text = json.dumps(_changed(tree, random), allow_nan=True)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    if random.random() < 0.05:
        text = re.sub(r'("(\w+)": )', r"\1 0, \1", text, count=1)  # a key twice
    return text.encode("utf-8", "surrogatepass")


def _changed(tree: Any, random: Random) -> Any:
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
        return random.choice((old * 2, -old, int(old), str(old), 1e300))
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


def _text(data: bytes, random: Random) -> bytes:
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


# ---- safetensors


def _safetensors(data: bytes, random: Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    told = header.get("__metadata__", {}).get("regress")
    if told is not None and random.random() < 0.75:
        head = json.loads(told)
        if random.random() < 0.5:
            head["meta"] = _changed(head["meta"], random)
        else:
            head = _changed(head, random)
        text = json.dumps(head)
        for mark, raw in RAW.items():
            text = text.replace(f'"{mark}"', raw)
        with contextlib.suppress(ValueError, RecursionError):
            text = dumps(json.loads(text)) if len(text) < 10_000 else text
        header["__metadata__"]["regress"] = text
        with_body = hashlib.sha256(text.encode("utf-8", "surrogatepass") + b"\0")
        with_body.update(_in_order(header, head, body))
        header["__metadata__"]["sha256"] = with_body.hexdigest()
    else:
        header = _changed(header, random)
    text = json.dumps(header)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    raw_header = text.encode("utf-8", "surrogatepass")
    raw_header += b" " * (-len(raw_header) % 8)
    return len(raw_header).to_bytes(8, "little") + raw_header + body


def _in_order(header: Any, head: Any, body: bytes) -> bytes:
    try:
        return b"".join(body[slice(*header[name]["data_offsets"])] for name, _, _ in head["tensors"])
    except (KeyError, TypeError, ValueError, IndexError):
        return body


# ---- archives of torch


def _archive(data: bytes, random: Random) -> bytes:
    """Write the archive anew with another pickle, other members, or members that grow on unpacking."""
    sealed_by = data[-79:].startswith(b"regress-sha256:")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            held = {info.filename: members.read(info) for info in members.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError):
        return _flip(data, random)
    name = next((name for name in held if name.endswith("data.pkl")), None)
    chance = random.random()
    if name is not None and chance < 0.7:
        held[name] = _pickle(held[name], random)
    elif chance < 0.8:
        held.pop(random.choice([*held]))
    elif chance < 0.9:
        victim = random.choice([*held])
        held[victim] = random.choice(BYTES)(held[victim], random)
    else:
        held[f"{random.choice([*held]).partition('/')[0]}/data/9"] = b"\0" * 1000
    kind = zipfile.ZIP_DEFLATED if random.random() < 0.05 else zipfile.ZIP_STORED
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as members:
        for one, content in held.items():
            members.writestr(
                one, content * (20_000 if kind == zipfile.ZIP_DEFLATED and len(content) < 500 else 1)
            )
    found = out.getvalue()
    if sealed_by and random.random() < 0.9:
        found = found[:-2] + (79).to_bytes(2, "little")
        found += b"regress-sha256:" + hashlib.sha256(found).hexdigest().encode()
    return found


def _pickle(data: bytes, random: Random) -> bytes:
    """Exchange one instruction of a pickle for another that has the same place, or any."""
    try:
        steps = [(step.name, at) for step, _, at in pickletools.genops(data)]
    except Exception:
        return _flip(data, random)
    ends = [at for _, at in steps[1:]] + [len(data)]
    index = random.randrange(1, len(steps))
    start, stop = steps[index][1], ends[index]
    pieces = (
        *(b"K\xff", b"J\xff\xff\xff\xff", b"\x8a\xff" + b"\x7f" * 255, b"N", b"\x88", b"]", b"}", b")", b"("),
        *(b"X\x03\x00\x00\x00\xed\xa0\x80", b"X\x01\x00\x00\x00x", b"G" + struct.pack(">d", float("nan"))),
        *(
            b"cos\nsystem\n",
            b"ctorch\nstorage\n",
            b"R",
            b"h\x00",
            b"r\xff\xff\xff\x7f",
            b"\x8b\xff\xff\xff\x7f" + b"1" * 9,
        ),
        *(
            b"l" * 3,
            b"(" * 2000,
            b"]" * 2000,
            b"\x96" + b"\xff" * 8,
            b"2" * 5,
            b"0",
            b"s",
            b"u",
            b".",
            b"\x80\x09",
        ),
    )
    return (
        data[:start]
        + random.choice(pieces)
        + (b"" if random.random() < 0.5 else data[start:stop])
        + data[stop:]
    )


# ---- checksums


def _reseal(files: Files, seed: Files) -> None:
    """Give what was changed the checksums of its new content."""
    for name, data in [*files.items()]:
        if (
            isinstance(data, bytes)
            and name.endswith(".jsonl")
            and b'"regress":' in data
            and data != seed[name]
        ):
            files[name] = b"\n".join(map(_line, data.split(b"\n")))
    for name in ("manifest.json", "tiny/manifest.json"):
        data = files.get(name)
        if isinstance(data, bytes):
            try:
                tree = json.loads(data)
            except (ValueError, RecursionError):
                continue
            if isinstance(tree, dict):
                _stamp(tree, files, seed, name.rpartition("manifest.json")[0])
                files[name] = _sealed(tree, data, own=name == "manifest.json")


def _line(line: bytes) -> bytes:
    text = re.sub(rb',\s*"sha256":\s*"[^"]*"\}\s*$', b"", line)
    return text + jsonl._seal(text)[:-1] if text.startswith(b"{") and text != line else line


def _stamp(tree: Any, files: Files, seed: Files, folder: str) -> None:
    """Set size and hash of every changed file, wherever the document names it."""
    changed = {
        name: data for name, data in files.items() if isinstance(data, bytes) and data != seed.get(name)
    }
    waiting = [("", tree)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            path = folder + (value["file"] if isinstance(value.get("file"), str) else key)
            if path in changed and "sha256" in value and "size" in value:
                data = changed[path]
                value |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                if "xxh3" in value:
                    sums = ChunkSums()
                    sums.add(memoryview(data))
                    value["xxh3"] = sums.text
            waiting += [(str(name), item) for name, item in value.items()]


def _sealed(tree: dict[str, Any], data: bytes, *, own: bool) -> bytes:
    try:
        if not own:
            content = {key: value for key, value in tree.items() if key not in ("sha256", "schema_version")}
            return sealed.seal(content).encode()
        tree.pop("sha256", None)
        tree["sha256"] = dumped._checksum(tree)
        return json.dumps(tree, sort_keys=True, indent=1).encode()
    except Exception:
        return data
