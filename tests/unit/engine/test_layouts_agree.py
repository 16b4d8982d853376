"""In true float64 every token layout computes the same step, for every model family and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.model_config import ModelConfig
from regress.engine.mini_batch import LossTokens, TokenBatch
from regress.engine.model_loading import build_model
from regress.engine.optimizer import adamw
from regress.engine.training_step import train_step, weigh
from regress.grpo.loss_aggregation import entropy_weights
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import make_objective
from regress.layout import ROW_ORDERS, BatchPlan

VOCABULARY = 24
MAX_COMPLETION = 12
TOLERANCE = 1e-12

PLANS = {
    "left": BatchPlan(padding_side="left"),
    "packed": BatchPlan(layout="packed"),
    "padded-to-8": BatchPlan(pad_to_multiple_of=8, pad_to_length=40),
    "packed-padded": BatchPlan(layout="packed", pad_to_multiple_of=64),
    "dynamic-padded": BatchPlan(max_tokens_per_microbatch=50),
    "dynamic-packed": BatchPlan(layout="packed", max_tokens_per_microbatch=40),
    "longest-first": BatchPlan(micro_batch_size=3, row_order="longest_first"),
    "shortest-first-packed": BatchPlan(layout="packed", micro_batch_size=4, row_order="shortest_first"),
    "reversed": BatchPlan(micro_batch_size=4, row_order="reversed"),
    "micro-1": BatchPlan(micro_batch_size=1),
    "micro-2-packed": BatchPlan(layout="packed", micro_batch_size=2),
    "micro-2-left": BatchPlan(micro_batch_size=2, padding_side="left"),
    "micro-4": BatchPlan(micro_batch_size=4),
}


def ragged(lengths: list[tuple[int, int]], seed: int) -> list[Trajectory]:
    """Random trajectories of (prompt, completion) lengths, with a masked tool token in every long completion."""
    rng = np.random.default_rng(seed)
    samples = []
    for run, (prompt, completion) in enumerate(lengths):
        mask = [0] * prompt + [1] * completion
        if completion > 4:
            mask[prompt + 2] = 0
        samples.append(
            Trajectory(
                group_id=str(run // 2),
                run_id=run,
                tokens=rng.integers(2, VOCABULARY, prompt + completion).tolist(),
                loss_mask=mask,
                reward=float(rng.normal()),
                prompt_length=prompt,
            )
        )
    return samples


def quantities(batch: TokenBatch, log_probs: Tensor, seed: int) -> LossTokens:
    """Off-policy, with a reference and a sampler that differ, so that every term of the loss counts."""
    generator = torch.Generator().manual_seed(seed)

    def near(scale: float) -> Tensor:
        return log_probs + scale * torch.randn(len(log_probs), generator=generator, dtype=torch.float64)

    advantages = torch.randn(len(log_probs), generator=generator, dtype=torch.float64)
    return replace(
        batch.loss_tokens(),
        advantages=advantages,
        old_log_probs=near(0.3),
        ref_log_probs=near(0.5),
        sampler_log_probs=near(0.2),
    )


@contextmanager
def one_update(
    model_config: ModelConfig, seed: int = 0, compile: str | None = None
) -> Iterator[Callable[..., dict[str, Tensor]]]:
    model = build_model(model_config, seed=seed, vocab_size=VOCABULARY, pad_id=0, eos_id=1)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def update(
        batch: TokenBatch,
        tokens: LossTokens | None,
        plan: BatchPlan,
        objective: Objective,
        chunk: int | None = None,
    ) -> dict[str, Tensor]:
        """Log-probs, loss and every gradient of one update from the same initial weights."""
        model.load_state_dict(state)
        policy = LocalPolicy(
            model,
            temperature=0.8,
            compile=compile,
            entropy_gradient=objective.entropy_coef != 0.0,
            log_prob_chunk_size=chunk,
        )
        microbatches = batch.microbatches(plan)
        log_probs = torch.zeros(len(batch.sequence), dtype=torch.float64)
        for micro, values in zip(microbatches, policy.log_probs(microbatches), strict=True):
            log_probs[micro.select] = values
        tokens = tokens or quantities(batch, log_probs, seed)
        weights = weigh(tokens, batch.partition(plan), objective, max_completion_length=MAX_COMPLETION)
        whole = tokens.sequence, tokens.num_sequences, objective
        entropy = entropy_weights(*whole, partition=batch.partition(plan))
        tokens = replace(tokens, weights=weights, entropy_weights=entropy)
        optimizer = adamw(policy.named_parameters(), 1e-3)
        outcome = train_step(policy, optimizer, tokens, microbatches, objective, max_grad_norm=None)
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        return {
            "log_probs": log_probs,
            "loss": torch.tensor(outcome.loss, dtype=torch.float64),
            **gradients,
            "tokens": tokens,  # type: ignore[dict-item] - handed on to the other layouts
        }

    yield update


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Relative L2 per tensor. The scale of a cancelled quantity is that of its terms.

    The terms of the loss are weight times advantage. A gradient that is zero but for rounding (queries and keys of a
    sample with nothing to attend to) has terms of the size of the whole gradient.
    """
    tokens = expected["tokens"]
    assert isinstance(tokens, LossTokens)
    assert tokens.weights is not None
    assert tokens.advantages is not None
    values = {name: value for name, value in expected.items() if isinstance(value, Tensor)}
    whole = torch.stack([v.norm() for name, v in values.items() if name not in ("log_probs", "loss")]).norm()
    for name, value in values.items():
        scale = value.norm()
        if name == "loss":
            scale = torch.maximum(scale, (tokens.weights * tokens.advantages.abs()).sum())
        elif scale < 1e-9 * whole:
            scale = whole
        error = (actual[name] - value).norm()
        assert error <= TOLERANCE * scale, f"{name} differs by {error / scale:.1e} (relative L2) {what}"


