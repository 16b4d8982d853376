"""Names that spell their configuration out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.engine.config import load_config
from regress.engine.config.config_schema import options
from regress.replay.command_replays import spelled_out
from regress.replay.variant_names import NUMBERS, WORDS, overrides_of
from regress.replay.variant_table import VARIANTS, check_name
from tests.as_subtests import as_subtests


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("dp2", {"parallel.dp": 2}),
        ("fsdp8-tp4", {"parallel.fsdp": 8, "parallel.tp": 4}),
        (
            "tp2-sp-packed-mbs3",
            {
                "parallel.tp": 2,
                "parallel.sequence_parallel": True,
                "batching.layout": "packed",
                "batching.micro_batch_size": 3,
            },
        ),
        (
            "pp2-zbv",
            {"parallel.pp": 2, "parallel.pp_schedule": "zbv_zero_bubble", "parallel.pp_stages_per_rank": 2},
        ),
        ("pp4-1f1b", {"parallel.pp": 4, "parallel.pp_schedule": "1f1b"}),
    ],
)
def test_a_name_says_what_it_is(name: str, overrides: dict[str, Any]) -> None:
    assert overrides_of(name) == overrides


@pytest.mark.parametrize("name", ["", "xp2", "dp", "2dp", "dp2-", "dp2--tp2", "packed4", "DP2", "dp2 tp2"])
def test_a_name_that_says_nothing(name: str) -> None:
    assert overrides_of(name) is None


@settings(deadline=None)
@given(st.lists(st.sampled_from([*WORDS, *(f"{word}2" for word in NUMBERS)]), min_size=1, max_size=6))
def test_every_name_of_the_language_can_stand_in_a_test_id(parts: list[str]) -> None:
    name = "-".join(parts)
    check_name(name, "variant")
    overrides = overrides_of(name)
    assert overrides is not None
    assert overrides.keys() <= options().keys()


@as_subtests("word", [*WORDS])
def test_a_word_sets_values_that_the_configuration_knows(word: str) -> None:
    """Each alone is not a combination that works, but none is refused for its value."""
    for key, value in WORDS[word].items():
        choices = options()[key].bounds.choices
        assert value in (choices or (value,))
        assert isinstance(value, str | bool | int)


@as_subtests("name", [*VARIANTS])
def test_the_engine_takes_every_layout(name: str) -> None:
    """No rule of the configuration refuses it."""
    given = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in VARIANTS[name].overrides.items()
    ]
    load_config(
        overrides=(
            *given,
            "data.max_prompt_length=16",
            "data.max_completion_length=8",
            "data.max_seq_length=24",
        ),
        environ={},
    )


def test_a_name_in_a_list_that_no_table_has() -> None:
    found = spelled_out("packed, dp2, fsdp8-tp4, nonsense", VARIANTS)
    assert [*found] == ["fsdp8-tp4"]
    assert found["fsdp8-tp4"].overrides == {"parallel.fsdp": 8, "parallel.tp": 4}
