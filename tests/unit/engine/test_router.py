"""The load-balancing loss of routers is that of transformers, whatever the layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from regress import check_dump
from regress.dump.dump_reader import DumpReader
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording
from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.config.model_config import ModelConfig
from regress.engine.engine_ranks import SingleProcess
from regress.engine.mini_batch import TokenBatch
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import arithmetic
from regress.engine.optimizer import adamw
from regress.engine.router_loss import RouterLoss
from regress.engine.training_run import train
from regress.engine.training_step import train_step, weigh
from regress.errors import ConfigError
from regress.grpo.objective_presets import make_objective
from regress.layout import BatchPlan
from regress.replay.replay_pool import shared_pool

sys.path.insert(0, str(Path(__file__).parent))  # ranks import the run by name

from ranked_training import trained

MakeConfig = Callable[..., Config]
COEF = 0.7
PLANS = {
    "one": BatchPlan(),
    "left": BatchPlan(padding_side="left", pad_to_multiple_of=8),
    "packed": BatchPlan(layout="packed"),
    "micro-1": BatchPlan(micro_batch_size=1),
    "micro-2-packed": BatchPlan(layout="packed", micro_batch_size=2),
    "micro-2": BatchPlan(micro_batch_size=2),
}


def samples() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    found = []
    for run, (prompt, completion) in enumerate([(3, 5), (2, 1), (6, 9), (4, 4), (2, 7)]):
        tokens = rng.integers(2, 24, prompt + completion).tolist()
        mask = [0] * prompt + [1] * completion
        found.append(Trajectory("0", run, tokens, mask, float(run % 3), prompt_length=prompt))
    return found


def model_of(checkpointing: bool = False) -> Any:
    config = ModelConfig(family="qwen3_moe", dtype="float64", gradient_checkpointing=checkpointing)
    model = build_model(config, seed=3, vocab_size=24, pad_id=0, eos_id=1)
    with torch.no_grad():  # the seed's routers are nearly even
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter *= 30
    return model


def one_update(model: Any, plan: BatchPlan, coef: float, scope: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one update from the same weights."""
    policy = LocalPolicy(model)
    batch, objective = TokenBatch(samples()), make_objective("dapo", old_log_probs="current")
    micros = batch.microbatches(plan)
    tokens = batch.loss_tokens()
    weights = weigh(tokens, batch.partition(plan), objective, max_completion_length=12)
    advantages = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
    outcome = train_step(
        policy,
        adamw(policy.named_parameters(), 0.0),
        replace(tokens, weights=weights, advantages=advantages),
        micros,
        objective,
        max_grad_norm=None,
        router=RouterLoss(policy, coef, scope) if coef else None,
    )
    if coef:
        assert outcome.terms["router"] == pytest.approx(outcome.loss - outcome.terms["policy"], rel=1e-9)
    return outcome.loss, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def theirs(parts: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """The mean over batches of what transformers computes, and its gradients."""
    model, rows = model_of(), samples()
    total = torch.zeros((), dtype=torch.float64)
    with arithmetic(torch.float64):
        for part in parts:
            width = max(len(rows[index].tokens) for index in part)
            ids = torch.tensor([rows[i].tokens + [0] * (width - len(rows[i].tokens)) for i in part])
            mask = torch.tensor(
                [[1] * len(rows[i].tokens) + [0] * (width - len(rows[i].tokens)) for i in part]
            )
            out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
            total = total + out.aux_loss / len(parts)
        total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(plan: BatchPlan, scope: str, checkpointing: bool = False) -> tuple[float, dict[str, Tensor]]:
    without, plain = one_update(model_of(checkpointing), plan, 0.0, scope)
    with_term, gradients = one_update(model_of(checkpointing), plan, COEF, scope)
    return with_term - without, {name: gradients[name] - plain[name] for name in gradients}


def assert_term(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(COEF * expected[0], rel=1e-10)
    size = max(float(value.norm()) for value in expected[1].values())
    assert size > 1e-3, "a term without a gradient shows nothing"
    for name, value in found[1].items():
        wanted = expected[1].get(name, torch.zeros_like(value))
        assert float((value - COEF * wanted).norm()) <= 1e-10 * size, name


@pytest.mark.parametrize("plan", PLANS)
def test_over_the_mini_batch_it_is_that_of_transformers_under_every_layout(plan: str) -> None:
    assert_term(difference(PLANS[plan], "global"), theirs([[0, 1, 2, 3, 4]]))


@pytest.mark.parametrize("scope", ["global", "microbatch"])
def test_it_is_in_the_recorded_losses(scope: str, tmp_path: Path) -> None:
    """Those of the microbatches add up to the loss of the update, and the dump holds what is true of every one."""
    kinds = ("batch_inputs", "forward_data", "is_loss_debug", "loss")
    with recording(Recorder(tmp_path, options=dict.fromkeys(kinds, True))), at(step=0, rank=0):
        whole, _ = one_update(model_of(), PLANS["micro-2"], COEF, scope)
    dump = DumpReader(tmp_path)
    records = [dump.read(name).tensors for name in dump.names("loss")]
    assert sum(float(found["loss"]) for found in records) == pytest.approx(whole, rel=1e-12)
    assert sum(float(found["router_loss"]) for found in records) > 1e-3 * COEF
    assert [verdict for verdict in check_dump(str(tmp_path)) if not verdict.ok] == []


@pytest.mark.parametrize("plan", ["one", "micro-1", "micro-2", "micro-2-packed"])
def test_over_microbatches_it_is_the_mean_of_theirs(plan: str) -> None:
    parts = [list(members) for members in TokenBatch(samples()).partition(PLANS[plan])]
    assert_term(difference(PLANS[plan], "microbatch"), theirs(parts))


def test_activations_that_are_computed_again_have_it_once() -> None:
    assert_term(difference(PLANS["micro-2"], "global", checkpointing=True), theirs([[0, 1, 2, 3, 4]]))


def test_it_adds_nothing_outside_of_an_update() -> None:
    model = model_of()
    policy = LocalPolicy(model)
    (micro,) = TokenBatch(samples()).microbatches(BatchPlan())
    plain = policy.log_probs([micro])[0]
    router = RouterLoss(policy, COEF, "global")
    with router.of_update([micro], SingleProcess()):
        pass
    assert torch.equal(policy.log_probs([micro])[0], plain)
    (share,) = policy.forward_backward([micro], lambda _, out: (out.log_probs.sum(), 0.0))
    other = model_of()
    LocalPolicy(other).forward_backward([micro], lambda _, out: (out.log_probs.sum(), share))
    wanted = dict(other.named_parameters())
    for name, parameter in policy.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, wanted[name].grad), name


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.router_scope=microbatch"], "model.router_scope=microbatch is not read"),
        (["model.router_coef=0.1", "parallel.tp=2"], "parallel.tp=2 spreads the layers or tokens"),
        (["model.router_coef=0.1", "model.compile=aot_eager"], "which model.compile=aot_eager would not see"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        load_config(overrides=overrides, environ={})


def test_a_model_without_experts_is_refused(config: MakeConfig, console: Console) -> None:
    with pytest.raises(ConfigError, match=r"model.router_coef=0.1: Qwen3ForCausalLM has no routers"):
        train(config("model.router_coef=0.1"), console)


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.ep=2",),
        pytest.param(("parallel.dp=2", "batching.layout=packed"), marks=pytest.mark.extended),
        pytest.param(("parallel.dp=2", "parallel.data_parallel=ddp"), marks=pytest.mark.extended),
        pytest.param(("parallel.fsdp=2", "batching.micro_batch_size=2"), marks=pytest.mark.extended),
    ],
    ids=lambda layout: "-".join(layout),
)
def test_ranks_make_the_same_run(
    config: MakeConfig, console: Console, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    own = (
        "model.family=qwen3_moe",
        "model.dtype=float64",
        "model.router_coef=0.5",
        "optimizer.learning_rate=0.01",
        "warm_start.steps=0",
    )
    folder = tmp_path / "rollouts"
    made = config(
        *own, "rollout_mock.enable=true", "rollout_mock.mode=dump", f"rollout_mock.dump_dir={folder}"
    )
    train(made, console)
    final = load_file(Path(made.output_dir) / "final" / "model.safetensors")
    replay = ("rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={folder}")
    other = tmp_path / "other"
    shared_pool().run(trained, {"config": config(*own, *replay, *layout, f"output_dir={other}")}, 2)
    found = load_file(other / "final" / "model.safetensors")
    for name, value in final.items():
        assert float((found[name] - value).norm()) <= 1e-9 * max(float(value.norm()), 1e-9), name
