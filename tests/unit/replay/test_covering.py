"""The default matrix meets every situation in which layouts are known to go wrong; computed, not taken from names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from regress.engine.run_construction import Run
from regress.golden.golden_case import GoldenCase
from regress.layout import DIMENSIONS, RankLayout
from regress.replay.case_run import replay
from regress.replay.case_traits import facts_of, traits_of
from regress.replay.replay_plan import PlannedUpdate, mesh_sizes
from regress.replay.test_matrix import Replay, replays
from regress.replay.variant import TIERS, Extent, Precision, Variant
from regress.replay.variant_table import BASE, VARIANTS, project_variants
from tests.golden_cases import cases, opened

ROOT = Path(__file__).parents[3]
CASES = cases()


@cache
def default_replays(extent: Extent) -> list[Replay]:
    return list(replays(CASES, project_variants(ROOT), TIERS["all"], extent))


def updates() -> Iterator[tuple[Replay, PlannedUpdate]]:
    for found in default_replays(Extent.DEFAULT):
        for update in found.plan:
            yield found, update


def loss_tokens(update: PlannedUpdate, layouts: list[RankLayout]) -> int:
    return sum(update.loss_tokens(layout.targets) for layout in layouts)


def sizes(found: Replay) -> dict[str, int]:
    return mesh_sizes(found.case.config, found.variant.overrides)


def model_value(found: Replay, name: str) -> object:
    return facts_of(found.case).model.get(name)


def rank_without_tokens(found: Replay, update: PlannedUpdate) -> bool:
    return any(loss_tokens(update, layouts) == 0 for layouts in update.layouts)


def one_token_at_a_border(found: Replay, update: PlannedUpdate) -> bool:
    """A sample of which one token lies on a rank of a split sequence, at its first or last column."""
    return any(
        segment.stop - segment.start == 1 and segment.col in (0, layout.tokens.shape[1] - 1)
        for layouts in update.layouts
        for layout in layouts
        for segment in layout.tokens.segments
        if layout.targets is not layout.tokens
    )


def sequence_on_all_context_ranks(found: Replay, update: PlannedUpdate) -> bool:
    cp = sizes(found).get("cp", 1)
    holders: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for layouts in update.layouts:
        for micro, layout in enumerate(layouts):
            for segment in layout.tokens.segments:
                columns = tuple(start for start, _ in layout.columns)
                holders.setdefault((micro, segment.sample), set()).add(columns)
    return cp > 1 and any(len(ranks) == cp for ranks in holders.values())


def vocabulary_not_divisible(found: Replay, update: PlannedUpdate) -> bool:
    vocabulary = model_value(found, "vocab_size")
    assert isinstance(vocabulary, int)
    return vocabulary % sizes(found).get("tp", 1) != 0


def tied_under_a_pipeline(found: Replay, update: PlannedUpdate) -> bool:
    return sizes(found).get("pp", 1) > 1 and model_value(found, "tie_word_embeddings") is True


def clipping_active(found: Replay, update: PlannedUpdate) -> bool:
    bound = found.case.config.get("optimizer", {}).get("max_grad_norm", 1.0)
    return found.world_size > 1 and float(found.case.truth(update.where)["grad_norm"]["grad_norm"]) > bound


def accumulation_does_not_divide(found: Replay, update: PlannedUpdate) -> bool:
    """Microbatches of a rank hold different numbers of samples, on several ranks."""
    numbers = [
        {len({s.sample for s in layout.tokens.segments}) for layout in layouts} - {0}
        for layouts in update.layouts
    ]
    return found.world_size > 1 and any(len(found) > 1 for found in numbers)


SITUATIONS: list[Callable[[Replay, PlannedUpdate], bool]] = [
    rank_without_tokens,
    one_token_at_a_border,
    sequence_on_all_context_ranks,
    vocabulary_not_divisible,
    tied_under_a_pipeline,
    clipping_active,
    accumulation_does_not_divide,
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda function: function.__name__)
def test_a_situation_is_met(situation: Callable[[Replay, PlannedUpdate], bool]) -> None:
    assert any(situation(found, update) for found, update in updates())


def test_experts_without_tokens_are_met(tmp_path: Path) -> None:
    """Under the microbatches of ``ep2-mbs1`` routers leave experts out, and ranks of experts too."""
    case = opened("moe")
    empty = {"experts": 0, "ranks": 0}

    def watch(run: Run) -> None:
        for name, module in run.trainer.policy.model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(count)

    def count(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        chosen = np.bincount(args[1].flatten().numpy(), minlength=4)
        empty["experts"] += int((chosen == 0).sum())
        empty["ranks"] += int((chosen.reshape(2, 2).sum(1) == 0).sum())

    overrides = {"batching.micro_batch_size": 1}
    variant = Variant("one-sample", BASE.why, overrides)
    replay(case, variant, Precision.FLOAT64, tmp_path, steps=1, prepare=watch)
    assert "ep2-mbs1" in VARIANTS
    assert empty["experts"] > 0


@pytest.mark.extended
def test_there_are_eighty_variants_on_every_extent() -> None:
    for extent in Extent:
        assert len({found.variant.name for found in default_replays(extent)}) >= 80


IMPOSSIBLE_PAIRS: dict[tuple[str, str], str] = {}
"""Pairs of dimensions that cannot be combined, and why."""


@pytest.mark.parametrize("pair", [*combinations(DIMENSIONS, 2)], ids="-".join)
def test_every_pair_of_strategies_meets(pair: tuple[str, str]) -> None:
    met = [found.name for found in default_replays(Extent.DEFAULT) if {*pair} <= sizes(found).keys()]
    assert met or pair in IMPOSSIBLE_PAIRS


BATCHES = {
    "padded": lambda o: o.get("batching.layout", "padded") == "padded",
    "packed": lambda o: o.get("batching.layout") == "packed",
    "dynamic": lambda o: "batching.max_tokens_per_microbatch" in o,
    "accumulated": lambda o: "batching.micro_batch_size" in o,
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_every_strategy_meets_every_kind_of_batch(dimension: str, batch: str) -> None:
    assert any(
        dimension in sizes(found) and BATCHES[batch](found.variant.overrides)
        for found in default_replays(Extent.DEFAULT)
    )


CROSSING = [case for case in CASES if {"@batch", "@microbatches", "@grpo"} & traits_of(case)]


@pytest.mark.parametrize("case", CROSSING, ids=lambda case: case.name)
def test_every_objective_meets_two_ranks_of_two_microbatches(case: GoldenCase) -> None:
    """Denominators and statistics of a batch, or of microbatches, on ranks that each hold some of it.

    The engine has none of an objective that compares the tokens of a microbatch.
    """
    met = [
        found.name
        for found in default_replays(Extent.DEFAULT)
        if found.case is case
        and all(u.ranks.mesh.data_size == 2 and min(map(len, u.layouts)) > 1 for u in found.plan)
    ]
    objective = facts_of(case).objective
    assert bool(met) != (objective.compares_tokens and objective.statistics_scope == "microbatch")


def test_a_reduced_matrix_leaves_out_combinations_alone() -> None:
    found = default_replays(Extent.REDUCED)
    names = {one.variant.name: set[str]() for one in found}
    for one in found:
        names[one.variant.name].add(one.case.name)
    table = {name: one for name, one in project_variants(ROOT).items() if one.most_telling(CASES)}
    assert names.keys() == {name for name, one in table.items() if not one.combines}
    assert names[BASE.name] == {case.name for case in CASES}
    assert all(len(cases) <= len(table[name].cases) for name, cases in names.items() if name != BASE.name)
