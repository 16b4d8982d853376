"""Reference policy, loss weights, advantages over mini-batches, and the supervised start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from regress.dump.dump_reader import DumpReader
from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.evaluation import due
from regress.engine.mini_batch import TokenBatch
from regress.engine.rollout_worker import TRAIN
from regress.engine.run_construction import Run, build
from regress.engine.tokenizer import fingerprint, load_tokenizer
from regress.engine.training_run import train
from regress.engine.training_step import weigh
from regress.errors import ConfigError
from regress.grpo.objective_presets import make_objective
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
    return torch.cat([p.flatten() for _, p in run.trainer.reference.parameters()])


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
    partition = batch.partition(BatchPlan(micro_batch_size=micro_batch_size))
    objective = make_objective(aggregation=aggregation)
    weights = weigh(batch.loss_tokens(), partition, objective, max_completion_length=10)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_weights_of_the_microbatch_scope_average_each_microbatch() -> None:
    batch = TokenBatch([trajectory(0, 2), trajectory(1, 4)])
    partition = batch.partition(BatchPlan(micro_batch_size=1))
    weights = weigh(batch.loss_tokens(), partition, make_objective("bnpo"), max_completion_length=10)
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
        rates.append(run.evaluation.run(0).pass_rate)
    assert rates[0] == 0.0
    assert rates[1] > 0.3


def test_evaluation_is_due_first_last_and_every_n_steps(config: MakeConfig) -> None:
    run = config("evaluation.every_n_steps=2", "max_steps=5")
    assert [step for step in range(6) if due(run, step)] == [0, 2, 4, 5]
    assert not any(due(config("evaluation.every_n_steps=0"), step) for step in range(6))


def test_training_does_not_depend_on_evaluation(config: MakeConfig, console: Console) -> None:
    """Neither a rollout nor an evaluation touches the global random state, and neither reads it."""
    before = torch.get_rng_state()
    results = [train(config(f"evaluation.every_n_steps={n}"), console) for n in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert results[0].metrics == results[1].metrics


WINDOW = "model.config={use_sliding_window: true, sliding_window: %d, max_window_layers: %d}"


@pytest.mark.parametrize("layers", [0, 1], ids=["all layers", "the second layer"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sliding_window_is_that_of_the_sampler(
    attention: str, layers: int, built: Callable[..., Run]
) -> None:
    """Else log-probs differ by 0.5 and nobody sees."""
    run = built(f"model.attn_implementation={attention}", WINDOW % (3, layers), "model.dtype=float64")
    trainer = run.trainer
    batch = TokenBatch(trainer.worker.rollout(0, trainer.prompts(0), TRAIN))
    sampled = batch.sampler_log_probs(torch.float64)
    assert sampled is not None
    for layout in ("padded", "packed"):
        (found,) = trainer.policy.log_probs(batch.microbatches(BatchPlan(layout=layout)))
        torch.testing.assert_close(found, sampled, rtol=0, atol=1e-12)


def test_attention_without_a_window_refuses_a_model_that_has_one(built: Callable[..., Run]) -> None:
    with pytest.raises(
        ConfigError, match=r"varlen has no sliding window, and that of the model is 3, shorter"
    ):
        built("model.attn_implementation=varlen", WINDOW % (3, 0))
    built("model.attn_implementation=varlen", WINDOW % (48, 0))


def test_rotary_frequencies_stay_float32_in_a_bfloat16_model(
    built: Callable[..., Run], tmp_path: Path
) -> None:
    """As ``from_pretrained`` keeps them; in bfloat16 the phases would be off by 0.1 at position 512."""
    buffers = dict(built("model.dtype=bfloat16").trainer.policy.model.named_buffers())
    assert {name: b.dtype for name, b in buffers.items() if "inv_freq" in name}
    assert all(b.dtype == torch.float32 for name, b in buffers.items() if "inv_freq" in name)


def test_a_checkpoint_keeps_every_bit(
    built: Callable[..., Run], config: MakeConfig, console: Console
) -> None:
    first = config("model.dtype=float64")
    train(first, console)
    final = f"{first.output_dir}/final"
    again = built(
        f"model.path={final}", f"tokenizer.path={final}", "model.dtype=float64", "warm_start.steps=0"
    )
    saved = load_file(f"{final}/model.safetensors")
    for name, parameter in again.trainer.policy.named_parameters():
        assert torch.equal(parameter, saved[name]), name


def test_the_gradient_norm_of_a_bfloat16_model_is_not_rounded_to_bfloat16(built: Callable[..., Run]) -> None:
    policy = built("model.dtype=bfloat16").trainer.policy
    for _, parameter in policy.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    grads = [p.grad.double() for _, p in policy.named_parameters() if p.grad is not None]
    expected = torch.stack([g.norm() for g in grads]).norm()
    torch.testing.assert_close(policy.clip_grad_norm(None).double(), expected, rtol=1e-6, atol=0)
    policy.clip_grad_norm(0.5)
    clipped = torch.stack(
        [p.grad.double().norm() for _, p in policy.named_parameters() if p.grad is not None]
    )
    torch.testing.assert_close(clipped.norm().item(), 0.5, rtol=2**-8, atol=0)


def test_the_learning_rate_that_is_logged_is_the_one_that_was_used(
    config: MakeConfig, console: Console
) -> None:
    result = train(
        config("max_steps=2", "optimizer.lr_scheduler=linear", "optimizer.learning_rate=1e-3"), console
    )
    assert result.metrics["training_step/learning_rate"] == 5e-4


def test_a_loss_record_names_what_the_loss_was_divided_by(config: MakeConfig, console: Console) -> None:
    run = config(
        "debug.enable_data_dump=true",
        "debug.dump_options.loss=true",
        "batching.micro_batch_size=3",
        "max_steps=1",
    )
    train(run, console)
    metas = [record.meta for record in DumpReader(run.debug.dump_dir).records("loss")]
    assert len(metas) == 3
    whole = sum(meta["num_loss_tokens"] for meta in metas)  # type: ignore[misc]
    for meta in metas:
        assert meta["mini_batch_loss_tokens"] == whole
        assert meta["mini_batch_sequences"] == 8
        assert meta["weight_sum"] == pytest.approx(meta["num_loss_tokens"] / whole)  # type: ignore[operator]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gpt2", "qwen3_next", "qwen3_5_text"])
@pytest.mark.one_in(5)  # each attention, each of another family
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
    torch.testing.assert_close(
        mini.tokens.old_log_probs, mini.tokens.sampler_log_probs, rtol=1e-12, atol=1e-12
    )
    assert mini.tokens.old_log_probs.std() > 0.1, "a flat policy would hide a shift"


def test_model_config_changes_a_checkpoint_too(
    built: Callable[..., Run], config: MakeConfig, console: Console
) -> None:
    first = config("max_steps=0", "warm_start.steps=0")
    train(first, console)
    final = f"{first.output_dir}/final"
    paths = (f"model.path={final}", f"tokenizer.path={final}")
    assert built(*paths, "model.config.rms_norm_eps=0.5").trainer.policy.model.config.rms_norm_eps == 0.5
    with pytest.raises(
        ConfigError, match=r"model\.config\.rms_norm_ep=0\.5: the config\.json of model\.path"
    ):
        built(*paths, "model.config.rms_norm_ep=0.5")


def test_a_checkpoint_brings_its_own_tokenizer(
    built: Callable[..., Run], config: MakeConfig, console: Console
) -> None:
    """One trained from another task may be of the same size and give every token another meaning."""
    first = config("max_steps=0", "warm_start.steps=0")
    train(first, console)
    final = f"{first.output_dir}/final"
    again = built(f"model.path={final}", "warm_start.steps=0", "task.params={alphabet: abcd}")
    assert fingerprint(again.tokenizer) == fingerprint(load_tokenizer(final))
