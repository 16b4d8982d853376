"""The scene of every comparison: a tiny model on disk, recorded rollouts, and our side of the computation.

A comparison gives both sides the same weights and the same rollouts, and asks for the advantages, the
loss that is back-propagated and the gradient of every parameter. Our side runs each completion alone,
without padding; the engines pad, mask and batch as they always do.

Weights are float64, so that what differs is mathematics, not rounding (norms and softmax stay float32
inside the model, and both engines keep rewards and advantages in float32).
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.kl_divergence import kl_penalty
from regress.grpo.loss_aggregation import batch_weights, entropy_scale, entropy_weights
from regress.grpo.objective import Objective
from regress.grpo.selective_log_softmax import token_log_probs
from regress.grpo.token_losses import TokenLoss, token_loss

PAD, EOS, VOCABULARY = 0, 1, 40
GROUPS, GROUP_SIZE = 3, 4
MAX_COMPLETION_LENGTH = 12
"""Longer than every completion, so that it cannot be mistaken for the padded length."""


@dataclass(frozen=True)
class Sample:
    """One completion: its ids, which of them the model wrote, and the error of the log-probs as sampled."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    model_tokens: tuple[int, ...]
    sampler_noise: tuple[float, ...]
    group: int
    reward: float

    @property
    def truncated(self) -> bool:
        return self.completion[-1] != EOS


@dataclass
class World:
    """A model on disk (the reference), two policies moved away from it, rollouts with and without tools."""

    path: Path
    reference: Qwen3ForCausalLM
    old: Qwen3ForCausalLM
    new: Qwen3ForCausalLM
    plain: list[Sample]
    tools: list[Sample]


@dataclass
class Outcome:
    """Compared values: advantage of each sample's tokens, loss, gradient by parameter name."""

    advantages: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def make_world(path: Path) -> World:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.35,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).double().save_pretrained(path)
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2", padding_side="left"
    ).save_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    old = moved(reference, 0.05, seed=1)
    return World(
        path, reference, old, moved(old, 0.05, seed=2), make_samples(tools=False), make_samples(tools=True)
    )


def moved(model: Qwen3ForCausalLM, distance: float, *, seed: int) -> Qwen3ForCausalLM:
    """A copy whose weights are shifted by noise."""
    generator = torch.Generator().manual_seed(seed)
    model = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += distance * torch.randn(parameter.shape, generator=generator)
    return model


def make_samples(*, tools: bool) -> list[Sample]:
    """Unequal lengths, one-token and truncated completions, a group without variance, tool outputs."""
    generator = torch.Generator().manual_seed(3)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    samples = []
    for group in range(GROUPS):
        prompt = tuple(integers(2, VOCABULARY, 2 + 2 * group))
        for member in range(GROUP_SIZE):
            length = 1 if (group, member) == (0, 0) else integers(3, MAX_COMPLETION_LENGTH - 1, 1)[0]
            completion = integers(2, VOCABULARY, length)
            if member != 3:
                completion[-1] = EOS
            # a tool's answer: never the first nor the last token
            mask = [int(not (tools and member % 2 and 0 < t < min(3, length - 1))) for t in range(length)]
            noise = (0.6 * torch.randn(length, generator=generator)).tolist()
            reward = 0.5 if group == 1 else integers(0, 5, 1)[0] / 4
            samples.append(Sample(prompt, tuple(completion), tuple(mask), tuple(noise), group, reward))
    return samples


