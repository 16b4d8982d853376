"""Every setting of the computation, and every pair that is read together, is met by a case or variant."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.grpo.objective_catalogue import CATALOGUE
from regress.grpo.policy_losses import LOSSES
from regress.replay.variant_table import project_variants
from tests.unit.replay.covering.coverage import Setting, missing, settings_of, shown, universe
from tests.unit.replay.covering.exercised import Unexercised, exercised, unexercised
from tests.unit.replay.covering.possible import forbidden
from tests.unit.replay.covering.traced import Reads, reads

ROOT = Path(__file__).parents[4]


def cases() -> list[GoldenCase]:
    store = GoldenStore(ROOT / "golden")
    return [store.case(name, allow_changed_inputs=True) for name in store.names()]


@pytest.fixture(scope="module")
def sets() -> set[frozenset[Setting]]:
    return set(exercised(cases(), project_variants(ROOT)))


LAYOUTS = (
    ("dense", "packed-dynamic"),
    ("dense", "dp2-fsdp2-hsdp-mbs3"),
    ("dense", "cp2-tp2-sp-zigzag-pad8"),
    ("dense", "fsdp2-pp2-zbv-noreshard-param32-mbs2"),
    ("moe", "ep2-tp2"),
)
"""Replays that between them go through the functions of every kind of layout."""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    objectives = [(case.name, "mbs4") for case in cases() if case.name != "rollout"]
    return reads(ROOT, [*objectives, *LAYOUTS], tmp_path_factory.mktemp("read"))


@pytest.fixture(scope="module")
def found(sets: set[frozenset[Setting]], read: Reads) -> Unexercised:
    return unexercised(sets, read)


BEYOND: dict[str, str] = {}
"""Settings that nothing exercises, though the configuration allows them, and why."""


RULES: dict[str, str] = {
    "needs": "objective_rules._inputs",
    "it belongs to advantage=gae": "checks._unread",
    "it belongs to advantage=optimal_token_baseline": "checks._unread",
    "it replaces the rule of grpo": "checks._advantage_conflicts",
    "means nothing with parallel.": "parallel_rules._needed",
    "both decide how large a microbatch is": "rules._microbatch_sizes",
    "whose rows begin with a sample": "rules._packed_side",
}
"""Words of a refusal -> the rule of the configuration that says them."""


@pytest.mark.extended
def test_everything_that_is_possible_is_exercised(found: Unexercised) -> None:
    assert found.lines() == [*BEYOND]


@pytest.mark.extended
def test_what_is_refused_is_refused_by_at_most_ten_rules(found: Unexercised) -> None:
    unknown = [text for text in found.refused.values() if not any(words in text for words in RULES)]
    assert unknown == []
    assert len({*RULES.values()}) <= 10
    assert not [words for words in RULES if not any(words in text for text in found.refused.values())]


def test_stages_of_a_schedule_are_as_many_as_it_has() -> None:
    from regress.errors import ConfigError
    from regress.parallel.pipeline_schedules import ranks_of_stages

    with pytest.raises(ConfigError):
        ranks_of_stages("1f1b", 2, 2)


def test_a_key_that_is_added_shows_up(sets: set[frozenset[Setting]]) -> None:
    """A key that the engine reads beside others is missing alone, and with each of them."""
    added = {"optimizer.betas", "optimizer.eps"}
    without = {
        frozenset(s for s in one if s.key not in ("optimizer.betas", "reference.path")) for one in sets
    }
    found = missing(without, {"grpo.token_losses.mine": frozenset(added)})
    assert {str(setting) for setting in found.settings} >= {"optimizer.betas", "reference.path"}
    pairs = [(shown(one), shown(other)) for one, other in found.pairs]
    assert ("optimizer.betas", "optimizer.eps") in pairs


@pytest.mark.extended
def test_a_part_reads_what_its_entry_declares(read: Reads) -> None:
    """Each part that a golden case chooses: its fields are read as its step is computed."""
    keys = {key for name, found in read.items() if name.startswith("grpo.") for key in found}
    chosen = {kind: {str(case.config["algorithm"].get(kind)) for case in cases()} for kind in CATALOGUE}
    declared = {
        f"algorithm.{field}"
        for kind, parts in CATALOGUE.items()
        for name in chosen[kind] & parts.keys()
        for field in parts[name].reads
    }
    assert len(declared) > 15
    assert declared - keys == set()


COMMON = {
    f"algorithm.{name}" for name in ("loss", "clip_low", "clip_high", "clip_bounds", "sampler_correction")
}
"""Fields that losses read and that mean something without them, too."""


@pytest.mark.extended
def test_a_loss_reads_nothing_that_its_entry_does_not_declare(read: Reads) -> None:
    for loss in LOSSES.values():
        declared = {f"algorithm.{field}" for field in loss.reads}
        found = read.get(f"grpo.{loss.home.replace(':', '.')}", frozenset())
        assert found - declared - COMMON == set(), loss.home


@pytest.mark.extended
def test_reads_are_those_of_the_function_that_asks(read: Reads) -> None:
    """Through properties, in ranks of a layout, and not while settings are made or checked."""
    assert {"algorithm.clip_low", "algorithm.clip_high", "algorithm.clip_bounds"} <= read[
        "grpo.policy_losses.ppo_clip"
    ]
    assert {"parallel.pp_schedule", "parallel.pp_stages_per_rank"} <= read["parallel.parallel_policy._cut"]
    assert not [name for name in read if ".fields." in name or "__post_init__" in name]


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