REMEMBERS = {
    "initializer_range": 0.1
}  # at 0.02 the state hardly counts, and the gradient of its decay cancels
HYBRID = {"qwen3_next": REMEMBERS, "qwen3_5_text": REMEMBERS}
LENGTHS = [(4, 5), (6, 1), (3, 12), (5, 7), (4, 2), (7, 9)]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gpt2", *HYBRID])
@pytest.mark.one_in(5)  # each attention, each of another family
def test_every_layout_computes_the_same_step(family: str, attention: str) -> None:
    """Basis of 1e-12: correct layouts agree to about 1e-15 here, the smallest real bug is far above 1e-6."""
    batch = TokenBatch(ragged(LENGTHS, seed=3))
    objective = make_objective("trl:dapo", kl_coef=0.1, entropy_coef=0.02, entropy_scope="global")
    config = ModelConfig(
        family=family, dtype="float64", attn_implementation=attention, config=dict(HYBRID.get(family, {}))
    )
    with one_update(config) as update:
        expected = update(batch, None, BatchPlan(), objective)
        for name, plan in PLANS.items():
            actual = update(batch, expected["tokens"], plan, objective)
            assert_equal(actual, expected, f"under {name}")
        for chunk in (1, 3, 1000):
            actual = update(batch, expected["tokens"], PLANS["micro-2-packed"], objective, chunk)
            assert_equal(actual, expected, f"in chunks of {chunk} loss tokens")


