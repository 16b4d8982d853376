"""The order of computation within an update: inputs of each quantity, and modules from input to output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from regress.compare.diagnosis.layer_names import LAST, layer_of, layer_order
from regress.compare.quantities import order_of
from regress.compare.verdicts.verdict import Verdict

INPUTS: Mapping[str, tuple[str, ...]] = {
    "trajectory": (),
    "coverage": ("trajectory",),
    "batch_inputs": ("trajectory", "coverage"),
    "advantages": ("trajectory", "coverage"),
    "weights": ("batch_inputs",),
    "activations": ("batch_inputs",),
    "log_probs": ("activations", "batch_inputs"),
    "entropy": ("activations",),
    "old_log_probs": ("batch_inputs",),
    "ref_log_probs": ("batch_inputs",),
    "sampler_weights": ("old_log_probs",),
    "kl": ("log_probs", "ref_log_probs"),
    "ratio": ("log_probs", "old_log_probs"),
    "policy_loss": ("ratio", "advantages", "sampler_weights", "log_probs"),
    "entropy_loss": ("entropy",),
    "token_loss": ("policy_loss", "kl", "entropy_loss"),
    "loss": ("token_loss", "weights"),
    "token_gradient": ("loss", "token_loss", "weights", "ratio"),
    "entropy_gradient": ("loss", "token_loss", "weights"),
    "token_residual": ("token_gradient", "entropy_gradient"),
    "logit_gradient": ("token_gradient", "entropy_gradient", "activations"),
    "gradient": (
        *("loss", "token_loss", "activations", "weights"),
        *("token_gradient", "entropy_gradient", "logit_gradient"),
    ),
    "grad_norm": ("gradient",),
    "optimizer": ("gradient", "grad_norm"),
    "param": ("optimizer", "gradient"),
    "metrics": ("loss", "ratio", "log_probs", "grad_norm"),
    "step_metrics": ("metrics", "advantages"),
    "replicas": ("param",),
    "invariants": (),
}
"""Inputs of each quantity within an update. Missing tokens, a break of coverage, break all that depends on them."""


def inputs_under(objective: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the log-probs that quantities before them in the order of computation are made of.

    A KL penalty in the rewards makes advantages of those that precede the updates, as far as anybody knows: they may
    where no objective is told. Rejection makes the loss mask of them. The sampler has the weights of the first update,
    so that a wrong model shows there, module by module.
    """
    found: dict[str, tuple[str, ...]] = {"sampler_log_probs": ("log_probs",), "mismatch": ("log_probs",)}
    if not objective or (objective.get("kl_placement") == "reward" and objective.get("kl_coef")):
        found["advantages"] = ("old_log_probs", "ref_log_probs")
    if objective.get("rejection") and objective.get("correction_policy") != "current":
        found["batch_inputs"] = ("old_log_probs",)
    return found


OPTIONAL = (
    *("trajectory", "coverage", "kl", "sampler_weights", "entropy_loss"),
    *("token_gradient", "entropy_gradient", "token_residual", "logit_gradient"),
    "metrics",
)
"""Quantities that not every objective or dump has."""

CARRIED = ("param", "optimizer")
"""Quantities that an update passes on to the next ones."""

_WITHIN = tuple(
    re.compile(expression)
    for expression in (
        *(
            r"input_layernorm|\.ln_1\b|attention_norm",
            r"attn\.(q|k|v|qkv)_proj|attn\.c_attn",
            r"\.(q|k)_norm\b",
        ),
        *(
            r"attn\.o_proj|attn\.c_proj|out_proj",
            r"post_attention_layernorm|\.ln_2\b|ffn_norm",
            r"\.(gate|router)\b",
        ),
        *(r"gate_proj|up_proj|gate_up_proj|\.c_fc\b|\.fc1\b", r"down_proj|\.mlp\.c_proj|\.fc2\b"),
    )
)
"""Order of modules within a layer, in the names that families of models use."""


def inputs_of(quantity: str) -> tuple[str, ...]:
    """Return all direct and indirect inputs of a quantity."""
    found: dict[str, None] = {}
    waiting = [*INPUTS.get(quantity, ())]
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found[name] = None
            waiting += INPUTS.get(name, ())
    return tuple(found)


def depth(name: str) -> tuple[int, ...]:
    """Return a key that sorts modules and their parameters from the input of a model to its output."""
    layer = layer_of(name)
    if layer is None:
        return 1, -1, len(_WITHIN)
    if layer == LAST:
        return (*layer_order(layer), int("head" in name or "logits" in name))
    within = next((i for i, part in enumerate(_WITHIN) if part.search(name)), len(_WITHIN))
    return (*layer_order(layer), within)


def dataflow_key(verdict: Verdict) -> tuple[object, ...]:
    """Return a key that sorts verdicts by when their tensor was computed.

    Activations of a microbatch are ordered by module, on whichever rank each lies, so that a tensor handed to the next
    rank (along a pipeline, or in a collective) comes before the results made of it. Gradients run backwards.
    """
    place = verdict.place
    step, update, micro, rank = (
        -1 if n is None else n for n in (place.step, place.update, place.micro, place.rank)
    )
    return step, update, order_of(verdict.quantity), micro, _within(verdict), rank


def _within(verdict: Verdict) -> tuple[int, ...]:
    if verdict.quantity == "activations":
        return depth(verdict.name)
    if verdict.quantity == "gradient":
        return tuple(-number for number in (*depth(verdict.name), 0)[:3])
    return ()


def first_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on the tensor that was computed first; the first given among equals."""
    return min(verdicts, key=dataflow_key)
