"""Sampling: the recorded log-probs are those of the distribution each token was drawn from, to the last bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import PreTrainedModel

from regress.engine.attention import VarlenSegments
from regress.engine.config.model_config import FAMILIES, ModelConfig
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import arithmetic
from regress.engine.sampling import (
    BLOCK,
    Completion,
    SamplingParams,
    UndefinedDistribution,
    inverse_cdf,
    sample,
)
from regress.tasks.portable_draws import generator

VOCABULARY, PAD, EOS = 12, 0, 1
PROMPTS = [[5], [7, 1, 3, 9, 2, 8], [4, 6, 11], [5, 1], [3, 3, 3, 10]]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL = {
    "qwen3": {**SIZES, "head_dim": 8},
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 16},
    "qwen3_next": {**SIZES, "num_hidden_layers": 2},
    "qwen3_5_text": {**SIZES, "num_hidden_layers": 2},
    "llama": SIZES,
    "gpt2": {"n_embd": 16, "n_layer": 1},
}


def build(family: str = "qwen3", dtype: str = "float64", attention: str = "sdpa") -> PreTrainedModel:
    config = ModelConfig(
        family=family,
        config={**SMALL[family], "initializer_range": 0.4},  # far from uniform
        dtype=dtype,
        attn_implementation=attention,
    )
    return build_model(config, seed=0, vocab_size=VOCABULARY, pad_id=PAD, eos_id=EOS)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {family: build(family) for family in FAMILIES}


def params(**given: float | bool) -> SamplingParams:
    return SamplingParams(max_new_tokens=6, eos_id=EOS, pad_id=PAD, **given)  # type: ignore[arg-type]


def teacher_forced(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> NDArray[np.float64]:
    """``[len(tokens), V]`` logits, one sequence on its own: no padding, no cache, no batch."""
    ids = torch.tensor([[*prompt, *tokens]])
    varlen = VarlenSegments(None, (ids.shape[1],))
    with torch.no_grad(), arithmetic(model.dtype):
        logits = model(input_ids=ids, use_cache=False, varlen=varlen).logits[0]
    found: NDArray[np.float64] = logits[len(prompt) - 1 : -1].double().numpy()
    return found


def truncated(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> NDArray[np.float64]:
    """Log-probs by the definitions: the k largest, then the fewest that hold mass p, renormalized."""
    out = np.full_like(logits, -np.inf)
    for row, values in enumerate(logits / temperature):
        order = np.argsort(-values)[: top_k or None]
        probs = np.exp(values[order] - values[order].max())
        probs /= probs.sum()
        kept = order[np.cumsum(probs) - probs < top_p]
        largest = values[kept].max()
        out[row, kept] = values[kept] - largest - np.log(np.exp(values[kept] - largest).sum())
    return out


def assert_as_sampled(
    model: PreTrainedModel,
    completions: list[Completion],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    tolerance: float = 1e-12,
) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = truncated(teacher_forced(model, prompt, completion.tokens), temperature, top_k, top_p)
        chosen = expected[np.arange(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.log_probs.double().numpy(), chosen, rtol=0, atol=tolerance)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.7)])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_distribution_drawn_from(
    family: str, temperature: float, top_k: int, top_p: float, models: dict[str, PreTrainedModel]
) -> None:
    """Unequal prompts in one left-padded batch against each sequence alone, in float64."""
    chosen = params(temperature=temperature, top_k=top_k, top_p=top_p)
    completions = sample(models[family], PROMPTS, chosen, generators=own(3))
    assert all(completion.log_probs.dtype == torch.float64 for completion in completions)
    assert_as_sampled(models[family], completions, temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_log_probs_of_narrow_models_are_float32(dtype: str, tolerance: float) -> None:
    model = build(dtype=dtype)
    completions = sample(model, PROMPTS, params(temperature=0.7), generators=own(3))
    assert all(completion.log_probs.dtype == torch.float32 for completion in completions)
    assert_as_sampled(model, completions, temperature=0.7, tolerance=tolerance)


def test_tokens_are_drawn_from_the_recorded_distribution(models: dict[str, PreTrainedModel]) -> None:
    """Recording one distribution and drawing from another would pass every comparison of log-probs."""
    model, prompt, draws = models["qwen3"], PROMPTS[2], 4000
    chosen = SamplingParams(max_new_tokens=1, eos_id=EOS, pad_id=PAD, temperature=1.5, top_k=8, top_p=0.9)
    completions = sample(model, [prompt] * draws, chosen, generators=own(*range(draws)))
    expected = np.exp(truncated(teacher_forced(model, prompt, [0]), 1.5, 8, 0.9))[0]
    counts = np.bincount([completion.tokens[0] for completion in completions], minlength=VOCABULARY)
    assert (counts[expected == 0] == 0).all()
    assert (expected == 0).any()
    errors = np.abs(counts / draws - expected)
    assert (errors <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()


def test_completions_end_with_eos_exactly_when_they_say_so(models: dict[str, PreTrainedModel]) -> None:
    """Prompts hold eos too, as chat templates do; it ends nothing there."""
    batch = PROMPTS * 12
    completions = sample(models["llama"], batch, params(temperature=1.5), generators=own(*range(len(batch))))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert len(stopped) + len(cut) == len(batch)
    assert {len(completion.tokens) for completion in stopped} >= {1, 2, 3}
    assert any(len(completion.tokens) == 6 for completion in stopped), "eos as the very last token"
    assert cut
    assert all(completion.tokens.index(EOS) == len(completion.tokens) - 1 for completion in stopped)
    assert all(EOS not in completion.tokens and len(completion.tokens) == 6 for completion in cut)
    assert all(len(completion.log_probs) == len(completion.tokens) for completion in completions)


def own(*keys: object) -> list[random.Random]:
    """One generator a row; a single number stands for as many rows as there are prompts."""
    if len(keys) == 1:
        keys = tuple(f"{keys[0]}:{row}" for row in range(len(PROMPTS)))
    return [generator("test", key) for key in keys]


def drawn(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def test_the_seed_decides_the_draw(models: dict[str, PreTrainedModel]) -> None:
    first, again, other = (
        sample(models["qwen3"], PROMPTS, params(temperature=1.5), generators=own(seed)) for seed in (7, 7, 8)
    )
    assert drawn(first) == drawn(again)
    for ours, theirs in zip(first, again, strict=True):
        assert torch.equal(ours.log_probs, theirs.log_probs)
    assert drawn(first) != drawn(other)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_in_every_batch(data: st.DataObject, models: dict[str, PreTrainedModel]) -> None:
    """One generator for the batch would give each row numbers that depend on its place and on its neighbors."""
    family = data.draw(st.sampled_from(FAMILIES))
    chosen = params(
        temperature=data.draw(st.sampled_from([0.7, 1.5])), top_p=data.draw(st.sampled_from([1.0, 0.9]))
    )
    rows = data.draw(st.permutations(range(len(PROMPTS))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(PROMPTS) - 1))))
    whole = sample(models[family], PROMPTS, chosen, generators=own("a"))
    generators = own("a")
    for start, stop in pairwise([0, *cuts, len(rows)]):
        part = rows[start:stop]
        found = sample(
            models[family],
            [PROMPTS[row] for row in part],
            chosen,
            generators=[generators[row] for row in part],
        )
        for row, completion in zip(part, found, strict=True):
            assert completion.tokens == whole[row].tokens
            torch.testing.assert_close(completion.log_probs, whole[row].log_probs, rtol=0, atol=1e-12)


def test_rows_with_equal_prompts_draw_apart(models: dict[str, PreTrainedModel]) -> None:
    together = sample(models["qwen3"], [PROMPTS[0]] * 8, params(temperature=1.5), generators=own(*range(8)))
    assert len({tuple(tokens) for tokens in drawn(together)}) > 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0]), min_size=1, max_size=40).filter(any),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2 * BLOCK),
)
def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number(
    weights: list[float], uniform: float, shift: int
) -> None:
    """Also where most of a large vocabulary is excluded, and never a token of probability 0."""
    probs = torch.tensor([[0.0] * shift + weights], dtype=torch.float64)
    (found,) = inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert probs[0, found] > 0
    total = probs[0].cumsum(0)
    target, slack = uniform * float(total[-1]), 1e-12 * float(total[-1])
    assert total[found] > target - slack
    assert found == 0 or total[found - 1] <= target + slack


@contextmanager
def untouched() -> Iterator[None]:
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


@pytest.mark.parametrize("greedy", [False, True])
def test_the_global_random_state_and_the_model_stay_as_they_were(greedy: bool) -> None:
    model = build(attention="varlen")
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    defaults = model.generation_config
    assert model.training
    with untouched():
        sample(model, PROMPTS, params(greedy=greedy), generators=own(0))
    assert model.training
    assert model.config._attn_implementation == "varlen"
    assert model.generation_config is defaults
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_left_behind_by_a_failure(models: dict[str, PreTrainedModel]) -> None:
    model = build(attention="varlen")
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = torch.nan  # only the third prompt holds token 11
    with untouched(), pytest.raises(UndefinedDistribution) as caught:
        sample(model, PROMPTS, params(), generators=own(0))
    assert caught.value.row == 2
    assert model.training
    assert model.config._attn_implementation == "varlen"


@pytest.mark.parametrize("excluded", [torch.inf, -torch.inf])
def test_infinite_logits_are_no_distribution(excluded: float) -> None:
    model = build("gpt2")
    model.lm_head.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, excluded))
    with pytest.raises(UndefinedDistribution, match="row 0"):
        sample(model, PROMPTS, params(), generators=own(0))


def test_varlen_models_sample_like_the_others(models: dict[str, PreTrainedModel]) -> None:
    """Their attention knows no key-value cache, so they lay it aside."""
    ours = sample(build(attention="varlen"), PROMPTS, params(temperature=0.7), generators=own(3))
    theirs = sample(models["qwen3"], PROMPTS, params(temperature=0.7), generators=own(3))
    assert drawn(ours) == drawn(theirs)
    assert_as_sampled(models["qwen3"], ours, temperature=0.7)
    assert_as_sampled(build(attention="varlen"), ours, temperature=0.7)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_takes_the_most_likely_token_of_the_plain_distribution(
    family: str, models: dict[str, PreTrainedModel]
) -> None:
    """Temperature and truncation belong to sampling."""
    model = models[family]
    completions = sample(
        model, PROMPTS, params(greedy=True, temperature=1.5, top_k=1, top_p=0.1), generators=own(3)
    )
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.tokens == teacher_forced(model, prompt, completion.tokens).argmax(-1).tolist()
    assert_as_sampled(model, completions)
    assert drawn(completions) == drawn(sample(model, PROMPTS, params(greedy=True), generators=own(4)))


@pytest.mark.parametrize("greedy", [False, True])
def test_a_checkpoints_own_generation_settings_are_ignored(
    greedy: bool, models: dict[str, PreTrainedModel]
) -> None:
    model = build()
    for name, value in {"repetition_penalty": 9.0, "min_new_tokens": 6, "suppress_tokens": [2, 3, 4]}.items():
        setattr(model.generation_config, name, value)
    chosen = params(greedy=greedy, temperature=1.5)
    assert drawn(sample(model, PROMPTS, chosen, generators=own(3))) == drawn(
        sample(models["qwen3"], PROMPTS, chosen, generators=own(3))
    )


def test_every_row_has_its_own_limit(models: dict[str, PreTrainedModel]) -> None:
    limits = [1, 6, 3, 2, 5]
    free = sample(models["qwen3"], PROMPTS, params(temperature=1.5), generators=own(7))
    bounded = sample(models["qwen3"], PROMPTS, params(temperature=1.5), generators=own(7), limits=limits)
    for limit, whole, cut in zip(limits, free, bounded, strict=True):
        assert cut.tokens == whole.tokens[:limit]
        assert torch.equal(cut.log_probs, whole.log_probs[:limit])
        assert cut.finish_reason == ("stop" if EOS in cut.tokens else "length")
    assert any(len(cut.tokens) < len(whole.tokens) for whole, cut in zip(free, bounded, strict=True))
