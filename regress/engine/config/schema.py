"""Configuration tree: one dataclass per section, attributes named as the YAML keys. Imports no torch.

Field metadata holds ``help`` and, where they apply, ``choices``, ``minimum``, ``exclusive_minimum``,
``maximum``, ``exclusive_maximum``, ``length`` (of a list) and ``regex``; `regress.engine.config.values`
enforces them. All fields are of types that OmegaConf's structured configs know.
"""

from dataclasses import dataclass, field
from typing import Any

from regress.grpo.objective import Objective
from regress.grpo.presets import PRESETS
from regress.layout import ROW_ORDERS, SAMPLE_SPLITS, SEQUENCE_SPLITS

FAMILIES = ("qwen3", "qwen3_moe", "llama", "gpt2")
DTYPES = ("float64", "float32", "bfloat16")
BACKENDS = ("eager", "aot_eager", "inductor")
ATTENTIONS = ("eager", "sdpa", "varlen")
WORKERS = ("hf", "mock")
DUMP_FORMATS = ("safetensors", "pt", "jsonl")
LAYOUTS = ("padded", "packed")
SIDES = ("right", "left")
OPTIMIZERS = ("auto", "for_loop", "foreach", "fused")
TP_IMPLEMENTATIONS = ("torch", "transformers")
CP_METHODS = ("ulysses", "ring", "all_gather")
PP_SCHEDULES = (
    *("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"),
    *("interleaved_zero_bubble", "zbv_zero_bubble"),
)
DATA_PARALLELS = ("after_backward", "ddp", "accelerate", "hsdp")
REDUCED_DTYPES = ("float32", "bfloat16")
SCHEDULERS = ("constant", "linear", "cosine")
# embeddings, every block, last norm and logits of all families: one module per stage of the dataflow
BLOCKS = r"^((model|transformer)\.(embed_tokens|wte|wpe|layers\.\d+|h\.\d+|norm|ln_f)|lm_head)$"


def _value(default: Any, help: str, **rules: Any) -> Any:
    """Return a field with its help text and the rules of its value."""
    return field(default=default, metadata={"help": help, **rules})


@dataclass
class ModelConfig:
    """Policy model."""

    path: str | None = _value(None, "local checkpoint directory; null: a tiny seeded model of `family`")
    family: str = _value("qwen3", "architecture of the tiny seeded model", choices=FAMILIES)
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "values that override the Hugging Face configuration, e.g. hidden_size: 64"},
    )
    tie_word_embeddings: bool = _value(False, "input and output embeddings are one parameter")
    dtype: str = _value("float32", "precision of weights and computation", choices=DTYPES)
    attn_implementation: str = _value(
        "sdpa", "attention: eager, sdpa, or varlen (packed sequences one by one)", choices=ATTENTIONS
    )
    attention: str | None = _value(
        None,
        "your own attention in place of attn_implementation, as package.module:function with the signature of "
        "transformers' attention functions; its mask is boolean, [B, 1, T, T]; null: none",
    )
    patch: str | None = _value(
        None,
        "what is done to the built model, as package.module:function: takes the model, and changes it in place or "
        "returns another; null: nothing",
    )
    compile: str | None = _value(
        None,
        "backend of torch.compile that trains the transformer blocks (the sampler is never compiled); null: none",
        choices=BACKENDS,
    )
    gradient_checkpointing: bool = _value(False, "recompute activations in the backward pass")


@dataclass
class TokenizerConfig:
    """Tokenizer."""

    path: str | None = _value(None, "local tokenizer directory; null: trained from the text of the task")


@dataclass
class ReferenceConfig:
    """Reference model of the KL term."""

    path: str | None = _value(
        None, "local checkpoint directory; null: the policy as it is before the first rollout"
    )
    sync_every_n_steps: int | None = _value(
        None, "update the reference model from the policy every so many steps; null: frozen", minimum=1
    )
    mixup_alpha: float = _value(
        1.0,
        "share a of the policy in a synchronization: reference = a * policy + (1 - a) * reference",
        exclusive_minimum=0.0,
        maximum=1.0,
    )


