"""Trajectory lists in NexRL's dump format, both generations of it.

Since NexRL commit 5bd3f78 `extra_fields` holds only group_id, uid, run_id, task_id, score and temperature;
before, it held everything, sampler log-probs included. Files of our own hold all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from regress.dump.canonical_json import plain
from regress.dump.file_damage import Damage
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.token_provenance import PROVENANCE, take_versions
from regress.dump.trajectory import Trajectory, from_record, to_record

_TEXTS = ("finish_reason", "task_id", "prompt", "response", "ground_truth", "temperature")


def trajectory_lists(record: Record) -> dict[str, Any]:
    """Return `num_trajectories` and `trajectories` of a trajectory record."""
    items = [as_dict(trajectory) for trajectory in from_record(record)]
    return {"num_trajectories": len(items), "trajectories": items}


def as_dict(t: Trajectory) -> dict[str, Any]:
    """Return a trajectory as NexRL writes it, with all that ours hold besides in `extra_fields`."""
    fields: dict[str, Any] = {"uid": t.group_id, "score": t.reward, **t.extra}
    fields |= {name: value for name in _TEXTS if (value := getattr(t, name)) is not None}
    fields |= {"group_id": t.group_id, "run_id": t.run_id}
    fields |= {"prompt_length": t.prompt_length, "rewards": t.rewards}
    fields |= {name: value for name in PROVENANCE if (value := getattr(t, name)) is not None}
    if t.log_probs is not None:
        fields["logprobs"] = [float(value) for value in t.log_probs]
    return {
        "tokens": t.tokens,
        "loss_mask": t.loss_mask,
        "reward": t.reward,
        "is_val": t.is_val,
        "extra_fields": fields,
    }


def trajectory_tensors(payload: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, Array]:
    """Return the tensors of a trajectory record of our own, in the order and element types of `dtypes`."""
    try:
        items = payload["trajectories"]
        fields = [item["extra_fields"] for item in items]
        log_probs = [field.get("logprobs") for field in fields]
        lists: dict[str, list[Any]] = {
            "lengths": [len(item["tokens"]) for item in items],
            "tokens": [token for item in items for token in item["tokens"]],
            "loss_mask": [value for item in items for value in item["loss_mask"]],
            "reward": [item["reward"] for item in items],
            "is_val": [item["is_val"] for item in items],
            "run_id": [field["run_id"] for field in fields],
            "prompt_length": [field["prompt_length"] for field in fields],
            "has_log_probs": [values is not None for values in log_probs],
            "log_probs": [value for values in log_probs if values is not None for value in values],
        }
        return {name: np.array(lists[name], dtype=dtype) for name, dtype in dtypes.items()}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Damage(f"its list of trajectories is malformed ({error})") from None


def foreign_trajectories(payload: Mapping[str, Any], step: int) -> Record:
    """Return the record of trajectories that NexRL dumped; raises `Damage` or `DumpError` for malformed ones.

    `logprobs` of the old generation are taken at the token's own position, in float64 (lists have no type).
    """
    items = payload["trajectories"]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Damage("its trajectories are not a list of dicts")
    if payload.get("num_trajectories", len(items)) != len(items):
        raise Damage(f"it announces {payload['num_trajectories']} trajectories but holds {len(items)}")
    return to_record([_from_dict(item, index) for index, item in enumerate(items)], step)


def _from_dict(item: dict[str, Any], index: int) -> Trajectory:
    fields = dict(item.get("extra_fields") or {})
    missing = [key for key in ("tokens", "loss_mask", "reward") if key not in item]
    group_id = fields.pop("group_id", None)
    group_id = fields.get("uid") if group_id is None else group_id
    if group_id is None or "run_id" not in fields:
        missing.append("group_id (or uid) and run_id in extra_fields")
    if missing:
        raise Damage(f"its trajectory number {index} lacks {', '.join(missing)}")
    tokens, loss_mask = list(item["tokens"]), [int(value) for value in item["loss_mask"]]
    first = loss_mask.index(1) if 1 in loss_mask else len(tokens)
    log_probs = fields.pop("logprobs", None)
    known = {name: fields.pop(name, None) for name in _TEXTS}
    prompt_length = int(fields.pop("prompt_length", first))
    known |= take_versions(fields, loss_mask, prompt_length)
    return Trajectory(
        group_id=str(group_id),
        run_id=int(fields.pop("run_id")),
        tokens=tokens,
        loss_mask=loss_mask,
        reward=item["reward"],
        prompt_length=prompt_length,
        is_val=bool(item.get("is_val", False)),
        log_probs=None if log_probs is None else np.array(log_probs, np.float64),
        rewards=fields.pop("rewards", {}),
        extra={key: plain(value, f"extra_fields[{key!r}]") for key, value in fields.items()},
        **known,
    )
