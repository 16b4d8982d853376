"""Bad configurations, checkpoints, tokenizers, tasks and rewards: one sentence, no traceback, no file lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UNFIT = (
    "model.config={…}: a model of this configuration cannot run (…); choose sizes that fit each other and this "
    "machine, such as a hidden size that the number of attention heads divides"
)
QUOTING = (
    "is malformed; write KEY=VALUE, KEY=[A,B], GROUP=NAME or ~KEY, and a value with special characters as "
    "KEY='\"VALUE\"'."
)

OVERRIDES = {
    "optimizer.learning_rat=1": "optimizer.learning_rat=1 (command line) is not a key of the configuration; "
    "the nearest "
    "valid key is optimizer.learning_rate.",
    "model.family=qwen": "model.family=qwen (command line) must be one of qwen3, qwen3_moe, qwen3_next, qwen3_5_text, "
    "llama, gpt2, or the model_type of another causal language model of transformers; did you mean qwen3?",
    "model.attention=flash": "model.attention=flash names no function; write package.module:function",
    "max_steps=two": "max_steps=two (command line) must be an integer of at least 0.",
    "data.group_size=0": "data.group_size=0 (command line) must be an integer of at least 1.",
    'debug.target_param_pattern="("': "debug.target_param_pattern=( (command line) must be a regular expression, "
    "which it is not: …; write special characters with \\.",
    "seed=18446744073709551616": "seed=18446744073709551616 (command line) must be an integer of at least 0 and at "
    "most 4294967295.",
    "threads=2000000": "threads=2000000 (command line) must be an integer of at least 1 and at most 1024.",
    "optimizer.learning_rate": f"Override optimizer.learning_rate (command line) {QUOTING}",
    "data.max_seq_length=10": "data.max_prompt_length=32 and data.max_completion_length=4 add up to 36, more than "
    "data.max_seq_length=10; shorten one of them or set data.max_seq_length=36.",
    "trainer.mini_batch_size=3": "trainer.mini_batch_size=3 does not divide the rollout batch of "
    "data.prompts_per_step=2 times data.group_size=2 = 4 samples; choose a divisor such as 2.",
    "rollout_worker.need_llm_inference=false": "rollout_worker.type=hf generates completions and "
    "rollout_worker.need_llm_inference=false forbids it; set rollout_worker.need_llm_inference=true or "
    "rollout_worker.type=mock.",
    "rollout_worker.type=mock": "rollout_worker.type=mock replays recorded completions and "
    "rollout_worker.need_llm_inference=true asks for new ones; set rollout_worker.need_llm_inference=false. | "
    "rollout_worker.type=mock finds nothing to replay while rollout_worker.trajectory_load_path=null; set it to a "
    "trajectory file, or to the directory that holds the step_* files @ rollout_worker.type (command line)",
    "task.rewards={exact_match: 0}": "task.rewards names no reward with a weight other than 0, so that every "
    "advantage is zero; give one, for example task.rewards.exact_match=1.0.",
    "data.prompts_per_step=9": "data.prompts_per_step=9 is more than task.train_size=8, so that a step would hold a "
    "prompt twice; set task.train_size to at least 9 or lower data.prompts_per_step.",
    "device=abacus": "device=abacus cannot be used (RuntimeError: …); set device=cpu or one that this machine has",
    "device=meta": "device=meta cannot be used (RuntimeError: …); set device=cpu or one that this machine has",
    "data.max_prompt_length=8": "data.max_prompt_length=8: the prompt of problem … takes 12 tokens; set "
    "data.max_prompt_length to at least 12 or make the task easier",
    "batching.pad_to_multiple_of=100000000000": "the memory does not suffice (MemoryError: …); lower "
    "batching.micro_batch_size, batching.pad_to_multiple_of, the sizes in data, or those of the model",
    "optimizer.learning_rate=1e300": "the optimizer cannot make an update with lr 1e+300, eps 1e-08, weight_decay 0 "
    "(RuntimeError: …); set the learning rate and the rest of section optimizer to usual sizes",
    "task.name=revers_string": "task.name: there is no task 'revers_string'; did you mean 'reverse_string'? "
    "(datasets of the optional reasoning-gym are named reasoning_gym/<dataset>, your own task is named by its path, "
    '"package.module:function", and task.dataset_path names a file)',
    "task.level=9": "task.level: task 'reverse_string' has levels 1 to 5, not 9",
    "task.params={min_length: 0}": "task.params.min_length: task 'reverse_string' needs a whole number from 1 to 64, "
    "not 0",
    "task.train_size=100000": "task 'reverse_string' at level 1 yields only 9288 distinct prompts, but train_size "
    "100000 and eval_size 2 need 100002: lower task.train_size or task.eval_size, raise task.level, or widen "
    "task.params",
    "task.rewards={exact_mach: 1}": "task.rewards: there is no reward 'exact_mach'; did you mean 'exact_match' or "
    "'character_match'? (your own is named by its path, \"package.module:function\")",
    "model.config={hidden_siz: 1}": "model.config.hidden_siz=1: the qwen3 configuration of transformers has no such "
    "key; the nearest is hidden_size",
    "model.config={to_dict: 1}": "model.config.to_dict=1: the qwen3 configuration of transformers has no such key; "
    "the nearest is …",
    "model.config={tie_word_embeddings: true}": "model.config.tie_word_embeddings=True is decided by another key; "
    "set model.tie_word_embeddings instead",
    "model.config={vocab_size: 3}": "model.config={…}: the model knows 3 tokens and the tokenizer 14; leave "
    "vocab_size away",
    "model.config={hidden_size: -1}": UNFIT,
    "model.config={hidden_size: large}": UNFIT,
    "model.config={num_attention_heads: 3, num_key_value_heads: 2}": UNFIT,
    "model.config={head_dim: 15}": UNFIT,
    "model.config={hidden_act: loud}": UNFIT,
    "model.config={intermediate_size: 100000000000}": UNFIT,
    "model.path=nowhere": "model.path='nowhere': there is no such directory, and models are not downloaded; give "
    "one written by "
    "save_pretrained",
    "tokenizer.path=nowhere": "tokenizer.path: nowhere is not a directory; give a directory made by save_pretrained",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_override(override: str, case: Any) -> None:
    case.refuses(override, says=OVERRIDES[override])


def test_learned_positions_have_an_end(case: Any) -> None:
    case.refuses(
        "model=gpt2",
        "model.config={n_embd: 16, n_positions: 47, hidden_size: 16}",
        "~model.config.intermediate_size",
        "~model.config.head_dim",
        says="data.max_seq_length=48: the model has 47 positions (n_positions); lower data.max_seq_length or give a "
        "model with more",
    )


def test_a_family_without_attention_is_named_by_its_key(case: Any) -> None:
    case.refuses(
        "model.family=mamba",
        "model.config={hidden_size: 16}",
        *("~model.config.intermediate_size", "~model.config.head_dim", "~model.config.num_attention_heads"),
        *("~model.config.num_key_value_heads",),
        says="model.family=mamba: the engine has no masks for its layers of the kind linear_attention, so trainer and "
        "sampler would compute different functions; set it to a model with full or sliding attention, such as qwen2",
    )


def test_patterns_that_find_nothing_leave_an_earlier_dump_alone(case: Any) -> None:
    """The recorder would have to remove it first."""
    overwriting = ("debug.enable_data_dump=true", "debug.overwrite=true")
    case.refuses(
        *overwriting,
        "debug.dump_options.gradient=true",
        "debug.target_param_pattern=lm_heat",
        says="target_param_pattern 'lm_heat' matches none of the 14 names: the nearest are lm_head.weight, …, and .* "
        "matches all",
    )
    case.refuses(
        *overwriting,
        "debug.dump_options.activations=true",
        "debug.target_module_pattern=lm_heat",
        says="target_module_pattern 'lm_heat' matches none of the … names: the nearest are lm_head, …, and .* "
        "matches all",
    )


FILES = {
    "max_steps: 1\nmax_step: 2\n": "max_step=2 (file my.yaml:2) is not a key of the configuration; the nearest valid "
    "key is max_steps.",
    "trainer: {epochs: many}\n": "trainer.epochs=many (file my.yaml:1) must be an integer of at least 1.",
    "data: [1\n": "File my.yaml:… is not valid YAML (…); correct it.",
    "- max_steps\n": "File my.yaml:1 must hold a mapping; write lines of KEY: VALUE.",
    "defaults: [basis]\n": "basis (file my.yaml:1) is not a configuration: basis.yaml is in none of the directories …; "
    "the nearest name is …",
    "exp_name: ${oc.env:NO_SUCH_VARIABLE}\n": "exp_name=${oc.env:NO_SUCH_VARIABLE} (file my.yaml:1) needs the "
    "environment variable NO_SUCH_VARIABLE, which is not set; set it or write ${oc.env:NO_SUCH_VARIABLE,DEFAULT}.",
    "system_envs: {A=B: x}\n": "system_envs.'A=B' cannot be the name of an environment variable, which is not empty "
    "and holds no = and no NUL; correct the name.",
    'system_envs: {A: "x\\0y"}\n': 'system_envs.A="x\\u0000y" (file my.yaml:1) must be text without the character NUL, '
    "which no path and no variable can hold.",
    'debug: {dump_dir: "a\\0b"}\n': 'debug.dump_dir="a\\u0000b" (file my.yaml:1) must be text without the character '
    "NUL, which no path and no variable can hold.",
}


@pytest.mark.parametrize("text", FILES)
def test_file(text: str, case: Any) -> None:
    case.refuses_file(text, says=FILES[text])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--config-name", "demoo"],
            "config_name=demoo is not a configuration: demoo.yaml is in none of the directories …",
        ),
        (
            ["--config-path", "no.yaml"],
            "config_path=no.yaml is not a directory and no .yaml file; correct the path.",
        ),
        (["--config-path", "."], "config_path=. is a directory; add config_name (there are: none here)."),
    ],
)
def test_missing_file(
    arguments: list[str], says: str, case: Any, command: Callable[..., Any], sentence: Callable[..., str]
) -> None:
    case.says(sentence(command("train", *arguments)), says)


REWARDS = {
    "nan": ("return float('nan')", "returned nan; a reward must be finite"),
    "inf": ("return 10**400", "returned inf; a reward must be finite"),
    "none": (
        "return None",
        "returned None; a reward must return a number, or None under algorithm.missing_rewards=exclude",
    ),
    "raises": (
        "raise ValueError('two\\nlines')",
        "raised ValueError: two lines; a reward must return a number for every text",
    ),
    "exits": ("raise SystemExit(0)", "raised SystemExit: 0; a reward must return a number for every text"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_reward(name: str, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body, says = REWARDS[name]
    (case.folder / f"reward_{name}.py").write_text(f"def judge(problem, completion):\n    {body}\n")
    monkeypatch.syspath_prepend(case.folder)
    case.refuses_file(
        f"task: {{rewards: {{'reward_{name}:judge': 1.0}}}}\n",
        says=f"reward 'reward_{name}:judge' on task 'reverse_string' (task_id …) {says}",
    )


def test_a_reward_that_cannot_be_imported(case: Any) -> None:
    case.refuses_file(
        "task: {rewards: {'no_such_module:judge': 1.0}}\n",
        says="task.rewards: cannot import 'no_such_module:judge' (ModuleNotFoundError: No module named "
        "'no_such_module'); "
        'the form is "package.module:function" and the package must be importable from here',
    )


def test_rewards_that_overflow_together(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (case.folder / "reward_big.py").write_text("def judge(problem, completion):\n    return 1e308\n")
    monkeypatch.syspath_prepend(case.folder)
    case.refuses_file(
        "task: {rewards: {'reward_big:judge': 1.0e+10}}\n",
        says="task.rewards: the weighted sum of {'reward_big:judge': 1e+308} on task 'reverse_string' (task_id …) is "
        "inf; lower the weights",
    )


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The sentence alone on stderr, nothing on stdout, and a code that scripts can tell from success."""
    done = subprocess.run(
        [sys.executable, "-m", "regress.cli", "train", "max_step=1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: max_step=1 (command line) is not a key of the configuration; the nearest valid key is max_steps.\n"
    )
