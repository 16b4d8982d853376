"""Impossible combinations: the exact sentence for each, and the neighbors that must pass."""

from collections.abc import Callable

import pytest

from regress.engine.config import Loaded

Refusal = Callable[..., str]

MOCK = "rollout_worker.type=mock rollout_worker.need_llm_inference=false"
PATH = "rollout_worker.trajectory_load_path=steps"

# overrides -> what is wrong with them together
IMPOSSIBLE = {
    "parallel.data_parallel=ddp parallel.dp=2 parallel.tp=2": (
        "parallel.data_parallel=ddp wraps whole models, and parallel.tp=2 splits them; set "
        "parallel.data_parallel=after_backward."
    ),
    "parallel.data_parallel=accelerate parallel.dp=2 parallel.cp=2": (
        "parallel.data_parallel=accelerate sums over all processes, which parallel.cp=2 gives parts of the same "
        "samples; set parallel.data_parallel=ddp or after_backward."
    ),
    "parallel.data_parallel=hsdp parallel.dp=2": (
        "parallel.data_parallel=hsdp shards parameters and replicates the shards, but parallel.fsdp=1 leaves them "
        "whole; set parallel.fsdp to 2 or more, or parallel.data_parallel=after_backward."
    ),
    "parallel.sequence_parallel=true": (
        "parallel.sequence_parallel=true means nothing with parallel.tp=1; set parallel.tp to 2 or more, or leave "
        "parallel.sequence_parallel away."
    ),
    "parallel.tp=2 parallel.tp_implementation=transformers parallel.pp=2": (
        "parallel.tp_implementation=transformers has no plan for parallel.pp=2; set parallel.tp_implementation=torch."
    ),
    "parallel.tp=2 parallel.tp_implementation=transformers parallel.sequence_parallel=true": (
        "parallel.tp_implementation=transformers has no plan for parallel.sequence_parallel=true; set "
        "parallel.tp_implementation=torch."
    ),
    "parallel.fsdp_param_dtype=bfloat16": (
        "parallel.fsdp_param_dtype=bfloat16 means nothing with parallel.fsdp=1; set parallel.fsdp to 2 or more, or "
        "leave parallel.fsdp_param_dtype away."
    ),
    "parallel.cp=2 model.attn_implementation=eager": (
        "parallel.cp=2 has attention of its own (parallel.cp_method=ulysses) in place of "
        "model.attn_implementation=eager; set model.attn_implementation=sdpa."
    ),
    "parallel.tp=2 model.compile=eager": (
        "model.compile=eager compiles whole blocks, which parallel.tp=2 splits over ranks; set model.compile=null."
    ),
    "parallel.fsdp=2 batching.log_prob_chunk_size=8": (
        "batching.log_prob_chunk_size=8 projects outside of the forward pass, where parallel.fsdp=2 has the parameters "
        "in shards; set batching.log_prob_chunk_size=null."
    ),
    "parallel.dp=2 algorithm.loss=kl_cov algorithm.statistics_scope=microbatch": (
        "algorithm.statistics_scope=microbatch compares the tokens of each microbatch, and the 2 ranks that share the "
        "tokens would each have others; set algorithm.statistics_scope=global."
    ),
    "algorithm.advantage=remax": (
        "algorithm.advantage=remax needs baselines_N, which the trainer does not compute; choose another one, or call "
        "regress.grpo.token_advantages with yours."
    ),
    "parallel.cp=2 algorithm.rejection=seq_max_k2:0.1 algorithm.correction_policy=current "
    "algorithm.old_log_probs=sampler": (
        "algorithm.rejection=seq_max_k2:0.1 looks for the greatest value of a sample, whose tokens parallel.cp=2 "
        "splits over ranks; set parallel.cp=1 or algorithm.correction_policy=old."
    ),
    "algorithm.loss_function=tests.foreign.pieces:loss algorithm.top_entropy_quantile=0.2": (
        "algorithm.loss_function=tests.foreign.pieces:loss is not told what the trainer finds out for the loss of the "
        "objective beforehand; set algorithm.statistics_scope=microbatch."
    ),
    "parallel.cp=7 batching.max_tokens_per_microbatch=48": (
        "batching.max_tokens_per_microbatch=48 cannot hold one row of 49 tokens, which is what data.max_seq_length=48 "
        "takes in multiples of 7 (parallel splits rows); raise it to 49 or more."
    ),
    "data.max_prompt_length=40": (
        "data.max_prompt_length=40 and data.max_completion_length=16 add up to 56, more than "
        "data.max_seq_length=48; shorten one of them or set data.max_seq_length=56."
    ),
    "trainer.mini_batch_size=24": (
        "trainer.mini_batch_size=24 does not divide the rollout batch of data.prompts_per_step=8 times "
        "data.group_size=8 = 64 samples; choose a divisor such as 16."
    ),
    "trainer.mini_batch_size=128": (
        "trainer.mini_batch_size=128 does not divide the rollout batch of data.prompts_per_step=8 times "
        "data.group_size=8 = 64 samples; choose a divisor such as 64."
    ),
    "data.group_size=1": (
        "data.group_size=1 leaves algorithm.advantage=grpo nothing to compare a completion with, so that "
        "every advantage is zero; set data.group_size to at least 2, algorithm.single_sample=raw or "
        "algorithm.advantage=reinforce_plus_plus."
    ),
    "data.group_size=1 algorithm.preset=rloo": (
        "data.group_size=1 leaves algorithm.advantage=rloo nothing to compare a completion with, so that "
        "every advantage is zero; set data.group_size to at least 2, algorithm.single_sample=raw or "
        "algorithm.advantage=reinforce_plus_plus."
    ),
    "task.train_size=7": (
        "data.prompts_per_step=8 is more than task.train_size=7, so that a step would hold a prompt twice; "
        "set task.train_size to at least 8 or lower data.prompts_per_step."
    ),
    "task.eval_size=0 evaluation.every_n_steps=5": (
        "evaluation.every_n_steps=5 finds no prompts while task.eval_size=0; set task.eval_size to at "
        "least 1 or evaluation.every_n_steps=0."
    ),
    "task.rewards.exact_match=0": (
        "task.rewards names no reward with a weight other than 0, so that every advantage is zero; give "
        "one, for example task.rewards.exact_match=1.0."
    ),
    "task.rewards={}": (
        "task.rewards names no reward with a weight other than 0, so that every advantage is zero; give "
        "one, for example task.rewards.exact_match=1.0."
    ),
    "task.max_turns=2": (
        "task.max_turns=2 needs somebody to answer the completions before the last; set task.environment, for "
        "example to checker, or task.max_turns=1."
    ),
    "task.environment=checker": (
        "task.environment=checker never has its turn while task.max_turns=1; set task.max_turns to at least 2 or "
        "task.environment=null."
    ),
    "model.compile=inductor model.attn_implementation=varlen": (
        "model.compile=inductor would compile model.attn_implementation=varlen anew for every layout; set "
        "model.attn_implementation=sdpa or model.compile=null."
    ),
    "model.compile=eager model.gradient_checkpointing=true": (
        "model.compile=eager decides by itself what the backward pass computes again, so that "
        "model.gradient_checkpointing=true cannot; set one of them to its default."
    ),
    "reference.path=final algorithm.kl_coef=0": (
        "reference.path=final finds no reference model while algorithm.kl_coef=0; give algorithm.kl_coef a "
        "value or set reference.path=null."
    ),
    "batching.micro_batch_size=4 batching.max_tokens_per_microbatch=96": (
        "batching.micro_batch_size=4 and batching.max_tokens_per_microbatch=96 both decide how large a "
        "microbatch is; set one of them to null."
    ),
    "batching.max_tokens_per_microbatch=47": (
        "batching.max_tokens_per_microbatch=47 cannot hold one row of 48 tokens, which is what "
        "data.max_seq_length=48 and the padding may ask for; set it to at least 48."
    ),
    "batching.max_tokens_per_microbatch=63 batching.pad_to_multiple_of=32": (
        "batching.max_tokens_per_microbatch=63 cannot hold one row of 64 tokens, which is what "
        "data.max_seq_length=48 and the padding may ask for; set it to at least 64."
    ),
    "batching.max_tokens_per_microbatch=63 batching.pad_to_length=64": (
        "batching.max_tokens_per_microbatch=63 cannot hold one row of 64 tokens, which is what "
        "data.max_seq_length=48 and the padding may ask for; set it to at least 64."
    ),
    "batching.pad_to_length=47": (
        "batching.pad_to_length=47 is shorter than data.max_seq_length=48, so that rows would differ in "
        "length after all; set it to null or to at least 48."
    ),
    "batching.layout=packed batching.padding_side=left": (
        "batching.padding_side=left means nothing to batching.layout=packed, whose rows begin with a "
        "sample; set batching.padding_side=right or batching.layout=padded."
    ),
    "optimizer.warmup_steps=11": (
        "optimizer.warmup_steps=11 is not less than the 10 optimizer updates of max_steps=10, so that the "
        "learning rate is never reached; lower it or raise max_steps."
    ),
    "algorithm.old_log_probs=current trainer.epochs=2": (
        "algorithm.old_log_probs=current makes every ratio 1, but a rollout gets 2 updates (trainer.epochs=2, "
        "trainer.mini_batch_size=null) and the policy has moved after the first; set "
        "algorithm.old_log_probs=recompute, or trainer.epochs=1 and trainer.mini_batch_size=null."
    ),
    "algorithm.old_log_probs=current debug.enable_data_dump=true debug.dump_options.old_log_probs=true": (
        "debug.dump_options.old_log_probs=true finds no log-probs from before the update while "
        "algorithm.old_log_probs=current; set it to false (is_loss_debug holds those used) or "
        "algorithm.old_log_probs=recompute."
    ),
    "reference.sync_every_n_steps=5": (
        "reference.sync_every_n_steps=5 finds no reference model while algorithm.kl_coef=0; give "
        "algorithm.kl_coef a value or set reference.sync_every_n_steps=null."
    ),
    "debug.enable_data_dump=true": (
        "debug.enable_data_dump=true dumps nothing while every one of debug.dump_options is false; set at "
        "least one of trajectory, old_log_probs, ref_log_probs, forward_data, loss, is_loss_debug, "
        "token_gradient, batch_inputs, activations, param, gradient, optimizer, metrics, step_metrics to true."
    ),
    "debug.enable_data_dump=true debug.dump_options.ref_log_probs=true": (
        "debug.dump_options.ref_log_probs=true alone dumps nothing while algorithm.kl_coef=0 needs no reference "
        "model; give algorithm.kl_coef a value or dump something else."
    ),
    "model.path=/ckpt model.tie_word_embeddings=true": (
        "model.tie_word_embeddings=true is not read beside model.path=/ckpt, whose config.json decides it; leave it "
        "away or edit config.json."
    ),
    "debug.enable_data_dump=true debug.dump_options.loss=true debug.dump_dir=''": (
        "debug.dump_dir is empty although debug uses it; set it to a directory."
    ),
    "model.path=/ckpt model.family=llama": (
        "model.path=/ckpt and model.family=llama are both given (command line), and the checkpoint already "
        "decides the family; leave model.family away or set model.path=null."
    ),
    f"{MOCK} {PATH} evaluation.every_n_steps=5": (
        "rollout_worker.type=mock holds no evaluation and evaluation.every_n_steps=5 asks for it; set "
        "evaluation.every_n_steps=0, record and replay both with rollout_mock, or sample the evaluations alone with "
        "rollout_worker.need_llm_inference=true."
    ),
    "rollout_worker.type=mock rollout_worker.trajectory_load_path=steps": (
        "rollout_worker.type=mock replays recorded completions and rollout_worker.need_llm_inference=true "
        "asks for new ones; set rollout_worker.need_llm_inference=false."
    ),
    MOCK: (
        "rollout_worker.type=mock finds nothing to replay while rollout_worker.trajectory_load_path=null; "
        "set it to a trajectory file, or to the directory that holds the step_* files."
    ),
    f"{MOCK} {PATH} rollout_mock.enable=true": (
        "rollout_worker.type=mock and rollout_mock.enable=true both decide where rollouts come from; set "
        "rollout_mock.enable=false or rollout_worker.type=hf."
    ),
    "rollout_worker.need_llm_inference=false": (
        "rollout_worker.type=hf generates completions and rollout_worker.need_llm_inference=false forbids "
        "it; set rollout_worker.need_llm_inference=true or rollout_worker.type=mock."
    ),
    "rollout_worker.trajectory_load_path=steps": (
        "rollout_worker.trajectory_load_path=steps is not read by rollout_worker.type=hf; set "
        "rollout_worker.type=mock or the path to null."
    ),
    "rollout_mock.enable=true rollout_mock.dump_dir=''": (
        "rollout_mock.dump_dir is empty although rollout_mock uses it; set it to a directory."
    ),
    "output_dir=s3://bucket/run": (
        "output_dir=s3://bucket/run is a URL, but metrics and checkpoints are written to this machine; set output_dir "
        "to a directory and debug.dump_dir to the URL."
    ),
    "debug.enable_data_dump=true debug.dump_options.loss=true debug.dump_dir=s3://b/run/ rollout_mock.enable=true "
    "rollout_mock.dump_dir=s3://b/run": (
        "debug.dump_dir=s3://b/run/ and rollout_mock.dump_dir are one directory, which holds only one dump; set them "
        "to different directories."
    ),
    "debug.enable_data_dump=true debug.dump_options.loss=true debug.dump_dir=file:///dumps debug.overwrite=true "
    "rollout_mock.enable=true rollout_mock.mode=mock rollout_mock.dump_dir=/dumps/run": (
        "debug.overwrite=true would delete the recording /dumps/run that this run replays, because it lies in "
        "debug.dump_dir=file:///dumps; set debug.dump_dir to another directory."
    ),
    "algorithm.loss=cispo algorithm.dual_clip=3": (
        "algorithm.dual_clip with loss=cispo is not possible: it belongs to loss=ppo_clip; set dual_clip "
        "to null."
    ),
}


