"""Wrong keys and wrong values: the exact sentence for each, whichever layer they come from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from regress.engine.config.model_config import FAMILIES
from regress.grpo.objective_presets import PRESETS
from regress.grpo.policy_losses import LOSSES

Refusal = Callable[..., str]

NO_KEY = "is not a key of the configuration; the nearest valid key is"
NOT_A_SEED = "must be an integer of at least 0 and at most 4294967295."
NOT_A_COUNT = "must be an integer of at least 0."
NOT_BETAS = "must be a list of 2 numbers of at least 0 and less than 1."
NOT_A_SECTION = (
    "must be a mapping with keys of path, family, config, tie_word_embeddings, dtype, attn_implementation, attention, "
    "patch, compile, gradient_checkpointing, router_coef, router_scope, lora.r, lora.alpha, lora.dropout, "
    "lora.target_modules, lora.layers_to_transform, lora.rank_pattern, lora.alpha_pattern, lora.bias, lora.use_rslora, "
    "lora.init_lora_weights, lora.base_path, lora.save_merged; to choose a file model/NAME.yaml, name one that is on "
    "the search path."
)
MANDATORY = "is mandatory; give it in a file or on the command line."
BROKEN_INTERPOLATION = (
    "is a malformed interpolation (missing BRACE_CLOSE at '<EOF>'); write ${KEY} or ${oc.env:NAME,DEFAULT}."
)
MALFORMED = (
    "is malformed; write KEY=VALUE, KEY=[A,B], GROUP=NAME or ~KEY, and a value with special characters as "
    "KEY='\"VALUE\"'."
)

# what is said about an override that is repeated as it was typed
VALUES = {
    "optimizer.learing_rate=1": f"{NO_KEY} optimizer.learning_rate.",
    "optimizer.lr=1": f"{NO_KEY} optimizer.learning_rate.",
    "group_size=4": f"{NO_KEY} data.group_size.",
    "rollout_worker.top_x=1": f"{NO_KEY} rollout_worker.top_p or rollout_worker.top_k.",
    "debug.dump_options.grad=true": f"{NO_KEY} debug.dump_options.gradient.",
    "exp_name.a=1": f"{NO_KEY} exp_name.",
    "seed=abc": NOT_A_SEED,
    "seed=1.5": NOT_A_SEED,
    "seed=true": NOT_A_SEED,
    "seed=-1": NOT_A_SEED,
    "seed=null": NOT_A_SEED,
    "seed=[1]": NOT_A_SEED,
    "seed=4294967296": NOT_A_SEED,
    "task.level=0": "must be an integer of at least 1.",
    "trainer.mini_batch_size=0": "must be an integer of at least 1 or null.",
    "debug.enable_data_dump=2": "must be true or false.",
    "optimizer.learning_rate=fast": "must be a finite number of at least 0.",
    "optimizer.learning_rate=-1": "must be a finite number of at least 0.",
    "rollout_worker.temperature=0": "must be a finite number greater than 0.",
    "rollout_worker.top_p=1.5": "must be a finite number greater than 0 and at most 1.",
    "optimizer.betas=[0.9]": NOT_BETAS,
    "optimizer.betas=0.9": NOT_BETAS,
    "system_envs=3": "must be a mapping.",
    "system_envs.A=null": "must be text.",
    "task.rewards.exact_match=much": "must be a finite number.",
    "model.dtype=float23": "must be one of float64, float32, bfloat16; did you mean float32?",
    "model.family=lama": f"must be one of {', '.join(FAMILIES)}, or the model_type of another causal "
    "language model of transformers; did you mean llama?",
    "algorithm.preset=trl:dappo": f"must be one of {', '.join(PRESETS)}; did you mean trl:dapo?",
    "algorithm.loss=ppo": f"must be one of {', '.join(LOSSES)}; did you mean sapo?",
    "model=null": NOT_A_SECTION,
    "seed=${sed}": "refers to sed, which is not a key of the configuration; the nearest valid key is seed.",
    "exp_name=${oc.env:NOWHERE}": "needs the environment variable NOWHERE, which is not set; set it or write "
    "${oc.env:NOWHERE,DEFAULT}.",
    "output_dir=${debug.dump_dir}": "refers to itself, perhaps through other keys; break the circle.",
    "exp_name=${nope:1}": "uses the unknown resolver nope; refer to a key or use oc.env.",
    "exp_name=???": MANDATORY,
}


@pytest.mark.parametrize("override", VALUES)
def test_value_of_an_override(override: str, refusal: Refusal) -> None:
    assert refusal({}, override) == f"{override} (command line) {VALUES[override]}"


SENTENCES = {
    "~optimizer.esp": f"optimizer.esp=null (command line) {NO_KEY} optimizer.eps.",
    "seed=": f"seed='' (command line) {NOT_A_SEED}",
    "optimizer.betas=[0.9,1]": f"optimizer.betas=[0.9, 1] (command line) {NOT_BETAS}",
    "optimizer.eps=nan": "optimizer.eps=.nan (command line) must be a finite number greater than 0.",
    "optimizer.eps=inf": "optimizer.eps=.inf (command line) must be a finite number greater than 0.",
    "exp_name=[a,b]": "exp_name=[a, b] (command line) must be text.",
    "exp_name={a:1}": "exp_name={a: 1} (command line) must be text.",
    "model.config.rope_theta=nan": "model.config.rope_theta=.nan (command line) must be made of text, finite "
    "numbers, booleans, lists and mappings.",
    "debug.target_param_pattern='['": "debug.target_param_pattern=[ (command line) must be a regular "
    "expression, which it is not: unterminated character set at position 0; write special characters with "
    "\\.",
    "exp_name='${oc.env:X'": f"exp_name (command line) {BROKEN_INTERPOLATION}",
    "seed": f"Override seed (command line) {MALFORMED}",
    "=3": f"Override =3 (command line) {MALFORMED}",
    "exp_name=a=b": f"Override exp_name=a=b (command line) {MALFORMED}",
    "seed=1,2": "Override seed=1,2 (command line) gives several values to sweep over, and a run takes one; "
    "write a list as KEY=[A,B], and text with commas as KEY='\"A,B\"'.",
    "hydra.run.dir=x": "Override hydra.run.dir=x (command line) is a setting of Hydra, of which only "
    "hydra.searchpath is used; remove it.",
    "hydra.searchpath=[file://nowhere]": "hydra.searchpath=file://nowhere is not a directory, seen from {cwd}; "
    "correct the path.",
    "hydra.searchpath=[s3://bucket]": "hydra.searchpath=s3://bucket has an unknown scheme; write "
    "file://DIRECTORY.",
    "hydra.searchpath=[pkg://no.such]": "hydra.searchpath=pkg://no.such has an unknown scheme; write file://DIRECTORY.",
    "hydra.searchpath=7": "hydra.searchpath=7 must be a list of directories such as [file://./configs].",
    "~model": "Override ~model (command line) deletes a group that is not chosen; remove it.",
}


@pytest.mark.parametrize("override", SENTENCES)
def test_override(override: str, refusal: Refusal, tmp_path: Path) -> None:
    assert refusal({}, override) == SENTENCES[override].replace("{cwd}", str(tmp_path))


FILE = {
    "optimizer:\n  learing_rate: 1": f"optimizer.learing_rate=1 (file run.yaml:2) {NO_KEY} "
    "optimizer.learning_rate.",
    "optimzer:\n  eps: 1": f"optimzer.eps=1 (file run.yaml:2) {NO_KEY} optimizer.eps.",
    "optimzer: {}": f"optimzer={{}} (file run.yaml:1) {NO_KEY} optimizer.",
    "1: 2": f"1=2 (file run.yaml:1) {NO_KEY} model.lora.r.",
    "data.group_size: 3": "data.group_size=3 (file run.yaml:1) is not a key of the configuration when its dots "
    "are part of one name; nest it, one level for each dot.",
    "seed: 1\nmax_steps: many": f"max_steps=many (file run.yaml:2) {NOT_A_COUNT}",
    "seed: 2020-01-01": f"seed=2020-01-01 (file run.yaml:1) {NOT_A_SEED}",
    "model: 3": f"model=3 (file run.yaml:1) {NOT_A_SECTION}",
    "model: llama": f"model=llama (file run.yaml:1) {NOT_A_SECTION}",
    "model: {config: {a: !!binary aGVsbG8=}}": "model.config.a=b'hello' (file run.yaml:1) must be made of "
    "text, finite numbers, booleans, lists and mappings.",
    "exp_name: ${oc.env:X": f"exp_name (file run.yaml:1) {BROKEN_INTERPOLATION}",
    "exp_name: ???": f"exp_name=??? (file run.yaml:1) {MANDATORY}",
    "output_dir: ${exp_name}\nexp_name: ???": f"exp_name=??? (file run.yaml:2) {MANDATORY}",
    "model:\n  config:\n    a: ???": "model.config={a: '???'} (file run.yaml:3) needs model.config.a, which "
    "is mandatory; give it a value.",
    "seed: ${max_steps}\nmax_steps: ???": "seed=${max_steps} (file run.yaml:1) needs max_steps, which is "
    "mandatory; give it a value.",
    "hydra: {run: {dir: x}}": "hydra.run (file run.yaml:1) is not used, only searchpath is; remove it.",
    "hydra:\n  searchpath: ['${oc.env:X}']": "hydra.searchpath (file run.yaml:2) needs the environment "
    "variable X, which is not set; set it or write ${oc.env:X,DEFAULT}.",
}


@pytest.mark.parametrize("text", FILE)
def test_file(text: str, refusal: Refusal) -> None:
    assert refusal({"run.yaml": text}) == FILE[text]


ENVIRONMENT = {
    ("REGRESS_SEED", "x"): f"seed=x (environment REGRESS_SEED) {NOT_A_SEED}",
    ("REGRESS_OPTIMIZER__LR", "1"): f"optimizer.lr=1 (environment REGRESS_OPTIMIZER__LR) {NO_KEY} "
    "optimizer.learning_rate.",
    ("REGRESS_OPTIMIZER__BETAS", "[0.1"): "optimizer.betas=[0.1 (environment REGRESS_OPTIMIZER__BETAS) is "
    "not valid YAML; quote it.",
    ("REGRESS_MODEL", "gpt2"): f"model=gpt2 (environment REGRESS_MODEL) {NOT_A_SECTION}",
    ("REGRESS_EXP_NAME", "${oc.env:X"): f"exp_name (environment REGRESS_EXP_NAME) {BROKEN_INTERPOLATION}",
}


@pytest.mark.parametrize(("variable", "value"), ENVIRONMENT)
def test_environment(variable: str, value: str, refusal: Refusal) -> None:
    assert refusal({}, env={variable: value}) == ENVIRONMENT[variable, value]


def test_a_long_value_is_cut(refusal: Refusal) -> None:
    assert refusal({}, f"seed={'x' * 200}") == f"seed={'x' * 77}... (command line) {NOT_A_SEED}"


def test_a_value_of_several_lines_stays_in_one(refusal: Refusal) -> None:
    assert refusal({"run.yaml": "seed: |\n  a\n  b\n"}) == rf'seed="a\nb\n" (file run.yaml:1) {NOT_A_SEED}'
