"""Mutations of files of tensors that know their headers: safetensors, and archives of torch."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickletools
import struct
import zipfile
from random import Random
from typing import Any

from regress.dump.canonical_json import dumps
from tests.fuzz.mutate_bytes import BYTES, flip
from tests.fuzz.mutate_text import RAW, changed


def safetensors(data: bytes, random: Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    told = header.get("__metadata__", {}).get("regress")
    if told is not None and random.random() < 0.75:
        head = json.loads(told)
        if random.random() < 0.5:
            head["meta"] = changed(head["meta"], random)
        else:
            head = changed(head, random)
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
        header = changed(header, random)
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


def archive(data: bytes, random: Random) -> bytes:
    """Write the archive anew with another pickle, other members, or members that grow on unpacking."""
    sealed_by = data[-79:].startswith(b"regress-sha256:")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            held = {info.filename: members.read(info) for info in members.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError):
        return flip(data, random)
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
                zipfile.ZipInfo(one),
                content * (20_000 if kind == zipfile.ZIP_DEFLATED and len(content) < 500 else 1),
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
        return flip(data, random)
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