@dataclass
class TaskConfig:
    """Training task."""

    name: str = _value("reverse_string", "name of the task")
    level: int = _value(1, "difficulty of the generated prompts", minimum=1)
    params: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "parameters of the generator that override the level's"}
    )
    train_size: int = _value(512, "prompts in the training split", minimum=1)
    eval_size: int = _value(64, "prompts in the held-out split", minimum=0)
    max_turns: int = _value(1, "completions in a conversation, at most", minimum=1)
    environment: str | None = _value(
        None, "what answers every completion but the last: checker, or your own as package.module:function"
    )
    rewards: dict[str, float] = field(
        default_factory=lambda: {"exact_match": 1.0},
        metadata={"help": "weight of each reward of the last completion, by name"},
    )


@dataclass
class DataConfig:
    """Batch and sequence sizes."""

    prompts_per_step: int = _value(8, "prompts (groups) in a rollout batch", minimum=1)
    group_size: int = _value(8, "completions sampled per prompt", minimum=1)
    max_prompt_length: int = _value(32, "longest prompt in tokens", minimum=1)
    max_completion_length: int = _value(
        16, "longest completion in tokens; with several turns, everything after the prompt", minimum=1
    )
    max_seq_length: int = _value(48, "longest prompt and completion together, in tokens", minimum=2)


@dataclass
class WarmStartConfig:
    """Supervised steps before the first rollout."""

    steps: int = _value(0, "supervised steps before the first rollout", minimum=0)
    batch_size: int = _value(32, "examples per supervised step", minimum=1)
    learning_rate: float = _value(3e-3, "learning rate of the supervised steps", minimum=0.0)


@dataclass
class RolloutWorkerConfig:
    """Source of completions."""

    type: str = _value("hf", "hf samples from the policy, mock replays a recording", choices=WORKERS)
    need_llm_inference: bool = _value(True, "whether completions are generated; a mock worker needs false")
    trajectory_load_path: str | None = _value(
        None, "mock: a trajectory file, or a directory that holds step_*.<ext>, or the URL of one"
    )
    trajectory_format: str = _value(
        "auto", "format of the recorded trajectories; auto: by their content", choices=("auto", *DUMP_FORMATS)
    )
    temperature: float = _value(
        1.0, "temperature of sampling and of the policy that is trained", exclusive_minimum=0.0
    )
    top_p: float = _value(
        1.0,
        "nucleus sampling: least probability mass that is kept",
        exclusive_minimum=0.0,
        maximum=1.0,
    )
    top_k: int = _value(0, "most likely tokens that are kept in sampling; 0: all", minimum=0)
    batch_size: int = _value(64, "completions generated at once", minimum=1)
    allow_environment_mismatch: bool = _value(
        False, "replay although the recording was made under another determinism environment"
    )


@dataclass
class RolloutMockConfig:
    """Recording or replay of whole rollouts."""

    enable: bool = _value(False, "record every rollout, or replay it, as mode says")
    mode: str = _value("dump", "dump records rollouts, mock replays them", choices=("dump", "mock"))
    dump_dir: str = _value(
        "./rollout_mock_dumps", "directory or URL of the recorded rollouts (train/ and val/)"
    )


@dataclass
class AlgorithmConfig(Objective):
    """Objective."""

    preset: str | None = _value(
        None, "named objective that sets the fields nobody set explicitly", choices=tuple(PRESETS)
    )
    loss_function: str | None = _value(
        None,
        "your own loss of each token, as package.module:function with the signature and result of "
        "regress.grpo.losses.token_loss; null: that one",
    )


@dataclass
class BatchingConfig:
    """Division of samples into microbatches."""

    layout: str = _value("padded", "one sample per row, or several packed in one", choices=LAYOUTS)
    padding_side: str = _value("right", "side of the padding in padded rows", choices=SIDES)
    pad_to_multiple_of: int = _value(1, "row lengths are rounded up to a multiple of this", minimum=1)
    pad_to_length: int | None = _value(
        None, "least row length; null: as long as the longest row of the microbatch", minimum=1
    )
    micro_batch_size: int | None = _value(
        None, "samples per microbatch; null: the whole mini-batch at once", minimum=1
    )
    max_tokens_per_microbatch: int | None = _value(
        None, "tokens per microbatch, instead of micro_batch_size", minimum=1
    )
    log_prob_chunk_size: int | None = _value(
        None,
        "loss tokens whose logits are held at once (computed again in the backward pass); null: all of a "
        "microbatch",
        minimum=1,
    )
    row_order: str = _value("given", "order in which samples fill rows and microbatches", choices=ROW_ORDERS)


