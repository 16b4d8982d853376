"""Rollouts that a run samples itself: what differs first, and whether the distributions before it agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.diagnosis.sampled_tokens import SAMPLED, draws_that_differ
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.trajectory import Trajectory, to_record

PROMPT = [3, 4, 5]
Change = Callable[[list[Trajectory]], None]


def rollouts(seed: int = 0) -> list[Trajectory]:
    """Six samples of two turns, with two tokens of an environment between them."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(6):
        first, second = (rng.integers(6, 14, size).tolist() for size in (4, 5))
        tokens = [*PROMPT, *first, 20, 21, *second]
        mask = [0] * 3 + [1] * 4 + [0] * 2 + [1] * 5
        log_probs = np.where(mask, -rng.exponential(1, len(mask)), 0.0)
        found.append(Trajectory(f"g{number // 3}", number % 3, tokens, mask, 1.0, 3, log_probs=log_probs))
    return found


def drawn(at: Sequence[int]) -> Change:
    """Another token at these positions, one a sample."""

    def change(found: list[Trajectory]) -> None:
        for one, place in zip(found, at, strict=False):
            one.tokens[place] = 15

    return change


def scaled(found: list[Trajectory]) -> None:
    drawn([12] * 6)(found)
    for one in found:
        assert one.log_probs is not None
        one.log_probs = one.log_probs * 1.3


def later_ones_scaled(found: list[Trajectory]) -> None:
    drawn([12] * 6)(found)
    for one in found:
        assert one.log_probs is not None
        one.log_probs = np.where(np.arange(14) > 3, one.log_probs * 1.3, one.log_probs)


def shortened(found: list[Trajectory]) -> None:
    for one in found[:4]:
        one.tokens, one.loss_mask = one.tokens[:-1], one.loss_mask[:-1]
        assert one.log_probs is not None
        one.log_probs = one.log_probs[:-1]


def replies_marked(found: list[Trajectory]) -> None:
    for one in found:
        one.loss_mask = [*one.loss_mask[:7], 1, 1, *one.loss_mask[9:]]


def other_prompts(found: list[Trajectory]) -> None:
    for one in found:
        one.tokens[1] = 9


def without(*places: int) -> Change:
    """Every sample without the tokens at these positions."""

    def change(found: list[Trajectory]) -> None:
        for one in found:
            kept = np.setdiff1d(np.arange(len(one.tokens)), places)
            assert one.log_probs is not None
            one.tokens, one.loss_mask = ([part[i] for i in kept] for part in (one.tokens, one.loss_mask))
            one.log_probs = one.log_probs[kept]

    return change


def with_one_more_of_the_template(found: list[Trajectory]) -> None:
    for one in found:
        assert one.log_probs is not None
        one.tokens, one.loss_mask = (
            [*part[:9], more, *part[9:]] for part, more in ((one.tokens, 22), (one.loss_mask, 0))
        )
        one.log_probs = np.insert(one.log_probs, 9, 0.0)


def one_reply_and_other_draws(found: list[Trajectory]) -> None:
    drawn([12] * 3)(found)
    found[4].tokens[8] = 9


def one_mask_and_other_draws(found: list[Trajectory]) -> None:
    drawn([12] * 3)(found)
    found[4].loss_mask = [*found[4].loss_mask[:7], 1, 1, *found[4].loss_mask[9:]]


def less_likely(found: list[Trajectory]) -> None:
    drawn([12] * 6)(found)
    for one in found:
        assert one.log_probs is not None
        one.log_probs[12] -= 2.0


CASES: dict[str, tuple[Change, str]] = {
    "another draw": (drawn([12, 5, 11]), "sampler-stream"),
    "another distribution": (scaled, "sampler-distribution"),
    "later tokens": (later_ones_scaled, "sampler-distribution"),
    "another end": (shortened, "sampler-end"),
    "another mask": (replies_marked, "rollout-mask"),
    "other prompts": (other_prompts, "rollouts-given"),
    "a reply without its last token": (without(8), "rollouts-given"),
    "a reply without its first token": (without(7), "rollouts-given"),
    "a reply with one token more": (with_one_more_of_the_template, "rollouts-given"),
    "a conversation that ends within a reply": (without(*range(8, 14)), "rollouts-given"),
    "another reply and other draws": (one_reply_and_other_draws, "rollouts-given"),
    "another mask and other draws": (one_mask_and_other_draws, "rollout-mask"),
    "no second turn": (without(*range(7, 14)), "sampler-end"),
    "a turn one token short": (without(6), "sampler-end"),
    "at the first token": (drawn([3, 3, 3]), "sampler"),
    "another reward": (lambda found: setattr(found[0], "reward", 0.0), "rollout-records"),
}


