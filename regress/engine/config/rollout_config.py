"""Source of completions, recording and replay of rollouts, and dumps of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

from regress.dump.dump_location import is_remote, local_path
from regress.engine.config.config_messages import absolute
from regress.engine.config.config_option import (
    Count,
    Flag,
    Fraction,
    Origins,
    Pattern,
    Positive,
    Section,
    Size,
    one_of,
)

if TYPE_CHECKING:
    from regress.engine.config.config_schema import Config


DUMP_FORMATS = ("safetensors", "pt", "jsonl")
# embeddings, every block, last norm and logits of all families: one module per stage of the dataflow
BLOCKS = r"^((model|transformer)\.(embed_tokens|wte|wpe|layers\.\d+|h\.\d+|norm|ln_f)|lm_head)$"
WORKERS = ("hf", "mock")


@dataclass
class RolloutWorkerConfig(Section):
    """Source of completions."""

    type: Annotated[str, one_of(*WORKERS)] = "hf"
    """hf samples from the policy, mock replays a recording"""
    need_llm_inference: bool = True
    """whether completions are generated; of a mock worker those of evaluations only"""
    trajectory_load_path: str | None = None
    """mock: a trajectory file, or a directory that holds step_*.<ext>, or the URL of one"""
    trajectory_format: Annotated[str, one_of("auto", *DUMP_FORMATS)] = "auto"
    """format of the recorded trajectories; auto: by their content"""
    temperature: Annotated[Positive, Flag("temperature")] = 1.0
    """temperature of sampling and of the policy that is trained"""
    top_p: Fraction = 1.0
    """nucleus sampling: least probability mass that is kept"""
    top_k: Count = 0
    """most likely tokens that are kept in sampling; 0: all"""
    batch_size: Size = 64
    """completions generated at once"""
    allow_environment_mismatch: bool = False
    """replay although the recording was made under another determinism environment"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        stated, path = f"rollout_worker.type={self.type}", self.trajectory_load_path
        if self.type != "mock":
            if not self.need_llm_inference:
                yield f"""{stated} generates completions and rollout_worker.need_llm_inference=false forbids it; set
                rollout_worker.need_llm_inference=true or rollout_worker.type=mock."""
            if path:
                yield f"""rollout_worker.trajectory_load_path={path} is not read by {stated}; set
                rollout_worker.type=mock or the path to null."""
            return
        evaluates = run.evaluation.every_n_steps  # evaluations are sampled
        if self.need_llm_inference and not evaluates:
            yield f"""{stated} replays recorded completions and rollout_worker.need_llm_inference=true asks for new
            ones; set rollout_worker.need_llm_inference=false."""
        if not path:
            yield f"""{stated} finds nothing to replay while rollout_worker.trajectory_load_path=null; set it to a
            trajectory file, or to the directory that holds the step_* files."""
        if evaluates and not self.need_llm_inference:
            yield f"""{stated} holds no evaluation and evaluation.every_n_steps={evaluates} asks for it; set
            evaluation.every_n_steps=0, record and replay both with rollout_mock, or sample the evaluations alone with
            rollout_worker.need_llm_inference=true."""
        if run.rollout_mock.enable:
            yield f"""{stated} and rollout_mock.enable=true both decide where rollouts come from; set
            rollout_mock.enable=false or rollout_worker.type=hf."""


