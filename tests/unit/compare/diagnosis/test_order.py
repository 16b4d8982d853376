"""The first divergence under an objective: what advantages, masks and a sampler's log-probs are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from regress.compare.diagnosis.dataflow import inputs_under
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place

PENALTY = {"kl_placement": "reward", "kl_coef": 0.1}
REJECTION = {"rejection": "token_k1:0.4:2.5"}
ALWAYS = {"sampler_log_probs", "mismatch"}


def drift(quantity: str, name: str = "", **place: Any) -> Verdict:
    return Verdict(Status.DRIFT, quantity, name or quantity, Place(**{"step": 0, "rank": 0, **place}))


def first(*failed: Verdict, **objective: Any) -> str:
    found = find_divergence(failed, RunContext(config={"algorithm": objective}))
    assert found is not None
    return f"{found.first.quantity} {found.first.name} at {found.first.place}"


@pytest.mark.parametrize(
    ("objective", "quantity", "made_of"),
    [
        (PENALTY, "advantages", {"old_log_probs", "ref_log_probs"}),
        ({**PENALTY, "kl_coef": 0.0}, "advantages", set()),
        ({**PENALTY, "kl_placement": "loss"}, "advantages", set()),
        (REJECTION, "batch_inputs", {"old_log_probs"}),
        ({**REJECTION, "correction_policy": "old"}, "batch_inputs", {"old_log_probs"}),
        ({**REJECTION, "correction_policy": "current"}, "batch_inputs", set()),
        ({"rejection": None}, "batch_inputs", set()),
        ({}, "advantages", {"old_log_probs", "ref_log_probs"}),  # as far as anybody knows
        ({"kl_coef": 0.1}, "sampler_log_probs", {"log_probs"}),
        ({"kl_coef": 0.1}, "mismatch", {"log_probs"}),
    ],
)
def test_the_objective_says_what_is_made_of_log_probs(
    objective: Mapping[str, Any], quantity: str, made_of: set[str]
) -> None:
    found = inputs_under(objective)
    assert {*found.get(quantity, ())} == made_of
    assert found.keys() - ALWAYS <= {quantity}


def test_advantages_of_penalized_rewards_come_after_the_log_probs_that_they_compare() -> None:
    failed = drift("advantages", update=0), drift("ref_log_probs", update=0)
    assert first(*failed, **PENALTY).startswith("ref_log_probs")
    assert first(*failed).startswith("ref_log_probs")  # of which they may be made
    assert first(*failed, kl_coef=0.1).startswith("advantages")
    assert first(failed[0], **PENALTY).startswith("advantages")
    assert first(failed[0], drift("kl", update=0), **PENALTY).startswith("advantages")


def test_a_wrong_model_comes_before_the_log_probs_that_a_penalty_compares() -> None:
    failed = [drift(quantity, update=0) for quantity in ("advantages", "old_log_probs", "log_probs")]
    layer = drift("activations", "model.layers.0", update=0, micro=0)
    assert first(*failed, layer, **PENALTY).startswith("activations model.layers.0")
    assert first(failed[0], layer, **PENALTY).startswith("advantages")  # whose own inputs hold


def test_log_probs_of_another_update_or_step_explain_nothing() -> None:
    wrong = drift("advantages", update=0)
    for other in (drift("old_log_probs", update=1), drift("old_log_probs", step=1, update=0)):
        assert first(wrong, other, **PENALTY).startswith("advantages")


def test_a_mask_of_rejected_tokens_comes_after_the_log_probs_that_it_looks_at() -> None:
    mask = drift("batch_inputs", "response_mask", update=0, micro=0)
    old = drift("old_log_probs", update=0, micro=1)
    assert first(mask, old, **REJECTION).startswith("old_log_probs")
    assert first(mask, old).startswith("batch_inputs")
    assert first(mask, old, **REJECTION, correction_policy="current").startswith("batch_inputs")


def test_other_inputs_of_the_batch_are_not_made_of_log_probs() -> None:
    ids = drift("batch_inputs", "input_ids", update=0, micro=0)
    assert first(ids, drift("old_log_probs", update=0, micro=1), **REJECTION).startswith(
        "batch_inputs input_ids"
    )


def test_a_microbatch_with_another_mask_tells_nothing_of_the_inputs_of_the_mask() -> None:
    mask = drift("batch_inputs", "response_mask", update=0, micro=0)
    assert first(mask, drift("old_log_probs", update=0, micro=0), **REJECTION).startswith("batch_inputs")


def test_the_log_probs_of_a_sampler_come_after_those_of_the_first_update() -> None:
    sampler = drift("sampler_log_probs")
    layer = drift("activations", "model.layers.0", update=0, micro=0)
    model = drift("log_probs", update=0, micro=0)
    assert first(sampler, layer, model).startswith("activations model.layers.0")
    assert first(sampler, layer).startswith("sampler_log_probs")
    assert first(sampler, drift("log_probs", update=1, micro=0)).startswith("sampler_log_probs")


def test_what_follows_from_reordered_inputs_is_counted_as_a_consequence() -> None:
    failed = [drift("advantages", update=0), drift("ref_log_probs", update=0)]
    found = find_divergence(failed, RunContext(config={"algorithm": PENALTY}))
    assert found is not None
    assert (found.downstream, found.independent) == ({"advantages": 1}, {})


def test_the_tensor_that_holds_is_the_same_in_every_process() -> None:
    """Catches a name that the hash seed of the process chooses among gradients at one depth."""
    for layer in range(8):
        attention = f"model.layers.{layer}.self_attn"
        behind = [
            replace(drift("gradient", f"{attention}.{name}_norm.weight"), status=Status.OK) for name in "qk"
        ]
        found = find_divergence([*behind, drift("gradient", f"{attention}.q_proj.weight")])
        assert found is not None
        assert found.held == (f"gradient {attention}.k_norm.weight",)
