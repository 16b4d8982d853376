"""Losses of the service: their formulas on the replies' own log-probs, and requests that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_requests import ADAM, VOCABULARY, datums, held, offer, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regress.engine.engine_ranks import SingleProcess
from regress.service.host.engine_host import EngineHost
from regress.service.service_api import Datum, ModelSpec, PassRequest, ServiceError

Array = np.ndarray[Any, Any]
LENGTHS = [9, 5, 12]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> EngineHost:
    """Host of a model in float64, whose weights no test changes."""
    folder = tmp_path_factory.mktemp("losses")
    found = EngineHost({"tiny": offer("model.dtype=float64")}, SingleProcess(), folder)
    found.create("m0", ModelSpec("tiny"))
    return found


def _named(names: list[str], seed: int = 0) -> list[Datum]:
    """Datums with some of the arrays, all random."""
    rng = np.random.default_rng(seed)
    found = []
    for datum in datums(LENGTHS, seed):
        arrays = {name: datum.inputs.get(name, rng.normal(size=len(datum.tokens))) for name in names}
        found.append(Datum(datum.tokens, arrays))
    return found


def _ratio(p: Array, x: Mapping[str, Array]) -> Array:
    return np.exp(p - x["logprobs"])


FORMULAS: dict[str, tuple[list[str], dict[str, Any], Callable[[Array, Mapping[str, Array]], Array]]] = {
    "cross_entropy": (["weights"], {}, lambda p, x: -p * x["weights"]),
    "importance_sampling": (["logprobs", "advantages"], {}, lambda p, x: -_ratio(p, x) * x["advantages"]),
    "ppo": (
        ["logprobs", "advantages"],
        {"clip_high_threshold": 1.1},
        lambda p, x: (
            -np.minimum(_ratio(p, x) * x["advantages"], _ratio(p, x).clip(0.8, 1.1) * x["advantages"])
        ),
    ),
    "cispo": (
        ["logprobs", "advantages"],
        {},
        lambda p, x: -_ratio(p, x).clip(0.0, 4.0) * p * x["advantages"],
    ),
    "dro": (
        ["logprobs", "advantages"],
        {"beta": 0.3},
        lambda p, x: -(p * x["advantages"] - 0.15 * (p - x["logprobs"]) ** 2),
    ),
    "surrogate": (["surrogate_weights"], {}, lambda p, x: p * x["surrogate_weights"]),
}


@pytest.mark.parametrize("loss", FORMULAS)
@pytest.mark.parametrize("mask", [False, True])
def test_a_loss_is_its_formula_summed_over_tokens(host: EngineHost, loss: str, mask: bool) -> None:
    names, config, formula = FORMULAS[loss]
    data = _named(["target_tokens", *names, *(["loss_mask"] if mask else [])])
    done = host.run_pass("m0", PassRequest(data, loss, config), {"seq_id": 1})
    total = 0.0
    for datum, out in zip(data, done.outputs, strict=True):
        counted = datum.inputs.get("loss_mask", np.ones(len(datum.tokens)))
        expected = counted * formula(out["logprobs"], datum.inputs)
        np.testing.assert_allclose(out["elementwise_loss"], expected, rtol=1e-12, atol=1e-12)
        total += expected.sum()
    assert done.metrics["loss:sum"] == pytest.approx(total, rel=1e-12)
    assert all(name.count(":") == 1 for name in done.metrics)


def test_gradients_are_those_of_the_formula(host: EngineHost) -> None:
    """A surrogate weighted by the derivative of a loss has the gradient of the loss: Weaver's custom losses."""
    data = _named(["target_tokens", "logprobs", "advantages"])
    host._models["m0"].drop_gradients()
    done = host.run_pass("m0", PassRequest(data, "importance_sampling"), {"seq_id": 1})
    direct = held(host)
    host._models["m0"].drop_gradients()
    weights = [
        -_ratio(out["logprobs"], d.inputs) * d.inputs["advantages"]
        for d, out in zip(data, done.outputs, strict=True)
    ]
    custom = [
        Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"], "surrogate_weights": w})
        for d, w in zip(data, weights, strict=True)
    ]
    host.run_pass("m0", PassRequest(custom, "surrogate"), {"seq_id": 2})
    for name, value in held(host).items():
        np.testing.assert_allclose(value, direct[name], rtol=1e-10, atol=1e-12)


def test_metrics_are_those_of_the_tokens_that_count(host: EngineHost) -> None:
    (datum,) = datums([9])
    done = host.run_pass("m0", PassRequest([datum], "ppo", forward_only=True), {"seq_id": 1})
    counted = datum.inputs["loss_mask"] == 1
    gap = (done.outputs[0]["logprobs"] - datum.inputs["logprobs"])[counted]
    outside = np.where(datum.inputs["advantages"][counted] > 0, np.exp(gap) > 1.2, np.exp(gap) < 0.8)
    expected = {
        "tokens:sum": counted.sum(),
        "ratio:max": np.exp(gap).max(),
        "logprob_diff_abs:max": np.abs(gap).max(),
        "logprob_diff_abs:sum": np.abs(gap).sum(),
        "clip:sum": outside.sum(),
    }
    for name, value in expected.items():
        assert done.metrics[name] == pytest.approx(value), name


