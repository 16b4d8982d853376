"""verl: `sft_loss` shifts the loss mask over the borders of samples.

The mask of all samples is rolled as one row. Where a loss counts the first token of a sample, the last position of the
sample before is trained, on a token that is none of its own: the first of the next sample.
"""

from importlib.metadata import version

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import sft_loss

LENGTHS = [4, 6, 5]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
rows = [torch.full((n,), -1.0 - i, requires_grad=True) for i, n in enumerate(LENGTHS)]
# every token counts, the first included: it has no prediction of its own
masks = [torch.ones(n, dtype=torch.long) for n in LENGTHS]
data = TensorDict({"loss_mask": jagged(masks)}, batch_size=[len(LENGTHS)])
tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(LENGTHS))
loss, _ = sft_loss(config, {"log_probs": jagged(rows)}, data)
loss.backward()
print(f"torch {torch.__version__}, verl {version('verl')}")
# position t predicts token t + 1 of its sample, so the last position of a sample predicts nothing
right = -sum(float(row.detach()[:-1].sum()) for row in rows) / sum(LENGTHS)
print(f"right  loss {right:.6f}, gradient at the last positions {[0.0] * len(rows)}")
found = [round(float(row.grad[-1]), 6) for row in rows]
print(f"actual loss {float(loss.detach()):.6f}, gradient at the last positions {found}")
reproduced = any(found)
print("reproduced" if reproduced else "fixed in this version")
raise SystemExit(not reproduced)
