"""Requests of the service are the engine's own step: bit for bit, however they are cut, and whatever fails between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from host_requests import ADAM, VOCABULARY, datums, held, offer, ratio_pass, same, several
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.mini_batch import TokenBatch
from regress.engine.optimizer import adamw
from regress.engine.training_step import train_step
from regress.grpo.objective import Objective
from regress.layout import BatchPlan
from regress.service.host.engine_host import EngineHost
from regress.service.service_api import Datum, PassRequest, SaveKind, ServiceError

MakeHost = Callable[..., EngineHost]

OBJECTIVES = {
    "importance_sampling": Objective(loss="importance_sampling", aggregation="token-sum"),
    "ppo": Objective(
        loss="ppo_clip", aggregation="token-sum", clip_bounds="absolute", clip_low=0.8, clip_high=1.2
    ),
    "cispo": Objective(
        loss="cispo", aggregation="token-sum", clip_bounds="absolute", clip_low=0.0, clip_high=4.0
    ),
}


def self_hosted(host: EngineHost, requests: list[PassRequest], objective: Objective) -> dict[str, Tensor]:
    """Train the model ``m1`` of a host with `train_step` on the datums of all requests; return what it holds.

    Like any trainer of whole sequences it computes nothing of tokens that are not in the loss.
    """
    model = host._models["m1"]
    found = [datum for request in requests for datum in request.data]
    counted = [np.asarray(d.inputs.get("loss_mask", d.inputs["advantages"])) != 0 for d in found]
    samples = [
        Trajectory(
            "g",
            i,
            [*d.tokens.tolist(), int(d.inputs["target_tokens"][-1])],
            [0, *kept.astype(int).tolist()],
            0.0,
            1,
        )
        for i, (d, kept) in enumerate(zip(found, counted, strict=True))
    ]
    batch = TokenBatch(samples)

    def of(name: str) -> Tensor:
        return torch.from_numpy(
            np.concatenate([d.inputs[name][kept] for d, kept in zip(found, counted, strict=True)])
        )

    tokens = replace(
        batch.loss_tokens(),
        weights=torch.ones(len(batch.sequence), dtype=torch.float64),
        advantages=of("advantages").to(model.policy.log_prob_dtype),
        old_log_probs=of("logprobs").to(model.policy.log_prob_dtype),
    )
    model.optimizer = adamw(
        model.policy.named_parameters(),
        ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    outcome = train_step(
        model.policy,
        model.optimizer,
        tokens,
        batch.microbatches(BatchPlan(micro_batch_size=1)),
        objective,
        max_grad_norm=ADAM.grad_clip_norm,
    )
    model.policy.zero_grad()
    return {**held(host, "m1"), "loss": torch.tensor(outcome.loss), "norm": torch.tensor(outcome.grad_norm)}


@pytest.mark.parametrize(
    "loss",
    ["ppo", *(pytest.param(name, marks=pytest.mark.extended) for name in OBJECTIVES if name != "ppo")],
)
def test_a_request_is_the_step_of_a_trainer_bit_for_bit(make_host: MakeHost, loss: str) -> None:
    host = make_host(models=2)
    request = PassRequest(datums([9, 5, 12], mask=loss != "ppo"), loss)
    done = host.run_pass("m0", request, {"seq_id": 1})
    step = host.optim_step("m0", ADAM, {"seq_id": 2})
    remote = {
        **held(host),
        "loss": torch.tensor(done.metrics["loss:sum"]),
        "norm": torch.tensor(step.grad_norm),
    }
    assert same(remote, self_hosted(host, [request], OBJECTIVES[loss]))
    assert step.step == 1


def test_a_batch_in_several_requests_is_the_whole_batch_bit_for_bit(make_host: MakeHost) -> None:
    host = make_host(models=2)
    whole = datums([9, 5, 12, 7, 3])
    for number, part in enumerate((whole[:2], whole[2:3], whole[3:])):
        host.run_pass("m0", PassRequest(part, "importance_sampling"), {"seq_id": number})
    host.run_pass("m1", PassRequest(whole, "importance_sampling"), {"seq_id": 1})
    assert host.pending_gradients("m0") == 3
    assert same(held(host, "m0"), held(host, "m1"))


def test_log_probs_of_a_forward_pass_are_those_of_the_backward_pass(make_host: MakeHost) -> None:
    host = make_host()
    request = ratio_pass([9, 5])
    forward = host.run_pass("m0", replace(request, forward_only=True), {"seq_id": 1})
    assert host.pending_gradients("m0") == 0
    backward = host.run_pass("m0", request, {"seq_id": 2})
    for one, other in zip(forward.outputs, backward.outputs, strict=True):
        assert one.keys() == {"logprobs", "elementwise_loss"}
        assert all((one[name] == other[name]).all() for name in one)
    assert forward.metrics == backward.metrics
    alone = host.run_pass(
        "m0", PassRequest(request.data, "forward_logprob", forward_only=True), {"seq_id": 3}
    )
    assert (alone.outputs[0]["logprobs"] == forward.outputs[0]["logprobs"]).all()


def _broken(kind: str, request: PassRequest) -> PassRequest:
    first, *rest = request.data

    def changed(**inputs: np.ndarray) -> PassRequest:
        return replace(request, data=[*rest, replace(first, inputs={**first.inputs, **inputs})])

    length = len(first.tokens)
    return {
        "unknown loss": lambda: replace(request, loss="gspo"),
        "unknown setting": lambda: replace(request, config={"clip_low_threshold": 0.5}),
        "NaN": lambda: changed(advantages=np.full(length, np.nan)),
        "shape": lambda: changed(logprobs=np.zeros(length + 1)),
        "token": lambda: changed(target_tokens=np.full(length, VOCABULARY)),
        "overflow": lambda: changed(logprobs=np.full(length, -1e30, dtype=np.float32)),
        "nothing": lambda: replace(request, data=[]),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["unknown loss", "unknown setting", "NaN", "shape", "token", "overflow", "nothing"]
)
def test_a_failed_request_leaves_no_trace(make_host: MakeHost, kind: str) -> None:
    """Leave none of its gradients, although earlier datums of the request were back-propagated already."""
    host = make_host()
    host.run_pass("m0", ratio_pass([9, 5], seed=1), {"seq_id": 1})
    before = held(host)
    with pytest.raises(ServiceError) as caught:
        host.run_pass("m0", _broken(kind, ratio_pass([7, 8, 4], seed=2)), {"seq_id": 2})
    if kind == "overflow":
        assert "microbatch 2 (samples request 2/2) has" in str(caught.value)
    assert same(held(host), before)
    assert host.pending_gradients("m0") == 1
    assert host._models["m0"].micro == 2


def test_a_gradient_that_is_not_finite_fails_the_step_and_leaves_the_model(make_host: MakeHost) -> None:
    host = make_host()
    host.run_pass("m0", ratio_pass([9, 5], seed=1), {"seq_id": 1})
    host.optim_step("m0", ADAM, {"seq_id": 2})
    before = held(host)
    host.run_pass("m0", ratio_pass([9, 5], seed=2), {"seq_id": 3})
    next(iter(host._models["m0"].policy.named_parameters()))[1].grad.fill_(torch.inf)  # type: ignore[union-attr]
    with pytest.raises(ServiceError, match=r"not finite.*dropped"):
        host.optim_step("m0", ADAM, {"seq_id": 4})
    assert same(held(host), before)
    host.run_pass("m0", ratio_pass([9, 5], seed=2), {"seq_id": 5})
    assert host.optim_step("m0", ADAM, {"seq_id": 6}).step == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta1": 1.0},
        {"learning_rate": -1.0},
        {"eps": float("nan")},
        {"learning_rate": 1e300},
        {"weight_decay": 1e60},
    ],
)
def test_settings_that_adamw_cannot_have_change_nothing(make_host: MakeHost, wrong: dict[str, float]) -> None:
    host = make_host()
    host.run_pass("m0", ratio_pass([9]), {"seq_id": 1})
    before = held(host)
    with pytest.raises(ServiceError, match=f"adam_params.{next(iter(wrong))}="):
        host.optim_step("m0", replace(ADAM, **wrong), {"seq_id": 2})
    assert same(held(host), before)


def test_a_state_that_is_loaded_goes_on_bit_for_bit(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host()
    host.run_pass("m0", ratio_pass([9, 5], seed=1), {"seq_id": 1})
    with pytest.raises(ServiceError, match="optim_step first") as caught:
        host.save("m0", str(tmp_path / "early"), SaveKind.STATE)
    assert caught.value.code == "pending_gradients"
    assert not (tmp_path / "early").exists()
    host.optim_step("m0", ADAM, {"seq_id": 2})
    assert host.save("m0", str(tmp_path / "state"), SaveKind.STATE) == 1
    assert host.create_from("m1", str(tmp_path / "state"), optimizer=True).step == 1
    for model_id in ("m0", "m1"):
        host.run_pass(model_id, ratio_pass([7, 8], seed=2), {"seq_id": 3})
        host.optim_step(model_id, ADAM, {"seq_id": 4})
    assert same(held(host, "m0"), held(host, "m1"))
    assert host.load("m0", str(tmp_path / "state"), optimizer=False) == 1
    assert not host._models["m0"].optimizer.state


def test_models_of_one_host_do_not_touch_each_other(make_host: MakeHost) -> None:
    host = make_host(models=2)
    host.run_pass("m0", ratio_pass([9, 5], seed=1), {"seq_id": 1})
    host.run_pass("m1", ratio_pass([4, 8, 3], seed=2), {"seq_id": 1})
    before = held(host, "m1")
    host.optim_step("m0", ADAM, {"seq_id": 2})
    host.close("m0")
    assert same(held(host, "m1"), before)


def test_a_target_need_not_be_the_next_token(make_host: MakeHost) -> None:
    """Each position is scored against its own target; one that is left out counts nowhere."""
    host = make_host()
    (datum,) = datums([8])
    base = {"target_tokens": datum.inputs["target_tokens"], "weights": np.ones(8, dtype=np.float32)}

    def scored(targets: np.ndarray) -> np.ndarray:
        changed = Datum(datum.tokens, {**base, "target_tokens": targets})
        found = host.run_pass("m0", PassRequest([changed], "cross_entropy", forward_only=True), {"seq_id": 1})
        return found.outputs[0]["logprobs"]

    total = sum(np.exp(scored(np.full(8, token))) for token in range(VOCABULARY))
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    targets = base["target_tokens"].copy()
    full = scored(targets)
    targets[2] = -100
    left = scored(targets)
    assert left[2] == 0.0
    assert (np.delete(left, 2) == np.delete(full, 2)).all()


def test_several_targets_at_a_position_are_requests_of_one_target_each(make_host: MakeHost) -> None:
    """Each has the log-prob of its own, bit for bit, and the gradients are the sum."""
    host = make_host(models=2)
    wide = several(datums([9, 5, 12]))
    done = host.run_pass("m0", PassRequest(wide, "cross_entropy"), {"seq_id": 1})
    total = 0.0
    for column in range(3):
        narrow = [
            Datum(datum.tokens, {name: array[:, column] for name, array in datum.inputs.items()})
            for datum in wide
        ]
        one = host.run_pass("m1", PassRequest(narrow, "cross_entropy"), {"seq_id": 1 + column})
        total += one.metrics["loss:sum"]
        for output, other in zip(done.outputs, one.outputs, strict=True):
            assert output["logprobs"].shape[1] == 3
            assert all((output[name][:, column] == other[name]).all() for name in other)
    np.testing.assert_allclose(done.metrics["loss:sum"], total, rtol=1e-6)
    gradients, expected = held(host, "m0"), held(host, "m1")
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "config", "told"),
    [
        ("importance_sampling", {}, "importance_sampling takes one target a token"),
        ("cross_entropy", {"entropy_coeff": 0.1}, "entropy_coeff takes one target a token"),
        ("cross_entropy", {"enable_debug_dump": True}, "no place in a dump"),
    ],
)
def test_several_targets_are_refused_where_they_mean_nothing(
    make_host: MakeHost, loss: str, config: dict[str, float], told: str
) -> None:
    (datum,) = several(datums([9]))
    if loss == "importance_sampling":
        rows = np.zeros((9, 3), np.float32)
        datum = Datum(datum.tokens, {**datum.inputs, "logprobs": rows, "advantages": rows})
        del datum.inputs["weights"]  # type: ignore[attr-defined]
    with pytest.raises(ServiceError, match=told):
        make_host().run_pass("m0", PassRequest([datum], loss, config), {"seq_id": 1})


def test_the_offered_configuration_decides_dtype_and_microbatches(make_host: MakeHost) -> None:
    host = make_host("model.dtype=float64", "batching.micro_batch_size=2")
    done = host.run_pass("m0", ratio_pass([9, 5, 4]), {"seq_id": 1})
    assert done.outputs[0]["logprobs"].dtype == np.float64
    assert host._models["m0"].micro == 2
    assert offer().model.dtype == "float32"
