"""Mutations of a folder of files that know the structure of what is in them, drawn from a numbered stream of chance.

A mutated manifest, header or line gets the checksum that belongs to its new content most of the time: otherwise nothing
behind the check of the checksum would ever be reached.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from regress.dump import dump_manifest as dumped
from regress.dump.chunk_checksums import ChunkSums
from regress.dump.formats import jsonl_format
from regress.golden.case_manifest import seal
from tests.fuzz.mutate_archives import archive, safetensors
from tests.fuzz.mutate_bytes import BYTES, flip
from tests.fuzz.mutate_text import json_lines, text_

Files = dict[str, "bytes | Special"]


@dataclass(frozen=True)
class Special:
    """Anything but an ordinary file: ``fifo``, ``loop``, ``zero``, ``folder``, ``socket``, ``gone``, ``hole``."""

    kind: str
    data: bytes = b""


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
                files[name] = flip(data, random)
    if random.random() < 0.85:
        _reseal(files, seed)
    return files


def _structured(name: str, data: bytes, random: Random) -> bytes:
    if name.endswith((".json", ".jsonl")):
        return json_lines(data, random)
    if name.endswith(".safetensors") and data[8:9] == b"{":
        return safetensors(data, random)
    if data[:4] == b"PK\x03\x04":
        return archive(data, random)
    return text_(data, random)


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
    return text + jsonl_format._seal(text)[:-1] if text.startswith(b"{") and text != line else line


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
            return seal(content).encode()
        tree.pop("sha256", None)
        tree["sha256"] = dumped._checksum(tree)
        return json.dumps(tree, sort_keys=True, indent=1).encode()
    except Exception:
        return data
