"""Several turns: the environment's tokens are read, never sampled, never trained on, and every number stays right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.dialogue_rollouts import Dialogue
from regress.engine.rollout_worker import TRAIN, VAL
from regress.engine.run_construction import Run, build
from regress.engine.tokenizer import completion_ids, completion_text, prompt_ids, train_tokenizer, turn_ids
from regress.engine.training_run import train
from regress.errors import ConfigError, RegressError, TaskError
from regress.tasks.dialogue_environments import checker, make_environment
from regress.tasks.problem import Problem

MakeConfig = Callable[..., Config]
TURNS = (
    "task.max_turns=3",
    "task.environment=checker",
    "data.max_completion_length=36",
    "data.max_seq_length=68",
    "warm_start.steps=25",
)
PROBLEM = Problem("reverse_string", "rev abc", "cba")
QWEN_LIKE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def built(config: MakeConfig) -> Iterator[Callable[..., Run]]:
    with ExitStack() as resources:

        def make(*overrides: str) -> Run:
            return build(config(*TURNS, *overrides), resources, lambda name, total: lambda: None)

        yield make


def turns_of(found: Trajectory) -> list[tuple[int, list[int]]]:
    """(loss mask, tokens) of every stretch after the prompt."""
    after = zip(found.loss_mask[found.prompt_length :], found.tokens[found.prompt_length :], strict=True)
    return [(mask, [token for _, token in part]) for mask, part in groupby(after, key=lambda pair: pair[0])]


def rollout(run: Run, split: str = TRAIN) -> list[Trajectory]:
    prompts = run.prompts.train(0) if split == TRAIN else run.prompts.evaluation()
    return run.trainer.worker.rollout(0, prompts, split)


@pytest.mark.parametrize("split", [TRAIN, VAL])
def test_a_conversation_is_what_policy_and_environment_said_in_turn(
    split: str, built: Callable[..., Run]
) -> None:
    run = built("rollout_worker.batch_size=5", "data.prompts_per_step=6")
    problems = {
        problem.task_id: problem for problem in run.prompts._dataset.train + run.prompts._dataset.evaluation
    }
    seen = set()
    for found in rollout(run, split):
        problem = problems[str(found.task_id)]
        stretches = turns_of(found)
        assert [mask for mask, _ in stretches] == [1, 0, 1, 0, 1][: len(stretches)]
        assert len(found.tokens) - found.prompt_length <= 36
        for place, (mask, tokens) in enumerate(stretches):
            if mask == 0:
                before = completion_text(run.tokenizer, stretches[place - 1][1])
                assert tokens == turn_ids(run.tokenizer, problem, "tool", str(checker(problem, before)))
        last = completion_text(run.tokenizer, stretches[-1][1])
        assert found.response == last
        exact = float(checker(problem, last) is None)
        assert found.rewards["exact_match"] == exact, "the reward is of the last completion"
        assert found.log_probs is not None
        masked = np.asarray(found.loss_mask) == 0
        assert (found.log_probs[masked] == 0).all()
        assert (found.log_probs[~masked] < 0).all()
        done = len(stretches) == 5 or exact == 1.0
        assert done or found.finish_reason == "length", "nobody ended it"
        seen.add((len(stretches), found.finish_reason, exact))
    if split == TRAIN:
        assert {(5, "stop"), (3, "stop"), (1, "stop")} & {(n, why) for n, why, _ in seen}
        assert any(n == 5 for n, _, _ in seen)
        assert any(why == "length" for _, why, _ in seen)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_trainer_and_sampler_agree_on_every_turn(
    family: str, temperature: float, built: Callable[..., Run]
) -> None:
    """Rows of one batch are in different turns and of different lengths; 1e-15 was measured."""
    run = built(
        f"model.family={family}",
        "model.dtype=float64",
        f"rollout_worker.temperature={temperature}",
        "batching.layout=packed",
        "batching.micro_batch_size=3",
    )
    found = rollout(run)
    assert sum(len(turns_of(one)) > 1 for one in found) >= 2
    (mini,) = run.trainer.mini_batches(found)
    assert mini.tokens.old_log_probs is not None
    assert mini.tokens.sampler_log_probs is not None
    torch.testing.assert_close(
        mini.tokens.old_log_probs, mini.tokens.sampler_log_probs, rtol=1e-12, atol=1e-12
    )


def test_the_same_rollout_twice_is_the_same(built: Callable[..., Run]) -> None:
    run = built()
    first, again = rollout(run), rollout(run)
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert [one.loss_mask for one in first] == [one.loss_mask for one in again]


def test_recorded_conversations_replay_and_are_evaluated(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    shared = (
        *TURNS,
        "rollout_mock.enable=true",
        f"rollout_mock.dump_dir={tmp_path / 'rollouts'}",
        "evaluation.every_n_steps=1",
    )
    first = train(config(*shared, "rollout_mock.mode=dump", f"output_dir={tmp_path / 'a'}"), console)
    second = train(config(*shared, "rollout_mock.mode=mock", f"output_dir={tmp_path / 'b'}"), console)
    assert first.metrics == second.metrics
    assert first.pass_rates == second.pass_rates


def test_every_other_demonstration_is_a_second_attempt(built: Callable[..., Run]) -> None:
    run = built()
    for index, found in enumerate(run.prompts.demonstrations(0)):
        stretches = turns_of(found)
        text = completion_text(run.tokenizer, stretches[-1][1])
        problem = next(
            p
            for p in run.prompts._dataset.train
            if found.tokens[: found.prompt_length] == prompt_ids(run.tokenizer, p.prompt)
        )
        assert text == problem.answer
        assert [mask for mask, _ in stretches] == ([0, 1] if index % 2 else [1])
        if index % 2:
            attempt = completion_ids(run.tokenizer, problem.answer[:-1])
            said = turn_ids(run.tokenizer, problem, "tool", problem.answer[:-1] + "?")
            assert stretches[0][1] == attempt + said


def test_a_demonstration_without_room_for_a_second_attempt_is_plain(built: Callable[..., Run]) -> None:
    short = built("data.max_completion_length=8", "data.max_seq_length=40")
    assert all(len(turns_of(found)) == 1 for found in short.prompts.demonstrations(0))


@pytest.mark.parametrize("template", [None, QWEN_LIKE])
def test_the_turns_together_are_what_the_chat_template_writes_for_the_whole(template: str | None) -> None:
    tokenizer = train_tokenizer(["rev abc", "cba", "\n?"], tool=True)
    tokenizer.chat_template = template or tokenizer.chat_template
    chat = [
        {"role": "user", "content": PROBLEM.prompt},
        {"role": "assistant", "content": "ca"},
        {"role": "tool", "content": "c??"},
        {"role": "assistant", "content": "cb"},
        {"role": "tool", "content": "cb?"},
    ]
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=True)
    dialogue = Dialogue(make_environment("checker"), tokenizer, 3, PROBLEM)
    parts = prompt_ids(tokenizer, PROBLEM.prompt)
    for text in ("ca", "cb"):
        said, reply = dialogue.reply(PROBLEM, text)
        assert said is not None
        parts += completion_ids(tokenizer, text) + reply
    assert parts == whole
    assert dialogue.reply(PROBLEM, "cba") == (None, [])


def test_a_template_without_tools_says_it_as_the_user() -> None:
    tokenizer = train_tokenizer(["rev abc", "cba", "?"])
    dialogue = Dialogue(make_environment("checker"), tokenizer, 2, PROBLEM)
    said, reply = dialogue.reply(PROBLEM, "ca")
    assert said == "c??"
    assert tokenizer.decode(reply) == "<user>c??<end><assistant>".replace("<end>", tokenizer.eos_token)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0].content }}{{ eos_token }}<assistant>", "the turn is left out"),
        ("{% for m in messages[-1:] %}{{ m.content }}{{ eos_token }}{% endfor %}", "written in another way"),
        (
            "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}{{ eos_token }}",
            "too long",
        ),
    ],
)
def test_a_template_that_cannot_go_on_is_refused(template: str, why: str) -> None:
    tokenizer = train_tokenizer(["rev abc", "cba", "?"], tool=True)
    tokenizer.chat_template = template
    with pytest.raises(
        ConfigError, match=rf"can write the turn of neither a tool \(.*{why}.*\) nor the user"
    ):
        Dialogue(make_environment("checker"), tokenizer, 2, PROBLEM)


def test_an_environment_the_tokenizer_cannot_write_is_refused() -> None:
    tokenizer = train_tokenizer(["rev abc", "cba"], tool=True)
    dialogue = Dialogue(make_environment("checker"), tokenizer, 2, PROBLEM)
    with pytest.raises(
        TaskError, match=r"task\.environment: 'checker' said 'c\?\?', which the tokenizer cannot wri"
    ):
        dialogue.reply(PROBLEM, "ca")


def test_a_failure_in_a_later_turn_names_the_right_sample(built: Callable[..., Run]) -> None:
    """Only some rows of the batch are still talking then."""
    run = built("rollout_worker.temperature=0.3")
    before = rollout(run)
    talking = [one.key for one in before if len(turns_of(one)) > 1]
    assert talking
    assert talking[0] != before[0].key or len(talking) < len(before)
    with torch.no_grad():
        tool = run.tokenizer.convert_tokens_to_ids("<tool>")
        run.trainer.policy.model.get_input_embeddings().weight[tool] = torch.nan
    group, run_id = talking[0]
    with pytest.raises(
        RegressError, match=f"nothing can be sampled for group '{group}' run {run_id} in train"
    ):
        rollout(run)
