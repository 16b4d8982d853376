"""The mock worker: what was recorded, for those who recorded it, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regress.dump.coordinates import Coordinates
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, to_record
from regress.engine.mock_rollouts import Expectations, MockRolloutWorker
from regress.engine.rollout_worker import TRAIN, VAL, Prompt
from regress.errors import DumpError, ReplayError
from regress.tasks.problem import Problem

VOCABULARY = 20
LONGEST = 4
ENVIRONMENT = {"device": "cpu", "threads": 1}
EXPECT = Expectations(
    tokenizer="abc",
    temperature=1.0,
    max_completion_length=LONGEST,
    vocabulary=VOCABULARY,
    log_probs=False,
    finish_reasons=False,
    environment=ENVIRONMENT,
)
META = {"tokenizer": "abc", "environment": ENVIRONMENT}


def prompt_of(index: int, tokens: Sequence[int], group_size: int) -> Prompt:
    return Prompt(f"{index:04d}", Problem("copy", f"say {index}", f"{index}"), tuple(tokens), group_size)


def answer(prompt: Prompt, run: int, completion: Sequence[int]) -> Trajectory:
    given_tokens, sampled = len(prompt.tokens), len(completion)
    return Trajectory(
        group_id=prompt.group_id,
        run_id=run,
        tokens=[*prompt.tokens, *completion],
        loss_mask=[0] * given_tokens + [1] * sampled,
        reward=float(sum(completion)),
        prompt_length=given_tokens,
        log_probs=np.array([0.0] * given_tokens + [-0.1 * token for token in completion]),
        temperature=1.0,
        response="text",
    )


def seal(trajectories: Sequence[Trajectory], meta: dict[str, Any], step: int = 0) -> bytes:
    """A whole file of these trajectories, whatever they are: each is sound, together they need not be."""
    parts = [to_record([trajectory], step) for trajectory in trajectories]
    tensors = {name: np.concatenate([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    samples = [sample for part in parts for sample in part.meta["samples"]]  # type: ignore[union-attr]
    record = Record.of("trajectory", Coordinates(step), tensors, {**meta, "samples": samples})
    return b"".join(FORMATS["safetensors"].encode(record))


def worker(path: Path, split: str = TRAIN, expect: Expectations = EXPECT) -> MockRolloutWorker:
    return MockRolloutWorker({split: path}, "auto", expect)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[Prompt], list[Trajectory]]:
    """Prompts and, in any order, the trajectories recorded for them."""
    token = st.integers(0, VOCABULARY - 1)
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    prompts = [
        prompt_of(index, draw(st.lists(token, min_size=1, max_size=4)), size)
        for index, size in enumerate(sizes)
    ]
    answers = [
        answer(prompt, run, draw(st.lists(token, min_size=1, max_size=LONGEST)))
        for prompt in prompts
        for run in range(prompt.group_size)
    ]
    return prompts, draw(st.permutations(answers))


Change = Callable[[Trajectory], list[Trajectory]]


def _tokens(trajectory: Trajectory, at: int, token: int) -> list[int]:
    return [*trajectory.tokens[:at], token, *trajectory.tokens[at + 1 :]]


MUTATIONS: dict[str, Change] = {
    "dropped": lambda t: [],
    "duplicated": lambda t: [t, t],
    "duplicated as another run": lambda t: [t, replace(t, run_id=t.run_id + 10)],
    "duplicated as another group": lambda t: [t, replace(t, group_id="9999")],
    "other run": lambda t: [replace(t, run_id=t.run_id + 1)],
    "other group": lambda t: [replace(t, group_id="9999")],
    "other mode": lambda t: [replace(t, is_val=True)],
    "other prompt token": lambda t: [replace(t, tokens=_tokens(t, 0, (t.tokens[0] + 1) % VOCABULARY))],
    "longer prompt": lambda t: [
        replace(
            t,
            prompt_length=t.prompt_length + 1,
            loss_mask=[*[0] * (t.prompt_length + 1), *t.loss_mask[t.prompt_length + 1 :]],
        )
    ],
    "shorter prompt": lambda t: [replace(t, prompt_length=t.prompt_length - 1)],
    "other temperature": lambda t: [replace(t, temperature=0.5)],
    "token beyond the vocabulary": lambda t: [replace(t, tokens=_tokens(t, len(t.tokens) - 1, VOCABULARY))],
    "longer completion": lambda t: [
        replace(
            t,
            tokens=[*t.tokens, *[1] * LONGEST],
            loss_mask=[*t.loss_mask, *[1] * LONGEST],
            log_probs=np.append(t.log_probs, [0.0] * LONGEST),
        )
    ],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "step_000000.safetensors"


@settings(max_examples=40, deadline=None)
@given(recorded=rollouts())
def test_what_was_recorded_is_served_in_the_order_of_the_prompts(
    recorded: tuple[list[Prompt], list[Trajectory]], path: Path
) -> None:
    prompts, answers = recorded
    path.write_bytes(seal(answers, META))
    served = worker(path).rollout(0, prompts, TRAIN)
    assert [t.key for t in served] == [(p.group_id, run) for p in prompts for run in range(p.group_size)]
    known = {t.key: t for t in answers}
    for trajectory in served:
        truth = known[trajectory.key]
        assert trajectory.log_probs is not None
        assert truth.log_probs is not None
        assert trajectory.log_probs.tobytes() == truth.log_probs.tobytes()
        assert replace(trajectory, log_probs=None).__dict__ == replace(truth, log_probs=None).__dict__


@pytest.mark.parametrize("mutation", MUTATIONS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recorded=rollouts(), data=st.data())
def test_any_single_change_is_refused(
    mutation: str, recorded: tuple[list[Prompt], list[Trajectory]], data: st.DataObject, path: Path
) -> None:
    prompts, answers = recorded
    victim = data.draw(st.integers(0, len(answers) - 1))
    changed = MUTATIONS[mutation](answers[victim])
    left = [*answers[:victim], *changed, *answers[victim + 1 :]]
    if not left:
        return  # a recording without trajectories cannot be written
    path.write_bytes(seal(left, META))
    with pytest.raises((ReplayError, DumpError), match=str(path)):
        worker(path).rollout(0, prompts, TRAIN)


def test_a_refusal_is_not_due_to_the_mutation_being_refused_everywhere(path: Path) -> None:
    """The same mutated recordings are served to whoever asks for just that."""
    prompt = prompt_of(0, [3, 4], 1)
    (mutated,) = MUTATIONS["other group"](answer(prompt, 0, [5]))
    path.write_bytes(seal([mutated], META))
    (served,) = worker(path).rollout(0, [replace(prompt, group_id="9999")], TRAIN)
    assert served.tokens == [3, 4, 5]
    (mutated,) = MUTATIONS["other mode"](answer(prompt, 0, [5]))
    path.write_bytes(seal([mutated], META))
    (served,) = worker(path, VAL).rollout(0, [prompt], VAL)
    assert served.is_val


PROMPT = prompt_of(0, [3, 4], 1)


def refusal(path: Path, meta: dict[str, Any], expect: Expectations = EXPECT) -> str:
    path.write_bytes(seal([answer(PROMPT, 0, [5])], meta))
    with pytest.raises(ReplayError) as caught:
        worker(path, expect=expect).rollout(0, [PROMPT], TRAIN)
    return str(caught.value)


def test_another_tokenizer(path: Path) -> None:
    assert refusal(path, {**META, "tokenizer": "xyz"}) == (
        f"{path}: recorded with tokenizer xyz but this run uses abc; give the recorded run's tokenizer.path or task"
    )


@pytest.mark.parametrize(
    ("then", "name", "was", "now"),
    [
        ({"device": "cpu", "threads": 4}, "threads", "4", "1"),
        ({"device": "cuda", "threads": 1}, "device", "'cuda'", "'cpu'"),
        ({**ENVIRONMENT, "NCCL_ALGO": "Ring"}, "NCCL_ALGO", "'Ring'", "None"),
    ],
)
def test_another_environment(path: Path, then: dict[str, Any], name: str, was: str, now: str) -> None:
    meta = {**META, "environment": then}
    assert refusal(path, meta) == (
        f"{path}: recorded with {name}={was} but it is {now} now, which may change arithmetic; set it as it was, or "
        "rollout_worker.allow_environment_mismatch=true to replay all the same"
    )
    allowed = replace(EXPECT, environment=None)
    (served,) = worker(path, expect=allowed).rollout(0, [PROMPT], TRAIN)
    assert served.tokens == [3, 4, 5]


def test_a_recording_that_tells_nothing_about_its_run_is_judged_by_its_tokens(path: Path) -> None:
    """So it is with files of other systems."""
    path.write_bytes(seal([answer(PROMPT, 0, [5])], {}))
    assert len(worker(path).rollout(0, [PROMPT], TRAIN)) == 1
    other = replace(PROMPT, tokens=(3, 5))
    with pytest.raises(ReplayError, match="was recorded for another prompt than 'say 0'"):
        worker(path).rollout(0, [other], TRAIN)


def test_steps_that_were_not_recorded_are_named_beside_those_that_were(tmp_path: Path) -> None:
    for step in (0, 1, 2, 5, 7):
        content = seal([answer(PROMPT, 0, [5])], META, step)
        (tmp_path / f"step_{step:06d}.safetensors").write_bytes(content)
    mock = worker(tmp_path)
    assert len(mock.rollout(7, [PROMPT], TRAIN)) == 1
    with pytest.raises(ReplayError) as caught:
        mock.rollout(3, [PROMPT], TRAIN)
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path} holds no recording of train step 3 (it holds the steps 0-2 5 7); record that step "
        "first, lower max_steps, or check the path and that the recording was made in train mode"
    )
