"""torch pipelining: the loss function is called once more than there are microbatches, on memory nobody wrote.

The first step infers shapes by running the stage and its loss on uninitialised tensors. A loss function that also
collects its values (for a log, a metric, a mean) collects that one too.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

RANKS, MICROBATCHES = 2, 4


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN then, not whatever was there
    torch.manual_seed(0)
    inputs, layers = torch.rand(8, 4), [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    stage = PipelineStage(layers[rank], rank, RANKS, torch.device("cpu"))
    collected = []

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(output, target)
        collected.append(loss.item())
        return loss

    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    reported = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs, losses=reported)
        right = [round(loss.item(), 6) for loss in reported]
        print("right: step(losses=...)  ", right)
        print("actual: calls of the loss", [round(loss, 6) for loss in collected])
        print(f"ratio of the numbers of losses {len(collected) / len(right)}")
        if len(collected) > MICROBATCHES:
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
