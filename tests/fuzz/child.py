"""Process that reads mutated inputs one after the other and tells what each came to, a line of JSON on its output.

    python -m tests.fuzz.child FIRST COUNT STEP [KIND...]

Input ``n`` is the same on every machine. The line before an input names it, so that whoever waits knows where it hangs.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.fuzz.mutators import Files, Special, mutate
from tests.fuzz.targets import PLANTED, TARGETS, Target, run, seeds

ALL = TARGETS | PLANTED
SPARE = 3 << 30
"""Bytes of address space beyond those at the start."""
SPECIAL_SIZE = 20 << 30
"""Bytes of a file that is one hole."""


def write(files: Files, folder: Path) -> None:
    """Write the files of an input, and what is not a file."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            _write_special(path, data)


def _write_special(path: Path, special: Special) -> None:
    if special.kind == "fifo":
        os.mkfifo(path)
    elif special.kind == "loop":
        path.symlink_to(path.name)
    elif special.kind == "zero":
        path.symlink_to("/dev/zero")
    elif special.kind == "folder":
        path.mkdir()
    elif special.kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)
    elif special.kind == "hole":
        path.write_bytes(special.data)
        os.truncate(path, SPECIAL_SIZE)


def plan(number: int, kinds: list[str]) -> tuple[str, Target, random.Random]:
    """Return the kind, the target and the chance of an input."""
    chance = random.Random(f"input {number}")
    kind = kinds[number % len(kinds)]
    return kind, chance.choice(ALL[kind]), chance


def peak() -> int:
    """Return the largest resident memory since it was last forgotten, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def forget_peak() -> int:
    """Forget the largest resident memory; return the current one."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def attempt(target: Target, files: Files, kind: str, folder: Path) -> dict[str, Any]:
    """Read one input; return what it came to: ``refused``, ``memory`` in bytes, and ``defect`` if it is one."""
    path = folder / kind
    write(files, path)
    gc.collect() if random.random() < 0.02 else None
    before = forget_peak()
    told: dict[str, Any] = {}
    try:
        told["refused"] = run(target, path, kind)
    except BaseException as error:  # whatever it is, it is a defect
        told["defect"] = f"{type(error).__name__}: {error}"[:300]
        told["traceback"] = traceback.format_exc()[-3000:]
    told["memory"] = peak() - before
    said = told.get("refused")
    if said is not None:
        if "\n" in said or not said.replace("\t", " ").isprintable():
            told["defect"] = f"no printable sentence: {said[:200]!r}"
        elif len(said) > 2000:
            told["defect"] = f"a sentence of {len(said)} characters: {said[:200]!r}"
    shutil.rmtree(path, ignore_errors=True)
    return told


def limit_memory() -> None:
    """Limit the address space, so that a bomb is an error and not the end of the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))


def main(arguments: list[str]) -> None:
    """Read the inputs FIRST, FIRST + STEP, ... below COUNT."""
    first, count, step = map(int, arguments[:3])
    kinds = arguments[3:] or [*TARGETS]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    known = seeds()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    usual: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="regress-fuzz-") as made:
        folder = Path(made)
        wanted = {plan(number, kinds)[:2] for number in range(first, count, step)}
        for kind in kinds:
            for target in ALL[kind]:
                found = attempt(target, dict(known[kind]), kind, folder)  # loads what is loaded once
                if "defect" not in found and (kind, target) in wanted:
                    found = attempt(target, dict(known[kind]), kind, folder)
                usual[f"{kind}/{target.__name__}"] = found["memory"]
                if "defect" in found:
                    print(
                        json.dumps({"number": -1, "kind": kind, "target": target.__name__, **found}), file=out
                    )
        limit_memory()
        for number in range(first, count, step):
            kind, target, chance = plan(number, kinds)
            print(json.dumps({"start": number, "kind": kind, "target": target.__name__}), file=out)
            found = attempt(target, mutate(dict(known[kind]), chance), kind, folder)
            found["memory"] -= usual[f"{kind}/{target.__name__}"]
            print(json.dumps({"number": number, "kind": kind, "target": target.__name__, **found}), file=out)


if __name__ == "__main__":
    main(sys.argv[1:])
