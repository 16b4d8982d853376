"""Training through a service is the engine's training: same rollouts, same metrics, same weights but for float32."""

from __future__ import annotations

import math

import pytest

from regress.errors import ConfigError
from regress.service.api import AdamParams
from tests.unit.service.client.conftest import Sides, rows, weights_differ

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
        ("rollout_worker.temperature=0.5", "rollout_worker.temperature"),
        ("optimizer.implementation=fused", "optimizer.implementation"),
        ("debug.dump_options.param=true", "debug.dump_options.param"),
    ],
)
def test_what_a_service_decides_is_refused_here(sides: Sides, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sides.config("there", "trainer.type=remote", override)
