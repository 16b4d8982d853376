"""Trial of a fault: a replay in which it should show, judged, and compared with what was written of it before."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from regress.compare.diagnosis.first_divergence import Divergence, find_divergence
from regress.compare.diagnosis.probable_cause import UNKNOWN, Diagnosis, diagnose
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.dump_manifest import Manifest
from regress.dump.dump_reader import DumpReader
from regress.errors import ConfigError, RankError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.engine_replayer import truth_of_ranks
from regress.replay.interprocess_lock import stated
from regress.replay.replay_context import run_context_of
from regress.replay.replay_judge import judge_replay
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.temporary_workspace import Workspace
from regress.replay.test_matrix import Replay, belongs
from regress.replay.variant import Precision, Variant
from regress.replay.variant_names import overrides_of
from regress.replay.variant_requirements import keeps_microbatches
from regress.replay.variant_table import VARIANTS
from tests.faults.fault import REFUSED, Fault, Shown
from tests.faults.registry import installed
from tests.faults.trials.common_practice import measured, noticed
from tests.faults.trials.rows import FaultRow

HARMLESS_STEPS = None
"""Steps of a replay that must not be flagged, and of one whose schedule depends on their number: all of them."""


@dataclass(frozen=True)
class Trial:
    """A fault in one of the replays in which it should show, or must not be flagged."""

    fault: Fault
    shown: Shown
    precision: Precision

    @property
    def name(self) -> str:
        """Name as in test ids."""
        return f"{self.fault.name}-{self.shown.case}-{self.shown.variant}{self.precision.suffix}"


@dataclass(frozen=True)
class Judged:
    """A judged replay with a fault.

    Attributes:
        verdicts: verdicts on the steps that were replayed.
        divergence: the first divergence; None if nothing fails.
        plan: updates that were replayed.
        problem: why there are no verdicts: the engine refused, or died.
    """

    replay: Replay
    verdicts: Sequence[Verdict] = ()
    divergence: Divergence | None = None
    plan: Sequence[PlannedUpdate] = ()
    diagnoses: Sequence[Diagnosis] = ()
    problem: str = ""

    @property
    def failed(self) -> list[Verdict]:
        """Verdicts that are not ok, in the order of computation."""
        return [verdict for verdict in self.verdicts if not verdict.ok]

    @property
    def with_the_first(self) -> list[Verdict]:
        """Failing verdicts on the quantity of the first divergence, in its update."""
        if self.divergence is None:
            return []
        first = self.divergence.first
        where = (first.quantity, first.place.step, first.place.update)
        return [v for v in self.failed if (v.quantity, v.place.step, v.place.update) == where]


def variant_named(name: str) -> Variant:
    """Return a variant of the tables, or the one that a name spells out.

    Raises:
        ConfigError: for a name that does neither.
    """
    known = VARIANTS.get(name)
    overrides = overrides_of(name)
    if known is not None:
        return known
    if overrides is None:
        raise ConfigError(f"there is no variant {name!r}; regress variants lists them")
    return Variant(name, "a fault shows in it", overrides)


def trials_of(
    faults: Iterable[Fault], case: str | None = None, variant: str | None = None
) -> Iterator[Trial]:
    """Yield the trials of faults: those that are written down, or of the case and variant that are asked for."""
    for fault in faults:
        replays = dict.fromkeys(_asked(shown, case, variant) for shown in fault.shown)
        for shown in replays:
            for precision in fault.precisions:
                yield Trial(fault, shown, Precision(precision))


def _asked(shown: Shown, case: str | None, variant: str | None) -> Shown:
    if case in (None, shown.case) and variant in (None, shown.variant):
        return shown
    return Shown(case or shown.case, variant or shown.variant, shown.first, steps=shown.steps)


def judged(trial: Trial, store: GoldenStore, *, diagnosed: bool = True, hidden: bool = False) -> Judged:
    """Replay a case with a fault, and judge it; whatever the broken engine raises is a problem of the result.

    Args:
        hidden: True to judge the dump as one that does not tell its configuration, as most foreign ones do not.

    Raises:
        ConfigError: for a replay that cannot be judged: of another precision or other microbatches than the case's.
    """
    shown = trial.shown
    chosen = Replay(_case(store, shown.case), variant_named(shown.variant), trial.precision)
    if not belongs(chosen) or not keeps_microbatches(chosen):
        raise ConfigError(
            f"fault {trial.fault.name}: {shown.case}/{shown.variant} in {trial.precision} is not a replay of "
            "the matrix: "
            "the case was not measured in this precision, or its values depend on microbatches that the variant makes "
            "anew; choose another case, variant or precision"
        )
    steps = shown.steps if trial.fault.wrong and not scheduled(chosen) else HARMLESS_STEPS
    plan = [update for update in chosen.plan if steps is None or update.step < steps]
    with Workspace() as folder:
        try:
            dump = replay(
                chosen.case,
                chosen.variant,
                trial.precision,
                folder,
                steps=steps,
                around=partial(installed, trial.fault.name),
            )
            if hidden:
                dump.manifest = _without_configuration(dump.manifest)
            verdicts = _verdicts(chosen, dump, plan, steps, Path(folder) / "truth")
        except Exception as error:  # a broken engine may raise anything
            notes = " ".join(getattr(error, "__notes__", ())) if isinstance(error, RankError) else ""
            return Judged(chosen, plan=plan, problem=f"{stated(error)} {notes}".strip())
        scene = run_context_of(chosen, dump.manifest.provenance.config)
    divergence = find_divergence(verdicts, scene)
    told = diagnose(divergence, scene) if divergence is not None and diagnosed else []
    return Judged(chosen, verdicts, divergence, plan, told)


def _without_configuration(manifest: Manifest) -> Manifest:
    """Return a manifest that tells of the configuration where files lie and how ranks share the work, no more."""
    told = {key: manifest.provenance.config[key] for key in ("output_dir", "parallel")}
    return replace(manifest, provenance=replace(manifest.provenance, config=told))


def scheduled(chosen: Replay) -> bool:
    """Return True if the learning rate of a step depends on how many steps there are."""
    given = chosen.case.config.get("optimizer")
    optimizer = given if isinstance(given, dict) else {}
    return bool(optimizer.get("warmup_steps")) or optimizer.get("lr_scheduler", "constant") != "constant"


_CASES: dict[tuple[Path, str], GoldenCase] = {}


def _case(store: GoldenStore, name: str) -> GoldenCase:
    key = (Path(str(store.root)), name)
    if key not in _CASES:
        _CASES[key] = store.case(name)
    return _CASES[key]


def _verdicts(
    chosen: Replay, dump: DumpReader, plan: Sequence[PlannedUpdate], steps: int | None, folder: Path
) -> list[Verdict]:
    truth = truth_of_ranks(chosen, folder)
    found = judge_replay(chosen.case, dump, plan, chosen.precision, truth=truth)
    return [v for v in found if steps is None or (v.place.step or 0) < steps]


def row_of(trial: Trial, found: Judged, seconds: float) -> FaultRow:
    """Return what a trial has shown, beside what was expected."""
    fault, shown = trial.fault, trial.shown
    first = None if found.divergence is None else found.divergence.first
    multiples = [verdict.multiple for verdict in found.with_the_first]
    largest = max(multiples, default=0.0)
    drifts = first is not None and first.status is Status.DRIFT and math.isfinite(largest)
    common = {} if found.problem else measured(found.replay.case, found.plan, found.verdicts)
    return FaultRow(
        fault=fault.name,
        category=fault.category,
        kind=fault.kind,
        source=fault.source,
        case=shown.case,
        variant=shown.variant,
        precision=str(trial.precision),
        held_out=fault.held_out,
        fresh=fault.fresh,
        expected=shown.first,
        caught=bool(found.failed) or refused(shown, found),
        first="" if first is None else f"{first.quantity} {tensor_of(first)}",
        place="" if first is None else str(first.place),
        multiple=largest if drifts or not (found.problem or found.failed) else None,
        stage=stage_right(shown, found),
        tensor=tensor_right(shown, found),
        rules=tuple(one.rule for one in found.diagnoses),
        diagnosis=score(fault, found),
        common=noticed(common),
        values=common,
        problem=found.problem,
        seconds=seconds,
    )


def refused(shown: Shown, found: Judged) -> bool:
    """Return True if a replay was ended as it had to be: any other error of a broken engine proves nothing."""
    return bool(found.problem) and shown.first == REFUSED and shown.says in found.problem


def tried(trial: Trial, store: GoldenStore, *, diagnosed: bool = True, hidden: bool = False) -> FaultRow:
    """Run a trial, and return its row; see `judged`."""
    begun = time.monotonic()
    found = judged(trial, store, diagnosed=diagnosed, hidden=hidden)
    return row_of(trial, found, time.monotonic() - begun)


def tensor_of(verdict: Verdict) -> str:
    """Return the name of a verdict's tensor, also where another stage repeats it."""
    return re.sub(r"^(is_loss_debug|forward_data)/", "", verdict.name)


def stage_right(shown: Shown, found: Judged) -> bool:
    """Return True if the first divergence is in the quantity that was expected."""
    if found.problem or shown.first == REFUSED:
        return refused(shown, found)
    return found.divergence is not None and found.divergence.first.quantity == shown.quantity


def tensor_right(shown: Shown, found: Judged) -> bool:
    """Return True if the first tensor is the expected one, and no other than expected ones fail with it."""
    if found.divergence is None or not stage_right(shown, found):
        return stage_right(shown, found)
    first, names = found.divergence.first, {tensor_of(verdict) for verdict in found.with_the_first}
    if shown.tensor and tensor_of(first) != shown.tensor:
        return False
    return all(re.fullmatch(shown.names, name) for name in names)


def score(fault: Fault, found: Judged) -> str:
    """Return ``right``, ``wrong`` or ``silent`` for the first diagnosis; "" if there is none to judge."""
    if not fault.wrong or not found.diagnoses:
        return ""
    rule = found.diagnoses[0].rule
    if rule in fault.rules or (rule == UNKNOWN and not fault.rules):
        return "right"
    return "silent" if rule == UNKNOWN else "wrong"
