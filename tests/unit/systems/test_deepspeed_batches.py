"""Microbatches around DeepSpeed: every token is predicted once, by whichever rank and row has the one before it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.systems.adapters.deepspeed_batches import batch_of
from regress.systems.exported import Sample


def sample(number: int, prompt: int, completion: int) -> Sample:
    tokens = [100 * (number + 1) + i for i in range(prompt + completion)]
    mask = [i % 3 != 1 for i in range(completion)]
    return Sample(
        key=(f"g{number}", 0),
        prompt=tokens[:prompt],
        completion=tokens[prompt:],
        mask=[int(one) for one in mask],
        reward=0.0,
        finish_reason="stop",
        old=None,
        sampler=[-0.5 - i if kept else None for i, kept in enumerate(mask)],
        reference=None,
    )


@pytest.mark.parametrize("packed", [False, True])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    parts=st.integers(1, 3),
)
def test_every_token_is_there_once_and_predicted_once(
    packed: bool, lengths: list[tuple[int, int]], parts: int
) -> None:
    micro = [(sample(number, *one), float(number + 1)) for number, one in enumerate(lengths)]
    by_key = {own.key: (own, advantage) for own, advantage in micro}
    inputs: Counter[tuple[str, int]] = Counter()
    predicted: Counter[tuple[str, int]] = Counter()
    for index in range(parts):
        batch = batch_of(micro, (index, parts), packed=packed)
        for place, seen in ((batch.of_inputs, inputs), (batch.of_log_probs, predicted)):
            keys = [tuple(key) for key in place["meta"]["samples"]]
            assert len(place["layout"].segments) == len(keys)
            for segment in place["layout"].segments:
                own, advantage = by_key[keys[segment.sample]]
                for position in range(segment.start, segment.stop):
                    at = segment.row, segment.col + position - segment.start
                    seen[(own.key[0], position)] += 1
                    if seen is inputs:
                        assert batch.inputs["input_ids"][at] == own.tokens[position]
                        assert batch.inputs["position_ids"][at] == position
                        continue
                    assert batch.next_ids[at] == own.tokens[position]
                    assert batch.advantage[at] == advantage
                    inside = position - len(own.prompt)
                    assert batch.mask[at] == (own.mask[inside] if inside >= 0 else 0)
                    if batch.mask[at]:
                        assert batch.old[at] == own.sampler[inside]  # type: ignore[index]  # it has them
        outside = batch.mask.clone()
        for segment in batch.of_log_probs["layout"].segments:
            outside[segment.row, segment.col : segment.col + segment.stop - segment.start] = 0
        assert not outside.any()
    tokens = {(own.key[0], i): 1 for own, _ in micro for i in range(len(own.tokens))}
    assert inputs == tokens
    assert predicted == {(name, i): 1 for name, i in tokens if i}