def words(change: Change, greedy: bool = False, tolerance: Tolerance | None = None) -> str:
    wrong = rollouts()
    change(wrong)
    return draws_that_differ(to_record(wrong, 0), to_record(rollouts(), 0), tolerance, greedy)


def told(detail: str, *before: Verdict, step: int = 0) -> list[str]:
    first = Verdict(Status.MASK, "trajectory", "tokens", Place(step), detail)
    found = find_divergence([first, *before])
    assert found is not None
    return [one.rule for one in diagnose(found)]


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_of_a_sampler(name: str) -> None:
    change, rule = CASES[name]
    found = words(change)
    assert found.startswith(SAMPLED)
    assert told(found)[0] == rule
    assert "other-rollouts" not in told(found)


@pytest.mark.parametrize(
    ("change", "event"),
    [
        (other_prompts, "the prompt is another"),
        (without(8), "an answer of the environment is another: its tokens end earlier"),
        (with_one_more_of_the_template, "an answer of the environment is another: its tokens end later"),
        (without(*range(8, 14)), "an answer of the environment is another: its tokens end earlier"),
        (without(6), "the completion ends earlier"),
        (without(*range(7, 14)), "the conversation ends earlier"),
    ],
)
def test_the_part_of_a_conversation_that_differs_first_is_named(change: Change, event: str) -> None:
    assert f", where {event};" in f"{words(change)};"


def test_rollouts_that_had_to_be_repeated_are_other_rollouts() -> None:
    assert told("3 of 9 elements differ in their bytes") == ["other-rollouts"]


def test_a_first_token_from_the_right_distribution_is_a_hint_at_the_cache() -> None:
    assert told(words(later_ones_scaled))[:2] == ["sampler-distribution", "sampler-cache"]
    assert "sampler-cache" not in told(words(scaled))


def test_weights_that_did_not_arrive_are_told_only_behind_an_update_that_holds() -> None:
    held = Verdict(Status.OK, "param", "w", Place(0, None, 0), count=4)
    assert told(words(scaled), held, step=1)[0] == "sampler-weights"
    assert told(words(scaled), step=1)[0] == "sampler-distribution"
    assert told(words(scaled), held, step=3)[0] == "sampler-distribution"  # parameters of two steps before


def test_a_greedy_completion_that_takes_a_less_likely_token_was_drawn() -> None:
    assert told(words(less_likely, greedy=True))[0] == "sampler-greedy"
    assert "sampler-greedy" not in told(words(less_likely))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(sample=st.integers(0, 5), at=st.sampled_from([4, 5, 6, 9, 12]))
def test_the_place_of_the_first_difference_is_named(sample: int, at: int) -> None:
    wrong, right = rollouts(), rollouts()
    wrong[sample].tokens[at] = 15
    found = draws_that_differ(to_record(wrong, 0), to_record(right, 0))
    name = f"g{sample // 3}/{sample % 3}"
    assert (
        f"the first of them ({name}) at position {at} in turn {1 if at < 7 else 2}, where token 15" in found
    )
    assert "1 of 6 samples differ" in found


def test_the_measured_tolerance_decides_whether_log_probs_agree() -> None:
    def nearly(found: list[Trajectory]) -> None:
        drawn([12] * 6)(found)
        for one in found:
            assert one.log_probs is not None
            one.log_probs = one.log_probs * (1 + 1e-4)

    assert told(words(nearly))[0] == "sampler-distribution"
    assert told(words(nearly, tolerance=Tolerance(1e-3, reason="a test")))[0] == "sampler-stream"


def test_samples_of_other_names_are_other_samples() -> None:
    wrong = rollouts()
    wrong[0] = replace(wrong[0], group_id="other")
    assert "other samples" in draws_that_differ(to_record(wrong, 0), to_record(rollouts(), 0))
