"""The configuration tree: one section for each part of a run, attributes named as the YAML keys. Imports no torch."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any

from regress.credential_redaction import HIDDEN
from regress.engine.adapters.adapter_settings import is_adapter
from regress.engine.config.batching_config import BatchingConfig, ParallelConfig
from regress.engine.config.config_messages import Origin, nearest_keys, shortened
from regress.engine.config.config_option import (
    Bounds,
    Count,
    Flag,
    KeyPath,
    Option,
    Origins,
    Section,
    Seed,
    options_of,
)
from regress.engine.config.model_config import LoraConfig, ModelConfig, ReferenceConfig, TokenizerConfig
from regress.engine.config.rollout_config import (
    DebugConfig,
    DumpOptions,
    RolloutMockConfig,
    RolloutWorkerConfig,
)
from regress.engine.config.task_config import (
    CurriculumConfig,
    DataConfig,
    EvaluationConfig,
    TaskConfig,
    WarmStartConfig,
    derive_lengths,
    derive_thresholds,
)
from regress.engine.config.training_config import (
    AlgorithmConfig,
    OptimizerConfig,
    ServiceConfig,
    TrackingConfig,
    TrainerConfig,
    derive_preset,
)
from regress.errors import ConfigError

__all__ = ["DumpOptions", "LoraConfig"]

DERIVATIONS = (derive_preset, derive_lengths, derive_thresholds)
"""What gives values that follow from others, in this order, when all layers are there."""

REFUSED = """
REGRESS_* GRPO_REGRESS_* LD_* DYLD_* PYTHON* PATH HOME XDG_* GCONV_PATH OPENSSL_* COVERAGE_* PYTEST_*
BASH_ENV BASH_FUNC_* ENV SHELL GIT_* PIP_* RAY_* WANDB__* CLASSPATH *JAVA*_OPTIONS
CC CXX CUDAHOSTCXX NVCC* CUDA_HOME CUDA_PATH *INCLUDE_PATH CPATH
*LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX CFLAGS CXXFLAGS CPPFLAGS LDFLAGS
*PRELOAD* *PLUGIN* *INJECTION* NCCL_CONF_FILE OMP_TOOL* MPL* MATPLOTLIB* NUMBA_*
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD TORCH_EXTENSIONS_DIR TORCH_HOME TORCHINDUCTOR_* TRITON_*
*TRUST_REMOTE_CODE* HF_HOME HF_MODULES_CACHE
HF_ENDPOINT WANDB_BASE_URL AWS_ENDPOINT_URL* FSSPEC_* *_PROXY MLFLOW_TRACKING_URI
"""
"""Patterns of environment variables, in capitals, that a configuration may not set, since it may come with a recording
or a case of somebody else: what loads a library or a module, starts a program or sends credentials elsewhere, and the
variables of this package, one of which allows all code."""


@dataclass
class Config(Section):
    """Complete configuration of a run; ``load_config`` makes it from files, environment and command line."""

    exp_name: str = "regress"
    """name of the run"""
    seed: Annotated[Seed, Flag("seed")] = 0
    """seed of weights, prompts and sampling"""
    max_steps: Count = 10
    """training steps"""
    output_dir: Annotated[str, Flag("output-dir", "DIR")] = "${oc.env:EXPERIMENT_PATH,./outputs}/${exp_name}"
    """directory of everything the run writes"""
    device: str = "cpu"
    """torch device"""
    threads: Annotated[int, Bounds(least=1, most=1024)] = 1
    """CPU threads of torch; results may change with it"""
    system_envs: dict[str, str] = field(default_factory=dict)
    """environment variables set before torch starts, but for those that decide which code runs"""
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
    service: ServiceConfig = field(default_factory=ServiceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def updates_per_rollout(self) -> int:
        """Return the number of optimizer updates on one rollout batch."""
        samples = self.data.prompts_per_step * self.data.group_size
        return self.trainer.epochs * (samples // (self.trainer.mini_batch_size or samples))

    @property
    def replays(self) -> bool:
        """Return True if rollouts come from a recording."""
        mock = self.rollout_mock
        return self.rollout_worker.type == "mock" or (mock.enable and mock.mode == "mock")

    @property
    def has_task(self) -> bool:
        """Return False if there is no task: prompts come from the recording too."""
        return self.task.name is not None or self.task.dataset_path is not None

    @property
    def uses_adapter(self) -> bool:
        """Return True if an adapter is trained: a new one, or that of ``model.path``."""
        return self.model.lora.r is not None or is_adapter(self.model.path)

    @property
    def trains_adapter_in_service(self) -> bool:
        """Return True if a service trains an adapter."""
        weaver, tinker = self.service.weaver_service, self.service.tinker_service
        lora = (
            weaver.training_mode == "lora"
            if self.service.train_service.backend == "weaver"
            else tinker.lora_rank
        )
        return self.trainer.type == "remote" and bool(lora)

    def options_below(self, prefix: str) -> list[tuple[Option, Any]]:
        """Return the options at and below a dotted key, with their values."""
        found = (one for key, one in options().items() if key == prefix or key.startswith(f"{prefix}."))
        return [(option, option.value_in(self)) for option in found]

    def conflicts(self, run: "Config", origin: Origins) -> Iterator[str]:
        for name in self.system_envs:
            if not name or "=" in name or "\0" in name:
                yield f"""system_envs.{name!r} cannot be the name of an environment variable, which is not empty and
                holds no = and no NUL; correct the name."""
            elif any(fnmatchcase(name.upper(), pattern) for pattern in REFUSED.split()):
                yield f"""system_envs.{name} ({origin(("system_envs", name))}) decides which code runs or where
                credentials go, which no configuration may; set it in the shell that starts the command."""
        if "://" in self.output_dir:
            yield f"""output_dir={self.output_dir} is a URL, but metrics and checkpoints are written to this machine;
            set output_dir to a directory and debug.dump_dir to the URL."""


@cache
def options() -> Mapping[str, Option]:
    """Return every option by its dotted key, in the order of the schema."""
    return {option.key: option for option in options_of(Config)}


@cache
def sections() -> tuple[str, ...]:
    """Return the dotted keys that hold further keys."""
    above = [".".join(one.path[:depth]) for one in options().values() for depth in range(1, len(one.path))]
    return tuple(dict.fromkeys(above))


@cache
def flags_by_name() -> Mapping[str, tuple[Flag, Option]]:
    """Return every flag by its name, with its option."""
    pairs = ((note, option) for option in options().values() for note in option.notes)
    return {flag.name: (flag, option) for flag, option in pairs if isinstance(flag, Flag)}


def find_option(path: KeyPath, value: Any, origin: Origin) -> Option | None:
    """Return the option that holds ``path`` (at it, or a free mapping above it); ``None`` for a section.

    Raises `ConfigError` with the nearest valid keys for a path outside the schema.
    """
    for depth in range(len(path), 0, -1):
        option = options().get(".".join(path[:depth]))
        if option is not None and path[:depth] == option.path and (depth == len(path) or option.kind is dict):
            return option
    key = ".".join(path)
    if key in sections():
        return None
    stated = f"{shortened(key)}={shortened(value)} ({origin}) is not a key of the configuration"
    if key in options():
        stated += " when its dots are part of one name; nest it, one level for each dot."
        raise ConfigError(stated)
    # a mapping was meant as a section, anything else as a value
    valid = [*options(), *(sections() if isinstance(value, dict) else ())]
    raise ConfigError(f"{stated}; the nearest valid key is {' or '.join(nearest_keys(key, valid))}.")


def conflicts(config: Config, origin: Origins) -> Iterator[str]:
    """Yield a sentence for each combination of values that cannot work, section by section."""

    def walk(section: Section) -> Iterator[str]:
        yield from (" ".join(sentence.split()) for sentence in section.conflicts(config, origin))
        for spec in fields(section):  # type: ignore[arg-type]
            if isinstance(below := getattr(section, spec.name), Section):
                yield from walk(below)

    return walk(config)


def to_plain(config: Config) -> dict[str, Any]:
    """Return nested dicts, lists and scalars, in the order of the schema; keys of services are hidden."""
    plain = asdict(config)
    for service in ("weaver_service", "tinker_service"):
        if plain["service"][service]["api_key"] is not None:
            plain["service"][service]["api_key"] = HIDDEN
    return plain


def flat(config: Config) -> dict[str, str | int | float | bool]:
    """Return dotted keys and scalars; null, lists and empty mappings as text, for trackers that keep
    scalars only.
    """

    def walk(prefix: str, value: Any) -> dict[str, str | int | float | bool]:
        if isinstance(value, dict) and value:
            return {k: v for name, item in value.items() for k, v in walk(f"{prefix}.{name}", item).items()}
        return {
            prefix.removeprefix("."): value if isinstance(value, str | int | float) else json.dumps(value)
        }

    return walk("", to_plain(config))


def config_hash(config: Config) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of all values; equal exactly if every key has the same value."""
    text = json.dumps(to_plain(config), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
