"""Self-hosted training of a configuration, as JSON for the clients: ``python self_hosted.py CONFIG OUTPUT``.

It runs in the service's environment, with the engine's own trainer and no service.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from regress.dump import Trajectory, read_trajectories
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.training_run import train
from regress.tasks.portable_draws import stream_seed


def trained(path: Path, folder: Path) -> dict[str, Any]:
    """Train; returns settings, rollouts, evaluations and updates."""
    dump = folder / "rollouts"
    recorded = ("rollout_mock.enable=true", f"rollout_mock.dump_dir={dump}", f"output_dir={folder / 'run'}")
    config = load_config(str(path), None, recorded, environ={}).config
    result = train(config, Console(quiet=True))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "training_step/loss" in row]
    return {
        "settings": _settings(config),
        "pass_rates": list(result.pass_rates.values()),
        "rollouts": _samples(config, dump / "train", "train"),
        "evaluations": _samples(config, dump / "val", "val"),
        "updates": [
            {name: row[f"training_step/{name}"] for name in ("loss", "grad_norm", "learning_rate")}
            for row in updates
        ],
    }


def _settings(config: Config) -> dict[str, Any]:
    chosen = config.optimizer
    return {
        "mini_batch_size": config.trainer.mini_batch_size,
        "max_tokens": config.data.max_completion_length,
        "eps": config.algorithm.eps,
        "adam": {
            "beta1": chosen.betas[0],
            "beta2": chosen.betas[1],
            "eps": chosen.eps,
            "weight_decay": chosen.weight_decay,
            "grad_clip_norm": chosen.max_grad_norm,
        },
    }


def _samples(config: Config, folder: Path, split: str) -> list[list[dict[str, Any]]]:
    """Return the samples of each step; the seed of one is that of its stream."""
    return [
        [
            _sample(found, stream_seed("sample", config.seed, step, split, found.group_id, found.run_id, 0))
            for found in recorded.trajectories
        ]
        for step, recorded in read_trajectories(str(folder)).items()
    ]


def _sample(found: Trajectory, seed: int) -> dict[str, Any]:
    assert found.log_probs is not None
    return {
        "group": found.group_id,
        "prompt": found.prompt,
        "answer": found.ground_truth,
        "seed": seed,
        "prompt_tokens": found.tokens[: found.prompt_length],
        "tokens": found.tokens[found.prompt_length :],
        "log_probs": found.log_probs[found.prompt_length :].tolist(),
        "reward": found.reward,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        content = trained(Path(sys.argv[1]), Path(scratch))
    Path(sys.argv[2]).write_text(json.dumps(content))
