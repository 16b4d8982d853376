"""Reference policy, loss weights, advantages over mini-batches, and the supervised start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from regress.dump.trajectory import Trajectory
from regress.engine.batch import TokenBatch
from regress.engine.build import Run, build
from regress.engine.config.schema import Config
from regress.engine.evaluation import due, pass_rate
from regress.engine.rollout import TRAIN
from regress.engine.run import train
from regress.engine.step import weigh
from regress.grpo.presets import make_objective
from regress.layout import BatchPlan

MakeConfig = Callable[..., Config]


@pytest.fixture
def built(config: MakeConfig) -> Iterator[Callable[..., Run]]:
    with ExitStack() as resources:

        def make(*overrides: str) -> Run:
            return build(config(*overrides), resources, lambda name, total: lambda: None)

        yield make


def parameters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in run.trainer.policy.named_parameters()])


def reference_parameters(run: Run) -> torch.Tensor:
    assert run.trainer.reference is not None
    return torch.cat([p.flatten() for p in run.trainer.reference.model.parameters()])


def test_there_is_no_reference_without_a_kl_term(built: Callable[..., Run]) -> None:
    assert built("algorithm.kl_coef=0").trainer.reference is None


def test_the_reference_starts_as_the_policy_and_stays_frozen(built: Callable[..., Run]) -> None:
    run = built("algorithm.kl_coef=0.1")
    before = reference_parameters(run).clone()
    torch.testing.assert_close(before, parameters(run), rtol=0, atol=0)
    run.trainer.step(0)
    assert not torch.equal(parameters(run), before), "nothing was learned, so nothing was shown"
    torch.testing.assert_close(reference_parameters(run), before, rtol=0, atol=0)


def test_the_reference_follows_the_policy_every_n_steps(built: Callable[..., Run]) -> None:
    run = built("algorithm.kl_coef=0.1", "reference.sync_every_n_steps=2", "reference.mixup_alpha=0.25")
    start = reference_parameters(run).clone()
    run.trainer.step(0)
    torch.testing.assert_close(reference_parameters(run), start, rtol=0, atol=0)
    run.trainer.step(1)
    torch.testing.assert_close(reference_parameters(run), start.lerp(parameters(run), 0.25))


def trajectory(run_id: int, completion: int, finish: str = "stop") -> Trajectory:
    return Trajectory(
        group_id="g",
        run_id=run_id,
        tokens=[2] * (3 + completion),
        loss_mask=[0] * 3 + [1] * completion,
        reward=0.0,
        prompt_length=3,
        finish_reason=finish,
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 6] * 6),
        ("seq-mean-token-mean", [1 / 2 / 2] * 2 + [1 / 2 / 4] * 4),
        ("seq-mean-token-sum-norm", [1 / 2 / 10] * 6),
    ],
)
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_weights_belong_to_the_mini_batch_not_to_the_microbatch(
    aggregation: str, expected: list[float], micro_batch_size: int | None
) -> None:
    batch = TokenBatch([trajectory(0, 2), trajectory(1, 4)])
    microbatches = batch.microbatches(BatchPlan(micro_batch_size=micro_batch_size))
    objective = make_objective(aggregation=aggregation)
    weights = weigh(batch.loss_tokens(), microbatches, objective, max_completion_length=10)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_weights_of_the_microbatch_scope_average_each_microbatch() -> None:
    batch = TokenBatch([trajectory(0, 2), trajectory(1, 4)])
    microbatches = batch.microbatches(BatchPlan(micro_batch_size=1))
    weights = weigh(batch.loss_tokens(), microbatches, make_objective("bnpo"), max_completion_length=10)
    torch.testing.assert_close(weights, torch.tensor([1 / 4] * 2 + [1 / 8] * 4, dtype=torch.float64))


def test_advantages_do_not_depend_on_the_mini_batches(built: Callable[..., Run]) -> None:
    """A group cut by a mini-batch boundary keeps its mean and deviation, and whitening sees the whole rollout."""
    for preset in ("grpo", "reinforce_plus_plus"):
        whole, cut = (
            built(f"algorithm.preset={preset}", *extra) for extra in ((), ("trainer.mini_batch_size=2",))
        )
        rollout = whole.trainer.worker.rollout(0, whole.prompts.train(0), TRAIN)
        found = [
            torch.cat([mini.tokens.advantages for mini in run.trainer.mini_batches(rollout)])  # type: ignore[misc]
            for run in (whole, cut)
        ]
        assert found[0].abs().max() > 0
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


def test_truncated_completions_leave_the_loss_if_asked(built: Callable[..., Run]) -> None:
    cut = [trajectory(0, 2), trajectory(1, 4, "length"), trajectory(2, 3)]
    for masked, count in ((False, 9), (True, 5)):
        run = built(f"algorithm.mask_truncated_completions={masked}")
        (mini,) = run.trainer.mini_batches([replace(t, log_probs=None) for t in cut])
        assert len(mini.tokens) == count
        assert mini.tokens.num_sequences == 3


def test_a_warm_start_raises_the_held_out_pass_rate(built: Callable[..., Run]) -> None:
    sizes = ("task.train_size=512", "task.eval_size=32", "warm_start.batch_size=32")
    rates = []
    for steps in (0, 70):
        run = built(*sizes, f"warm_start.steps={steps}")
        rates.append(pass_rate(run.trainer.worker, run.prompts.evaluation(), 0))
    assert rates[0] == 0.0
    assert rates[1] > 0.3


def test_evaluation_is_due_first_last_and_every_n_steps(config: MakeConfig) -> None:
    run = config("evaluation.every_n_steps=2", "max_steps=5")
    assert [step for step in range(6) if due(run, step)] == [0, 2, 4, 5]
    assert not any(due(config("evaluation.every_n_steps=0"), step) for step in range(6))


def test_sampling_does_not_depend_on_evaluation(config: MakeConfig, console: Console) -> None:
    """Evaluation on the global random state would change training."""
    results = [train(config(f"evaluation.every_n_steps={n}"), console) for n in (0, 1)]
    assert results[0].metrics == results[1].metrics


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gpt2"])
def test_trainer_and_sampler_compute_the_same_log_probs(
    family: str, attention: str, built: Callable[..., Run]
) -> None:
    """An off-by-one shift or a forgotten temperature in the trainer is the same in every layout, but not here.

    Basis of 1e-12: float64 on both sides, a key-value cache on one of them; about 1e-15 was measured.
    """
    run = built(
        f"model.family={family}",
        f"model.attn_implementation={attention}",
        "model.dtype=float64",
        "rollout_worker.temperature=0.7",
        "batching.layout=packed",
        "batching.micro_batch_size=3",
    )
    rollout = run.trainer.worker.rollout(0, run.prompts.train(0), TRAIN)
    (mini,) = run.trainer.mini_batches(rollout)
    assert mini.tokens.old_log_probs is not None
    assert mini.tokens.sampler_log_probs is not None
    torch.testing.assert_close(mini.tokens.old_log_probs, mini.tokens.sampler_log_probs, rtol=1e-12, atol=1e-12)
    assert mini.tokens.old_log_probs.std() > 0.1, "a flat policy would hide a shift"
