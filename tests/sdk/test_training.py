"""Twenty steps of GRPO through an SDK: prompts, rewards and advantages are the client's, the rest is the service's."""

from __future__ import annotations

import random
from typing import Any

import pytest

STEPS, PROMPTS, GROUP, UPDATES, HELD_OUT = 20, 32, 12, 4, 64
LETTERS = "abcdef"
LEARNING_RATE = 3e-4
WARM_UP = 8
"""Updates; the first ones of Adam are as long as the rate, and would unlearn the warm start."""


class Trainer:
    """GRPO on reversed words."""

    def __init__(self, driver: Any, seed: int) -> None:
        self._driver, self._random = driver, random.Random(seed)
        self._end = driver.tokenizer.convert_tokens_to_ids("<end>")
        self._held_out = [self._word() for _ in range(HELD_OUT)]

    def pass_rate(self) -> float:
        """Share of held-out words that greedy completions reverse."""
        passed = 0.0
        for word in self._held_out:
            ((tokens, _),) = self._driver.sample(self._prompt(word), 1, 8, 0.0, 0)
            passed += self._answer(tokens) == word[::-1]
        return passed / HELD_OUT

    def step(self, number: int) -> None:
        """Sample groups, and make updates on parts of them with advantages that have mean 0 in each group."""
        rows = []
        for _ in range(PROMPTS):
            word = self._word()
            prompt = self._prompt(word)
            drawn = self._driver.sample(prompt, GROUP, 8, 1.0, self._random.randrange(2**31))
            rewards = [self._reward(word, tokens) for tokens, _ in drawn]
            mean = sum(rewards) / GROUP
            spread = (sum((reward - mean) ** 2 for reward in rewards) / (GROUP - 1)) ** 0.5
            for (tokens, log_probs), reward in zip(drawn, rewards, strict=True):
                mask = [0] * len(prompt) + [1] * len(tokens)
                known = [0.0] * len(prompt) + list(log_probs)
                rows.append(([*prompt, *tokens], known, mask, (reward - mean) / (spread + 1e-6)))
        size = len(rows) // UPDATES
        for update in range(UPDATES):
            kept = [row for row in rows[update * size : (update + 1) * size] if row[3]]
            if kept:
                made = number * UPDATES + update + 1
                self._driver.step(kept, LEARNING_RATE * min(1.0, made / WARM_UP))

    def _reward(self, word: str, tokens: list[int]) -> float:
        answer, right = self._answer(tokens), word[::-1]
        if answer is None:
            return 0.0
        same = sum(a == b for a, b in zip(answer, right, strict=False))
        return (same / max(len(answer), len(right)) + (answer == right)) / 2

    def _word(self) -> str:
        return "".join(self._random.choice(LETTERS) for _ in range(self._random.randint(3, 5)))

    def _prompt(self, word: str) -> list[int]:
        text = f"<user>rev {word}<end><assistant>"
        found: list[int] = self._driver.tokenizer.encode(text, add_special_tokens=False)
        return found

    def _answer(self, tokens: list[int]) -> str | None:
        """Text before the end token; None without one."""
        if self._end not in tokens:
            return None
        return str(self._driver.tokenizer.decode(tokens[: tokens.index(self._end)]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pass_rate_rises(driver: Any, seed: int) -> None:
    trainer = Trainer(driver, seed)
    driver.publish("initial")
    before = trainer.pass_rate()
    for step in range(STEPS):
        trainer.step(step)
        driver.publish(f"step_{step + 1:06d}")
    after = trainer.pass_rate()
    print(f"greedy pass rate {before:.3f} -> {after:.3f}")
    assert after >= before + 0.1
