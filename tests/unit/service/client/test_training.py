"""Training through a service is the engine's training: same rollouts, same metrics, same weights but for float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from regress.errors import ConfigError
from regress.service.service_api import AdamParams
from tests.unit.service.client.conftest import Sides, over_http, rows, serving, weights_differ

DIRECT = {
    "importance_sampling": ("algorithm.loss=importance_sampling", "algorithm.old_log_probs=sampler"),
    "ppo": (
        "algorithm.preset=dapo",
        "trainer.epochs=2",
        "trainer.mini_batch_size=4",
        "algorithm.clip_low=0.01",
    ),
    "cispo": ("algorithm.preset=cispo", "algorithm.clip_high=0.002", "trainer.epochs=2"),
    "cross_entropy": ("algorithm.loss=reinforce", "algorithm.aggregation=seq-mean-token-mean"),
}
CUSTOM = {
    "kl": ("algorithm.preset=grpo", "algorithm.kl_coef=0.3", "trainer.epochs=2"),
    "gspo": ("algorithm.preset=gspo", "trainer.epochs=2", "algorithm.clip_low=0.001"),
    "dual_clip": ("algorithm.dual_clip=1.5", "trainer.epochs=2"),
    "current": ("algorithm.old_log_probs=current",),
}
ENTROPY = {"training_step/entropy"}
"""No wire carries entropies."""
LARGE = (
    "optimizer.learning_rate=0.01",
    "optimizer.weight_decay=0.1",
    "optimizer.max_grad_norm=0.3",
    "max_steps=3",
)
LARGE += ("optimizer.lr_scheduler=linear", "optimizer.warmup_steps=1", "optimizer.eps=1e-4")


def check(sides: Sides, loss: str, *overrides: str) -> None:
    here, service = sides.here(*LARGE, *overrides), sides.there(*LARGE, *overrides)
    ours, theirs = rows(here), rows(sides.root / "there")
    assert [sorted({*row} - ENTROPY) for row in ours] == [sorted(row) for row in theirs]
    for own, other in zip(ours, theirs, strict=True):
        for name, value in own.items():
            if name not in ENTROPY and isinstance(value, float) and "time" not in name:
                assert other[name] == pytest.approx(value, rel=2e-3, abs=2e-4, nan_ok=True), name
    assert weights_differ(here, service) < 1e-4
    assert loss in {name for name, _ in service.calls}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("loss", DIRECT)
def test_losses_of_the_wires(sides: Sides, loss: str) -> None:
    check(sides, loss, *DIRECT[loss])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CUSTOM)
def test_losses_that_no_wire_has(sides: Sides, name: str) -> None:
    check(sides, "surrogate", *CUSTOM[name])


@pytest.mark.extended
def test_a_correction_for_the_sampler(sides: Sides) -> None:
    correction = ("algorithm.sampler_correction=token_truncate", "algorithm.correction_max=1.0")
    check(sides, "ppo", *correction, "trainer.epochs=2", "trainer.mini_batch_size=4")


def test_settings_of_the_optimizer_arrive(sides: Sides) -> None:
    service = sides.there(*LARGE, "optimizer.betas=[0.8, 0.95]")
    sent = [value for name, value in service.calls if name == "optim_step"]
    rest = (0.8, 0.95, 1e-4, 0.1, 0.3)
    assert [vars(params) for params in sent] == [vars(AdamParams(rate, *rest)) for rate in (0.0, 0.01, 0.005)]


def test_no_clipping_is_sent_as_zero(sides: Sides) -> None:
    service = sides.there("optimizer.max_grad_norm=null")
    assert {v.grad_clip_norm for name, v in service.calls if name == "optim_step"} == {0.0}


def test_weights_are_refreshed_before_they_are_sampled_from(sides: Sides) -> None:
    service = sides.there("evaluation.every_n_steps=1")
    names = [(name, value) for name, value in service.calls if name.startswith("save")]
    saved = [value for name, value in names if name == "save sampler"]
    assert saved == ["initial", "step_000001", "step_000002"]
    assert names[-1] == ("save weights", "final")


def test_log_probs_that_are_not_finite_end_the_run(sides: Sides) -> None:
    service = sides.service()
    real = service.run_pass

    def broken(model_id: str, seq_id: int | None, request: object) -> object:
        found = real(model_id, seq_id, request)  # type: ignore[arg-type]
        found.result.outputs[0]["logprobs"][:] = math.nan
        return found

    service.run_pass = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="not finite"):
        sides.there("algorithm.kl_coef=0.1", service=service)
    assert not [name for name, _ in service.calls if name == "optim_step"]


def test_entropy_with_one_weight_for_all_tokens_goes_to_weaver(sides: Sides) -> None:
    chosen = ("algorithm.entropy_coef=0.02", "algorithm.aggregation=seq-mean-token-mean")
    with pytest.raises(ConfigError, match="aggregation=token-mean"):
        sides.there(*chosen)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("parallel.dp=2", "parallel.dp"),
        ("warm_start.steps=3", "warm_start.steps"),
        ("trainer.on_nonfinite=skip", "trainer.on_nonfinite"),
        (
            "algorithm.entropy_coef=0.1 service.train_service.backend=tinker",
            "has no place in Tinker's protocol",
        ),
        (
            "rollout_worker.temperature=0.5 algorithm.old_log_probs=sampler",
            "set algorithm.old_log_probs=recompute or rollout_worker.temperature=1",
        ),
        ("optimizer.implementation=fused", "optimizer.implementation"),
        ("debug.dump_options.param=true", "debug.dump_options.param"),
    ],
)
def test_what_a_service_decides_is_refused_here(sides: Sides, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sides.config("there", "trainer.type=remote", *override.split())


def test_a_temperature_is_that_of_the_sampler_alone(sides: Sides) -> None:
    """The loss compares with log-probs of the policy at 1, as the protocols define them."""
    chosen = ("rollout_worker.temperature=0.5", "algorithm.old_log_probs=recompute", "algorithm.preset=dapo")
    service = sides.there(*chosen, "max_steps=1")
    drawn = [request for name, request in service.calls if name == "sample"]
    assert {request.temperature for request in drawn} == {0.5}
    (request,) = [request for name, request in service.calls if name == "ppo"]
    (scored, *_) = [request for name, request in service.calls if name == "forward"]
    fresh = sides.service()
    values = fresh.run_pass("m", 1, scored).result.outputs  # type: ignore[union-attr]
    for datum, output in zip(request.data, values, strict=True):
        mask = datum.inputs["loss_mask"] == 1
        assert mask.any()
        assert (datum.inputs["logprobs"][mask] == output["logprobs"][mask]).all()


@pytest.mark.parametrize(("temperature", "told"), [("1.0", True), ("0.5", False)])
def test_log_probs_at_another_temperature_are_compared_with_nothing(
    sides: Sides, temperature: str, told: bool
) -> None:
    chosen = ("algorithm.old_log_probs=current", "algorithm.kl_coef=0.1", "max_steps=1")
    sides.there(*chosen, f"rollout_worker.temperature={temperature}")
    keys = {key for row in rows(sides.root / "there") for key in row}
    assert "rollouts/advantages_mean" in keys
    assert ("rollouts/kl_mean" in keys) == told


@pytest.fixture(scope="module")
def url(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a service for all tests of this file."""
    with serving(base, tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chosen", [("algorithm.kl_coef=0.2",), ()], ids=["custom", "direct"])
def test_the_entropies_of_tokens_are_rewarded_by_weaver(
    sides: Sides, url: str, chosen: tuple[str, ...]
) -> None:
    """Also beside a loss that the client computes, and of tokens whose ratio is clipped."""
    hard = (*LARGE, "algorithm.entropy_coef=0.3", "algorithm.aggregation=token-mean", "trainer.epochs=2")
    hard += ("algorithm.clip_low=0.001", "algorithm.clip_high=0.001", "max_steps=2", *chosen)
    here = sides.here(*hard)
    there = over_http(sides, "there", "weaver", url, *hard)
    for own, other in zip(rows(here), rows(there), strict=True):
        for name in ("loss", "grad_norm", "entropy_loss", "policy_loss"):
            key = f"training_step/{name}"
            if key in own:
                assert other[key] == pytest.approx(own[key], rel=2e-3, abs=2e-4), name
