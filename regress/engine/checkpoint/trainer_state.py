"""``trainer_state.json``: a run's progress under the names that users of Hugging Face's Trainer know."""

from __future__ import annotations

import json
from typing import Any

from regress.dump.jsontext import plain, tag_floats
from regress.engine.checkpoint.names import checkpoint_name
from regress.engine.checkpoint.state import CheckpointState
from regress.engine.config.schema import Config

PASS_RATE = "eval_avg_test_pass_rate"


def trainer_state(config: Config, state: CheckpointState, problems: int | None) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``; ``problems`` are those of an epoch, None if nobody knows.

    ``global_step``, ``max_steps``, ``eval_steps``, ``save_steps`` and the ``step`` of the rows in ``log_history``
    count optimizer updates, as Hugging Face's do; ``step`` at the top counts completed rollout steps.
    """
    each = config.updates_per_rollout
    data, chosen = config.data, config.trainer
    best = max(state.pass_rates, key=lambda step: (state.pass_rates[step], step), default=None)
    saved = best is not None and chosen.save_steps is not None and best and best % chosen.save_steps == 0
    epoch = data.prompts_per_step / problems if problems else 0.0
    return {
        "best_global_step": None if best is None else best * each,
        "best_metric": None if best is None else state.pass_rates[best],
        "best_model_checkpoint": checkpoint_name(best) if best is not None and saved else None,
        "epoch": state.step * epoch,
        "eval_steps": config.evaluation.every_n_steps * each,
        "global_step": state.update,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [
            {"epoch": step * epoch, "step": step * each, "rollout_step": step, PASS_RATE: rate}
            for step, rate in sorted(state.pass_rates.items())
        ],
        "logging_steps": each,
        "max_steps": config.max_steps * each,
        "num_train_epochs": config.max_steps * epoch,
        "save_steps": chosen.save_updates or (chosen.save_steps or config.max_steps) * each,
        "step": state.step,
        "train_batch_size": chosen.mini_batch_size or data.prompts_per_step * data.group_size,
    }


def json_bytes(tree: Any) -> bytes:
    """Return strict JSON for people and programs."""
    text = json.dumps(tag_floats(plain(tree, "state")), indent=2, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()