def test_entropy_is_rewarded_where_the_mask_says_so(host: EngineHost) -> None:
    data = datums(LENGTHS)
    plain = host.run_pass("m0", PassRequest(data, "importance_sampling"), {"seq_id": 1})
    done = host.run_pass(
        "m0", PassRequest(data, "importance_sampling", {"entropy_coeff": 0.5}), {"seq_id": 2}
    )
    for datum, out, before in zip(data, done.outputs, plain.outputs, strict=True):
        bonus = before["elementwise_loss"] - out["elementwise_loss"]
        counted = datum.inputs["loss_mask"] == 1
        assert (bonus[~counted] == 0).all()
        assert (bonus[counted] > 0).all()
        assert (bonus <= 0.5 * np.log(VOCABULARY)).all()
    request = PassRequest(datums(LENGTHS, mask=False), "importance_sampling", {"entropy_coeff": 0.5})
    with pytest.raises(ServiceError, match="loss_mask"):
        host.run_pass("m0", request, {"seq_id": 3})


@pytest.mark.parametrize(
    ("loss", "config", "named"),
    [
        ("ppoo", {}, "did you mean ppo"),
        ("gspo", {}, "gspo"),
        ("forward_logprob", {}, "forward pass"),
        ("importance_sampling", {"clip_low_threshold": 0.9}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.3}, "enclose 1"),
        ("ppo", {"clip_low_threshold": "low"}, "not a number"),
        ("ppo", {"clip_high_threshold": float("inf")}, "not finite"),
        ("ppo", {"enable_debug_dump": "perhaps"}, "neither true nor false"),
        ("dro", {}, "loss_fn_config.beta"),
        ("dro", {"beta": -1.0}, "negative"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    host: EngineHost, loss: str, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ServiceError, match=named):
        host.run_pass("m0", PassRequest(datums(LENGTHS), loss, config), {"seq_id": 1})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target_tokens": None}, "datum 1 lacks target_tokens"),
        ({"logprobs": None}, "datum 1 lacks logprobs"),
        ({"advantages": np.ones(4)}, r"advantages has the shape \[4\] for 5 tokens"),
        ({"advantages": np.full(5, 1j)}, "real numbers"),
        ({"logprobs": np.full(5, np.inf)}, "logprobs is inf at position 0"),
        ({"loss_mask": np.full(5, 0.5)}, "loss_mask holds other values"),
        ({"rewards": np.ones(5)}, "rewards, which loss_fn=importance_sampling does not use"),
        ({"target_tokens": np.full(5, -1)}, "target_tokens holds -1"),
        ({"target_tokens": np.full(5, 0.0)}, "list of integers"),
    ],
)
def test_arrays_that_make_no_sense_are_named(
    host: EngineHost, change: dict[str, Array | None], named: str
) -> None:
    data = datums(LENGTHS)
    inputs = {name: value for name, value in {**data[1].inputs, **change}.items() if value is not None}
    data[1] = Datum(data[1].tokens, inputs)
    with pytest.raises(ServiceError, match=named):
        host.run_pass("m0", PassRequest(data, "importance_sampling"), {"seq_id": 1})


_ARRAYS = st.one_of(
    st.lists(st.integers(-101, VOCABULARY), max_size=6).map(lambda v: np.array(v, dtype=np.int64)),
    st.lists(st.floats(width=32), max_size=6).map(lambda v: np.array(v, dtype=np.float32)),
    st.integers(0, 5).map(lambda n: np.zeros((n, 2))),
    st.lists(st.booleans(), max_size=6).map(np.array),
    st.just(np.array(3)),
    st.just(np.array(["text"])),
)
_NAMES = st.sampled_from(["target_tokens", "logprobs", "advantages", "weights", "loss_mask", "other"])
_REQUESTS = st.builds(
    PassRequest,
    data=st.lists(st.builds(Datum, _ARRAYS, st.dictionaries(_NAMES, _ARRAYS, max_size=4)), max_size=3),
    loss=st.sampled_from([*FORMULAS, "forward_logprob", "", "custom"]),
    config=st.dictionaries(
        st.sampled_from(["entropy_coeff", "clip_low_threshold", "beta", "x"]),
        st.one_of(st.floats(), st.booleans(), st.text(max_size=2)),
        max_size=2,
    ),
    forward_only=st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_=_REQUESTS)
def test_whatever_comes_is_computed_or_refused(host: EngineHost, request_: PassRequest) -> None:
    host._models["m0"].drop_gradients()
    before = held(host)
    try:
        host.run_pass("m0", request_, {"seq_id": 1})
    except ServiceError:
        assert same(held(host), before)


@pytest.mark.extended
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_=_REQUESTS)
def test_whatever_comes_is_computed_or_refused_more_often(host: EngineHost, request_: PassRequest) -> None:
    test_whatever_comes_is_computed_or_refused.hypothesis.inner_test(host, request_)  # type: ignore[attr-defined]


def test_names_of_others_models_are_refused(tmp_path: Path) -> None:
    host = EngineHost({"tiny": offer()}, SingleProcess(), tmp_path)
    for call in (
        lambda: host.create("m0", ModelSpec("other")),
        lambda: host.run_pass("m9", PassRequest(datums([4]), "ppo"), {}),
        lambda: host.optim_step("m9", ADAM, {}),
        lambda: host.create_from("m1", str(tmp_path / "nothing"), optimizer=True),
        lambda: host.open_sampler("s", str(tmp_path / "nothing"), None),
        lambda: host.open_sampler("s", None, None),
    ):
        with pytest.raises(ServiceError):
            call()
    assert not host._models
