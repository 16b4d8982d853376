"""Division of the sequence's length between prompt and completion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.engine.config import Loaded
from regress.engine.config.task_config import CUSTOM, STRATEGIES, allocated
from regress.errors import ConfigError

Load = Callable[..., Loaded]
Refusal = Callable[..., str]
FILE = {"run.yaml": "data: {max_prompt_length: 10, max_completion_length: 20, max_seq_length: 40}"}


def lengths(loaded: Loaded) -> tuple[int, int, int]:
    data = loaded.config.data
    return data.max_prompt_length, data.max_completion_length, data.max_seq_length


@settings(deadline=None)
@given(st.integers(2, 10**6), st.sampled_from([name for name in STRATEGIES if name != CUSTOM]))
def test_the_parts_are_the_whole(longest: int, strategy: str) -> None:
    prompt, completion = allocated(longest, strategy)
    assert prompt + completion == longest
    assert (
        prompt
        == {
            "balanced": longest // 2,
            "prompt_heavy": int(0.6 * longest),
            "completion_heavy": int(0.4 * longest),
        }[strategy]
    )


@pytest.mark.parametrize(
    ("files", "overrides", "env", "expected"),
    [
        ({}, (), {}, (32, 16, 48)),
        ({}, ("data.max_seq_length=1024",), {}, (512, 512, 1024)),
        (FILE, (), {}, (10, 20, 40)),
        (FILE, ("data.max_seq_length=100",), {}, (50, 50, 100)),
        (FILE, ("data.max_seq_length=100", "data.max_prompt_length=30"), {}, (30, 20, 100)),
        (FILE, ("data.length_allocation_strategy=prompt_heavy",), {}, (24, 16, 40)),
        (FILE, ("data.length_allocation_strategy=custom", "data.max_seq_length=100"), {}, (10, 20, 100)),
        (
            {},
            ("data.max_seq_length=1000",),
            {"LENGTH_ALLOCATION_STRATEGY": "completion_heavy"},
            (400, 600, 1000),
        ),
        (
            {},
            ("data.max_seq_length=4096",),
            {
                "LENGTH_ALLOCATION_STRATEGY": "completion_heavy",
                "MAX_PROMPT_LENGTH": "1024",
                "MAX_COMPLETION_LENGTH": "3072",
            },
            (1024, 3072, 4096),
        ),
        (
            {},
            ("data.max_seq_length=4096", "data.length_allocation_strategy=balanced"),
            {"MAX_PROMPT_LENGTH": "1024"},
            (1024, 3072, 4096),
        ),
        (
            {},
            ("data.max_seq_length=100",),
            {"MAX_PROMPT_LENGTH": "40", "REGRESS_DATA__MAX_PROMPT_LENGTH": "50"},
            (50, 16, 100),
        ),
        (FILE, (), {"MAX_PROMPT_LENGTH": "12"}, (12, 20, 40)),
        (
            {"run.yaml": "data: {max_seq_length: 64, length_allocation_strategy: balanced}"},
            ("data.max_prompt_length=20",),
            {},
            (20, 44, 64),
        ),
    ],
)
def test_who_decides(
    load: Load,
    files: dict[str, str],
    overrides: tuple[str, ...],
    env: dict[str, str],
    expected: tuple[int, ...],
) -> None:
    assert lengths(load(files, *overrides, env=env)) == expected


def test_two_given_lengths_make_the_third(load: Load) -> None:
    """The variables of a run that is resumed: nobody has to repeat their sum."""
    env = {"MAX_PROMPT_LENGTH": "1024", "MAX_COMPLETION_LENGTH": "3072"}
    for more in ({}, {"LENGTH_ALLOCATION_STRATEGY": "completion_heavy"}):
        loaded = load({}, env={**env, **more})
        assert lengths(loaded) == (1024, 3072, 4096)
        assert str(loaded.origins["data.max_seq_length"]) == "default sum of prompt and completion"
    shorter = {"MAX_PROMPT_LENGTH": "8", "MAX_COMPLETION_LENGTH": "8"}
    assert lengths(load({}, env=shorter)) == (8, 8, 48)
    with pytest.raises(ConfigError, match=r"add up to 4096, more than data\.max_seq_length=4095"):
        load({}, "data.max_seq_length=4095", "data.length_allocation_strategy=custom", env=env)


def test_the_origin_of_a_length_is_its_strategy(load: Load) -> None:
    loaded = load({}, "data.max_seq_length=64")
    assert str(loaded.origins["data.max_prompt_length"]) == "strategy balanced of data.max_seq_length=64"


@pytest.mark.parametrize(
    ("overrides", "env", "says"),
    [
        (
            (),
            {"MAX_PROMPT_LENGTH": "100"},
            "data.max_prompt_length=100 and data.max_completion_length=16 add up to",
        ),
        (
            (
                "data.max_seq_length=64",
                "data.length_allocation_strategy=balanced",
                "data.max_prompt_length=64",
            ),
            {},
            "data.max_prompt_length=64 and data.max_completion_length=16 add up to 80, more than data.max_seq",
        ),
        (
            (),
            {"LENGTH_ALLOCATION_STRATEGY": "heavy"},
            "data.length_allocation_strategy=heavy (environment LENGTH_ALLOCATION_STRATEGY) must be one of balanced",
        ),
        (
            (),
            {"MAX_PROMPT_LENGTH": "long"},
            "data.max_prompt_length=long (environment MAX_PROMPT_LENGTH) must be an",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    refusal: Refusal, overrides: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    assert says in refusal({}, *overrides, env=env)
