"""Every setting of the computation, and every pair that one function reads, is met by a case or variant."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from regress.golden.store import GoldenStore
from regress.replay.table import project_variants
from tests.unit.replay.covering import reads
from tests.unit.replay.covering.coverage import Setting, missing, settings_of, shown, universe
from tests.unit.replay.covering.exercised import Unexercised, exercised, unexercised
from tests.unit.replay.covering.possible import forbidden

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def sets() -> set[frozenset[Setting]]:
    store = GoldenStore(ROOT / "golden")
    return set(
        exercised(
            [store.case(name, allow_changed_inputs=True) for name in store.names()], project_variants(ROOT)
        )
    )


@pytest.fixture(scope="module")
def found(sets: set[frozenset[Setting]]) -> Unexercised:
    return unexercised(sets)


BEYOND: dict[str, str] = {
    "parallel.policy._cut: parallel.pp_schedule=1f1b with parallel.pp_stages_per_rank": (
        "regress.parallel.schedules.ranks_of_stages"
    ),
}
"""Settings that nothing exercises, though the configuration allows them, with the rule that forbids them."""

RULES: dict[str, str] = {
    "needs": "objective_rules._inputs",
    "it belongs to advantage=gae": "checks._unread",
    "it belongs to advantage=optimal_token_baseline": "checks._unread",
    "it is for one advantage a sample": "checks._advantage_conflicts",
    "it replaces the rule of grpo": "checks._advantage_conflicts",
    "are distances there, not bounds of the ratio": "checks._loss_conflicts",
    "means nothing with parallel.": "parallel_rules._needed",
    "takes the place of torch's DistributedDataParallel": "parallel_rules._wrapper",
    "both decide how large a microbatch is": "rules._microbatch_sizes",
    "whose rows begin with a sample": "rules._packed_side",
}
"""Words of a refusal -> the rule of the configuration that says them."""


def test_everything_that_is_possible_is_exercised(found: Unexercised) -> None:
    assert found.lines() == [*BEYOND]


def test_what_is_refused_is_refused_by_at_most_ten_rules(found: Unexercised) -> None:
    unknown = [text for text in found.refused.values() if not any(words in text for words in RULES)]
    assert unknown == []
    assert len({*RULES.values(), *BEYOND.values()}) <= 10


def test_stages_of_a_schedule_are_as_many_as_it_has() -> None:
    from regress.errors import ConfigError
    from regress.parallel.schedules import ranks_of_stages

    with pytest.raises(ConfigError):
        ranks_of_stages("1f1b", 2, 2)


def test_a_key_that_is_added_shows_up(sets: set[frozenset[Setting]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that the engine reads beside others is missing alone, and with each of them."""
    function = reads.Function("grpo.losses.mine", {"optimizer.betas": (str,), "optimizer.eps": (str,)})
    without = {
        frozenset(s for s in one if s.key not in ("optimizer.betas", "reference.path")) for one in sets
    }
    monkeypatch.setattr("tests.unit.replay.covering.coverage.functions", lambda: (function,))
    found = missing(without)
    assert {str(setting) for setting in found.settings} >= {"optimizer.betas", "reference.path"}
    assert [(shown(one), shown(other)) for one, other in found.pairs] == [
        ("optimizer.betas", "optimizer.eps")
    ]


def test_settings_are_values_other_than_the_default() -> None:
    config = {
        "algorithm": {
            "preset": "gspo",
            "clip_low": 0.2,
            "loss": "ppo_clip",
            "rejection": "token_k2:0.1, seq_max_k3:2",
        },
        "data": {"group_size": 3},
    }
    overrides = {"parallel.dp": 2, "batching.layout": "packed", "parallel.tp": 1, "trainer.epochs": 2}
    assert {str(setting) for setting in settings_of(config, overrides)} == {
        "algorithm.importance_level=sequence",
        "algorithm.clip_high",
        "algorithm.aggregation=seq-mean-token-mean",
        "algorithm.rejection=token_k2",
        "algorithm.rejection=seq_max_k3",
        "parallel.dp",
        "batching.layout=packed",
    }


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("batching.layout=packed batching.padding_side=left", True),
        ("algorithm.advantage=gae", True),
        ("parallel.data_parallel=ddp parallel.fsdp_param_dtype=float32", True),
        # possible with a third setting, and with a fourth
        ("algorithm.delta algorithm.loss=dppo_tv", False),
        ("algorithm.sampler_correction=token_mask algorithm.old_log_probs=sampler", False),
        ("algorithm.correction_normalize algorithm.correction_policy=current", False),
    ],
)
def test_settings_are_forbidden_that_no_company_makes_possible(settings: str, refused: bool) -> None:
    parts = (text.partition("=") for text in settings.split())
    chosen = [Setting(key, value or "*") for key, _, value in parts]
    assert (forbidden(chosen) is not None) == refused


def test_settings_alone_are_possible_unless_their_parts_are_not() -> None:
    """Only advantages whose inputs the engine never has, and the keys that belong to them, are impossible alone."""
    impossible = {str(s) for each in universe().values() for s in each if forbidden((s,)) is not None}
    assert impossible == {
        *(f"algorithm.advantage={name}" for name in ("remax", "gae")),
        *(f"algorithm.advantage={name}optimal_token_baseline" for name in ("", "tir_")),
        "algorithm.lam",
        "algorithm.otb_zero_tail",
    }


@pytest.mark.extended
def test_nothing_that_is_exercised_is_refused(sets: set[frozenset[Setting]]) -> None:
    pairs = {pair for one in sets for pair in combinations(sorted(one), 2)}
    assert [pair for pair in sorted(pairs) if forbidden(pair) is not None] == []