def completion_log_probs(
    model: Qwen3ForCausalLM, samples: Iterable[Sample], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all tokens of the completions, one after another; each sample runs alone."""
    log_probs, entropies = [], []
    for sample in samples:
        ids = torch.tensor([sample.prompt + sample.completion])
        logits = model(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1]
        targets = torch.tensor(sample.completion)
        out = token_log_probs(logits, targets, temperature=temperature, entropy=True)
        assert out.entropy is not None
        log_probs.append(out.log_probs)
        entropies.append(out.entropy)
    return torch.cat(log_probs), torch.cat(entropies)


def loss_tokens(samples: Sequence[Sample], objective: Objective) -> Tensor:
    """Return a mask of the completions' tokens, one completion after another: True for loss tokens."""
    dropped = [objective.mask_truncated_completions and sample.truncated for sample in samples]
    masks = [
        [0] * len(s.completion) if drop else s.model_tokens for s, drop in zip(samples, dropped, strict=True)
    ]
    return torch.tensor([value for mask in masks for value in mask], dtype=torch.bool)


def our_step(
    world: World,
    samples: Sequence[Sample],
    objective: Objective,
    *,
    on_policy: bool,
    microbatches: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> tuple[Outcome, list[TokenLoss]]:
    """One accumulated update of ``world.new`` (``world.old``, if on-policy), from the same rollouts."""
    model = deepcopy(world.old if on_policy else world.new)
    keep = loss_tokens(samples, objective)
    lengths = torch.tensor([len(sample.completion) for sample in samples])
    owner = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    with torch.no_grad():
        old = completion_log_probs(world.old, samples, temperature)[0]
        ref = completion_log_probs(world.reference, samples, temperature)[0]
    sampler = old + torch.tensor([value for sample in samples for value in sample.sampler_noise])

    advantages_K = token_advantages(
        torch.tensor([sample.reward for sample in samples]),
        torch.tensor([sample.group for sample in samples]),
        owner[keep],
        objective,
        kl_penalty(old[keep], ref[keep], objective) if objective.kl_in_reward else None,
    )
    whole = owner[keep], len(samples), objective
    shares_K = batch_weights(*whole, max_completion_length=MAX_COMPLETION_LENGTH, partition=microbatches)
    entropy_K = entropy_weights(*whole, partition=microbatches)
    scale_K = None if entropy_K is None else entropy_scale(shares_K, entropy_K)
    loss_total, losses = 0.0, []
    for members in microbatches:
        tokens = torch.cat([torch.nonzero(owner == member)[:, 0] for member in members])
        kept = keep[tokens]
        chosen = (keep.cumsum(0) - 1)[tokens][kept]
        local = torch.repeat_interleave(torch.arange(len(members)), lengths[list(members)])[kept]
        new, entropy = completion_log_probs(model, [samples[member] for member in members], temperature)
        weights = shares_K[chosen]
        loss = token_loss(
            new[kept],
            new[kept].detach() if on_policy else old[tokens][kept],
            advantages_K[chosen],
            local,
            len(members),
            objective,
            ref_log_probs_K=ref[tokens][kept],
            sampler_log_probs_K=sampler[tokens][kept],
            entropy_K=entropy[kept],
            entropy_scale_K=None if scale_K is None else scale_K[chosen],
        )
        share = (weights * loss.loss_K).sum()
        share.backward()
        loss_total += float(share)
        losses.append(loss)
    per_sample = [advantages_K[owner[keep] == sample] for sample in range(len(samples))]
    return Outcome(per_sample, loss_total, gradients(model)), losses


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative_l2(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Distance of two gradients, as one long vector each, relative to theirs."""
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    return float(difference.norm() / torch.cat([value.flatten() for value in theirs.values()]).norm())


DEVIATIONS: list[tuple[str, float, float, float]] = []
"""(case, advantages, loss, gradients) of every comparison made, for the summary."""

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5


def assert_parity(name: str, ours: Outcome, theirs: Outcome) -> None:
    """Advantages and loss within 1e-5 absolute, gradients within 1e-5 relative L2, and none of them void."""
    advantages = float((torch.cat(ours.advantages) - torch.cat(theirs.advantages)).abs().max())
    loss = abs(ours.loss - theirs.loss)
    gradient = relative_l2(ours.gradients, theirs.gradients)
    DEVIATIONS.append((name, advantages, loss, gradient))
    assert all(torch.isfinite(value).all() for value in theirs.gradients.values())
    assert sum(float(value.abs().sum()) for value in theirs.gradients.values()) > 0
    assert advantages <= LOSS_TOLERANCE
    assert loss <= LOSS_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE
