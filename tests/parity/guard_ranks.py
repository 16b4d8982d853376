"""One rank of TRL's `GRPOTrainer` under DDP and `guard`, of which the second one changes a weight after an update.

``python guard_ranks.py FOLDER WORK``, with the environment of torchrun; the violation is written to ``FOLDER``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl_loop import make_trainer

from regress import guard
from regress.errors import GuardError


class Touched(TrainerCallback):
    """Changes one weight of the second rank before the optimizer's step of update 2."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2 and os.environ["RANK"] == "1":
            with torch.no_grad():
                next(iter(given["model"].parameters()))[3, 2] += 1e-3


def main(folder: Path, work: Path) -> None:
    trainer = make_trainer(work, beta=0.0, num_iterations=1, per_device_train_batch_size=8)
    trainer.add_callback(Touched())
    try:
        with guard(trainer, checks=["finite", "group_sums", "shares", "replicas"]):
            trainer.train()
    except GuardError as error:
        (folder / f"rank{os.environ['RANK']}.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
