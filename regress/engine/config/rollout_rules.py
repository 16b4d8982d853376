"""Contradictory settings of the rollout source; see `regress.engine.config.rules`."""

from collections.abc import Callable
from pathlib import PurePath

from regress.dump.location import is_remote, local_path
from regress.engine.config.origins import absolute
from regress.engine.config.schema import Config

Rule = Callable[[Config], str | None]


def _mock_inference(c: Config) -> str | None:
    if c.rollout_worker.type != "mock" or not c.rollout_worker.need_llm_inference:
        return None
    if c.evaluation.every_n_steps:
        return None  # evaluations are sampled
    return (
        "rollout_worker.type=mock replays recorded completions and rollout_worker.need_llm_inference=true "
        "asks for new ones; set rollout_worker.need_llm_inference=false."
    )


def _mock_path(c: Config) -> str | None:
    if c.rollout_worker.type != "mock" or c.rollout_worker.trajectory_load_path:
        return None
    return (
        "rollout_worker.type=mock finds nothing to replay while rollout_worker.trajectory_load_path=null; "
        "set it to a trajectory file, or to the directory that holds the step_* files."
    )


def _mock_evaluation(c: Config) -> str | None:
    if c.rollout_worker.type != "mock" or not c.evaluation.every_n_steps:
        return None
    if c.rollout_worker.need_llm_inference:
        return None  # evaluations are sampled
    return (
        f"rollout_worker.type=mock holds no evaluation and evaluation.every_n_steps={c.evaluation.every_n_steps} "
        "asks for it; set evaluation.every_n_steps=0, record and replay both with rollout_mock, or sample the "
        "evaluations alone with rollout_worker.need_llm_inference=true."
    )


def _two_mocks(c: Config) -> str | None:
    if c.rollout_worker.type != "mock" or not c.rollout_mock.enable:
        return None
    return (
        "rollout_worker.type=mock and rollout_mock.enable=true both decide where rollouts come from; set "
        "rollout_mock.enable=false or rollout_worker.type=hf."
    )


def _sampler_inference(c: Config) -> str | None:
    if c.rollout_worker.type == "mock" or c.rollout_worker.need_llm_inference:
        return None
    return (
        f"rollout_worker.type={c.rollout_worker.type} generates completions and "
        "rollout_worker.need_llm_inference=false forbids it; set rollout_worker.need_llm_inference=true or "
        "rollout_worker.type=mock."
    )


def _sampler_path(c: Config) -> str | None:
    if c.rollout_worker.type == "mock" or not c.rollout_worker.trajectory_load_path:
        return None
    return (
        f"rollout_worker.trajectory_load_path={c.rollout_worker.trajectory_load_path} is not read by "
        f"rollout_worker.type={c.rollout_worker.type}; set rollout_worker.type=mock or the path to null."
    )


def _empty_directories(c: Config) -> str | None:
    asked = {
        "debug.dump_dir": (c.debug.enable_data_dump, c.debug.dump_dir),
        "rollout_mock.dump_dir": (c.rollout_mock.enable, c.rollout_mock.dump_dir),
    }
    for key, (used, directory) in asked.items():
        if used and not directory:
            section = key.partition(".")[0]
            return f"{key} is empty although {section} uses it; set it to a directory."
    return None


def _shared_directory(c: Config) -> str | None:
    records = c.rollout_mock.enable and c.rollout_mock.mode == "dump" and c.debug.enable_data_dump
    if not records or _place(c.rollout_mock.dump_dir) != _place(c.debug.dump_dir):
        return None
    return (
        f"debug.dump_dir={c.debug.dump_dir} and rollout_mock.dump_dir are one directory, which holds only one dump; "
        "set them to different directories."
    )


def _overwritten_recording(c: Config) -> str | None:
    if not (c.debug.enable_data_dump and c.debug.overwrite):
        return None
    replayed = c.rollout_worker.trajectory_load_path
    if c.rollout_mock.enable and c.rollout_mock.mode == "mock":
        replayed = c.rollout_mock.dump_dir
    if not replayed or not _place(replayed).is_relative_to(_place(c.debug.dump_dir)):
        return None
    return (
        f"debug.overwrite=true would delete the recording {replayed} that this run replays, because it lies in "
        f"debug.dump_dir={c.debug.dump_dir}; set debug.dump_dir to another directory."
    )


def _place(path: str) -> PurePath:
    """Return a path that is equal for equal directories, be they folders or URLs."""
    return PurePath(path) if is_remote(path) else absolute(local_path(path))


def _remote_outputs(c: Config) -> str | None:
    if "://" not in c.output_dir:
        return None
    return (
        f"output_dir={c.output_dir} is a URL, but metrics and checkpoints are written to this machine; set output_dir "
        "to a directory and debug.dump_dir to the URL."
    )


ROLLOUT_RULES: tuple[Rule, ...] = (
    _mock_inference,
    _mock_path,
    _mock_evaluation,
    _two_mocks,
    _sampler_inference,
    _sampler_path,
    _empty_directories,
    _shared_directory,
    _overwritten_recording,
    _remote_outputs,
)