@pytest.mark.parametrize("overrides", IMPOSSIBLE)
def test_impossible(overrides: str, refusal: Refusal) -> None:
    assert refusal({}, *overrides.split()) == IMPOSSIBLE[overrides]


POSSIBLE = [
    "data.max_prompt_length=30 data.max_completion_length=18",
    "trainer.mini_batch_size=64",
    "trainer.mini_batch_size=4",
    "data.group_size=1 algorithm.single_sample=raw",
    "data.group_size=1 algorithm.advantage=reinforce_plus_plus",
    "data.group_size=2",
    "task.train_size=8",
    "task.eval_size=0",
    "batching.max_tokens_per_microbatch=48",
    "batching.max_tokens_per_microbatch=64 batching.pad_to_multiple_of=32",
    "batching.pad_to_length=48",
    "batching.layout=packed batching.pad_to_length=64",
    "batching.padding_side=left",
    "optimizer.warmup_steps=9",
    "optimizer.warmup_steps=39 trainer.epochs=2 trainer.mini_batch_size=32",
    "reference.sync_every_n_steps=5 algorithm.kl_coef=0.1",
    "reference.sync_every_n_steps=5 algorithm.preset=grpo",
    "debug.enable_data_dump=true debug.dump_options.loss=true",
    "debug.enable_data_dump=true debug.dump_options.ref_log_probs=true algorithm.kl_coef=0.1",
    "algorithm.old_log_probs=current debug.dump_options.old_log_probs=true",
    "model.path=/ckpt",
    f"{MOCK} {PATH}",
    "rollout_mock.enable=true",
    "rollout_mock.enable=true rollout_mock.mode=mock",
]


@pytest.mark.parametrize("overrides", POSSIBLE)
def test_possible(overrides: str, load: Callable[..., Loaded]) -> None:
    load({}, *overrides.split())


def test_a_checkpoint_wins_over_the_family_of_another_layer(load: Callable[..., Loaded]) -> None:
    """Only one author who gives both contradicts himself: an inherited family must not stop model.path."""
    base = {
        "run.yaml": "defaults: [base, _self_]\nmodel: {path: /ckpt}",
        "base.yaml": "model: {family: llama}",
    }
    assert load(base).config.model.path == "/ckpt"
    assert load({"run.yaml": "defaults: [{model: gpt2}]"}, "model.path=/ckpt").config.model.family == "gpt2"


def test_one_file_with_checkpoint_and_family(refusal: Refusal) -> None:
    sentence = refusal({"run.yaml": "model:\n  path: /ckpt\n  family: llama\n"})
    assert "are both given (file run.yaml), and" in sentence
