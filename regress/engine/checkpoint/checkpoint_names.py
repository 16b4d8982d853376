"""Names of checkpoints, and the list of those in a directory. Loads no torch."""

from __future__ import annotations

import re

from regress.dump.canonical_json import loads
from regress.dump.dump_location import Location, children, location, read_bytes
from regress.dump.dump_manifest import MANIFEST
from regress.untrusted_files import DOCUMENT

STATE, TRAINER_STATE, CURRICULUM_STATE = "regress_state.json", "trainer_state.json", "curriculum_state.json"
"""Files of a checkpoint besides those that Hugging Face's ``save_pretrained`` writes."""
OPTIMIZER, REFERENCE, UNFINISHED = "optimizer.safetensors", "reference.safetensors", "unfinished.safetensors"
"""Files of a checkpoint that hold its tensors other than the weights, those that it has."""
DUMP = "state"
"""Folder of a checkpoint of schema 1 that holds them as a dump."""
LATEST = "latest"
"""Value of ``trainer.resume_from_checkpoint`` that stands for the newest checkpoint."""

_NAME = re.compile(r"checkpoint-(\d+)(?:-update([1-9]\d*))?", re.ASCII)


def checkpoint_name(step: int, updates_in_step: int = 0) -> str:
    """Return ``checkpoint-<step>``, or ``checkpoint-<step>-update<k>`` inside a step.

    Args:
        step: completed rollout steps.
        updates_in_step: optimizer updates of the next step that are made, too.
    """
    return f"checkpoint-{step}" + (f"-update{updates_in_step}" if updates_in_step else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return completed steps and updates of the next one from a folder's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def checkpoints(folder: str | Location) -> list[Location]:
    """Return the complete checkpoints in a directory, the newest last.

    Newer is what a later segment wrote, and what lies further on within one. A checkpoint whose state cannot be
    read counts as the newest of all, so that nobody overlooks it.

    Raises:
        DumpError: if the directory cannot be listed.
    """
    found = [path for path in children(location(folder)) if parse_name(path.name) is not None]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=_age)


def latest(folder: str | Location) -> Location | None:
    """Return the newest complete checkpoint in a directory; None if it holds none.

    Raises:
        DumpError: if the directory cannot be listed.
    """
    found = checkpoints(folder)
    return found[-1] if found else None


def _age(path: Location) -> tuple[float, int, int]:
    step, updates = parse_name(path.name) or (0, 0)
    try:
        if not (path / STATE).is_file():  # a named pipe would be waited for
            return float("inf"), step, updates
        state = loads(read_bytes(path / STATE, DOCUMENT))
        return float(state["segment"]), step, updates
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf"), step, updates
