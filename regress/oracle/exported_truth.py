"""Exported golden case as a program of the engine: its truth under any objective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regress.errors import ConfigError, GoldenError
from regress.grpo.objective_presets import preset_values
from regress.oracle.float64_engine import Program, run_program
from regress.replay.exported_case import ExportedCase
from regress.replay.replay_configuration import compose, dump_everything

ADVANTAGES = "advantages"
"""Key of an override that is not a key of the configuration: one advantage for every loss token."""
_SECTIONS = ("algorithm.", "optimizer.", "batching.", "trainer.", "reference.", "rollout_worker.temperature")
_SCHEDULE = ("optimizer.learning_rate", "optimizer.lr_scheduler", "optimizer.warmup_steps")
_PRESET = "algorithm.preset"


def truth(
    export_folder: str | Path, overrides: Mapping[str, Any], updates: int | None, folder: str | Path
) -> Path:
    """Compute the first updates of an exported case in true float64, on one process.

    Args:
        export_folder: folder that ``regress golden export`` wrote.
        overrides: dotted key -> value over the case's own objective and optimizer, such as
            ``{"algorithm.clip_high": 0.28}``. ``algorithm.preset`` replaces the case's objective.
            ``{"advantages": 1.0}`` gives every loss token that advantage, whatever the rewards: supervised fine-tuning
            with ``algorithm.loss`` ``reinforce`` and ``algorithm.old_log_probs`` ``current``.
        updates: number of optimizer updates; None: all.
        folder: new folder, which will hold ``config.yaml`` and ``dump``.

    Returns:
        The folder of the dump.

    Raises:
        GoldenError: if the folder is not an exported case, or has fewer updates.
        ConfigError: for an override that is not one of an objective or optimizer, or does not fit the others.
    """
    case = ExportedCase(Path(export_folder))
    return run_program(program_of(case, overrides, updates, Path(folder)))


def program_of(
    case: ExportedCase, overrides: Mapping[str, Any], updates: int | None, folder: Path
) -> Program:
    """Return the program of an exported case; see `truth`."""
    count = len(case.updates) if updates is None else updates
    if not 1 <= count <= len(case.updates):
        raise GoldenError(
            f"{case.folder} holds {len(case.updates)} updates, not {count}; ask for 1 to {len(case.updates)}"
        )
    chosen = {key: value for key, value in overrides.items() if key != ADVANTAGES}
    _require_known(chosen)
    steps = dict.fromkeys(int(update["step"]) for update in case.updates[:count])
    rollouts = {step: case.trajectories(step) for step in steps}
    own_rates = [float(update["learning_rate"]) for update in case.updates]
    own = {**_settings(case, chosen, len(steps), folder), "optimizer.learning_rate": max(own_rates)}
    config = compose({}, {**dump_everything(folder), **own, **chosen}, folder)
    program = Program(
        config=config,
        rollouts=rollouts,
        advantage=advantage_in(overrides),
        state=case.optimizer_state(),
        rates=None if any(key in chosen for key in _SCHEDULE) else own_rates,
        updates=count,
    )
    if not any(key.startswith("trainer.") for key in chosen):
        _require_cuts(case, program)
    return program


def advantage_in(overrides: Mapping[str, Any]) -> float | None:
    """Return the advantage that is given for every loss token, if any."""
    value = overrides.get(ADVANTAGES)
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    raise ConfigError(
        f"{ADVANTAGES}={value!r} is not a number: give one advantage for every loss token, such as 1.0"
    )


def _require_known(overrides: Mapping[str, Any]) -> None:
    for key in overrides:
        if not key.startswith(_SECTIONS):
            raise ConfigError(f"""{key} is none of an objective or optimizer, which alone can change over an exported
            case; give keys that begin with {", ".join(_SECTIONS)}, or {ADVANTAGES}""")


def _settings(case: ExportedCase, overrides: Mapping[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    """Return dotted key -> value of the case's own program."""
    numbers, optimizer = case.numbers, case.numbers["optimizer"]
    first = case.updates[0]
    minis = [update for update in case.updates if update["step"] == first["step"]]
    algorithm = {
        f"algorithm.{key}": value for key, value in numbers["algorithm"].items() if key != "norm_length"
    }
    found: dict[str, Any] = {
        "model.path": str(case.model.absolute()),
        "model.dtype": "float64",
        "task.name": None,
        "rollout_worker.type": "mock",
        "rollout_worker.need_llm_inference": False,
        "rollout_worker.trajectory_load_path": str((case.folder / "rollouts").absolute()),
        "rollout_worker.temperature": numbers["temperature"],
        "max_steps": steps,
        "trainer.epochs": 1 + max(int(update["epoch"]) for update in case.updates),
        "trainer.mini_batch_size": len(first["samples"]) if len(minis) > 1 else None,
        "data.max_completion_length": numbers["norm_length"],
        **_lengths(case),
        "optimizer.max_grad_norm": numbers["max_grad_norm"],
        **{f"optimizer.{key}": optimizer[key] for key in ("betas", "eps", "weight_decay")},
        **({} if _PRESET in overrides else algorithm),
    }
    if case.reference is not None and _has_kl(numbers, overrides):
        found["reference.path"] = str(case.reference.absolute())
        found |= {f"reference.{key}": value for key, value in (numbers["reference"] or {}).items()}
    scope = overrides.get("algorithm.denominator_scope", found.get("algorithm.denominator_scope"))
    if scope == "microbatch" and not any(key.startswith("batching.") for key in overrides):
        found["batching.micro_batch_size"] = _micro_batch_size(case)
    return found


