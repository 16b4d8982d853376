"""An update of random values that its objective and optimizer made, and the changes that diagnosis tries on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import torch

from regress.compare.diagnosis.related_values import RelatedValues
from regress.compare.diagnosis.token_counterfactuals import TokenCounterfactuals
from regress.compare.diagnosis.token_formulas import TokenFormulas
from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses
from regress.compare.dumps.adamw_settings import CLIP_EPS
from regress.grpo.objective import Objective
from regress.grpo.objective_evaluation import Samples, advantages_of, gradients_of, loss_of, weights_of
from regress.layout import TokenFrame

LENGTHS, VOCABULARY, REWARDS = (6, 9, 4, 7), 11, (1.0, 0.0, 0.3, 1.0)
TEMPERATURE = 0.8
KEYS = tuple((f"g{number // 2}", number % 2) for number in range(len(LENGTHS)))
FRAME = TokenFrame(KEYS, LENGTHS)
COEFFICIENTS = {"kl_coef": 0.1, "entropy_coef": 0.02}
SETTINGS = {"learning_rate": 0.02, "eps": 1e-8, "weight_decay": 0.03, "betas": [0.9, 0.99]}


def objective_of(**section: Any) -> Objective:
    """Return an objective in which every term of the loss counts."""
    return Objective(**{**COEFFICIENTS, "dro_beta": 0.5 if section.get("loss") == "dro" else None, **section})


def made(objective: Objective) -> dict[str, dict[str, Any]]:
    """Return what an objective makes of random log-probs and rewards, by quantity and name."""
    torch.manual_seed(3)
    size = FRAME.size
    logits = torch.randn(size, VOCABULARY, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (size,))
    normal = (logits / TEMPERATURE).log_softmax(-1)
    policy = normal.gather(1, ids[:, None])[:, 0]
    old, reference = (policy + 0.4 * torch.randn(2, size, dtype=torch.float64)).unbind()
    values = {
        "log_probs": policy,
        "old_log_probs": old,
        "ref_log_probs": reference,
        "entropy": -(normal.exp() * normal).sum(-1),
        "rewards": torch.tensor([*REWARDS], dtype=torch.float64),
        "groups": torch.tensor([0, 0, 1, 1]),
        "sampler_log_probs": old + 0.1 * torch.randn(size, dtype=torch.float64),
    }
    samples = samples_of()
    for part in (advantages_of, weights_of, loss_of, gradients_of):
        values |= part(values, samples, objective)
    found = {name: {name: one.detach().numpy()} for name, one in values.items() if len(one) == size}
    own = logits.requires_grad_()
    normal = (own / TEMPERATURE).log_softmax(-1)
    by_log_probs = (values["token_gradient"] * normal.gather(1, ids[:, None])[:, 0]).sum()
    by_entropy = (values["entropy_gradient"] * -(normal.exp() * normal).sum(-1)).sum()
    found["logit_gradient"] = {"logits": torch.autograd.grad(by_log_probs + by_entropy, own)[0].numpy()}
    found["activations"] = {"lm_head": logits.detach().numpy()}
    found["batch_inputs"] = {"input_ids": ids.numpy()}
    return found


def samples_of() -> Samples:
    """Return the samples of the update, which is a rollout of its own."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return Samples(sequence, len(LENGTHS), torch.arange(len(LENGTHS)), whole=True, length=9)


def counterfactuals_of(
    objective: Objective, truth: Mapping[str, Mapping[str, Any]], *, known: bool = True
) -> TokenCounterfactuals:
    """Return the counterfactuals of an update; ``known=False`` for one whose configuration nobody tells."""
    rewards = dict(zip(KEYS, REWARDS, strict=True))
    beside = RelatedValues(rewards, sampler=truth["sampler_log_probs"]["sampler_log_probs"])
    logits = truth["activations"]["lm_head"], truth["batch_inputs"]["input_ids"]
    section = asdict(objective) if known else {}
    mask = np.ones(FRAME.size, bool)
    return TokenCounterfactuals(TokenFormulas(truth, FRAME, mask, section, beside, logits, length=9))


def updated(
    *, steps: int = 4, coupled: bool = False, counter: int = 0, limit: float | None = None
) -> dict[str, Any]:
    """Return state and parameters after some updates by AdamW, the last one with these mistakes.

    Args:
        limit: norm that gradients are clipped to.
    """
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.02, eps=1e-8, betas=(0.9, 0.99), weight_decay=0.03)
    for step in range(steps):
        weight.grad = gradient = torch.randn(5, 3, dtype=torch.float64)
        if limit is not None:
            weight.grad = gradient * min(1.0, limit / (float(gradient.norm()) + CLIP_EPS))
        if step == steps - 1:
            if counter:
                optimizer.state[weight]["step"] += counter
            if coupled:
                optimizer.param_groups[0]["weight_decay"] = 0.0
                weight.grad = gradient + 0.03 * weight.detach()
        optimizer.step()
    state = optimizer.state[weight]
    return {
        "gradient": {"w": gradient.numpy()},
        "grad_norm": {"grad_norm": np.asarray(np.linalg.norm(gradient.numpy()))},
        "param": {"w": weight.detach().numpy()},
        "optimizer": {f"w/{key}": np.asarray(state[key]) for key in ("exp_avg", "exp_avg_sq", "step")},
    }


@cache
def changes() -> frozenset[tuple[str, str]]:
    """Return the quantity and the id of every change that is tried, whatever the loss."""
    return frozenset(_changes())


def _changes() -> Iterator[tuple[str, str]]:
    corrected = {"sampler_correction": "token_truncate", "correction_max": 1.1}
    sections: list[dict[str, Any]] = [
        {"loss": "cispo", "clip_high": 0.3},
        {"clip_high": 0.3, **corrected},
        {"importance_level": "sequence", "advantage": "reinforce_plus_plus", "gamma": 0.9},
        {"loss": "reinforce", "correction_policy": "current", **corrected},
    ]
    for section in sections:
        objective = objective_of(**section)
        truth = made(objective)
        known = counterfactuals_of(objective, truth)
        for quantity in (*truth, "advantages"):
            yield from ((quantity, str(found.numbers.get("id", ""))) for found in known.of(quantity))
    update = UpdateHypotheses(updated(), {**SETTINGS, "max_grad_norm": 0.5, "eps": 1e-3})
    for quantity, name in (("optimizer", "w/exp_avg"), ("optimizer", "w/exp_avg_sq"), ("param", "w")):
        for found in update.of(quantity, name):
            yield quantity, str(found.numbers.get("id", found.numbers["what"]))
