"""Weights of losses and entropies against loops over plain numbers, written from the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regress.grpo.argument_checks import InputError
from regress.grpo.fields import ObjectiveFields
from regress.grpo.loss_aggregation import batch_weights, entropy_scale, entropy_weights, token_weights
from tests.unit.grpo.plain_losses import LENGTHS, SEQUENCE

COMPLETIONS = [5, 2, 1, 4, 6]
PARTITION = [[4, 0], [], [1], [2, 3]]
RULES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LIMIT = 7


def weight(rule: str, length: int, lengths: list[int], norm: int, empty: bool) -> float:
    """Weight of a token of a sample of some length among samples of these lengths."""
    samples = len(lengths) if empty else sum(one > 0 for one in lengths)
    return {
        "token-mean": 1 / max(sum(lengths), 1),
        "token-sum": 1.0,
        "seq-mean-token-mean": 1 / (samples * length),
        "seq-mean-token-sum": 1 / samples,
        "seq-mean-token-sum-norm": 1 / (samples * norm),
    }[rule]


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("norm", [None, 3])
@pytest.mark.parametrize("rule", RULES)
def test_weights_of_a_batch(rule: str, norm: int | None, empty: bool) -> None:
    objective = ObjectiveFields(aggregation=rule, norm_length=norm, count_empty_rows=empty)
    sequence = torch.tensor(SEQUENCE)
    found = token_weights(sequence, 5, objective, max_completion_length=LIMIT)
    wanted = [weight(rule, LENGTHS[s], LENGTHS, norm or LIMIT, empty) for s in SEQUENCE]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(wanted, rel=1e-15)
    whole = batch_weights(sequence, 5, objective, max_completion_length=LIMIT, partition=PARTITION)
    assert whole.tolist() == found.tolist()


@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize(("scope", "ranks"), [("microbatch", 1), ("microbatch", 2), ("microbatch_sum", 2)])
@pytest.mark.parametrize("rule", RULES)
def test_weights_of_microbatches(rule: str, scope: str, ranks: int, longest: bool) -> None:
    fields: dict[str, Any] = {"aggregation": rule, "denominator_scope": scope}
    if longest:
        fields["norm_rule"] = "longest"
    found = batch_weights(
        torch.tensor(SEQUENCE),
        5,
        ObjectiveFields(**fields),
        max_completion_length=LIMIT,
        partition=PARTITION,
        ranks=ranks,
        completion_lengths=COMPLETIONS,
    )
    divisor = 3 if scope == "microbatch" else ranks  # a part without samples is none
    wanted = []
    for sample in SEQUENCE:
        part = next(part for part in PARTITION if sample in part)
        norm = max(COMPLETIONS[one] for one in part) if longest else LIMIT
        lengths = [LENGTHS[one] for one in part]
        wanted.append(weight(rule, LENGTHS[sample], lengths, norm, True) / divisor)
    assert found.tolist() == pytest.approx(wanted, rel=1e-15)


def test_the_longest_completion_of_a_microbatch_divides_a_whole_batch() -> None:
    objective = ObjectiveFields(aggregation="seq-mean-token-sum-norm", norm_rule="longest")
    known: dict[str, Any] = {"max_completion_length": LIMIT, "partition": PARTITION}
    found = batch_weights(torch.tensor(SEQUENCE), 5, objective, completion_lengths=COMPLETIONS, **known)
    norms = {0: 6, 4: 6, 2: 4, 3: 4}
    assert found.tolist() == pytest.approx([1 / (5 * norms[s]) for s in SEQUENCE], rel=1e-15)
    with pytest.raises(InputError, match="completion_lengths is missing"):
        batch_weights(torch.tensor(SEQUENCE), 5, objective, **known)


@pytest.mark.parametrize("kept", [None, [True, False, True] + [True] * 4 + [False, False, False]])
@pytest.mark.parametrize("scope", ["global", "microbatch"])
def test_weights_of_entropies(scope: str, kept: list[bool] | None) -> None:
    objective = ObjectiveFields(entropy_coef=0.1, entropy_aggregation="token-mean", entropy_scope=scope)
    mask = None if kept is None else torch.tensor(kept)
    found = entropy_weights(torch.tensor(SEQUENCE), 5, objective, partition=PARTITION, kept_K=mask)
    counted = kept or [True] * len(SEQUENCE)
    wanted = []
    for sample, one in zip(SEQUENCE, counted, strict=True):
        part = next(part for part in PARTITION if sample in part) if scope == "microbatch" else range(5)
        tokens = sum(yes for s, yes in zip(SEQUENCE, counted, strict=True) if s in part)
        parts = 3 if scope == "microbatch" else 1
        wanted.append(one / max(tokens, 1) / parts)
    assert found is not None
    assert found.tolist() == pytest.approx(wanted, rel=1e-15)
    weights = torch.full((len(SEQUENCE),), 0.25, dtype=torch.float64)
    assert entropy_scale(weights, found).tolist() == [4 * one for one in found.tolist()]


@pytest.mark.parametrize("fields", [{"entropy_coef": 0.1}, {"entropy_aggregation": "token-mean"}])
def test_entropies_without_weights_of_their_own(fields: dict[str, Any]) -> None:
    assert entropy_weights(torch.tensor(SEQUENCE), 5, ObjectiveFields(**fields), partition=PARTITION) is None


def test_nothing_to_weigh() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for rule in RULES:
        objective = ObjectiveFields(aggregation=rule, count_empty_rows=False)
        assert token_weights(none, 2, objective, max_completion_length=3).tolist() == []
    with pytest.raises(InputError, match="length 0 cannot divide"):
        token_weights(
            torch.tensor(SEQUENCE),
            5,
            ObjectiveFields(aggregation="seq-mean-token-sum-norm"),
            max_completion_length=0,
        )
    one = ObjectiveFields(aggregation="seq-mean-token-sum-norm")
    assert token_weights(torch.tensor([0]), 1, one, max_completion_length=1).tolist() == [1.0]
    masked = ObjectiveFields(entropy_coef=0.1, entropy_aggregation="token-mean")
    kept = torch.zeros(len(SEQUENCE), dtype=torch.bool)
    for scope in ("global", "microbatch"):
        masked.entropy_scope = scope
        found = entropy_weights(torch.tensor(SEQUENCE), 5, masked, partition=PARTITION, kept_K=kept)
        assert found is not None
        assert found.tolist() == [0.0] * len(SEQUENCE)


@pytest.mark.parametrize("rule", RULES)
def test_a_single_token_weighs_one(rule: str) -> None:
    objective = ObjectiveFields(aggregation=rule, norm_length=1)
    assert token_weights(torch.tensor([0]), 1, objective, max_completion_length=9).tolist() == [1.0]
