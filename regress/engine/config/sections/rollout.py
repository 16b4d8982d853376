"""Source of completions, and recording or replay of rollouts."""

from dataclasses import dataclass

from regress.engine.config.sections.value import DUMP_FORMATS, value

WORKERS = ("hf", "mock")


@dataclass
class RolloutWorkerConfig:
    """Source of completions."""

    type: str = value("hf", "hf samples from the policy, mock replays a recording", choices=WORKERS)
    need_llm_inference: bool = value(
        True, "whether completions are generated; of a mock worker those of evaluations only"
    )
    trajectory_load_path: str | None = value(
        None, "mock: a trajectory file, or a directory that holds step_*.<ext>, or the URL of one"
    )
    trajectory_format: str = value(
        "auto", "format of the recorded trajectories; auto: by their content", choices=("auto", *DUMP_FORMATS)
    )
    temperature: float = value(
        1.0, "temperature of sampling and of the policy that is trained", exclusive_minimum=0.0
    )
    top_p: float = value(
        1.0,
        "nucleus sampling: least probability mass that is kept",
        exclusive_minimum=0.0,
        maximum=1.0,
    )
    top_k: int = value(0, "most likely tokens that are kept in sampling; 0: all", minimum=0)
    batch_size: int = value(64, "completions generated at once", minimum=1)
    allow_environment_mismatch: bool = value(
        False, "replay although the recording was made under another determinism environment"
    )


@dataclass
class RolloutMockConfig:
    """Recording or replay of whole rollouts."""

    enable: bool = value(False, "record every rollout, or replay it, as mode says")
    mode: str = value("dump", "dump records rollouts, mock replays them", choices=("dump", "mock"))
    dump_dir: str = value(
        "./rollout_mock_dumps", "directory or URL of the recorded rollouts (train/ and val/)"
    )
    overwrite: bool = value(False, "dump: replace an earlier recording in dump_dir instead of refusing")