@dataclass
class ParallelConfig:
    """Parallel dimensions; the product of their extents is the number of processes."""

    pp: int = _value(1, "pipeline stages' ranks", minimum=1)
    dp: int = _value(1, "replicas of the model, each with its own samples", minimum=1)
    fsdp: int = _value(1, "ranks that share the parameters (FSDP2), each with its own samples", minimum=1)
    ep: int = _value(1, "ranks that share the experts, each with its own samples", minimum=1)
    cp: int = _value(1, "ranks that share the tokens of each sequence", minimum=1)
    tp: int = _value(1, "ranks that share each matrix product", minimum=1)
    sample_split: str = _value(
        "contiguous",
        "how samples are dealt out to ranks: in blocks, or one after the other",
        choices=SAMPLE_SPLITS,
    )
    data_parallel: str = _value(
        "after_backward",
        "who sums the gradients over replicas: one collective after the last microbatch, torch's "
        "DistributedDataParallel, accelerate's, or torch's fully_shard over dp and fsdp",
        choices=DATA_PARALLELS,
    )
    wrapper: str | None = _value(
        None,
        "your own wrapper in place of torch's with data_parallel=ddp, as package.module:function: takes the model and "
        "the process group, returns a module that averages gradients over the group and has no_sync(); null: torch's",
    )
    reshard_after_forward: bool = _value(True, "fsdp: parameters are gathered again for the backward pass")
    fsdp_param_dtype: str | None = _value(
        None,
        "fsdp: dtype of gathered parameters and of computation; null: that of the model",
        choices=REDUCED_DTYPES,
    )
    fsdp_reduce_dtype: str | None = _value(
        None, "fsdp: dtype in which gradients are summed; null: that of computation", choices=REDUCED_DTYPES
    )
    tp_implementation: str = _value(
        "torch",
        "tp: by torch's parallelize_module, or by transformers' plan of the model",
        choices=TP_IMPLEMENTATIONS,
    )
    sequence_parallel: bool = _value(False, "tp: ranks share the tokens between matrix products")
    cp_method: str = _value(
        "ulysses",
        "cp: exchange heads for tokens, pass keys and values round, or gather them",
        choices=CP_METHODS,
    )
    cp_split: str = _value(
        "contiguous",
        "cp: one block of columns a rank, or two that balance causal attention",
        choices=SEQUENCE_SPLITS,
    )
    pp_schedule: str = _value("gpipe", "pp: order of forward and backward passes", choices=PP_SCHEDULES)
    pp_stages_per_rank: int = _value(1, "pp: stages on each rank", minimum=1)
    timeout: float = _value(
        600.0, "seconds after which a rank that waits for the others gives up", exclusive_minimum=0.0
    )


@dataclass
class TrainerConfig:
    """Mini-batches and epochs."""

    epochs: int = _value(1, "passes over a rollout batch", minimum=1)
    mini_batch_size: int | None = _value(
        None, "samples per optimizer update; null: the whole rollout batch", minimum=1
    )


