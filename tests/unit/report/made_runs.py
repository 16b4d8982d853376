"""Output directories of runs as training writes them, hostile ones included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>"


def row(
    sequence: int, step: int, update: int | None = None, segment: int = 0, **metrics: Any
) -> dict[str, Any]:
    """One line of ``metrics.jsonl``; ``__`` in names stands for ``/``."""
    head = {"segment": segment, "sequence": sequence, "time": 1732280000.0 + sequence, "step": step}
    told = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {**head, **({} if update is None else {"update": update}), **told}


def rows(steps: int = 4, updates: int = 2, offset: float = 0.0) -> list[dict[str, Any]]:
    """Rows of a run without interruptions: evaluations at every second step."""
    found: list[dict[str, Any]] = []
    for step in range(steps):
        if step % 2 == 0:
            found.append(
                row(
                    len(found),
                    step,
                    eval_avg_test_pass_rate=step / 10 + offset,
                    curriculum__current_stage=step // 2,
                )
            )
        for number in range(updates):
            update = step * updates + number
            found.append(
                row(
                    len(found),
                    step,
                    update,
                    training_step__loss=0.1,
                    training_step__grad_norm=1.0 + update,
                    training_step__learning_rate=1e-3,
                    training_step__kl=0.01 * update,
                    training_step__clip_ratio__high=0.1,
                )
            )
        found.append(
            row(
                len(found),
                step,
                rollouts__returns_mean=step / 4 + offset,
                rollouts__returns_min=0.0,
                rollouts__completion_length_mean=5.0 + step,
            )
        )
    return found


def resumed(steps: int = 4) -> list[dict[str, Any]]:
    """Rows of a run that was killed after its third step and went on after its second, with other values."""
    before = rows(3)
    after = next(known["sequence"] for known in before if known["step"] == 2) - 1
    start = row(len(before), 2, 4, segment=1, resumed_from="checkpoint-2", after=after)
    again = [known for known in rows(steps, offset=0.5) if known["step"] >= 2]
    anew = [{**known, "segment": 1, "sequence": len(before) + 1 + i} for i, known in enumerate(again)]
    return [*before, start, *anew]


def written(
    folder: Path, lines: Sequence[Mapping[str, Any]], name: str = "metrics.jsonl", tail: str = ""
) -> Path:
    """Write rows, and perhaps the beginning of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def hostile(folder: Path) -> Path:
    """A run whose metric names, texts, samples and checkpoint names are markup."""
    bad = {f"rollouts/{HOSTILE}": 1.0, "rollouts/returns_mean": 0.5, "examples/completion": HOSTILE}
    bad |= {"curriculum/current_stage": 1, "curriculum/stage_name": HOSTILE}
    bad |= {"eval_pass_at_" + HOSTILE: 0.5, "__proto__": 1.0, "constructor": 2.0}
    start = row(3, 1, 1, segment=1, resumed_from=HOSTILE, after=1)
    found = [{**row(i, i), **bad} for i in range(2)]
    written(folder, [*found, start, {**row(4, 1, segment=1), **bad}])
    samples = [
        {**row(0, 1), "prompt": HOSTILE, HOSTILE: "x", "nested": {"a": [HOSTILE]}, "control": "\x1b[31m"}
    ]
    written(folder, samples, "eval_samples.jsonl")
    return folder
