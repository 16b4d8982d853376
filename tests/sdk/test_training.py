"""Twenty steps of GRPO through an SDK are those of self-hosted training: token for token, and every number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from grpo import Sample, Trainer

from conftest import SEEDS

STEPS = 20
RISE = 0.1


def same(drawn: Sequence[Sample], expected: Sequence[dict[str, Any]], where: str) -> int:
    """Return the number of tokens, which have to be those that were expected, with their log-probs and rewards."""
    for sample, one in zip(drawn, expected, strict=True):
        for name in ("prompt_tokens", "tokens", "log_probs", "reward"):
            assert getattr(sample, name) == one[name], f"{name} of {one['group']} in {where}"
    return sum(len(sample.tokens) for sample in drawn)


@pytest.mark.parametrize("seed", SEEDS)
def test_training_is_that_of_the_engine(
    make_driver: Callable[[str], Any], self_hosted: Callable[[int], dict[str, Any]], seed: int
) -> None:
    expected = self_hosted(seed)
    started = time.monotonic()
    driver = make_driver(f"seed-{seed}")
    trainer = Trainer(driver, expected["settings"])
    driver.publish("initial")
    first, last = expected["evaluations"]
    before = trainer.draw(first, 0.0)
    same(before, first, "the first evaluation")
    tokens = made = 0
    for step, rollout in enumerate(expected["rollouts"]):
        drawn = trainer.draw(rollout)
        tokens += same(drawn, rollout, f"step {step}")
        size = len(rollout) // expected["settings"]["mini_batch_size"]
        updates = expected["updates"][made : made + size]
        metrics = trainer.update(drawn, [update["learning_rate"] for update in updates])
        for found, update in zip(metrics, updates, strict=True):
            assert (found["loss:sum"], found["grad_norm"]) == (update["loss"], update["grad_norm"]), step
        made += size
        driver.publish(f"step_{step + 1:06d}")
    after = trainer.draw(last, 0.0)
    same(after, last, "the last evaluation")
    rates = [trainer.pass_rate(before), trainer.pass_rate(after)]
    seconds = time.monotonic() - started
    print(
        f"seed {seed}: greedy pass rate {rates[0]:.3f} -> {rates[1]:.3f}; {tokens} tokens, their log-probs, rewards "
        f"and {made} updates as self-hosted; {seconds:.0f} s"
    )
    assert len(expected["rollouts"]) == STEPS
    assert rates == expected["pass_rates"]
    assert rates[1] >= rates[0] + RISE