def _has_kl(numbers: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Return True if the objective has a KL term, which alone needs a reference model."""
    preset = overrides.get(_PRESET)
    own = numbers["algorithm"] if preset is None else preset_values(preset)
    return bool(overrides.get("algorithm.kl_coef", own.get("kl_coef", 0.0)) != 0.0)


def _lengths(case: ExportedCase) -> dict[str, int]:
    """Return sizes that the rollouts have to keep to."""
    steps = dict.fromkeys(int(update["step"]) for update in case.updates)
    samples = [sample for step in steps for sample in case.trajectories(step)]
    longest = max(len(sample.tokens) for sample in samples)
    norm = int(case.numbers["norm_length"])
    prompt = max(1, max(sample.prompt_length for sample in samples))
    first = [sample.group_id for sample in case.trajectories(next(iter(steps)))]
    groups = len({*first})
    return {
        "data.max_prompt_length": prompt,
        "data.max_seq_length": max(longest, prompt + norm),
        "data.prompts_per_step": groups if len(first) % groups == 0 else 1,
        "data.group_size": len(first) // groups if len(first) % groups == 0 else len(first),
    }


def _micro_batch_size(case: ExportedCase) -> int:
    """Return the samples of a microbatch, over which a denominator counts."""
    sizes = {len(micro) for update in case.updates for micro in update["microbatches"][:-1]}
    sizes |= {len(update["microbatches"][0]) for update in case.updates}
    if len(sizes) == 1:
        return sizes.pop()
    raise ConfigError(f"""{case.folder} has microbatches of {", ".join(map(str, sorted(sizes)))} samples, and the
    objective counts its denominator over a microbatch; set batching.micro_batch_size""")


def _require_cuts(case: ExportedCase, program: Program) -> None:
    """Refuse an export whose updates are not cut from its rollouts as the engine cuts them."""
    size = program.config.trainer.mini_batch_size
    for update in case.updates[: program.updates]:
        samples = [list(sample.key) for sample in program.rollouts[int(update["step"])]]
        start = int(update["mini_batch"]) * (size or len(samples))
        if samples[start : start + (size or len(samples))] != [list(key) for key in update["samples"]]:
            raise GoldenError(f"""update {update["name"]} of {case.folder} has other samples than mini-batches of
            {size or len(samples)} have; export the case again""")
