"""Objective, mini-batches, optimizer, the service that may train, checkpoints and trackers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from regress import plugins
from regress.engine.config.config_messages import DEFAULT, PRESET, Origin, in_yaml
from regress.engine.config.config_option import (
    Bounds,
    Count,
    Entry,
    Flag,
    NonNegative,
    Origins,
    Positive,
    Section,
    Size,
    one_of,
)
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.objective_presets import PRESETS
from regress.grpo.rejection_criteria import criteria

if TYPE_CHECKING:
    from regress.engine.config.batching_config import ParallelConfig
    from regress.engine.config.config_schema import Config
    from regress.engine.config.config_values import Values


OPTIMIZERS = ("auto", "for_loop", "foreach", "fused")
NONFINITE = ("stop", "skip")
TRAINERS = ("local", "remote")
RESAMPLINGS = ("none", "pow", "max_min", "max_random")
SCHEDULERS = ("constant", "linear", "cosine")
BACKENDS = ("weaver", "tinker")
TRAINING_MODES = ("lora", "full_ft")
CLIENTS = ("auto", "own", "sdk")


def other_trainers() -> Iterable[str]:
    """Return the names of the trainers that packages register."""
    return plugins.registered(plugins.TRAINERS)


@dataclass
class AlgorithmConfig(Objective, Section):
    """Objective."""

    preset: Annotated[str | None, one_of(*PRESETS)] = None
    """named objective that sets the fields nobody set explicitly"""
    loss_function: str | None = None
    """your own loss of each token, as package.module:function with the signature and result of
    regress.grpo.token_losses.token_loss; null: that one"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        needs = ADVANTAGES[self.advantage].needs
        if needs:
            yield f"""algorithm.advantage={self.advantage} needs {" and ".join(needs)}, which the trainer does not
            compute; choose another one, or call regress.grpo.token_advantages with yours."""
        updates = run.updates_per_rollout
        if self.old_log_probs == "current" and updates > 1:
            yield f"""algorithm.old_log_probs=current makes every ratio 1, but a rollout gets {updates} updates
            (trainer.epochs={run.trainer.epochs}, trainer.mini_batch_size={in_yaml(run.trainer.mini_batch_size)}) and
            the policy has moved after the first; set algorithm.old_log_probs=recompute, or trainer.epochs=1 and
            trainer.mini_batch_size=null."""
        yield from self._split_conflicts(run.parallel)
        if self.loss_function is not None:
            yield from self._own_loss_conflicts()
        if run.trainer.type == "remote":
            yield from self._remote_conflicts(run)

    def _split_conflicts(self, parallel: ParallelConfig) -> Iterator[str]:
        ranks = parallel.dp * parallel.fsdp * parallel.ep * parallel.cp
        if ranks > 1 and self.compares_tokens and self.statistics_scope != "global":
            yield f"""algorithm.statistics_scope=microbatch compares the tokens of each microbatch, and the {ranks}
            ranks that share the tokens would each have others; set algorithm.statistics_scope=global."""
        rejection = self.rejection if self.correction_policy != "old" else None
        if parallel.cp > 1 and rejection and any(one.level == "seq_max" for one in criteria(rejection)):
            yield f"""algorithm.rejection={self.rejection} looks for the greatest value of a sample, whose tokens
            parallel.cp={parallel.cp} splits over ranks; set parallel.cp=1 or algorithm.correction_policy=old."""

    @property
    def _compares_all_tokens(self) -> bool:
        return self.compares_tokens and self.statistics_scope == "global"

    def _own_loss_conflicts(self) -> Iterator[str]:
        beyond = {
            "algorithm.statistics_scope=microbatch": self._compares_all_tokens,
            "algorithm.entropy_aggregation=loss": self.has_entropy_term
            and self.entropy_aggregation == "token-mean",
            "algorithm.correction_normalize=false": self.correction_normalize,
            "algorithm.rejection=null": self.rejection is not None,
        }
        for remedy in (remedy for remedy, needed in beyond.items() if needed):
            yield f"""algorithm.loss_function={self.loss_function} is not told what the trainer finds out for the loss
            of the objective beforehand; set {remedy}."""

    def _remote_conflicts(self, run: Config) -> Iterator[str]:
        """Yield what the protocols of services do not carry: further passes, entropies of tokens, temperatures."""
        beyond = {
            "top_entropy_quantile=1": self.top_entropy_quantile < 1.0,
            "statistics_scope=microbatch": self._compares_all_tokens,
            "entropy_controller=fixed": self.entropy_controller == "adaptive",
            "kl_controller=fixed": self.kl_controller == "adaptive",
        }
        for remedy in (remedy for remedy, needed in beyond.items() if needed):
            name = remedy.partition("=")[0]
            yield f"""algorithm.{name}={getattr(self, name)} needs entropies or a further pass, which the service of
            trainer.type=remote does not give; set algorithm.{remedy}."""
        temperature = run.rollout_worker.temperature
        compares = {
            "old_log_probs=recompute": self.old_log_probs == "sampler",
            "sampler_correction=none": self.sampler_correction != "none",
        }
        for remedy in (remedy for remedy, needed in compares.items() if needed and temperature != 1.0):
            name = remedy.partition("=")[0]
            yield f"""algorithm.{name}={getattr(self, name)} compares log-probs of the sampler at
            rollout_worker.temperature={temperature:g} with those of the policy, which the protocols of
            trainer.type=remote compute at 1; set algorithm.{remedy} or rollout_worker.temperature=1."""
        if self.entropy_coef != 0.0 and run.service.train_service.backend == "tinker":
            yield f"""algorithm.entropy_coef={self.entropy_coef:g} has no place in Tinker's protocol, whose losses are
            functions of log-probs alone; set algorithm.entropy_coef=0 or service.train_service.backend=weaver."""


