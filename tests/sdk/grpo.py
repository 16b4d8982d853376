"""GRPO through an SDK: prompts, rewards, advantages and mini-batches are the client's, the rest is the service's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Problem with the seed of a completion, and what was drawn for it."""

    group: str
    prompt: str
    answer: str
    prompt_tokens: list[int]
    tokens: list[int]
    log_probs: list[float]
    reward: float


class Trainer:
    """GRPO as the self-hosted training of `grpo.yaml` makes it.

    Args:
        settings: those of the self-hosted training.
    """

    def __init__(self, driver: Any, settings: Mapping[str, Any]) -> None:
        self._driver, self._settings = driver, settings
        self._tokenizer = driver.tokenizer
        self._end = self._tokenizer.convert_tokens_to_ids("<end>")

    def draw(self, problems: Sequence[Mapping[str, Any]], temperature: float = 1.0) -> list[Sample]:
        """Sample one completion of each problem from its own seed, and score it."""
        prompts = [self._prompt(problem["prompt"]) for problem in problems]
        seeds = [problem["seed"] for problem in problems]
        drawn = self._driver.draw(prompts, seeds, self._settings["max_tokens"], temperature)
        return [
            Sample(
                problem["group"],
                problem["prompt"],
                problem["answer"],
                prompt,
                tokens,
                log_probs,
                self._reward(problem["answer"], tokens),
            )
            for problem, prompt, (tokens, log_probs) in zip(problems, prompts, drawn, strict=True)
        ]

    def pass_rate(self, samples: Sequence[Sample]) -> float:
        """Return the share of completions that are the answer."""
        return sum(self._text(sample.tokens) == sample.answer for sample in samples) / len(samples)

    def update(self, samples: Sequence[Sample], learning_rates: Sequence[float]) -> list[dict[str, float]]:
        """Make updates on mini-batches; like NexRL leave datums without an advantage out."""
        rows = [
            (
                [*sample.prompt_tokens, *sample.tokens],
                [0.0] * len(sample.prompt_tokens) + sample.log_probs,
                [0] * len(sample.prompt_tokens) + [1] * len(sample.tokens),
                advantage,
            )
            for sample, advantage in zip(samples, self._advantages(samples), strict=True)
        ]
        size = self._settings["mini_batch_size"]
        minis = [rows[start : start + size] for start in range(0, len(rows), size)]
        found = []
        for mini, learning_rate in zip(minis, learning_rates, strict=True):
            kept = [row for row in mini if row[3]] or mini  # an update without any datum would be refused
            found.append(self._driver.step(kept, learning_rate, self._settings["adam"], 0.0))
        return found

    def _advantages(self, samples: Sequence[Sample]) -> list[float]:
        groups: dict[str, list[float]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample.reward)
        return [self._advantage(sample.reward, groups[sample.group]) for sample in samples]

    def _advantage(self, reward: float, group: Sequence[float]) -> float:
        if len({*group}) == 1:
            return 0.0
        mean = sum(group) / len(group)
        spread: float = (sum((one - mean) ** 2 for one in group) / (len(group) - 1)) ** 0.5
        return float((reward - mean) / (spread + self._settings["eps"]))

    def _reward(self, answer: str, tokens: list[int]) -> float:
        text = self._text(tokens)
        same = sum(a == b for a, b in zip(answer, text, strict=False))
        return 0.5 * (text == answer) + 0.5 * (same / max(len(answer), len(text)))

    def _prompt(self, problem: str) -> list[int]:
        text = f"<user>{problem}<end><assistant>"
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def _text(self, tokens: list[int]) -> str:
        """Return the text before the end token."""
        kept = tokens[: tokens.index(self._end)] if self._end in tokens else tokens
        return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False)).strip()