WHOLE_BATCH: dict[str, dict[str, Any]] = {
    "clip_cov": {"loss": "clip_cov", "cov_fraction": 0.3, "cov_low": -1.0, "cov_high": 1.0},
    "kl_cov": {"loss": "kl_cov", "cov_fraction": 0.3, "cov_kl_coef": 1.0},
    "top-entropy": {
        "top_entropy_quantile": 0.4,
        "entropy_aggregation": "token-mean",
        "aggregation": "seq-mean-token-mean",
    },
    "off-policy": {"off_policy_threshold": 0.0, "loss": "sapo"},
    "vespo": {
        "loss": "vespo",
        "sampler_correction": "token_mask",
        "correction_max": 1.2,
    },
    "geo_mean": {"loss": "geo_mean", "aggregation": "seq-mean-token-mean", "kl_estimator": "k3+"},
    "bypass": {
        "loss": "reinforce",
        "old_log_probs": "sampler",
        "correction_policy": "current",
        "sampler_correction": "sequence_truncate",
        "correction_max": 1.1,
        "correction_normalize": True,
        "rejection": "token_k1:0.7:1.4",
        "aggregation": "seq-mean-token-mean",
    },
}


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_what_compares_tokens_compares_those_of_the_mini_batch(name: str) -> None:
    """Marks and weights that depend on the other tokens are the same however the mini-batch is cut."""
    batch = TokenBatch(ragged(LENGTHS, seed=3))
    objective = make_objective(**WHOLE_BATCH[name], kl_coef=0.1, entropy_coef=0.02)
    with one_update(ModelConfig(dtype="float64")) as update:
        expected = update(batch, None, BatchPlan(), objective)
        for plan in ("micro-1", "micro-2-packed", "reversed"):
            assert_equal(update(batch, expected["tokens"], PLANS[plan], objective), expected, f"under {plan}")
        if objective.compares_tokens:
            scope = "microbatch" if objective.entropy_aggregation == "token-mean" else "global"
            by_microbatch = replace(objective, statistics_scope="microbatch", entropy_scope=scope)
            other = update(batch, expected["tokens"], PLANS["micro-1"], by_microbatch)
            assert abs(float(other["loss"] - expected["loss"])) > 1e-6


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.extended), True])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_attentions_ties_and_checkpointing_agree(family: str, checkpointing: bool) -> None:
    batch = TokenBatch(ragged(LENGTHS, seed=4))
    objective = make_objective("gspo")
    for tied in (False, True):
        config = ModelConfig(family=family, dtype="float64", tie_word_embeddings=tied)
        with one_update(config) as update:
            expected = update(batch, None, BatchPlan(), objective)
        for attention in ("eager", "sdpa", "varlen"):
            other = replace(config, attn_implementation=attention, gradient_checkpointing=checkpointing)
            with one_update(other) as update:
                assert_equal(
                    update(batch, expected["tokens"], BatchPlan(), objective), expected, f"with {other}"
                )


def test_a_leak_between_packed_samples_is_far_above_the_tolerance() -> None:
    """The check above can fail: a mask that lets samples see each other changes log-probs by orders of magnitude."""
    samples = ragged(LENGTHS, seed=5)
    joined = [replace_tokens(samples[0], samples[1])]
    batch, leaky = TokenBatch(samples[:2]), TokenBatch(joined)
    with one_update(ModelConfig(dtype="float64")) as update:
        right = update(batch, None, BatchPlan(layout="packed"), Objective())
        wrong = update(leaky, None, BatchPlan(layout="packed"), Objective())
    count = len(right["log_probs"]) - sum(samples[1].loss_mask)
    torch.testing.assert_close(right["log_probs"][:count], wrong["log_probs"][:count], rtol=1e-12, atol=0)
    assert (right["log_probs"][count:] - wrong["log_probs"][count:]).abs().max() > 1e-6


def replace_tokens(first: Trajectory, second: Trajectory) -> Trajectory:
    return replace(first, tokens=first.tokens + second.tokens, loss_mask=first.loss_mask + second.loss_mask)


LAYOUT_INVARIANT = ["dapo", "dr_grpo", "grpo", "gspo", "cispo", "trl:dapo", "trl:sapo", "verl:dppo_kl"]

plans = st.builds(
    BatchPlan,
    layout=st.sampled_from(["padded", "packed"]),
    padding_side=st.sampled_from(["left", "right"]),
    pad_to_multiple_of=st.integers(1, 7),
    micro_batch_size=st.none() | st.integers(1, 5),
    row_order=st.sampled_from(ROW_ORDERS),
)
ragged_lengths = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, MAX_COMPLETION)), min_size=1, max_size=6
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ragged_lengths,
    plans,
    st.sampled_from(LAYOUT_INVARIANT),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
