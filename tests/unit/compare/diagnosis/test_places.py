"""A cause that would reach all ranks and microbatches is named only where all of them show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.diagnosis.common_patterns import find_patterns
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place

TIGHT = Tolerance(1e-12, reason="a test")
SCENE = RunContext(world_size=2, micros=2, mesh={"dp": 2})
PLACES = [(rank, micro) for rank in range(2) for micro in range(2)]
NUMBERS = {"scaled:world_size", "scaled:mesh_dp", "scaled:micros"}


def times(
    factor: float,
    rank: int,
    micro: int | None,
    *,
    quantity: str = "token_gradient",
    size: int = 20,
    scale: float = 3.0,
) -> Verdict:
    """Return the verdict on golden values times a factor; a size of 0 stands for values that are all zero.

    Args:
        scale: largest golden value of all places, which the tolerance is a part of.
    """
    golden = np.random.default_rng([rank, micro or 0]).standard_normal(max(size, 20)) * bool(size)
    place = Place(0, None, rank, micro)
    found = judge_tensor(
        factor * golden, golden, TIGHT, quantity=quantity, name=quantity, place=place, scale=scale
    )
    if found.ok:
        return found
    around = FailureContext().affected(factor * golden, golden, factor * golden != golden, None, 1e-12)
    return Verdict(**{**vars(found), "affected": around})


def ids(verdicts: Sequence[Verdict], scene: RunContext = SCENE) -> set[str]:
    failed = [verdict for verdict in verdicts if not verdict.ok]
    return {pattern.id for pattern in find_patterns(failed, verdicts, scene)}


def rules(*verdicts: Verdict, scene: RunContext = SCENE) -> list[str]:
    found = find_divergence(verdicts, scene)
    assert found is not None
    return [one.rule for one in diagnose(found, scene)]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(hit=st.sets(st.sampled_from(PLACES), min_size=1), factor=st.sampled_from([2.0, 0.5]))
def test_a_number_of_ranks_or_microbatches_reaches_all_of_them(hit: set[Any], factor: float) -> None:
    found = ids([times(factor if place in hit else 1.0, *place) for place in PLACES])
    assert {"scaled", "scaled:power_of_two"} <= found
    assert found & NUMBERS == (NUMBERS if len(hit) == len(PLACES) else set())


def test_one_microbatch_that_goes_back_twice_is_no_average_over_ranks() -> None:
    told = rules(*(times(2.0 if place == (1, 1) else 1.0, *place) for place in PLACES))
    assert told[0] == "token-gradient-power-of-two"
    assert not {"token-gradient-of-ranks", "token-gradient-of-microbatches"} & {*told}
    every = rules(*(times(2.0, *place) for place in PLACES))
    assert {"token-gradient-of-ranks", "token-gradient-of-microbatches"} <= {*every}


def test_a_microbatch_whose_values_are_zero_tells_nothing_of_a_factor() -> None:
    silent = times(2.0, 1, 1, size=0)
    assert silent.ok
    assert ids([silent, *(times(2.0, *place) for place in PLACES[:-1])]) >= NUMBERS


def test_a_place_that_holds_by_its_wide_tolerance_alone_tells_nothing_of_a_factor() -> None:
    small = times(2.0, 1, 1, scale=1e13)
    assert small.ok
    assert ids([small, *(times(2.0, *place) for place in PLACES[:-1])]) >= NUMBERS


def test_ranks_with_other_numbers_of_microbatches_have_other_factors() -> None:
    found = ids([times(2.0, *place) for place in PLACES[:-1]])
    assert "scaled:world_size" in found
    assert "scaled:micros" not in found


ADAPTERS = [
    f"model.layers.{layer}.self_attn.q_proj.lora_{side}.default.weight" for layer in (0, 1) for side in "AB"
]
WHOLE = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]


def gradients(names: Sequence[str], factor: float = 0.5, silent: str = "-") -> list[Verdict]:
    """Return verdicts on gradients times a factor; those whose names have a part are zero."""
    verdicts = [
        times(
            factor,
            0,
            None,
            quantity="gradient",
            size=20 * (silent not in name),
            scale=3.0 * (silent not in name),
        )
        for name in names
    ]
    return [replace(one, name=name) for one, name in zip(verdicts, names, strict=True)]


ALONE = RunContext(world_size=1, micros=2)
LOSS = Verdict(Status.OK, "loss", "loss", Place(0, None, 0, 0), count=4)


@pytest.mark.parametrize("silent", ["-", "lora_A"])
@pytest.mark.parametrize("before", [(), (LOSS,)])
@pytest.mark.parametrize("scene", [ALONE, RunContext(world_size=2, micros=1, mesh={"dp": 2})])
def test_a_factor_of_adapters_alone_may_be_their_scale(
    silent: str, before: Sequence[Verdict], scene: RunContext
) -> None:
    told = rules(*before, *gradients(ADAPTERS, silent=silent), scene=scene)
    assert told == ["gradient-of-adapters"]


def test_a_factor_of_more_than_adapters_is_not_their_scale() -> None:
    every = [LOSS, *gradients([*ADAPTERS, *WHOLE], silent="lora_A")]
    assert rules(*every, scene=ALONE)[0] == "gradient-divided-by-microbatches"
    some = [LOSS, *gradients(ADAPTERS), *gradients(WHOLE, factor=1.0)]
    assert not {"gradient-of-adapters", "gradient-divided-by-microbatches"} & {*rules(*some, scene=ALONE)}


def test_accumulation_is_told_only_behind_a_loss_that_holds() -> None:
    assert rules(LOSS, *gradients(WHOLE), scene=ALONE)[0] == "gradient-divided-by-microbatches"
    assert rules(*gradients(WHOLE), scene=ALONE) == ["gradient-size-of-microbatches"]


@pytest.mark.parametrize(
    ("quantity", "rule"),
    [
        ("weights", "weights-world-size"),
        ("gradient", "gradient-averaged-over-ranks"),
        ("loss", "loss-of-ranks"),
    ],
)
def test_a_rank_that_holds_speaks_against_every_rule_of_ranks(quantity: str, rule: str) -> None:
    held = [times(1.0, rank, None, quantity="gradient") for rank in range(2)] if quantity == "loss" else []
    every = [times(2.0, rank, None, quantity=quantity) for rank in range(2)]
    assert rule in rules(*every, *held)
    assert rule not in rules(times(1.0, 0, None, quantity=quantity), every[1], *held)


@pytest.mark.parametrize("dimension", ["cp", "tp", "pp", "ep"])
def test_a_module_on_ranks_that_share_it_may_be_off_by_what_a_rank_makes_itself(dimension: str) -> None:
    wrong = times(3.0, 1, 0, quantity="activations")
    wrong = Verdict(**{**vars(wrong), "name": "model.layers.1", "alpha": None, "residual": None})
    golden = np.ones(3)
    inputs = [
        judge_tensor(golden, golden, TIGHT, quantity=quantity, name=name, place=Place(0, None, rank, 0))
        for rank, (quantity, name) in enumerate(
            [("activations", "model.layers.0"), ("batch_inputs", "input_ids")]
        )
    ]
    found = find_divergence([wrong, *inputs])
    assert found is not None
    (told,) = (
        one
        for one in diagnose(found, RunContext(world_size=2, mesh={dimension: 2}))
        if one.rule.endswith("exchange")
    )
    assert all(word in told.cause for word in ("masks", "positions", "weights", "mode"))
