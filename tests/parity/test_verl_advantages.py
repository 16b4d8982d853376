"""Every estimator that verl names and what precedes it, on verl's own functions, in float64.

The names are read from verl's registries and from the source of its functions, so that a new one fails here.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import Ragged, make_ragged, quick, seeds
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.batch_resampling import PF_PPO_METHODS, resampling_weights, varied_groups
from regress.grpo.objective_presets import make_objective
from regress.grpo.value_loss import gae, value_loss

pytestmark = pytest.mark.filterwarnings("ignore")
ESTIMATORS = {name: f"verl:{name}" for name in core_algos.ADV_ESTIMATOR_REGISTRY if name != "grpo"} | {
    "grpo": "verl:token-mean"
}


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=seeds, data=st.data())
def test_estimators(name: str, seed: int, data: st.DataObject) -> None:
    ragged = make_ragged(seed, empty=data.draw(st.booleans()))
    if data.draw(st.booleans()) and name != "grpo_passk":
        ragged.groups[-1] = 99  # alone in its group
    gamma, lam, norm = (
        data.draw(st.floats(0.5, 1.0)),
        data.draw(st.floats(0.0, 1.0)),
        data.draw(st.booleans()),
    )
    fields: dict[str, Any] = {}
    scaled = name in ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
    if scaled and not norm:
        fields["scale"] = "none"
    if name in ("reinforce_plus_plus", "gae"):
        fields["gamma"] = gamma
    if name == "gae":
        fields["lam"] = lam
    objective = make_objective(ESTIMATORS[name], **fields)
    old, values = ragged.log_probs(), ragged.normal()
    squares = old.exp().square() + 0.2 * torch.rand(
        old.shape, generator=ragged.generator, dtype=torch.float64
    )
    baselines = torch.rand(ragged.rows, generator=ragged.generator, dtype=torch.float64)
    weights = ragged.normal(0.3).exp() if data.draw(st.booleans()) else None
    penalty = ragged.normal(0.2) * ragged.mask if name != "gdpo" and data.draw(st.booleans()) else None
    rewards = ragged.token_rewards if penalty is None else ragged.token_rewards - penalty
    components = torch.rand(ragged.rows, 2, generator=ragged.generator, dtype=torch.float64).float().double()
    tensors = rewards, old, squares, values, baselines, weights, components
    theirs = their_advantages(name, ragged, *tensors, gamma, lam, norm)
    ours = token_advantages(
        components if name == "gdpo" else ragged.scores,
        ragged.groups,
        ragged.sequence,
        objective,
        None if penalty is None else ragged.flat(penalty),
        reward_weights=[1.0, 0.5] if name == "gdpo" else None,
        baselines_N=baselines,
        values_K=ragged.flat(values),
        old_log_probs_K=ragged.flat(old),
        sum_pi_squared_K=ragged.flat(squares),
        correction_K=None if weights is None else ragged.flat(weights),
        position_K=torch.nonzero(ragged.mask)[:, 1],
    )
    # whitening adds 1e-8 to the number of tokens; gdpo and grpo_vectorized compute in float32
    rounded = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gdpo", "grpo_vectorized")
    # gpg has a factor, and grpo the deviation of a sample that is alone, in float32
    tolerance = 1e-5 if name in rounded else 1e-7 if name in ("gpg", "grpo") else 1e-12
    torch.testing.assert_close(ours, ragged.flat(theirs).double(), rtol=tolerance, atol=tolerance)


def their_advantages(
    name: str,
    ragged: Ragged,
    rewards: Tensor,
    old: Tensor,
    squares: Tensor,
    values: Tensor,
    baselines: Tensor,
    weights: Tensor | None,
    components: Tensor,
    gamma: float,
    lam: float,
    norm: bool,
) -> Tensor:
    function = core_algos.get_adv_estimator_fn(name)
    mask, index = ragged.mask, np.array([str(group) for group in ragged.groups.tolist()], dtype=object)
    if name == "gae":
        return function(rewards, values, mask, gamma, lam)[0]
    config = AlgoConfig(gamma=gamma, norm_adv_by_std_in_grpo=norm)
    given: dict[str, Any] = {"token_level_rewards": rewards.clone(), "response_mask": mask, "config": config}
    if name in ("grpo", "grpo_vectorized"):
        given["norm_adv_by_std_in_grpo"] = norm
    if name not in ("reinforce_plus_plus",):
        given["index"] = index
    if name == "remax":
        given["reward_baselines"] = baselines
    if name.endswith("optimal_token_baseline"):
        given |= {"old_log_probs": old, "sum_pi_squared": squares, "rollout_is_weights": weights}
    if name == "gdpo":
        given["config"] = AlgoConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
        given["norm_adv_by_std_in_grpo"] = norm
        given["non_tensor_batch"] = {"a": components[:, 0].numpy(), "b": components[:, 1].numpy()}
        attention = torch.cat(
            [torch.ones(ragged.rows, 2), (torch.arange(mask.shape[1]) < ragged.lengths[:, None])], 1
        )
        given["batch"] = {"prompts": torch.ones(ragged.rows, 2), "attention_mask": attention.long()}
        # verl counts a component only where the completion's last token is one of the loss
    return function(**given)[0]


@quick
@given(seed=seeds, clip=st.floats(0.0, 1.0))
def test_value_loss(seed: int, clip: float) -> None:
    ragged = make_ragged(seed)
    old, returns, new = ragged.normal(), ragged.normal(), ragged.normal()
    leaves = [new.clone().requires_grad_() for _ in range(2)]
    theirs, share = core_algos.compute_value_loss(leaves[0], returns, old, ragged.mask, clip)
    losses, clipped = value_loss(*(ragged.flat(each) for each in (leaves[1], old, returns)), clip)
    torch.testing.assert_close(losses.mean(), theirs, rtol=1e-12, atol=1e-12)
    assert float(clipped.double().mean()) == pytest.approx(float(share), abs=1e-6)
    gradients = [
        torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((theirs, losses.mean()), leaves, strict=True)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


@quick
@given(seed=seeds)
def test_returns_of_gae(seed: int) -> None:
    ragged = make_ragged(seed)
    values = ragged.normal()
    theirs = core_algos.compute_gae_advantage_return(ragged.token_rewards, values, ragged.mask, 0.9, 0.8)[1]
    objective = make_objective("verl:gae", gamma=0.9, lam=0.8)
    _, ours = gae(ragged.flat(ragged.token_rewards), ragged.flat(values), ragged.sequence, objective)
    torch.testing.assert_close(ours, ragged.flat(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", PF_PPO_METHODS)
@quick
@given(seed=seeds, power=st.floats(0.5, 3.0))
def test_pf_ppo(method: str, seed: int, power: float) -> None:
    ragged = make_ragged(seed)
    seen: list[Tensor] = []
    data = DataProto.from_dict(tensors={"token_level_scores": ragged.token_rewards})
    with pytest.MonkeyPatch.context() as patch:
        right = torch.multinomial

        def watched(weights: Tensor, *args: Any, **rest: Any) -> Tensor:
            seen.append(weights)
            return right(weights, *args, **rest)

        patch.setattr(core_algos.torch, "multinomial", watched)
        core_algos.compute_pf_ppo_reweight_data(data, method, power)
    ours = resampling_weights(ragged.scores, method, power)
    torch.testing.assert_close(ours.float(), seen[0].float(), rtol=1e-6, atol=1e-12)


def test_groups_that_dynamic_sampling_keeps() -> None:
    """The rule of ``ReplayBuffer._dapo_filtered_keys``: the standard deviation of several values is 0."""
    scores = torch.tensor([0.5, 0.5, 1.0, 0.0, 0.3, 0.7, 0.7])
    groups = torch.tensor([7, 7, 2, 2, 5, 4, 4])
    filtered = {
        group
        for group in groups.tolist()
        if (groups == group).sum() > 1 and float(np.std(scores[groups == group].numpy())) == 0.0
    }
    kept = varied_groups(scores, groups)
    assert {int(group) for group in groups[~kept]} == filtered == {7, 4}