def derive_preset(values: Values, environ: Mapping[str, str]) -> None:
    """Set the fields of ``algorithm.preset``, below every explicitly given value."""
    name = values.value("algorithm.preset")
    for field_name, value in PRESETS[name].items() if name is not None else ():
        path = ("algorithm", field_name)
        if values.origin(path).layer == DEFAULT:
            values.put(Entry(path, value, Origin(PRESET, name)))


@dataclass
class TrainerConfig(Section):
    """Mini-batches and epochs, checkpoints and what to go on from."""

    type: Annotated[str, Bounds(choices=TRAINERS, more=other_trainers)] = "local"
    """where the model is trained: in this process and its ranks, or in the training service that section service
    names"""
    epochs: Size = 1
    """passes over a rollout batch"""
    mini_batch_size: Annotated[Size | None, Flag("train-batch-size")] = None
    """samples per optimizer update; null: the whole rollout batch"""
    resampling: Annotated[str, one_of(*RESAMPLINGS)] = "none"
    """draw the samples of a rollout anew, with replacement, by their rewards R (PF-PPO, arXiv 2409.06957): pow by
    |R|^resampling_power, max_min only those of the greatest and least R, max_random 4 to 1 for the greatest R; none:
    each sample once"""
    resampling_power: NonNegative = 2.0
    """power of resampling=pow"""
    save_steps: Annotated[Size | None, Flag("save-steps"), Flag("checkpoint-interval")] = None
    """write a checkpoint after every so many steps, and at the end; null: none"""
    save_updates: Size | None = None
    """write a checkpoint after every so many optimizer updates, also inside a step, and at the end; null: none"""
    save_total_limit: Annotated[Size | None, Flag("save-total-limit")] = None
    """keep only so many checkpoints, the newest; null: all"""
    checkpoint_dir: str = "${output_dir}"
    """directory of the checkpoints, or its URL in a store: s3://bucket/run"""
    resume_from_checkpoint: Annotated[str | None, Flag("resume-from-checkpoint", "DIR")] = None
    """go on from this checkpoint: its directory or URL, or latest for the newest in checkpoint_dir (none there: start
    at the beginning); null: start at the beginning"""
    on_nonfinite: Annotated[str, one_of(*NONFINITE)] = "stop"
    """what follows a loss or gradient that is not finite on any rank: stop ends the run, skip leaves that update out on
    all ranks and counts it"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        data, size = run.data, self.mini_batch_size
        samples = data.prompts_per_step * data.group_size
        if size is not None and samples % size:
            divisors = [divisor for divisor in range(1, samples + 1) if samples % divisor == 0]
            yield f"""trainer.mini_batch_size={size} does not divide the rollout batch of
            data.prompts_per_step={data.prompts_per_step} times data.group_size={data.group_size} = {samples} samples;
            choose a divisor such as {min(divisors, key=lambda divisor: abs(divisor - size))}."""
        if self.resampling != "pow" and self.resampling_power != 2.0:
            yield f"""trainer.resampling_power={self.resampling_power:g} is not read while
            trainer.resampling={self.resampling}; set it to 2 or trainer.resampling=pow."""
        if self.resampling != "none":
            yield from self._resampling_conflicts(run, samples)
        if self.type == "remote":
            yield from self._remote_conflicts(run)

    def _resampling_conflicts(self, run: Config, samples: int) -> Iterator[str]:
        stated, algorithm = f"trainer.resampling={self.resampling}", run.algorithm
        if self.mini_batch_size not in (None, samples):
            yield f"""{stated} draws from the whole rollout, of which trainer.mini_batch_size={self.mini_batch_size}
            updates on parts; set trainer.mini_batch_size=null."""
        if algorithm.has_entropy_term and algorithm.entropy_aggregation == "token-mean":
            yield f"""{stated} counts a sample as often as it is drawn, and algorithm.entropy_aggregation=token-mean
            counts its tokens once; set algorithm.entropy_aggregation=loss."""
        if algorithm.missing_rewards == "exclude":
            yield f"{stated} draws by rewards, which each sample needs; set algorithm.missing_rewards=refuse."

    def _remote_conflicts(self, run: Config) -> Iterator[str]:
        for prefix, why in LOCAL.items():
            for option, value in run.options_below(prefix):
                if value != option.default and option.key not in IDLE:
                    yield f"""{option.key}={in_yaml(value)} cannot be had with trainer.type=remote: {why}; set
                    {option.key}={in_yaml(option.default)} or trainer.type=local."""
        if self.on_nonfinite == "skip":
            yield """trainer.on_nonfinite=skip would have to drop gradients that the service of trainer.type=remote has
            added up, for which its protocols have no call; set trainer.on_nonfinite=stop."""


LOCAL = {
    "parallel": "the ranks of the service are its own; give regress serve the section parallel",
    "warm_start": "a warm start is made before the service begins; let the service begin with the warm model",
    "optimizer.factory": "the service has an optimizer of its own",
    "optimizer.implementation": "the service has an optimizer of its own",
    "optimizer.state_path": "the state of the optimizer lies in the service; give it to regress serve",
    "debug.dump_options": (
        "tensors of the training are those of the service; set WEAVER_DEBUG_DUMP_ENABLED=1 there, and "
        "debug.remote_api_dump_options here"
    ),
    "model.compile": "the service computes; give it to regress serve",
    "trainer.resampling": "its clients weigh tokens, not samples",
    "model.router_coef": "its protocols have no such loss",
    "model.attention": "the service computes; give it to regress serve",
    "model.patch": "the service computes; give it to regress serve",
}
"""Sections and keys that mean nothing, or another thing, where a service trains."""
IDLE = ("warm_start.batch_size", "warm_start.learning_rate")
"""Keys of them that do nothing by themselves."""


@dataclass
class OptimizerConfig(Section):
    """AdamW, clipping and schedule."""

    learning_rate: Annotated[NonNegative, Flag("lr"), Flag("learning-rate")] = 1e-3
    """peak learning rate of AdamW"""
    betas: Annotated[list[float], Bounds(length=2, least=0, below=1)] = field(
        default_factory=lambda: [0.9, 0.999]
    )
    """decay of the first and second moment"""
    eps: Positive = 1e-08
    """added to the root of the second moment"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: Positive | None = 1.0
    """gradients are clipped to this global norm; null: never"""
    implementation: Annotated[str, one_of(*OPTIMIZERS)] = "auto"
    """how torch computes an update: one parameter after the other, horizontally or vertically fused; auto: torch's
    choice"""
    factory: str | None = None
    """your own optimizer, as package.module:function: takes a list of (name, parameter), the learning rate, and betas,
    eps and weight_decay by name, returns a torch.optim.Optimizer; null: AdamW of torch"""
    state_path: str | None = None
    """file of a dump (type optimizer) that holds the state to start from; null: none"""
    lr_scheduler: Annotated[str, one_of(*SCHEDULERS)] = "constant"
    """learning rate after the warmup"""
    warmup_steps: Count = 0
    """optimizer updates over which the learning rate rises linearly"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        updates = run.max_steps * run.updates_per_rollout
        if self.warmup_steps and self.warmup_steps >= updates:
            yield f"""optimizer.warmup_steps={self.warmup_steps} is not less than the {updates} optimizer updates of
            max_steps={run.max_steps}, so that the learning rate is never reached; lower it or raise max_steps."""


WARMUP = ("optimizer", "warmup_steps")
LENGTH = (
    *(("max_steps",), ("trainer", "epochs"), ("trainer", "mini_batch_size")),
    *(("data", "prompts_per_step"), ("data", "group_size")),
)
"""Keys that decide how many optimizer updates a run makes."""


def shorten_warmup(run: Config, values: Values) -> Iterator[str]:
    """Let the last update of a short run have the full learning rate; yield a sentence where that changes something.

    Whoever gives both, a warm-up and the length of the run, contradicts himself, and a rule refuses it.
    """
    asked, updates = run.optimizer.warmup_steps, run.max_steps * run.updates_per_rollout
    last = max(LENGTH, key=values.age)
    origin, earlier = values.origin(last), values.age(last) < values.age(WARMUP)
    if asked == 0 or asked < updates or earlier or origin.author == values.origin(WARMUP).author:
        return
    shortened = run.optimizer.warmup_steps = max(updates - 1, 0)
    values.put(Entry(WARMUP, shortened, Origin("shortened", f"from {asked} for {updates} updates")))
    yield (
        f"optimizer.warmup_steps={asked} is not less than the {updates} optimizer updates of this run "
        f"({'.'.join(last)}: {origin}), so the learning rate rises over {shortened}"
    )


@dataclass
class WeaverServiceConfig(Section):
    """Service that speaks Weaver's protocol."""

    base_url: str | None = None
    """its URL, such as http://127.0.0.1:8000; null: WEAVER_BASE_URL"""
    api_key: str | None = None
    """its key; null: that of the environment variable WEAVER_API_KEY"""
    base_model: str | None = None
    """name of the model to train; null: the only one that the service offers"""
    training_mode: Annotated[str, one_of(*TRAINING_MODES)] = "lora"
    """what is trained: low-rank adapters, or all parameters"""
    lora_rank: Size = 32
    """training_mode=lora: rank of the adapters"""
    client: Annotated[str, one_of(*CLIENTS)] = "auto"
    """who speaks to the service: own client, the official SDK, or auto: the SDK where it is installed"""
    timeout: Positive = 600.0
    """seconds for which one operation of the service is waited for"""


