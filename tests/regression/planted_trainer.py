"""A GRPO trainer of plain PyTorch, two updates on each rollout, in which one of a few bugs can be planted.

    python planted_trainer.py FOLDER [--bug NAME] [--old untapped|tapped|classified] [--packed] [--minis]
        [--dtype float64]

Two groups of four samples, in microbatches of unequal size; a token mean, a clip range of 0.8 to 1.28 and a KL to the
initial weights. With ``--packed`` each microbatch is one row of samples that lie behind each other.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress import Trajectory, at, record, tap_batch, tap_trajectories, true_float64

Model = Callable[..., Any]
Rows = tuple[int, ...]

BUGS: Mapping[str, str] = {
    "uncentred": "advantages of a group are its rewards, without their mean",
    "positions": "positions of a packed row go on from sample to sample",
    "kl-sign": "the KL term is subtracted: a coefficient of -0.05",
    "recomputed": "old log-probs are computed again before the second update",
    "mean-of-means": "each microbatch is divided by its own tokens, and the mean of them is taken",
    "leak": "tokens of a packed row attend to all samples before them",
}
"""Bugs by name; the two of packed rows show with ``packed`` only."""
PACKED = ("positions", "leak")
KL = 0.05
CLIP = (0.8, 1.28)
UPDATES = 2
"""Optimizer steps on each rollout."""
LENGTHS = ((3, 4), (3, 6), (3, 2), (3, 5), (4, 3), (4, 6), (4, 1), (4, 4))
"""Tokens of prompt and completion of each sample."""
MICROBATCHES = ((0, 1, 2), (3, 4), (5, 6, 7))
MINI_BATCHES = (((0, 1, 2), (3,)), ((4, 5), (6, 7)))
"""The same for updates on one group each."""


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "use_cache": False}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=24, initializer_range=0.3, **sizes, **heads, **special))


def rollout(number: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(number)
    found = []
    for index, (prompt, completion) in enumerate(LENGTHS):
        tokens = torch.randint(2, 24, (prompt + completion,), generator=generator).tolist()
        tokens[:prompt] = [2 + index // 4] * prompt
        reward = float(torch.randint(0, 5, (1,), generator=generator))
        mask = [0] * prompt + [1] * completion
        found.append(Trajectory(f"{number}-{index // 4}", index % 4, tokens, mask, reward, prompt))
    return found


def advantages_of(samples: Sequence[Trajectory], bug: str | None) -> Tensor:
    rewards = torch.tensor([sample.reward for sample in samples]).reshape(2, 4)
    centred = rewards if bug == "uncentred" else rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-6)).reshape(-1)


def arranged(samples: Sequence[Trajectory], packed: bool, bug: str | None) -> dict[str, Tensor]:
    """Return the arguments of the model: rows padded on the right, or one row of all samples."""
    if not packed:
        width = max(len(sample.tokens) for sample in samples)
        pads = [width - len(sample.tokens) for sample in samples]
        ids = [sample.tokens + [0] * pad for sample, pad in zip(samples, pads, strict=True)]
        mask = [[1] * len(sample.tokens) + [0] * pad for sample, pad in zip(samples, pads, strict=True)]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    lengths = [len(sample.tokens) for sample in samples]
    places = range(sum(lengths)) if bug == "positions" else [place for n in lengths for place in range(n)]
    ids = [[token for sample in samples for token in sample.tokens]]
    given = {"input_ids": torch.tensor(ids), "position_ids": torch.tensor([list(places)])}
    if bug == "leak":
        given["attention_mask"] = torch.ones(1, 1, sum(lengths), sum(lengths), dtype=torch.bool).tril()
    return given


def log_probs_of(
    model: Model, samples: Sequence[Trajectory], packed: bool = False, bug: str | None = None
) -> Tensor:
    """Return log-probs in the rows of the model, ``[B, T]``, each at its own token."""
    given = arranged(samples, packed, bug)
    found = model(**given).logits[:, :-1].log_softmax(-1).gather(-1, given["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def loss_mask_of(samples: Sequence[Trajectory], packed: bool) -> tuple[Tensor, Tensor]:
    """Return mask and sample of each token, ``[B, T]``."""
    if packed:
        mask = [[value for sample in samples for value in sample.loss_mask]]
        owner = [[n for n, sample in enumerate(samples) for _ in sample.tokens]]
    else:
        width = max(len(sample.tokens) for sample in samples)
        mask = [sample.loss_mask + [0] * (width - len(sample.tokens)) for sample in samples]
        owner = [[n] * width for n in range(len(samples))]
    return torch.tensor(mask), torch.tensor(owner)


def loss_of(now: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, bug: str | None) -> Tensor:
    """Return the loss of each token: the clipped ratio and a KL to the reference (k3)."""
    ratio = (now - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(*CLIP) * advantages)
    kl = (ref - now).exp() - (ref - now) - 1
    return policy + (-KL if bug == "kl-sign" else KL) * kl


def update(
    model: Any,
    samples: Sequence[Trajectory],
    batches: Sequence[Rows],
    old: Mapping[Rows, Tensor],
    reference: Mapping[Rows, Tensor],
    *,
    bug: str | None,
    old_tapped: bool,
    advantages_tapped: bool,
    packed: bool,
) -> None:
    """Accumulate the gradients of one update."""
    advantages = advantages_of(samples, bug)
    total = sum(sum(samples[row].loss_mask) for rows in batches for row in rows)
    for rows in batches:
        before, frozen = old[rows], reference[rows]
        own = [samples[row] for row in rows]
        now = log_probs_of(model, own, packed, bug)
        mask, owner = loss_mask_of(own, packed)
        told = {"old_log_probs": before} if old_tapped else {}
        told |= {"advantages": advantages[list(rows)][owner]} if advantages_tapped else {}
        tap_batch(ref_log_probs=frozen, **told)
        terms = loss_of(now, before, frozen, advantages[list(rows)][owner], bug) * mask
        count = mask.sum() * len(batches) if bug == "mean-of-means" else total
        (terms.sum() / count).backward()


def train(
    folder: str | Path,
    bug: str | None = None,
    *,
    old: str = "untapped",
    advantages: bool = False,
    packed: bool = False,
    minis: bool = False,
    rollout_tapped: str = "each update",
    rollouts: int = 1,
    dtype: torch.dtype = torch.float32,
    true: bool = False,
) -> None:
    """Train, recorded.

    Args:
        old: what is recorded of the old log-probs: untapped, tapped or classified.
        advantages: they are tapped.
        minis: each update trains on one of the two groups, by default on both.
        rollout_tapped: the trajectories are tapped at each update, at the first one, or at each update its own.
        true: train under `true_float64`.
    """
    model: Any = tiny_model().to(dtype)
    frozen: Any = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    classify = (lambda arguments: "old") if old == "classified" else None
    options = {"token_gradient": True, "initial_weights": True, "temperature": 1.0, "classify": classify}
    with ExitStack() as stack:
        stack.enter_context(true_float64() if true else nullcontext())
        stack.enter_context(record(folder, model, **options))
        for number in range(rollouts):
            samples = rollout(number)
            updates = MINI_BATCHES if minis else (MICROBATCHES,) * UPDATES
            every = list(dict.fromkeys(rows for batches in updates for rows in batches))

            @torch.no_grad()
            def computed(policy: Any, samples: Any = samples, every: Any = every) -> dict[Rows, Tensor]:
                return {
                    rows: log_probs_of(policy, [samples[row] for row in rows], packed, bug) for rows in every
                }

            reference = computed(frozen)
            for count, batches in enumerate(updates):
                own = [samples[row] for rows in batches for row in rows]
                if count == 0 or rollout_tapped != "first update":
                    with at(step=number * UPDATES + count):
                        tap_trajectories(own if rollout_tapped == "its own" else samples)
                if count == 0 or bug == "recomputed":
                    before = computed(model)
                told: dict[str, Any] = {"bug": bug, "packed": packed, "old_tapped": old == "tapped"}
                told |= {"advantages_tapped": advantages}
                update(model, samples, batches, before, reference, **told)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--bug", choices=[*BUGS])
    parser.add_argument("--old", default="untapped", choices=["untapped", "tapped", "classified"])
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--minis", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    given = parser.parse_args()
    options = {"old": given.old, "packed": given.packed, "minis": given.minis}
    train(given.folder, given.bug, **options, dtype=getattr(torch, given.dtype))
