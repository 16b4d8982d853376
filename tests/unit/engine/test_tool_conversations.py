"""Conversations with a tool, and the defects of the experiments that they come from, one by one.

The numbers are those of the table in docs/howto/experiments.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby

import numpy as np
import pytest
import torch

from regress.dump.trajectory import Trajectory
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.rollout_worker import TRAIN
from regress.engine.run_construction import Run, build
from regress.engine.tokenizer import completion_text, turn_ids
from regress.errors import ConfigError, TaskError
from regress.grpo.advantage_computation import token_advantages
from regress.grpo.loss_aggregation import token_weights
from regress.grpo.objective import Objective
from regress.tasks.conversation_turns import parse_answer, parse_call
from regress.tasks.dialogue_environments import make_environment
from regress.tasks.problem import is_correct

MakeConfig = Callable[..., Config]
TOOL = (
    *("task.name=calculate", "task.environment=calculator", "task.max_turns=2", "task.train_size=64"),
    "task.rewards={exact_match: 0.0, character_match: 0.0, step1_format: 1.0, step1_exec: 1.0, step2_format: 1.0, "
    "step2_content: 1.0}",
    *("data.max_prompt_length=16", "data.max_completion_length=32", "warm_start.batch_size=32"),
    *("data.prompts_per_step=6", "rollout_worker.temperature=0.7", "model.dtype=float64"),
)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A policy that has seen some calls, and makes mistakes."""
    config = load_config(
        overrides=[*TOOL, "warm_start.steps=30", "data.group_size=4", "task.eval_size=8"], environ={}
    ).config
    with ExitStack() as resources:
        yield build(config, resources, lambda name, total: lambda: None)


@pytest.fixture(scope="module")
def rollout(run: Run) -> list[Trajectory]:
    return run.trainer.worker.rollout(0, run.prompts.train(0), TRAIN)


def stretches(found: Trajectory) -> list[tuple[int, list[int]]]:
    """(loss mask, tokens) of every stretch after the prompt."""
    after = zip(found.loss_mask[found.prompt_length :], found.tokens[found.prompt_length :], strict=True)
    return [(mask, [token for _, token in part]) for mask, part in groupby(after, key=lambda pair: pair[0])]


@pytest.mark.extended
def test_both_kinds_of_conversation_occur(rollout: list[Trajectory]) -> None:
    """Otherwise the tests below would look at nothing."""
    kinds = {len(stretches(found)) for found in rollout}
    assert kinds == {1, 3}


def test_the_result_of_a_call_is_in_the_context_and_out_of_the_loss(
    run: Run, rollout: list[Trajectory]
) -> None:
    """Defects 6 and 7: masks of another sample's lengths, and a second turn trained without the tool's result."""
    environment = make_environment("calculator")
    problems = {prompt.group_id: prompt.problem for prompt in run.prompts.train(0)}
    for found in rollout:
        parts = stretches(found)
        problem = problems[found.group_id]
        said = completion_text(run.tokenizer, parts[0][1])
        reply = environment(problem, said)
        if len(parts) == 3:
            assert reply is not None
            assert parts[1] == (0, turn_ids(run.tokenizer, problem, "tool", reply))
            assert parse_call(said) is not None
        else:
            assert reply is None or found.finish_reason == "length"
        assert found.extra["turns"][0] == [said, reply]
        assert found.response == completion_text(run.tokenizer, parts[-1][1])
        content = found.rewards["step2_content"]
        assert (content == 1.0) == (len(parts) == 3 and parse_answer(str(found.response)) == problem.answer)
        assert is_correct(problem, str(found.response)) or content < 1.0


def test_the_end_of_every_turn_is_trained(run: Run, rollout: list[Trajectory]) -> None:
    """Defect 1: an end token that is also the padding is neither learned nor seen."""
    end = run.tokenizer.eos_token_id
    assert run.tokenizer.pad_token_id != end
    for found in rollout:
        own = [tokens for mask, tokens in stretches(found) if mask]
        for tokens in own[:-1] if found.finish_reason == "length" else own:
            assert tokens[-1] == end


def test_trainer_and_sampler_see_one_context_at_one_temperature(run: Run, rollout: list[Trajectory]) -> None:
    """Defects 2, 4 and 5: tokens of padding in the context, dropout in training, log-probs of another temperature."""
    (mini,) = run.trainer.mini_batches(rollout)
    assert mini.tokens.old_log_probs is not None
    assert mini.tokens.sampler_log_probs is not None
    torch.testing.assert_close(
        mini.tokens.old_log_probs, mini.tokens.sampler_log_probs, rtol=1e-11, atol=1e-11
    )


def test_demonstrations_show_call_result_and_answer(run: Run) -> None:
    for found in run.prompts.demonstrations(0):
        parts = stretches(found)
        assert [mask for mask, _ in parts] == [1, 0, 1]
        assert parse_call(completion_text(run.tokenizer, parts[0][1])) is not None
        assert parse_answer(completion_text(run.tokenizer, parts[2][1])) is not None
        assert parts[2][1][-1] == run.tokenizer.eos_token_id


def test_a_solution_that_the_environment_ends_is_refused(config: MakeConfig) -> None:
    with (
        ExitStack() as resources,
        pytest.raises(TaskError, match=r"does not reply to '<tool:calculator>.*which the"),
    ):
        build(config(*TOOL, "task.environment=search"), resources, lambda name, total: lambda: None)


def test_a_group_of_one_has_no_undefined_advantage() -> None:
    """Defect 3: the standard deviation of one reward is not a number."""
    for estimator in ("grpo", "rloo"):
        objective = Objective(advantage=estimator, scale="group" if estimator == "grpo" else "none")
        found = token_advantages(
            torch.tensor([1.0]), torch.tensor([0]), torch.zeros(3, dtype=torch.int64), objective, None
        )
        assert found.isfinite().all()
    with pytest.raises(ConfigError, match=r"data\.group_size=1 leaves .* nothing to compare"):
        load_config(overrides=["data.group_size=1"], environ={})


def test_no_sample_is_dropped(run: Run, rollout: list[Trajectory]) -> None:
    """Defect 9: a last mini-batch that is not full is lost."""
    (mini,) = run.trainer.mini_batches(rollout)
    assert mini.tokens.num_sequences == len(rollout) == 24
    with pytest.raises(ConfigError, match=r"trainer\.mini_batch_size=7 does not divide the rollout batch"):
        load_config(overrides=["trainer.mini_batch_size=7"], environ={})


def test_dr_grpo_divides_by_the_completion_limit() -> None:
    """Defect 13: the limit of prompt and completion together makes every loss smaller."""
    config = load_config(config_name="experiment_drgrpo", environ={}).config
    weights = token_weights(
        torch.zeros(3, dtype=torch.int64),
        1,
        config.algorithm,
        max_completion_length=config.data.max_completion_length,
    )
    np.testing.assert_allclose(weights, 1 / config.data.max_completion_length)