@dataclass
class RolloutMockConfig(Section):
    """Recording or replay of whole rollouts."""

    enable: bool = False
    """record every rollout, or replay it, as mode says"""
    mode: Annotated[str, one_of("dump", "mock")] = "dump"
    """dump records rollouts, mock replays them"""
    dump_dir: str = "./rollout_mock_dumps"
    """directory or URL of the recorded rollouts (train/ and val/)"""
    overwrite: bool = False
    """dump: replace an earlier recording in dump_dir instead of refusing"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        if self.enable and not self.dump_dir:
            yield "rollout_mock.dump_dir is empty although rollout_mock uses it; set it to a directory."


@dataclass
class DumpOptions(Section):
    """Types of tensors to dump."""

    trajectory: bool = False
    """rollout trajectories"""
    old_log_probs: bool = False
    """log-probs of the policy before the update"""
    ref_log_probs: bool = False
    """log-probs of the reference model"""
    forward_data: bool = False
    """log-probs and entropy of the forward pass"""
    loss: bool = False
    """loss values and what they were divided by"""
    is_loss_debug: bool = False
    """every intermediate value of the policy loss"""
    token_gradient: bool = False
    """gradient of the loss by the log-prob and entropy of each token, and by recorded logits"""
    batch_inputs: bool = False
    """model inputs"""
    activations: bool = False
    """outputs of the modules that target_module_pattern names"""
    param: bool = False
    """parameters that target_param_pattern names"""
    gradient: bool = False
    """their gradients, fully accumulated"""
    optimizer: bool = False
    """their optimizer state"""
    metrics: bool = False
    """metrics of each update, on every rank"""
    step_metrics: bool = False
    """metrics of each rollout step, on every rank"""


@dataclass
class RemoteDumpOptions(Section):
    """Files of a remote trainer, as document and keys of NexRL have them: pt, or jsonl where dump_format says so."""

    prepared_trajectories: bool = False
    """trajectories with the advantages of their tokens"""
    datums: bool = False
    """what the service is sent for each optimizer update"""
    training_metrics: bool = False
    """metrics that the service returned for it"""


@dataclass
class DebugConfig(Section):
    """Dump settings."""

    enable_data_dump: bool = False
    """write the tensors that dump_options names"""
    dump_dir: str = "${output_dir}/debug_dump"
    """directory of the dump, or its URL in a store: s3://bucket/run"""
    dump_format: Annotated[str, one_of(*DUMP_FORMATS)] = "safetensors"
    """file format of the dump"""
    dump_fsync: bool = True
    """force every file to the disk, so that what is written outlasts a power failure"""
    dump_every_n_steps: Size = 1
    """dump only every so many steps"""
    overwrite: bool = False
    """replace an earlier dump in dump_dir instead of refusing to mix with it"""
    dump_options: DumpOptions = field(default_factory=DumpOptions)
    remote_api_dump_options: RemoteDumpOptions = field(default_factory=RemoteDumpOptions)
    target_param_pattern: Pattern = ".*"
    """regular expression; all parameters whose full name matches are dumped"""
    target_module_pattern: Pattern = BLOCKS
    """regular expression; outputs of all modules whose full name matches are dumped"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        remote, chosen = run.trainer.type == "remote", _chosen(self.remote_api_dump_options)
        if chosen and not remote:
            yield f"""debug.remote_api_dump_options.{chosen[0]}=true has nothing to write with trainer.type=local; set
            trainer.type=remote, or use debug.dump_options."""
        if not self.enable_data_dump:
            return
        if remote and not chosen:
            yield f"""debug.enable_data_dump=true dumps nothing with trainer.type=remote while every one of
            debug.remote_api_dump_options is false; set at least one of {", ".join(vars(self.remote_api_dump_options))}
            to true."""
        if not remote:
            yield from self._option_conflicts(run)
        yield from self._place_conflicts(run)

    def _option_conflicts(self, run: Config) -> Iterator[str]:
        chosen = _chosen(self.dump_options)
        if not chosen:
            yield f"""debug.enable_data_dump=true dumps nothing while every one of debug.dump_options is false; set at
            least one of {", ".join(vars(self.dump_options))} to true."""
        if chosen == ["ref_log_probs"] and not run.algorithm.needs_reference:
            yield """debug.dump_options.ref_log_probs=true alone dumps nothing while algorithm.kl_coef=0 needs no
            reference model; give algorithm.kl_coef a value or dump something else."""
        if run.algorithm.old_log_probs == "current" and self.dump_options.old_log_probs:
            yield """debug.dump_options.old_log_probs=true finds no log-probs from before the update while
            algorithm.old_log_probs=current; set it to false (is_loss_debug holds those used) or
            algorithm.old_log_probs=recompute."""

    def _place_conflicts(self, run: Config) -> Iterator[str]:
        mock, replayed = run.rollout_mock, run.rollout_worker.trajectory_load_path
        if not self.dump_dir:
            yield "debug.dump_dir is empty although debug uses it; set it to a directory."
        if mock.enable and mock.mode == "dump" and _place(mock.dump_dir) == _place(self.dump_dir):
            yield f"""debug.dump_dir={self.dump_dir} and rollout_mock.dump_dir are one directory, which holds only one
            dump; set them to different directories."""
        replayed = mock.dump_dir if mock.enable and mock.mode == "mock" else replayed
        if self.overwrite and replayed and _place(replayed).is_relative_to(_place(self.dump_dir)):
            yield f"""debug.overwrite=true would delete the recording {replayed} that this run replays, because it lies
            in debug.dump_dir={self.dump_dir}; set debug.dump_dir to another directory."""


def _chosen(options: Section) -> list[str]:
    return [name for name, on in vars(options).items() if on]


def _place(path: str) -> PurePath:
    """Return a path that is equal for equal directories, be they folders or URLs."""
    return PurePath(path) if is_remote(path) else absolute(local_path(path))
