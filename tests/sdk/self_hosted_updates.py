"""Self-hosted updates on the datums of a client, as JSON: ``python self_hosted_updates.py REQUEST OUTPUT``.

It runs in the service's environment, with the engine's own training step and no service. REQUEST names a
configuration, the rows and settings of each update, and the folder of a save whose weights are compared.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from regress.dump import Trajectory
from regress.engine.config import load_config
from regress.engine.determinism_environment import configure_torch
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import TokenBatch
from regress.engine.run_construction import build
from regress.engine.training_step import train_step
from regress.layout import BatchPlan


def updated(trainer: Trainer, rows: list[Any], adam: dict[str, float]) -> dict[str, Any]:
    """Make one update on rows of tokens, log-probs, loss mask and advantage; returns its numbers."""
    policy = trainer.policy
    batch = TokenBatch(
        [
            Trajectory("row", i, tokens, mask, 0.0, mask.index(1))
            for i, (tokens, _, mask, _) in enumerate(rows)
        ]
    )
    kept = [
        [value for value, counts in zip(known, mask, strict=True) if counts] for _, known, mask, _ in rows
    ]
    advantages = [[advantage] * len(own) for own, (*_, advantage) in zip(kept, rows, strict=True)]
    found = replace(
        batch.loss_tokens(),
        weights=torch.ones(len(batch.sequence), dtype=torch.float64),
        old_log_probs=torch.tensor([*chain(*kept)], dtype=policy.log_prob_dtype),
        advantages=torch.tensor([*chain(*advantages)], dtype=policy.log_prob_dtype),
    )
    for group in trainer.optimizer.param_groups:
        group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"])}
        group |= {"eps": adam["eps"], "weight_decay": adam["weight_decay"]}
    micros = batch.microbatches(BatchPlan(micro_batch_size=1))
    log_probs = [values.tolist() for values in policy.log_probs(micros)]
    objective, limit = trainer.config.algorithm, adam["grad_clip_norm"]
    outcome = train_step(policy, trainer.optimizer, found, micros, objective, max_grad_norm=limit)
    return {"log_probs": log_probs, "loss": outcome.loss, "grad_norm": outcome.grad_norm}


def main() -> None:
    """Make the updates, and compare the weights."""
    request = json.loads(Path(sys.argv[1]).read_text())
    config = load_config(request["config"], None, (), environ={}).config
    configure_torch(config.threads)
    with ExitStack() as resources:
        trainer = build(config, resources, lambda *_: lambda: None).trainer
        updates = [updated(trainer, update["rows"], update["adam"]) for update in request["updates"]]
        own = {name: value.detach() for name, value in trainer.policy.named_parameters()}
    saved = load_file(request["weights"])
    differing = [name for name, value in own.items() if not torch.equal(saved[name], value)]
    content = {"updates": updates, "compared": len(own), "differing": differing}
    Path(sys.argv[2]).write_text(json.dumps(content))


if __name__ == "__main__":
    main()
