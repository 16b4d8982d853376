"""One rank of TRL's `GRPOTrainer` under DDP: records its part, and writes its own derivatives beside the dump.

``python trl_ranks.py FOLDER ACCUMULATION LOSS_TYPE``, with the environment of torchrun.
"""

import os
import sys
from pathlib import Path

import torch
from parity_world import GROUP_SIZE, GROUPS, make_world
from test_token_gradient import Own, listen, trajectories
from test_trl import Case, make_trainer

from regress.capture.recording import record
from regress.dump.trajectory import to_record


def main(folder: Path, accumulation: int, loss_type: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = make_world(folder / f"model{rank}")
    size = GROUPS * GROUP_SIZE // ranks
    mine = world.plain[rank * size : (rank + 1) * size]
    more = {
        "loss_type": loss_type,
        "per_device_train_batch_size": size // accumulation,
        "ddp_backend": "gloo",
    }
    case = Case("trl:dapo", "ranks", accumulation=accumulation, trl=more)
    trainer = make_trainer(world, mine, folder / f"trainer{rank}", case)
    trainer.model.load_state_dict(world.old.state_dict())
    own: list[Own] = listen(trainer)
    model = trainer.accelerator.prepare(trainer.model)
    assert type(model).__name__ == "DistributedDataParallel"
    model.train()
    prompts = [{"prompt": f"w{2 + sample.group}"} for sample in mine]
    with record(folder / "dump", model, token_gradient=True) as recorder:
        if rank == 0:
            recorder.put(to_record(trajectories(world.plain), 0))
        for number in range(accumulation):
            trainer.accelerator.gradient_state._set_sync_gradients(number == accumulation - 1)
            trainer.training_step(model, prompts, None)
    torch.save([(found.prompt, found.log_probs) for found in own], folder / f"own{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
