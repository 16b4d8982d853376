"""Judgement of another trainer's dump by the true float64 values of its own batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.rank_averaged_loss import averaged
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.tolerance_bounds import Bounds, spacing
from regress.compare.verdicts.tolerance_overrides import read_overrides
from regress.dump.dump_files import file_stamp
from regress.dump.dump_reader import DumpReader
from regress.engine.config.config_schema import Config
from regress.errors import DumpError, OracleError
from regress.golden.golden_directory import project_root
from regress.grpo.objective import Objective
from regress.oracle.claimed_objective import Claim, claim_of
from regress.oracle.measured_tolerances import NAME as COARSE
from regress.oracle.measured_tolerances import measured_bounds
from regress.oracle.observed_updates import Recorded, require_complete
from regress.oracle.old_log_probs import PASSES
from regress.oracle.update_repetition import Repetition, judged_types
from regress.oracle.update_samples import FROM_GRADIENTS
from regress.replay.replay_configuration import compose, dump_everything

INITIAL = "initial"
"""Name of the initial weights as reference model."""


@dataclass(frozen=True)
class Judgement:
    """Result of judging a dump.

    Attributes:
        truth: folder of the dump with the true values.
        claim: the objective, and who says that it is the trainer's.
        objective: the same, with every field.
        notes: what was not judged, or was taken from the dump itself; a sentence each.
    """

    comparison: Comparison
    truth: Path
    claim: Claim
    objective: Objective
    notes: Sequence[str]


def judge_dump(
    path: str | Path,
    work: Path,
    *,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    model: Path | None = None,
    reference: str | None = None,
    precision: str | None = None,
    ranks_average: bool = False,
    only: Sequence[str] = (),
) -> Judgement:
    """Compute what a trainer should have, in true float64, from its dump alone, and compare.

    Args:
        path: dump of `regress.record` with ``initial_weights=True``, or with ``model``.
        work: new folder for the true values.
        preset: the objective that the trainer claims, such as ``trl:dapo``; None: the one that explains its token
            gradients.
        settings: dotted key -> value over the preset, of ``algorithm`` or ``optimizer``; ``advantages`` is one number
            for every loss token.
        model: checkpoint with the weights before the first update, in place of those in the dump.
        reference: checkpoint of the reference model, or ``initial`` for the weights before the first update.
        precision, ranks_average, only: see `regress.compare.comparison_request.compare_sources`.

    Raises:
        OracleError: if the dump does not hold what the engine needs, or is of something that it cannot compute.
        ConfigError: for an objective that is none.
    """
    recorded = Recorded(require_complete(str(path)))
    weights = _weights(recorded, model)
    unclaimed = _config(recorded, Claim("", {}), weights, None, work)
    claim = claim_of(recorded, str(path), preset, settings or {}, Repetition(unclaimed, recorded).old_before)
    config = _config(recorded, claim, weights, reference, work)
    dtype, left = open_side(str(path)).precision or "float32", recorded.capture.get("left_float64")
    if left and precision is None:
        precision = "float32"
        recorded.notes[_left(left)] = None
    rounding = Bounds(precision=precision).of("log_probs", [dtype])

    coarse = (precision or dtype) == COARSE

    def repetition(chosen: Config) -> Repetition:
        own = claim.advantage, claim.max_grad_norm
        return Repetition(chosen, recorded, *own, rounding.relative, spacing(precision or dtype), coarse)

    first = repetition(config)
    truth = first.run()
    bounds = Bounds(overrides=read_overrides(project_root()), precision=precision)
    if coarse:
        mixed = recorded.dump.manifest.provenance.config.get("model", {}).get("dtype") != COARSE
        bounds = measured_bounds(repetition, config, truth, work / "measured", mixed=mixed)
    options = Options(bounds=bounds, only=Selection.of(*only), common=True)
    found = compare_dumps(str(truth), averaged(str(path)) if ranks_average else str(path), options)
    notes = [*recorded.notes, *claim.notes, *_notes(recorded, config), *first.notes]
    return Judgement(found, truth, claim, config.algorithm, tuple(dict.fromkeys(notes)))


def _config(recorded: Recorded, claim: Claim, weights: Path, reference: str | None, work: Path) -> Config:
    """Compose the configuration of the engine."""
    places = recorded.places
    keep = judged_types(recorded, places)
    updates = [*recorded.updates()]
    samples = [
        one for place in updates for one in (place.rollout.samples if place.rollout else place.samples)
    ]
    completion = max(len(one.tokens) - one.prompt_length for one in samples)
    longest = max([completion + 1, *(length for place in updates for length in place.tokens.frame.lengths)])
    values: dict[str, Any] = {
        **dump_everything(work),
        **{f"debug.dump_options.{name}": known for name, known in keep.items()},
        "model.path": str(weights.absolute()),
        "model.dtype": "float64",
        "task.name": None,
        "rollout_worker.type": "mock",
        "rollout_worker.need_llm_inference": False,
        "rollout_worker.trajectory_load_path": str(recorded.dump.folder),
        "rollout_worker.temperature": _temperature(recorded),
        "max_steps": len(places),
        "data.max_prompt_length": longest - completion,
        "data.max_completion_length": completion,
        "data.max_seq_length": longest,
        **claim.values,
    }
    if reference is not None:
        values["reference.path"] = str(weights.absolute()) if reference == INITIAL else reference
    config = compose({}, values, work)
    chosen = config.algorithm
    if chosen.aggregation == "seq-mean-token-sum-norm" and chosen.norm_length is None:
        raise OracleError("""seq-mean-token-sum-norm divides by a constant length, which no dump tells; give --set
        algorithm.norm_length=N, the longest completion that the trainer allows""")
    passes = {kind: True for kind in PASSES if recorded.dump.names(kind)}
    return replace(
        config, debug=replace(config.debug, dump_options=replace(config.debug.dump_options, **passes))
    )


def _left(operations: Sequence[str]) -> str:
    """Return the sentence on a float64 model that does not stay in float64."""
    more = f", as do {len(operations) - 1} others" if len(operations) > 1 else ""
    return (
        f"the model is of float64, but {operations[0]}{more}, so it was judged by the bounds of float32; train under "
        "regress.true_float64() for those of float64"
    )


def _temperature(recorded: Recorded) -> float:
    """Return the temperature that the log-probs were recorded at: the one that the trainer claims."""
    dump = recorded.dump
    found = {dump.read(name).meta.get("temperature", 1.0) for name in dump.names("forward_data")}
    if len(found) == 1 and isinstance(value := next(iter(found)), int | float):
        return float(value)
    raise OracleError(f"""log-probs of {dump.folder} were recorded at several temperatures, {sorted(map(str, found))};
    record with temperature=, that of the trainer""")


def _notes(recorded: Recorded, config: Config) -> list[str]:
    """Return what the dump itself decides, so that the judgement cannot see it wrong."""
    notes = []
    if not judged_types(recorded, recorded.places)["param"]:
        notes.append(
            "parameters and optimizer states were not judged: the dump does not tell the settings of AdamW, or it is "
            "another optimizer"
        )
    update = next(recorded.updates())
    if update.mask_from == FROM_GRADIENTS:
        notes.append("the loss mask is that of the token gradients: a mask that is wrong does not show")
    temperatures = update.tokens.temperatures
    claimed = config.rollout_worker.temperature
    if temperatures and any(abs(value / claimed - 1) > 1e-3 for value in temperatures):
        notes.append(
            f"the token gradients are those of logits divided by {temperatures[0]:g}, and log-probs were recorded at "
            f"{claimed:g}: if the trainer means {temperatures[0]:g}, record with temperature={temperatures[0]:g}"
        )
    return notes


def _weights(recorded: Recorded, given: Path | None) -> Path:
    """Return the checkpoint with the weights before the first update."""
    folder = recorded.dump.folder
    adapted = next((name for name in _parameters(recorded) if "lora_" in name), None)
    if adapted is not None:
        raise OracleError(f"""{folder} is of a trainer of an adapter (LoRA: {adapted}), and the oracle repeats trainers
        of whole models only; record one that trains all weights""")
    initial = recorded.capture.get("initial_weights")
    if given is None and not isinstance(initial, Mapping):
        raise OracleError(f"""{folder} does not hold the weights before its first update; record with
        initial_weights=True, or give --model CHECKPOINT""")
    path = given
    if path is None:
        assert isinstance(initial, Mapping)
        path = Path(str(folder)) / str(initial["folder"])
        _verify(path, initial["sha256"])
    return path


def _parameters(recorded: Recorded) -> list[str]:
    dump: DumpReader = recorded.dump
    for record_type in ("gradient", "gradient_clipped", "param"):
        names = dump.names(record_type)
        if names:
            return list(dump.read(names[0]).tensors)
    return []


def _verify(path: Path, digests: Mapping[str, str]) -> None:
    for name, digest in digests.items():
        try:
            found = file_stamp(path / name).sha256
        except (OSError, DumpError):
            found = ""
        if found != digest:
            state = "is missing" if not found else "was changed"
            raise OracleError(f"""{path / name} {state} since it was recorded, so the weights are not those of the
            trainer; copy the dump again, or give --model""")