@dataclass
class TinkerServiceConfig(Section):
    """Service that speaks Tinker's protocol."""

    base_url: str | None = None
    """its URL, such as http://127.0.0.1:8000; null: TINKER_BASE_URL"""
    api_key: str | None = None
    """its key; null: that of the environment variable TINKER_API_KEY"""
    base_model: str | None = None
    """name of the model to train; null: the only one that the service offers"""
    lora_rank: Count = 32
    """rank of the adapters; 0: all parameters are trained"""
    client: Annotated[str, one_of(*CLIENTS)] = "auto"
    """who speaks to the service: own client, the official SDK, or auto: the SDK where it is installed"""
    timeout: Positive = 600.0
    """seconds for which one operation of the service is waited for"""


@dataclass
class TrainServiceConfig(Section):
    """Choice of the service."""

    backend: Annotated[str, one_of(*BACKENDS)] = "weaver"
    """protocol of the service that trains and samples"""


@dataclass
class ServiceConfig(Section):
    """Training service of trainer.type=remote."""

    train_service: TrainServiceConfig = field(default_factory=TrainServiceConfig)
    weaver_service: WeaverServiceConfig = field(default_factory=WeaverServiceConfig)
    tinker_service: TinkerServiceConfig = field(default_factory=TinkerServiceConfig)


