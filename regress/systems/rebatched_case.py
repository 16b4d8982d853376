"""An exported case whose samples are cut into other batches than they were recorded in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from regress.errors import SystemsError


def recut(export: Path, sizes: Sequence[int], folder: Path, without: Sequence[int] = ()) -> Path:
    """Write an export in which the first samples of another form batches of these sizes, an update each.

    Groups may be torn apart, so the objective has to leave them out of account, as supervised fine-tuning does.

    Args:
        without: token ids; samples that hold one of them are left out first.

    Raises:
        SystemsError: if the export has fewer samples.
    """
    lines = [
        line
        for path in sorted((export / "rollouts").glob("step_*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if not _holds(json.loads(line), without)
    ]
    if sum(sizes) > len(lines):
        raise SystemsError(
            f"{export} has {len(lines)} samples, not {sum(sizes)}: ask for smaller batches in Cell.batches"
        )
    shutil.copytree(export, folder, ignore=shutil.ignore_patterns("rollouts", "derived", "README.md"))
    (folder / "rollouts").mkdir()
    objective = json.loads((folder / "objective.json").read_text(encoding="utf-8"))
    rate = objective["updates"][0]["learning_rate"]
    updates, start = [], 0
    for step, size in enumerate(sizes):
        own, start = lines[start : start + size], start + size
        text = "".join(f"{line}\n" for line in own)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text, encoding="utf-8")
        updates.append(_update(step, [json.loads(line) for line in own], rate))
    (folder / "objective.json").write_text(json.dumps(objective | {"updates": updates}, indent=1) + "\n")
    index = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "export.json")
    stamps = {p.relative_to(folder).as_posix(): sha256(p.read_bytes()).hexdigest() for p in files}
    (folder / "export.json").write_text(
        json.dumps(index | {"derived": False, "sha256": stamps}, indent=1) + "\n"
    )
    return folder


def _holds(sample: dict[str, Any], tokens: Sequence[int]) -> bool:
    return bool({*sample["prompt_ids"], *sample["completion_ids"]} & {*tokens})


def _update(step: int, samples: Sequence[dict[str, Any]], rate: float) -> dict[str, Any]:
    keys = [[sample["group_id"], sample["run_id"]] for sample in samples]
    return {
        "number": step,
        "name": f"step_{step:06d}",
        "step": step,
        "epoch": 0,
        "mini_batch": 0,
        "learning_rate": rate,
        "samples": keys,
        "microbatches": [keys],
    }
