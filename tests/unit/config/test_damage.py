"""Whatever happens to a file or an override, the answer is a configuration or one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regress.engine.config.conf
from regress.engine.config import Loaded
from regress.errors import ConfigError

Load = Callable[..., Loaded]
DEMO = (Path(regress.engine.config.conf.__path__[0]) / "reverse_string.yaml").read_bytes()
FUZZ = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def assert_answers(load: Load, *args: object, **kwargs: object) -> None:
    sentence = "."
    try:
        load(*args, **kwargs)
    except ConfigError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))


@pytest.mark.parametrize("tenths", range(10))
def test_truncated(tenths: int, load: Load) -> None:
    assert_answers(load, {"run.yaml": DEMO[: len(DEMO) * tenths // 10]})


@FUZZ
@given(st.integers(0, len(DEMO) * 8 - 1))
def test_bit_flips(load: Load, bit: int) -> None:
    damaged = bytearray(DEMO)
    damaged[bit // 8] ^= 1 << bit % 8
    assert_answers(load, {"run.yaml": bytes(damaged)})


@FUZZ
@given(
    st.sampled_from(
        ["seed", "exp_name", "optimizer.betas", "system_envs", "model", "hydra", "defaults", "debug.x"]
    ),
    st.text(st.sampled_from("abc01=,:[]{}()'\"$#~+@%!&*\\ .-_/\n\té"), max_size=10),
)
def test_any_override_variable_and_line(load: Load, key: str, text: str) -> None:
    assert_answers(load, {}, f"{key}={text}")
    assert_answers(load, {}, env={f"REGRESS_{key.replace('.', '__')}": text})
    assert_answers(load, {"run.yaml": f"{key}: {text}"})
