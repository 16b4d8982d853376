"""Rewards of several functions, of which some are None, to advantages: TRL's own code, under random settings.

``GRPOTrainer`` and ``RLOOTrainer`` score recorded completions themselves; the advantages that they hand to the loss,
and the sampler weights of GRPO, are compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity_world import GROUP_SIZE, GROUPS, World, completion_log_probs
from trl_objective import AGGREGATIONS_OF_REWARDS, MODES, SCALES, make_trainer

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.objective_presets import make_objective
from regress.grpo.token_losses import sampler_weights

pytestmark = pytest.mark.filterwarnings("ignore")
random = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
N = GROUPS * GROUP_SIZE
GIVEN: list[list[float | None]] = [[], []]
"""Rewards that the two functions return."""
FUNCTIONS = [lambda **_: list(GIVEN[0]), lambda **_: list(GIVEN[1])]


@pytest.fixture(scope="module")
def grpo(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return scripted(make_trainer("grpo", world, tmp_path_factory.mktemp("grpo"), FUNCTIONS), world)


@pytest.fixture(scope="module")
def rloo(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return scripted(make_trainer("rloo", world, tmp_path_factory.mktemp("rloo"), FUNCTIONS, beta=0.0), world)


def scripted(trainer: Any, world: World) -> Any:
    """Let the trainer take the recorded completions."""
    trainer._tokenize_prompts = lambda prompts: ([list(s.prompt) for s in world.plain], None, {})
    trainer._generate_single_turn = lambda *_, **__: single_turn(trainer, world)
    return trainer


def single_turn(trainer: Any, world: World) -> Any:
    completions = [list(sample.completion) for sample in world.plain]
    if type(trainer).__name__ == "RLOOTrainer":
        return completions
    noise = [list(sample.sampler_noise) for sample in world.plain]
    flat = completion_log_probs(world.reference, world.plain, 1.0)[0].split([len(one) for one in noise])
    old = [[float(a) + b for a, b in zip(x, y, strict=True)] for x, y in zip(flat, noise, strict=True)]
    return completions, old


def rewards() -> st.SearchStrategy[list[float | None]]:
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0])
    return st.lists(st.one_of(value, value, value, st.none()), min_size=N, max_size=N)


def their_advantages(trainer: Any, world: World, patched: dict[str, Any]) -> torch.Tensor:
    prompts = [{"prompt": f"w{2 + sample.group}"} for sample in world.plain]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(trainer, name, value)
        with torch.no_grad():
            found = trainer._generate_and_score_completions(prompts)
    return found["advantages"].double()


def our_advantages(world: World, weights: list[float], objective: Any) -> torch.Tensor:
    given = [[float("nan") if one is None else one for one in column] for column in GIVEN]
    return token_advantages(
        torch.tensor(given, dtype=torch.float64).T,
        torch.tensor([sample.group for sample in world.plain]),
        torch.arange(N),
        objective,
        reward_weights=weights,
    )


@random
@given(data=st.data())
def test_grpo(grpo: Any, world: World, data: st.DataObject) -> None:
    GIVEN[:] = [data.draw(rewards()), data.draw(rewards())]
    weights = [data.draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(2)]
    scale, rule = data.draw(st.sampled_from(SCALES)), data.draw(st.sampled_from(AGGREGATIONS_OF_REWARDS))
    theirs = their_advantages(
        grpo,
        world,
        {
            "scale_rewards": scale,
            "multi_objective_aggregation": rule,
            "reward_weights": torch.tensor(weights),
        },
    )
    fields: dict[str, Any] = {"reward_aggregation": rule}
    if rule == "sum_then_normalize":
        fields["scale"] = scale
    objective = make_objective("trl:dapo", **fields)
    torch.testing.assert_close(our_advantages(world, weights, objective), theirs, rtol=1e-5, atol=1e-5)


@random
@given(data=st.data())
def test_rloo(rloo: Any, world: World, data: st.DataObject) -> None:
    GIVEN[:] = [data.draw(rewards()), data.draw(rewards())]
    weights = [data.draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(2)]
    clip = data.draw(st.none() | st.sampled_from([(0.25, 1.0), (-0.5, 0.5), (0.5, 2.0)]))
    normalize = data.draw(st.booleans())
    theirs = their_advantages(
        rloo,
        world,
        {
            "reward_clip_range": clip,
            "normalize_advantages": normalize,
            "reward_weights": torch.tensor(weights),
        },
    )
    low, high = clip or (None, None)
    objective = make_objective(
        "trl:rloo", kl_coef=0.0, reward_min=low, reward_max=high, normalize_advantages=normalize
    )
    torch.testing.assert_close(our_advantages(world, weights, objective), theirs, rtol=1e-5, atol=1e-5)


@random
@given(mode=st.sampled_from(MODES), low=st.none() | st.floats(0.1, 0.9), high=st.floats(1.1, 4.0))
def test_sampler_weights(grpo: Any, world: World, mode: str, low: float | None, high: float) -> None:
    GIVEN[:] = [[1.0] * N, [0.0] * N]
    prompts = [{"prompt": f"w{2 + sample.group}"} for sample in world.plain]
    changes: dict[str, Any] = {
        "use_vllm": True,
        "_last_loaded_step": grpo.state.global_step,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(grpo, name, value, raising=False)
        with torch.no_grad():
            found = grpo._generate_and_score_completions(prompts)
    mask = found["completion_mask"].bool()
    objective = make_objective("trl:dapo", sampler_correction=mode, correction_min=low, correction_max=high)
    sequence = torch.arange(N).repeat_interleave(mask.sum(1))
    old, sampler = (found[name][mask] for name in ("old_per_token_logps", "sampling_per_token_logps"))
    ours = sampler_weights(old, sampler, sequence, N, objective)
    theirs = found["importance_sampling_ratio"].expand(mask.shape)[mask]
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)
