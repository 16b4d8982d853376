"""Every KL, sampler weight and criterion that verl names, on its own functions, in float64.

The names are read from verl's registries and from the source of its functions, so that a new one fails here.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from names import KL
from ragged import make_ragged, quick, seeds
from verl.trainer.ppo import core_algos, rollout_corr_helper

from regress.grpo.coefficient_controllers import adapted_kl_coef
from regress.grpo.kl_divergence import kl_estimate
from regress.grpo.objective_catalogue import REJECTIONS
from regress.grpo.objective_presets import make_objective
from regress.grpo.sampler_corrections import accepted, sampler_weights
from regress.grpo.token_samples import Samples

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", KL)
@quick
@given(seed=seeds)
def test_kl(name: str, plus: str, seed: int) -> None:
    ragged = make_ragged(seed)
    log_probs, reference = ragged.log_probs(), ragged.log_probs() + ragged.normal(3.0)
    reference[0, 0] = log_probs[0, 0] + 30.0
    estimator = KL[name] if KL[name] == "k2" else KL[name] + plus
    objective = make_objective("verl:token-mean", kl_coef=1.0, kl_estimator=estimator)
    results = []
    for function in (
        lambda leaf: core_algos.kl_penalty(leaf, reference, name + plus),
        lambda leaf: kl_estimate(leaf, reference, objective),
    ):
        leaf = log_probs.clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@quick
@given(seed=seeds, normalize=st.booleans(), icepop=st.booleans())
def test_sampler_weights(level: str, seed: int, normalize: bool, icepop: bool) -> None:
    ragged = make_ragged(seed, empty=True)
    gap = ragged.normal(0.5)
    gap[0, 0] = 40.0
    theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(
        gap, ragged.mask, level, "0.5_1.5" if icepop else 1.5, normalize
    )
    objective = make_objective(
        "verl:token-mean",
        sampler_correction=f"{level}_{'mask' if icepop else 'truncate'}",
        correction_min=0.5 if icepop else None,
        correction_max=1.5,
        correction_normalize=normalize,
    )
    flat = ragged.flat(gap)
    ours = sampler_weights(flat, torch.zeros_like(flat), ragged.sequence, ragged.rows, objective)
    tolerance = 1e-7 if normalize else 1e-12
    torch.testing.assert_close(ours, ragged.flat(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("criterion", sorted(REJECTIONS))
@quick
@given(seed=seeds, high=st.floats(1.01, 3.0), both=st.booleans())
def test_rejection(criterion: str, seed: int, high: float, both: bool) -> None:
    ragged = make_ragged(seed, empty=True)
    gap = ragged.normal(0.4)
    ratio = criterion.endswith("k1")
    bound = high if ratio else (high - 1.0) / 2
    their_bounds = f"0.7_{bound}" if ratio and both else str(bound)
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(gap, ragged.mask, criterion, their_bounds)
    objective = make_objective("verl:token-mean", rejection=f"{criterion}:{their_bounds.replace('_', ':')}")
    flat = ragged.flat(gap)
    ours = accepted(flat, torch.zeros_like(flat), Samples(ragged.sequence, ragged.rows), objective)
    assert torch.equal(ours, ragged.flat(theirs).bool())


@quick
@given(
    coefficient=st.floats(0.001, 1.0),
    kl=st.floats(0.0, 3.0),
    samples=st.integers(1, 512),
    target=st.floats(0.01, 1.0),
    horizon=st.integers(100, 10000),
)
def test_adaptive_kl(coefficient: float, kl: float, samples: int, target: float, horizon: int) -> None:
    controller = core_algos.AdaptiveKLController(coefficient, target, horizon)
    controller.update(kl, samples)
    objective = make_objective(
        kl_coef=coefficient, kl_controller="adaptive", kl_target=target, kl_horizon=horizon
    )
    assert adapted_kl_coef(coefficient, kl, samples, objective) == pytest.approx(controller.value, rel=1e-14)