@dataclass
class TrackingConfig(Section):
    """Destinations of metrics besides metrics.jsonl."""

    trackers: Annotated[list[str] | None, Flag("wandb", given="[wandb]"), Flag("no-wandb", given="[]")] = (
        field(default_factory=list)
    )
    """names of trackers, as accelerate knows them: tensorboard, wandb, trackio, swanlab and others; null: wandb if it
    is installed and has a login, else tensorboard if that is installed, else none"""
    project: Annotated[str | None, Flag("wandb-project", "NAME", of_wandb=True)] = None
    """project of the run in its trackers; null: WANDB_PROJECT for wandb, else exp_name"""
    run_name: Annotated[
        str | None, Flag("run-name", "NAME"), Flag("wandb-run-name", "NAME", of_wandb=True)
    ] = None
    """name of the run in its trackers; null: exp_name"""
    run_id: str | None = None
    """id of the run in its trackers; null: WANDB_RUN_ID, else the id in the checkpoint that is resumed, else a new
    one"""
    log_dir: Annotated[str | None, Flag("log-dir", "DIR")] = None
    """directory of trackers that keep files; null: WANDB_DIR for wandb, else output_dir"""
    force_new_run: Annotated[bool, Flag("force-new-wandb-run", given="true", of_wandb=True)] = False
    """begin a new run in the trackers, whatever the run that is resumed"""
    queue_size: Size = 1000
    """rows that wait for a tracker, at most; the others go to wandb_backup/"""
    finish_timeout: NonNegative = 30.0
    """seconds for which the end of the run waits for trackers; what they have not taken goes to wandb_backup/"""
