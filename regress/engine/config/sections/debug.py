"""Dumps of tensors."""

from dataclasses import dataclass, field

from regress.engine.config.sections.value import DUMP_FORMATS, value

# embeddings, every block, last norm and logits of all families: one module per stage of the dataflow
BLOCKS = r"^((model|transformer)\.(embed_tokens|wte|wpe|layers\.\d+|h\.\d+|norm|ln_f)|lm_head)$"


@dataclass
class DumpOptions:
    """Types of tensors to dump."""

    trajectory: bool = value(False, "rollout trajectories")
    old_log_probs: bool = value(False, "log-probs of the policy before the update")
    ref_log_probs: bool = value(False, "log-probs of the reference model")
    forward_data: bool = value(False, "log-probs and entropy of the forward pass")
    loss: bool = value(False, "loss values and what they were divided by")
    is_loss_debug: bool = value(False, "every intermediate value of the policy loss")
    token_gradient: bool = value(
        False, "gradient of the loss by the log-prob and entropy of each token, and by recorded logits"
    )
    batch_inputs: bool = value(False, "model inputs")
    activations: bool = value(False, "outputs of the modules that target_module_pattern names")
    param: bool = value(False, "parameters that target_param_pattern names")
    gradient: bool = value(False, "their gradients, fully accumulated")
    optimizer: bool = value(False, "their optimizer state")
    metrics: bool = value(False, "metrics of each update, on every rank")
    step_metrics: bool = value(False, "metrics of each rollout step, on every rank")


@dataclass
class RemoteDumpOptions:
    """Files of a remote trainer, as document and keys of NexRL have them: pt, or jsonl where dump_format says so."""

    prepared_trajectories: bool = value(False, "trajectories with the advantages of their tokens")
    datums: bool = value(False, "what the service is sent for each optimizer update")
    training_metrics: bool = value(False, "metrics that the service returned for it")


@dataclass
class DebugConfig:
    """Dump settings."""

    enable_data_dump: bool = value(False, "write the tensors that dump_options names")
    dump_dir: str = value(
        "${output_dir}/debug_dump", "directory of the dump, or its URL in a store: s3://bucket/run"
    )
    dump_format: str = value("safetensors", "file format of the dump", choices=DUMP_FORMATS)
    dump_fsync: bool = value(
        True, "force every file to the disk, so that what is written outlasts a power failure"
    )
    dump_every_n_steps: int = value(1, "dump only every so many steps", minimum=1)
    overwrite: bool = value(False, "replace an earlier dump in dump_dir instead of refusing to mix with it")
    dump_options: DumpOptions = field(default_factory=DumpOptions)
    remote_api_dump_options: RemoteDumpOptions = field(default_factory=RemoteDumpOptions)
    target_param_pattern: str = value(
        ".*", "regular expression; all parameters whose full name matches are dumped", regex=True
    )
    target_module_pattern: str = value(
        BLOCKS, "regular expression; outputs of all modules whose full name matches are dumped", regex=True
    )
