"""Configuration tree: one dataclass per section, attributes named as the YAML keys. Imports no torch.

Field metadata holds ``help`` and, where they apply, ``choices`` (with ``more``, a function of
further ones, and ``others``, their words), ``minimum``, ``exclusive_minimum``,
``maximum``, ``exclusive_maximum``, ``length`` (of a list) and ``regex``; `regress.engine.config.values`
enforces them. All fields are of types that OmegaConf's structured configs know. Each section has a module in
`regress.engine.config.sections`.
"""

from dataclasses import dataclass, field

from regress.engine.config.sections.curriculum import CurriculumConfig
from regress.engine.config.sections.debug import BLOCKS, DebugConfig, DumpOptions, RemoteDumpOptions
from regress.engine.config.sections.evaluation import EvaluationConfig
from regress.engine.config.sections.layout import (
    CP_METHODS,
    DATA_PARALLELS,
    LAYOUTS,
    PP_SCHEDULES,
    REDUCED_DTYPES,
    SIDES,
    TP_IMPLEMENTATIONS,
    BatchingConfig,
    ParallelConfig,
)
from regress.engine.config.sections.model import (
    ATTENTIONS,
    BACKENDS,
    DTYPES,
    FAMILIES,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    TokenizerConfig,
)
from regress.engine.config.sections.objective import AlgorithmConfig
from regress.engine.config.sections.rollout import WORKERS, RolloutMockConfig, RolloutWorkerConfig
from regress.engine.config.sections.service import (
    ServiceConfig,
    TinkerServiceConfig,
    TrainServiceConfig,
    WeaverServiceConfig,
)
from regress.engine.config.sections.task import DataConfig, TaskConfig, WarmStartConfig
from regress.engine.config.sections.tracking import TrackingConfig
from regress.engine.config.sections.training import OPTIMIZERS, SCHEDULERS, OptimizerConfig, TrainerConfig
from regress.engine.config.sections.value import DUMP_FORMATS, value

__all__ = [
    "ATTENTIONS",
    "BACKENDS",
    "BLOCKS",
    "CP_METHODS",
    "DATA_PARALLELS",
    "DTYPES",
    "DUMP_FORMATS",
    "FAMILIES",
    "LAYOUTS",
    "OPTIMIZERS",
    "PP_SCHEDULES",
    "REDUCED_DTYPES",
    "SCHEDULERS",
    "SIDES",
    "TP_IMPLEMENTATIONS",
    "WORKERS",
    "AlgorithmConfig",
    "BatchingConfig",
    "Config",
    "CurriculumConfig",
    "DataConfig",
    "DebugConfig",
    "DumpOptions",
    "EvaluationConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReferenceConfig",
    "RemoteDumpOptions",
    "RolloutMockConfig",
    "RolloutWorkerConfig",
    "ServiceConfig",
    "TaskConfig",
    "TinkerServiceConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainServiceConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "WeaverServiceConfig",
]


@dataclass
class Config:
    """Complete configuration of a run; ``load_config`` makes it from files, environment and command line."""

    exp_name: str = value("regress", "name of the run")
    seed: int = value(0, "seed of weights, prompts and sampling", minimum=0, maximum=2**32 - 1)
    max_steps: int = value(10, "training steps", minimum=0)
    output_dir: str = value(
        "${oc.env:EXPERIMENT_PATH,./outputs}/${exp_name}", "directory of everything the run writes"
    )
    device: str = value("cpu", "torch device")
    threads: int = value(1, "CPU threads of torch; results may change with it", minimum=1, maximum=1024)
    system_envs: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "environment variables set before torch starts, but for those that decide which code runs"
        },
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
    service: ServiceConfig = field(default_factory=ServiceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