@dataclass
class OptimizerConfig:
    """AdamW, clipping and schedule."""

    learning_rate: float = _value(1e-3, "peak learning rate of AdamW", minimum=0.0)
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata={
            "help": "decay of the first and second moment",
            "length": 2,
            "minimum": 0.0,
            "exclusive_maximum": 1.0,
        },
    )
    eps: float = _value(1e-8, "added to the root of the second moment", exclusive_minimum=0.0)
    weight_decay: float = _value(0.0, "decoupled weight decay", minimum=0.0)
    max_grad_norm: float | None = _value(
        1.0, "gradients are clipped to this global norm; null: never", exclusive_minimum=0.0
    )
    implementation: str = _value(
        "auto",
        "how torch computes an update: one parameter after the other, horizontally or vertically fused; "
        "auto: torch's choice",
        choices=OPTIMIZERS,
    )
    factory: str | None = _value(
        None,
        "your own optimizer, as package.module:function: takes a list of (name, parameter), the learning rate, and "
        "betas, eps and weight_decay by name, returns a torch.optim.Optimizer; null: AdamW of torch",
    )
    state_path: str | None = _value(
        None, "file of a dump (type optimizer) that holds the state to start from; null: none"
    )
    lr_scheduler: str = _value("constant", "learning rate after the warmup", choices=SCHEDULERS)
    warmup_steps: int = _value(0, "optimizer updates over which the learning rate rises linearly", minimum=0)


@dataclass
class EvaluationConfig:
    """Evaluation: greedy pass rate on held-out prompts."""

    every_n_steps: int = _value(
        0, "evaluate before the first step, every so many steps and at the end; 0: never", minimum=0
    )


@dataclass
class TrackingConfig:
    """Destinations of metrics besides metrics.jsonl."""

    trackers: list[str] = field(
        default_factory=list,
        metadata={
            "help": "names of trackers, as accelerate knows them: tensorboard, wandb, trackio, swanlab and others"
        },
    )


@dataclass
class DumpOptions:
    """Types of tensors to dump."""

    trajectory: bool = _value(False, "rollout trajectories")
    old_log_probs: bool = _value(False, "log-probs of the policy before the update")
    ref_log_probs: bool = _value(False, "log-probs of the reference model")
    forward_data: bool = _value(False, "log-probs and entropy of the forward pass")
    loss: bool = _value(False, "loss values and what they were divided by")
    is_loss_debug: bool = _value(False, "every intermediate value of the policy loss")
    token_gradient: bool = _value(
        False, "gradient of the loss by the log-prob and entropy of each token, and by recorded logits"
    )
    batch_inputs: bool = _value(False, "model inputs")
    activations: bool = _value(False, "outputs of the modules that target_module_pattern names")
    param: bool = _value(False, "parameters that target_param_pattern names")
    gradient: bool = _value(False, "their gradients, fully accumulated")
    optimizer: bool = _value(False, "their optimizer state")


@dataclass
class DebugConfig:
    """Dump settings."""

    enable_data_dump: bool = _value(False, "write the tensors that dump_options names")
    dump_dir: str = _value(
        "${output_dir}/debug_dump", "directory of the dump, or its URL in a store: s3://bucket/run"
    )
    dump_format: str = _value("safetensors", "file format of the dump", choices=DUMP_FORMATS)
    dump_every_n_steps: int = _value(1, "dump only every so many steps", minimum=1)
    overwrite: bool = _value(False, "replace an earlier dump in dump_dir instead of refusing to mix with it")
    dump_options: DumpOptions = field(default_factory=DumpOptions)
    target_param_pattern: str = _value(
        ".*", "regular expression; all parameters whose full name matches are dumped", regex=True
    )
    target_module_pattern: str = _value(
        BLOCKS, "regular expression; outputs of all modules whose full name matches are dumped", regex=True
    )


@dataclass
class Config:
    """Complete configuration of a run; ``load_config`` makes it from files, environment and command line."""

    exp_name: str = _value("regress", "name of the run")
    seed: int = _value(0, "seed of weights, prompts and sampling", minimum=0, maximum=2**32 - 1)
    max_steps: int = _value(10, "training steps", minimum=0)
    output_dir: str = _value(
        "${oc.env:EXPERIMENT_PATH,./outputs}/${exp_name}", "directory of everything the run writes"
    )
    device: str = _value("cpu", "torch device")
    threads: int = _value(1, "CPU threads of torch; results may change with it", minimum=1, maximum=1024)
    system_envs: dict[str, str] = field(
        default_factory=dict, metadata={"help": "environment variables set before torch starts"}
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout_worker: RolloutWorkerConfig = field(default_factory=RolloutWorkerConfig)
    rollout_mock: RolloutMockConfig = field(default_factory=RolloutMockConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
