"""Documents of an exported case, as ``regress golden export`` writes them, with the types of what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from regress.errors import GoldenError
from regress.json_schema import Count, Finite, conform
from regress.untrusted_files import DOCUMENT, parse_json, read_bytes

INDEX, OBJECTIVE, ROLLOUTS = "export.json", "objective.json", "rollouts"
Key = tuple[str | int, int]


class ExportedUpdate(TypedDict):
    """An optimizer update of ``objective.json``."""

    name: str
    step: Count
    epoch: Count
    mini_batch: Count
    learning_rate: Finite
    samples: list[Key]
    microbatches: list[list[Any]]


class Objective(TypedDict):
    """Content of ``objective.json``."""

    case: str
    algorithm: dict[str, Any]
    optimizer: dict[str, Any]
    temperature: Finite
    norm_length: Count | None
    max_grad_norm: Finite | None
    reference: NotRequired[dict[str, Any] | None]
    optimizer_steps: dict[str, Count] | None
    updates: list[ExportedUpdate]


class Rollout(TypedDict):
    """A line of a file in ``rollouts/``."""

    group_id: str | int
    run_id: int
    prompt_ids: list[Count]
    completion_ids: list[Count]
    loss_mask: list[int]
    sampler_log_probs: list[float | None] | None
    old_log_probs: NotRequired[Any]
    ref_log_probs: NotRequired[Any]
    reward: Finite
    rewards: NotRequired[dict[str, Finite]]
    finish_reason: str | None
    prompt: Any
    response: NotRequired[str | None]


class _Index(TypedDict):
    case: str


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of ``export.json``; raises `GoldenError` if the folder is not an exported case."""
    return dict(_document(folder, INDEX, _Index))


def read_objective(folder: Path) -> dict[str, Any]:
    """Return the content of ``objective.json``; raises `GoldenError` if the folder is not an exported case."""
    return dict(_document(folder, OBJECTIVE, Objective))


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of rollouts; raises `GoldenError` for anything else."""
    try:
        lines = [line for line in read_bytes(path).split(b"\n") if line]
        return [dict(conform(parse_json(line), Rollout, f"line {n}")) for n, line in enumerate(lines, 1)]
    except OSError as error:
        raise GoldenError(
            f"{path} cannot be read as rollouts ({error.strerror}); export the case again"
        ) from error
    except ValueError as error:
        raise GoldenError(f"{path} cannot be read as rollouts ({error}); export the case again") from None


def _document(folder: Path, name: str, kind: Any) -> Any:
    try:
        found = parse_json(read_bytes(folder / name, DOCUMENT))
        return conform(found, kind, name)
    except OSError as error:
        cause = error.strerror or str(error)
    except ValueError as error:
        cause = str(error)
    raise GoldenError(
        f"{folder} is not an exported case ({name}: {cause}); write one with regress golden export CASE DIR"
    )
