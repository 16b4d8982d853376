"""Runs on somebody's own data: files, functions, prompts as token ids, and recordings without a task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import read_metrics
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.tokenizer import train_tokenizer
from regress.engine.training_run import train
from regress.errors import ConfigError, RegressError

MakeConfig = Callable[..., Config]

LEVELS = ("basic", "advanced")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [
        {"question": f"say {index}", "answer": index, "level": LEVELS[index % 2], "complexity": index % 10}
        for index in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_is_trained_on_and_evaluated_by_its_levels(
    config: MakeConfig, console: Console, rows: Path
) -> None:
    run = config(
        f"task.dataset_path={rows}",
        "task.prompt_field=question",
        "task.train_size=null",
        "evaluation.every_n_steps=1",
        "curriculum.enable=true",
        "curriculum.stages=[{name: all, threshold: 0.9}]",
    )
    train(run, console)
    row = read_metrics(Path(run.output_dir) / "metrics.jsonl")[0]
    assert row["eval_level/basic/samples"] + row["eval_level/advanced/samples"] == 4
    assert row["curriculum/stage_steps_needed"] == 8, "16 problems in steps of 2"


def test_a_held_out_file_shares_no_prompt_with_the_training_problems(
    config: MakeConfig, console: Console, rows: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.json"
    held_out.write_text(json.dumps([{"question": "say 3", "answer": "3"}]))
    files = (f"task.dataset_path={rows}", f"task.eval_path={held_out}", "task.prompt_field=question")
    with pytest.raises(
        ConfigError, match="the prompt 'say 3' is there twice, so that it could be trained on and"
    ):
        train(config(*files, "task.train_size=null", "task.eval_size=0"), console)


def test_a_file_wins_over_the_task_of_another_layer_only(rows: Path, tmp_path: Path) -> None:
    given = f"task.dataset_path={rows}"
    assert load_config(None, "reverse_string", [given], {}).config.task.dataset_path == str(rows)
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[given, "task.level=2"], environ={})
    assert (
        "and task.level are both given (command line), and the file already holds the problems; leave"
        in str(caught.value)
    )


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's model and tokenizer, which pads with its end token and has no chat template."""
    folder = tmp_path_factory.mktemp("foreign")
    tokenizer = train_tokenizer(["abcdefgh 0123456789"])
    tokenizer.chat_template, tokenizer.pad_token = None, tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    size = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(size).save_pretrained(folder)
    return folder


def trajectories(step: int) -> list[dict[str, object]]:
    """Two groups of other sizes, with prompts that no task of ours has, in the layout of another system."""
    found = []
    for group, runs in (("q-7", 3), ("q-9", 2)):
        for run in range(runs):
            prompt, after = [5, 6, 7 + step, 8][: 2 + runs % 2], [9 + run, 10, 1]
            found.append(
                {
                    "tokens": prompt + after,
                    "loss_mask": [0] * len(prompt) + [1] * len(after),
                    "reward": float(run),
                    "is_val": False,
                    "extra_fields": {"group_id": group, "run_id": run},
                }
            )
    return found


def record(folder: Path) -> Path:
    folder.mkdir()
    for step in range(2):
        payload = {"step": step, "num_trajectories": 5, "trajectories": trajectories(step)}
        (folder / f"step_{step:06d}.jsonl").write_text(json.dumps(payload) + "\n")
    return folder


MOCK = ("rollout_worker.type=mock", "rollout_worker.need_llm_inference=false", "warm_start.steps=0")
SIZES = ("data.max_prompt_length=16", "data.max_completion_length=16", "data.max_seq_length=32")


def test_foreign_rollouts_are_replayed_without_a_task(
    config: MakeConfig, console: Console, foreign: Path, tmp_path: Path
) -> None:
    recording = record(tmp_path / "theirs")
    given = (
        *(*MOCK, *SIZES, "task.name=null", f"model.path={foreign}"),
        f"rollout_worker.trajectory_load_path={recording}",
        *(
            "debug.enable_data_dump=true",
            "debug.dump_options.trajectory=true",
            "debug.dump_options.loss=true",
        ),
    )
    run = config(*given, f"output_dir={tmp_path / 'one'}")
    train(run, console)
    for record_ in DumpReader(run.debug.dump_dir).records("trajectory"):
        wanted = [token for found in trajectories(record_.step) for token in found["tokens"]]  # type: ignore[attr-defined]
        assert record_.tensors["tokens"].tolist() == wanted
    before, after = (
        load_file(foreign / "model.safetensors"),
        load_file(tmp_path / "one/final/model.safetensors"),
    )
    assert any(not before[name].equal(after[name]) for name in before), "nothing was learned"
    packed = config(
        *given, "batching.layout=packed", "model.attn_implementation=varlen", f"output_dir={tmp_path / 'two'}"
    )
    train(packed, console)
    ours, theirs = (
        [
            row["training_step/loss"]
            for row in read_metrics(Path(c.output_dir) / "metrics.jsonl")
            if "training_step/loss" in row
        ]
        for c in (run, packed)
    )
    assert ours == pytest.approx(theirs, abs=1e-5)


REFUSED = {
    "evaluation.every_n_steps=1": "task.name=null leaves the prompts to a recording, but evaluation.every_n_steps",
    "warm_start.steps=3": "task.name=null leaves the prompts to a recording, but warm_start.steps needs problems",
    "data.max_seq_length=4 data.max_prompt_length=2 data.max_completion_length=2": "tokens but data.max_",
    "trainer.mini_batch_size=2": "holds 5 trajectories, but trainer.mini_batch_size=2 cuts the 8 of",
    "max_steps=3": "holds no recording of train step 2",
    "model.path=null": "task.name=null leaves no text that a tokenizer could be made from; set tokenizer.path",
    "rollout_worker.type=hf rollout_worker.need_llm_inference=true rollout_worker.trajectory_load_path=null": (
        "task.name=null leaves the prompts to a recording, but rollout_worker.type=hf samples; set task.name"
    ),
    "task.name=copy": "has no chat template; set chat_template, or give the prompts as token ids",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("overrides", REFUSED)
def test_what_does_not_fit_a_foreign_recording(
    overrides: str, config: MakeConfig, console: Console, foreign: Path, tmp_path: Path
) -> None:
    recording = f"rollout_worker.trajectory_load_path={record(tmp_path / 'theirs')}"
    expected = REFUSED[overrides]
    if overrides == "task.name=copy":  # its padding would be refused first
        overrides = f"{overrides} tokenizer.path={_padded(foreign, tmp_path)}"
    with pytest.raises(RegressError) as caught:
        train(
            config(*MOCK, *SIZES, "task.name=null", f"model.path={foreign}", recording, *overrides.split()),
            console,
        )
    assert expected in str(caught.value)


def _padded(foreign: Path, tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(foreign)
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(tmp_path / "padded")
    return tmp_path / "padded"


def test_prompts_as_token_ids_need_no_chat_template(
    config: MakeConfig, console: Console, foreign: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([{"prompt": [5, 6 + index], "answer": "a"} for index in range(12)]))
    run = config(
        *(*SIZES, f"model.path={foreign}", f"tokenizer.path={_padded(foreign, tmp_path)}"),
        *(f"task.dataset_path={path}", "task.train_size=8", "evaluation.every_n_steps=2", "max_steps=1"),
    )
    train(run, console)
    path.write_text(json.dumps([{"prompt": [5, 600 + index], "answer": "a"} for index in range(12)]))
    with pytest.raises(ConfigError, match=r"a prompt holds the token id 6.., and the tokenizer knows"):
        train(run, console)
