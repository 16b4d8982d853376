"""Gradients of tokens are judged at every token, those that the loss leaves out included, and named by formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.update_judge import judge_update
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.layout import BatchPlan

LENGTHS = (9, 12, 7, 11, 8, 12)
PLAN = BatchPlan(micro_batch_size=3)
CONFIG = {
    "algorithm": {
        "kl_coef": 0.1,
        "kl_estimator": "k3",
        "kl_placement": "loss",
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
}
Change = Callable[[Array, Array], Array]


@pytest.fixture
def judged(make_world: Any, tolerances: Any) -> Callable[[str, Change], list[Verdict]]:
    """``judged(tensor, change)``: verdicts after ``change(values, loss_mask)`` of it in every microbatch."""

    def run(tensor: str, change: Change) -> list[Verdict]:
        world = make_world(LENGTHS)
        with_terms(world)
        records: list[Record] = []
        for record in world.records(PLAN):
            if tensor in record.tensors and record.type == "token_gradient":
                (mask,) = (
                    other.tensors["response_mask"]
                    for other in world.records(PLAN)
                    if (other.type, other.micro) == ("batch_inputs", record.micro)
                )
                values = change(record.tensors[tensor].copy(), mask.astype(bool))
                record = replace(record, tensors={**record.tensors, tensor: values})
            records.append(record)
        return judge_update(
            records,
            world.truth,
            world.frame,
            tolerances,
            place=Place(0),
            planned=world.planned(PLAN),
            config=CONFIG,
        )

    return run


def with_terms(world: Any) -> None:
    """Make the gradient by log-probs that of a KL term (k3) and something else."""
    gap = world.token("log_probs") - world.token("ref_log_probs")
    world.truth["token_gradient"]["token_gradient"] = np.where(
        world.loss_mask,
        world.token("weights")
        * (0.1 * (1 - np.exp(-gap)) - world.token("advantages") * world.token("ratio")),
        0.0,
    )


def told(verdicts: list[Verdict]) -> tuple[str, list[str]]:
    """Quantity of the first divergence, and the rules."""
    divergence = find_divergence(verdicts)
    assert divergence is not None
    return divergence.first.quantity, [diagnosis.rule for diagnosis in diagnose(divergence)]


def test_right_gradients_pass(judged: Callable[[str, Change], list[Verdict]]) -> None:
    found = judged("token_gradient", lambda values, _: values)
    assert all(verdict.ok for verdict in found)
    assert {"token_gradient", "entropy_gradient", "logit_gradient"} <= {verdict.quantity for verdict in found}


@pytest.mark.parametrize("tensor", ["token_gradient", "entropy_gradient"])
def test_a_gradient_at_tokens_that_the_mask_leaves_out_is_found(
    tensor: str, judged: Callable[[str, Change], list[Verdict]]
) -> None:
    """As where an entropy bonus is summed over the prompt, too: at loss tokens everything is right."""
    found = judged(tensor, lambda values, mask: np.where(mask, values, 0.01))
    assert told(found) == (tensor, ["gradient-of-masked-tokens"])
    assert found[0].ok  # nothing before it fails


def test_one_gradient_at_one_prompt_token_is_found(judged: Callable[[str, Change], list[Verdict]]) -> None:
    def change(values: Array, mask: Array) -> Array:
        values[0, 1] = 1e-9 if not mask[0, 1] else values[0, 1] + 1e-9
        return values

    found = judged("token_gradient", change)
    assert told(found)[0] == "token_gradient"


@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0, 0.37])
def test_a_factor_is_said_and_no_term_is_blamed(
    factor: float, judged: Callable[[str, Change], list[Verdict]]
) -> None:
    wanted = {0.0: "loss-detached", 2.0: "token-gradient-power-of-two", -1.0: "token-gradient-sign"}
    found = told(judged("token_gradient", lambda values, _: values * factor))
    assert found[1][0] == wanted.get(factor, "token-gradient-scale")
    assert not {"kl-detached", "policy-loss-detached", "ratio-not-in-the-gradient"} & {*found[1]}


def test_noise_is_blamed_on_no_term(judged: Callable[[str, Change], list[Verdict]]) -> None:
    rng = np.random.default_rng(0)
    noisy = judged("token_gradient", lambda v, mask: np.where(mask, v * rng.uniform(0.5, 2.0, v.shape), 0.0))
    assert told(noisy) == ("token_gradient", ["token-gradient"])


def test_a_term_that_is_missing_at_some_tokens_only_is_not_called_detached(
    make_world: Any, judged: Callable[[str, Change], list[Verdict]]
) -> None:
    """Where half of the tokens are as if KL were detached and the others are right, something else is wrong."""
    world = make_world(LENGTHS)
    gap = world.token("log_probs") - world.token("ref_log_probs")
    slopes = 0.1 * world.token("weights") * (1 - np.exp(-gap))
    assert np.abs(slopes[world.loss_mask]).min() > 1e-6
    layouts = world.layouts(PLAN)
    number = iter(range(len(layouts)))

    def change(values: Array, mask: Array) -> Array:
        local = layouts[next(number)].scatter(np.where(world.loss_mask, slopes, 0.0), world.frame.offsets)
        local[:, 1::2] = 0.0
        return values - local

    assert told(judged("token_gradient", change)) == ("token_gradient", ["token-gradient"])
    whole = iter(range(len(layouts)))
    everywhere = judged(
        "token_gradient",
        lambda values, _: (
            values - layouts[next(whole)].scatter(np.where(world.loss_mask, slopes, 0.0), world.frame.offsets)
        ),
    )
    assert told(everywhere) == ("token_gradient", ["kl-detached"])
