"""verl: `seq-mean-token-sum-norm` without `loss_scale_factor` divides by the longest response of each microbatch.

So the loss of one batch, and the weight of a token in it, depend on how the batch is cut. Rows of unequal length are
nested tensors, as the trainer of `trainer.use_v1` (the default) hands them to the worker.
"""

from importlib.metadata import version

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

LENGTHS, PROMPT = [2, 13, 5, 7, 3, 11, 4, 9], 3


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def loss_of(batch: list[int], log_probs: list[torch.Tensor]) -> torch.Tensor:
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum-norm",
        policy_loss=PolicyLossConfig(loss_mode="vanilla"),
    )
    lengths = [LENGTHS[i] for i in batch]
    rows = {
        "prompts": jagged([torch.zeros(PROMPT, dtype=torch.long) for _ in batch]),
        "responses": jagged([torch.zeros(n, dtype=torch.long) for n in lengths]),
        "response_mask": jagged([torch.ones(n, dtype=torch.long) for n in lengths]),
        "old_log_probs": jagged([log_probs[i].detach()[PROMPT - 1 : -1] for i in batch]),
        "advantages": jagged([torch.full((n,), 1.0 + i) for i, n in zip(batch, lengths, strict=True)]),
    }
    data = TensorDict(rows, batch_size=[len(batch)])
    facts = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS)}
    tensordict_utils.assign_non_tensor(data, **facts)
    return ppo_loss(config, {"log_probs": jagged([log_probs[i] for i in batch])}, data)[0]


print(f"torch {torch.__version__}, verl {version('verl')}")
found = {}
for size in (8, 4, 1):
    log_probs = [torch.full((PROMPT + n,), -1.0, requires_grad=True) for n in LENGTHS]
    batches = [list(range(i, i + size)) for i in range(0, 8, size)]
    total = sum(loss_of(batch, log_probs) for batch in batches)
    total.backward()
    # a token's gradient is -advantage / (samples x norm), and the norm is read off it
    norms = [-(1.0 + i) / 8 / float(p.grad[PROMPT - 1]) for i, p in enumerate(log_probs)]
    found[size] = (float(total.detach()), [round(norm, 2) for norm in norms])
for size, (total, norms) in found.items():
    name = "right " if size == 8 else "actual"
    print(f"{name} microbatches of {size}: loss {total:.6f}, sums of tokens are divided by {norms}")
reproduced = found[1][1] != found[8][1]
print("reproduced" if reproduced else "fixed in this version")
raise SystemExit(not reproduced)