def test_split_order_padding_and_packing_never_matter(
    lengths: list[tuple[int, int]], plan: BatchPlan, preset: str, seed: int, random: object
) -> None:
    objective = make_objective(preset)
    samples = ragged(lengths, seed)
    order = list(range(len(samples)))
    random.shuffle(order)  # type: ignore[attr-defined]
    config = ModelConfig(
        dtype="float64", config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    )
    with one_update(config, seed) as update:
        batch = TokenBatch(samples)
        expected = update(batch, None, BatchPlan(), objective)
        shuffled = TokenBatch([samples[index] for index in order])
        tokens = permuted(expected["tokens"], order)  # type: ignore[arg-type]
        actual = update(shuffled, tokens, plan, objective)
        actual["log_probs"] = inverse(actual["log_probs"], tokens_of(batch, order))
        assert_equal(actual, expected, f"with {plan}, order {order} and {preset}")


def tokens_of(batch: TokenBatch, order: list[int]) -> Tensor:
    return torch.cat([torch.nonzero(batch.sequence == index).squeeze(1) for index in order])


def permuted(tokens: LossTokens, order: list[int]) -> LossTokens:
    index = torch.cat([torch.nonzero(tokens.sequence == sample).squeeze(1) for sample in order])
    position = torch.empty(len(order), dtype=torch.int64)
    position[torch.tensor(order)] = torch.arange(len(order))
    return tokens.select(index, position[tokens.sequence[index]], tokens.num_sequences)


def inverse(values: Tensor, index: Tensor) -> Tensor:
    out = torch.empty_like(values)
    out[index] = values
    return out


def test_values_at_masked_positions_never_reach_loss_or_gradient() -> None:
    samples = ragged(LENGTHS, seed=6)
    rng = np.random.default_rng(0)
    clean, dirty = [], []
    for sample in samples:
        recorded = rng.normal(-1.0, 0.1, len(sample.tokens))
        masked = np.asarray(sample.loss_mask) == 0
        clean.append(replace(sample, log_probs=np.where(masked, 0.0, recorded)))
        dirty.append(replace(sample, log_probs=np.where(masked, np.nan, recorded)))
    objective = Objective(sampler_correction="token_truncate", correction_max=2.0)
    results = []
    with one_update(ModelConfig(dtype="float64")) as update:
        for trajectories in (clean, dirty):
            batch = TokenBatch(trajectories)
            sampler = batch.sampler_log_probs(torch.float64)
            assert sampler is not None
            tokens = replace(quantities(batch, sampler, 1), sampler_log_probs=sampler)
            results.append(update(batch, tokens, BatchPlan(), objective))
    for name, value in results[0].items():
        if isinstance(value, Tensor):
            assert torch.equal(value, results[1][name]), name


def test_a_microbatch_without_loss_tokens_contributes_nothing() -> None:
    samples = ragged([(4, 5), (3, 6)], seed=7)
    idle = replace(samples[1], loss_mask=[0] * len(samples[1].tokens))
    with one_update(ModelConfig(dtype="float64")) as update:
        alone = update(TokenBatch(samples[:1]), None, BatchPlan(), make_objective("dapo"))
        both = update(
            TokenBatch([samples[0], idle]),
            replace(alone["tokens"], num_sequences=2),  # type: ignore[type-var]
            BatchPlan(micro_batch_size=1),
            make_objective("dapo"),
        )
    assert_equal(both, alone, "with an idle microbatch")


@pytest.mark.extended  # the golden variant `traced` compares the first of them by default
@pytest.mark.parametrize(
    ("family", "backend"), [("gpt2", "aot_eager"), ("qwen3_moe", "eager"), ("qwen3", "aot_eager")]
)
def test_compiled_blocks_compute_the_same_in_true_float64(family: str, backend: str) -> None:
    batch = TokenBatch(ragged(LENGTHS, seed=8))
    objective = make_objective("dapo")
    config = ModelConfig(family=family, dtype="float64", config=ONE_LAYER[family])
    with one_update(config) as update:
        expected = update(batch, None, BatchPlan(), objective)
    with one_update(config, compile=backend) as update:
        for name in ("left", "packed"):
            actual = update(batch, expected["tokens"], PLANS[name], objective)
            assert_equal(actual, expected, f"under {name}, compiled by {backend}")


ONE_LAYER: dict[str, dict[str, object]] = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 1, "num_experts": 2},
    "gpt2": {"n_layer": 1},
}
