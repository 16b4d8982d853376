"""Invariants hold for what is right, and each fails for what breaks it, without any golden values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401  # names bfloat16 for numpy
import numpy as np
import pytest
import torch

from regress.compare.single_dump_units import check_records
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Coordinates, Place
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.layout import Segment, TokenLayout
from regress.replay.replay_judge import judge_rolled

CONFIG = {
    "algorithm": {"advantage": "grpo", "importance_level": "token", "old_log_probs": "recompute"},
    "data": {"group_size": 2},
}
LENGTHS = ((5, 7), (6, 4))


def records(seed: int = 0, dtype: str = "float64") -> list[Record]:
    """Two microbatches of a group each, all of whose values fit together; the policy is the one that sampled."""
    rng = np.random.default_rng(seed)
    found = []
    tokens = sum(n - 2 for lengths in LENGTHS for n in lengths)
    for micro, lengths in enumerate(LENGTHS):
        width = max(lengths)
        layout = TokenLayout((2, width), tuple(Segment(i, 0, n, i, 0) for i, n in enumerate(lengths)))
        mask = layout.attention_mask & (layout.positions >= 2)
        advantage = rng.uniform(0.5, 2)
        new = np.where(mask, -rng.exponential(1, (2, width)), 0.0).astype(dtype)
        terms = np.where(mask, rng.normal(0, 1, (2, width)), 0.0).astype(dtype)
        weights = np.where(mask, 1 / tokens, 0.0)
        place = Coordinates(0, rank=0, micro=micro)
        meta: dict[str, Any] = {"layout": layout.to_json(), "samples": [[f"g{micro}", 0], [f"g{micro}", 1]]}
        count = int(mask.sum())
        counts = {
            "num_loss_tokens": count,
            "mini_batch_loss_tokens": tokens,
            "aggregation": "token-mean",
            "weight_sum": count / tokens,
        }
        inputs = {"attention_mask": layout.attention_mask, "response_mask": mask.astype(np.int64)}
        debug = {
            "log_probs": new,
            "old_log_probs": new.copy(),
            "prob_ratio": np.where(mask, 1.0, 0.0).astype(dtype),
            "advantages": np.where(mask, np.array([[advantage], [-advantage]]), 0.0).astype(dtype),
            "weights": weights,
            "elementwise_loss": terms,
            "effective_valid": mask.astype(np.int64),
        }
        forward = {"log_probs": new, "entropy": np.where(mask, 0.5, 0.0).astype(dtype)}
        logits = {"lm_head": rng.normal(0, 1, (1, count, 8)).astype(dtype)}
        total = np.array((weights * terms.astype(np.float64)).sum(), dtype)
        found += [
            Record.of("batch_inputs", place, inputs, meta),
            Record.of("activations", place, logits, meta),
            Record.of("forward_data", place, {**forward, "response_mask": inputs["response_mask"]}, meta),
            Record.of("is_loss_debug", place, debug, meta),
            Record.of("loss", place, {"loss": total}, {**meta, **counts}),
        ]
    return found


def check(found: list[Record], config: dict[str, Any] = CONFIG) -> dict[str, Verdict]:
    return {
        verdict.name: verdict for verdict in check_records(found, "invariants", place=Place(0), config=config)
    }


def changed(
    record_type: str, name: str, change: Callable[[Array], Array], dtype: str = "float64"
) -> list[Record]:
    def of(record: Record) -> Record:
        if record.type != record_type or record.micro != 0:
            return record
        return replace(record, tensors={**record.tensors, name: change(record.tensors[name].copy())})

    return [of(record) for record in records(dtype=dtype)]


def put(value: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array[1, 3] = value
        return array

    return change


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_right_holds(dtype: str) -> None:
    for seed in range(20):
        found = check(records(seed, dtype))
        assert [verdict.detail for verdict in found.values() if not verdict.ok] == []
        names = "masks tokens weight_sum advantages log_probs certain entropy on_policy ratio loss"
        assert {*found} == {*names.split()}
        assert all(verdict.count for verdict in found.values())


def in_padding(mask: Array) -> Array:
    mask[0, -1] = 1
    return mask


BROKEN = {
    "masks": changed("batch_inputs", "response_mask", in_padding),
    "advantages": changed("is_loss_debug", "advantages", lambda a: a + 1e-6),
    "log_probs": changed("forward_data", "log_probs", put(1e-9)),
    "entropy": changed("forward_data", "entropy", put(2.2)),
    "on_policy": changed("is_loss_debug", "old_log_probs", put(-0.5)),
    "ratio": changed("is_loss_debug", "prob_ratio", put(1.0 + 1e-9)),
    "loss": changed("is_loss_debug", "elementwise_loss", put(3.0)),
    "tokens": [r for r in records() if r.micro == 0],
    "weight_sum": [
        replace(r, meta={**r.meta, "weight_sum": 1.0}) if r.type == "loss" else r for r in records()
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_with_its_place(name: str) -> None:
    verdict = check(BROKEN[name])[name]
    assert not verdict.ok
    assert verdict.worst is not None
    assert verdict.worst.where in verdict.detail


def of_samples(*, empty: bool) -> list[Record]:
    """Records of a mean over samples, with weights that add up to 1; of an empty one no token is in the loss."""

    def of(record: Record) -> Record:
        if record.type == "loss":
            return replace(record, meta={**record.meta, "aggregation": "seq-mean-token-mean"})
        name = {"is_loss_debug": "effective_valid"}.get(record.type, "response_mask")
        if not empty or record.micro != 0 or name not in record.tensors:
            return record
        mask = record.tensors[name].copy()
        mask[1] = 0
        return replace(record, tensors={**record.tensors, name: mask})

    return [of(record) for record in records()]


@pytest.mark.parametrize(
    ("empty", "algorithm", "expected"),
    [
        (False, {}, True),
        (True, {}, None),  # nobody tells whether samples without loss tokens count
        (True, {"count_empty_rows": False}, True),
        (True, {"advantage": "grpo"}, False),  # they count by default
    ],
)
def test_a_sum_of_weights_is_asked_of_who_tells_what_counts(
    empty: bool, algorithm: dict[str, Any], expected: bool | None
) -> None:
    found = check(of_samples(empty=empty), {**CONFIG, "algorithm": algorithm}).get("weight_sum")
    assert (found and found.ok) == expected


@pytest.mark.parametrize(
    "stage_and_name", [("is_loss_debug", "log_probs"), ("is_loss_debug", "elementwise_loss")]
)
def test_a_rolled_tensor_fails(stage_and_name: tuple[str, str]) -> None:
    found = check(changed(*stage_and_name, lambda a: np.roll(a, 1, axis=1)))
    assert any(not verdict.ok for verdict in found.values())


def in_base_2(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs of the last column, as kernels with exp2 compute them."""
    scaled = logits * torch.tensor(1 / math.log(2), dtype=logits.dtype)
    top = scaled.amax(-1)
    normal = top + torch.log2(torch.exp2(scaled - top[:, None]).sum(-1))
    return logits[:, -1] - normal * torch.tensor(math.log(2), dtype=logits.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_may_round_above_0_and_no_further(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 50, generator=generator, dtype=torch.float64).mul(8).to(dtype)
    logits[:, -1] = logits.amax(-1) + 4 + 50 * torch.rand(400, generator=generator).to(dtype)
    top = float(in_base_2(logits).max())
    assert top > 0, "nothing is rounded"

    def verdict(value: float) -> Verdict:
        return check(changed("forward_data", "log_probs", put(value), str(dtype).split(".")[1]))["log_probs"]

    assert verdict(top).ok
    partial = logits[:, -1] - logits[:, :-1].logsumexp(-1)  # without the column of the target
    assert not verdict(float(partial.max())).ok


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_old_log_probs_of_the_same_weights_may_be_computed_in_another_order(dtype: str) -> None:
    spacing = float(np.finfo(dtype).eps)
    moved = changed("is_loss_debug", "old_log_probs", lambda a: a * (1 + spacing), dtype)
    assert check(moved)["on_policy"].ok
    assert not check(changed("is_loss_debug", "old_log_probs", lambda a: a * 1.001, dtype))["on_policy"].ok


def test_log_probs_on_policy_are_as_coarse_as_the_model() -> None:
    """A model in bfloat16 whose log-probs are stored in float32."""
    moved = changed("is_loss_debug", "old_log_probs", lambda a: a * (1 + 2.0**-9), "float32")
    assert not check(moved)["on_policy"].ok
    assert check(moved, CONFIG | {"model": {"dtype": "bfloat16"}})["on_policy"].ok
    wrong = changed("is_loss_debug", "old_log_probs", lambda a: a * 2, "float32")
    assert not check(wrong, CONFIG | {"model": {"dtype": "bfloat16"}})["on_policy"].ok


def test_an_entropy_below_zero_is_none() -> None:
    assert not check(changed("forward_data", "entropy", put(-0.1)))["entropy"].ok


def test_nothing_is_asked_of_an_objective_that_is_unknown() -> None:
    wrong = changed("is_loss_debug", "prob_ratio", put(1.5))
    found = check(wrong, {})
    assert not {"ratio", "on_policy", "advantages"} & {*found}
    assert all(verdict.ok for verdict in found.values())


def test_ranks_that_repeat_each_other_are_found_and_compared() -> None:
    twins = [replace(record, rank=rank) for record in records() for rank in (0, 1)]
    assert all(verdict.ok for verdict in check_records(twins, "invariants", place=Place(0), config=CONFIG))
    assert all(verdict.ok for verdict in check_records(twins, "replicas", place=Place(0), config=CONFIG))
    odd = [
        r
        if (r.rank, r.type) != (1, "is_loss_debug")
        else replace(r, tensors={**r.tensors, "weights": r.tensors["weights"] * 2})
        for r in twins
    ]
    failed = [v for v in check_records(odd, "replicas", place=Place(0), config=CONFIG) if not v.ok]
    assert {verdict.quantity for verdict in failed} == {"replicas"}


def test_a_tolerance_under_which_rolled_values_pass_is_refused() -> None:
    truth = {"log_probs": {"log_probs": np.array([-1.0, -2.0, -1.5])}}
    assert judge_rolled([truth], lambda _: Tolerance(0.1), (0, None)).ok
    verdict = judge_rolled([truth], lambda _: Tolerance(0.6), (0, None))
    assert not verdict.ok
    assert verdict.detail.startswith("values that are rolled by one place pass: log_probs (0.5 of the scale")
    constant = {"weights": {"weights": np.ones(3)}}
    assert judge_rolled([constant], lambda _: Tolerance(9.0), (0, None)).ok
