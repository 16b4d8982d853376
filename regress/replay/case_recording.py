"""Recording of a golden case: its inputs if they are missing, its golden values, and its measured tolerances."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from regress.compare.quantities import quantity_named
from regress.compare.verdicts.verdict import Status
from regress.dump.dump_reader import DumpReader, read_all
from regress.engine.decision_margins import margins
from regress.errors import GoldenError, RegressError, ReplayError
from regress.golden.case_manifest import ToleranceEntry
from regress.golden.case_update import commit
from regress.golden.golden_case import GREEDY, GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_files import CASE_FILE, input_files
from regress.golden.golden_provenance import differences, environment_lines
from regress.golden.hub_goldens import hub_address
from regress.replay.case_recipe import Recipe, has_inputs, make_inputs
from regress.replay.case_run import run_steps, write_rollouts
from regress.replay.case_signal import SignalError
from regress.replay.case_truth import Truth, compute_truth, provenance_of, require_case_signal
from regress.replay.drift_update import propose as propose_values
from regress.replay.noise_floor import Floor
from regress.replay.replay_configuration import replay_config
from regress.replay.temporary_workspace import Workspace
from regress.replay.tolerance_calibration import calibrate
from regress.replay.tolerance_proof import Proof, prove
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE


def record(store: GoldenStore, name: str, *, inputs: bool = False, signal: bool = True) -> list[Path]:
    """Record a case anew from its ``case.yaml``; tolerances are left to `measure`.

    Args:
        inputs: make weights, optimizer state and rollouts again although they exist.
        signal: refuse a case in which some faults could not show.

    Returns:
        The files written, none when nothing changes.

    Raises:
        RegressError: if it cannot be recorded, or has too little signal; what was recorded is then unchanged.
    """
    case = store.case(name, allow_changed_inputs=True)
    makes = inputs or not has_inputs(case)
    if makes and not case.recipe:
        raise GoldenError(f"""{case.folder} has neither model/ nor a recipe in case.yaml; lay model/, trajectories/ and
        optimizer.safetensors there, or say with a recipe how they are made""")
    if not makes and not case.sampled:
        with Workspace() as workspace:
            truth = _computed(case, workspace, signal)
        return _keep(case, case, truth)
    return _record_draft(case, makes, signal)


def _record_draft(case: GoldenCase, makes: bool, signal: bool) -> list[Path]:
    """Record a case whose inputs change, under the first of its seeds that has every signal."""
    Recipe.of(case)
    seeds = seeds_of(case) if makes else seeds_of(case)[:1]
    refused: list[SignalError] = []
    never: list[str] = []
    for seed in seeds:
        with Workspace() as workspace, draft(case, workspace / "golden", seed) as store:
            try:
                return _made(case, store, workspace, makes, signal)
            except SignalError as error:
                refused.append(error)
                never = [key for key in error.keys if all(key in other.keys for other in refused)]
                if not error.luck or (never and len(refused) >= HOPELESS):
                    break
    keys = ", ".join(never if len(refused) > 1 and never else dict.fromkeys(refused[0].keys))
    tried = f"; no seed of {', '.join(map(str, seeds[: len(refused)]))} will do" if len(refused) > 1 else ""
    raise GoldenError(f"{refused[0]}, such as {keys}{tried}")


def _made(case: GoldenCase, store: GoldenStore, workspace: Path, makes: bool, signal: bool) -> list[Path]:
    """Make the inputs of a draft, compute its values, and write both into the case."""
    made = store.case(case.name)
    if makes:
        make_inputs(made, workspace / "inputs")
        made = store.case(case.name)
    if made.sampled:
        sample_rollouts(made, workspace / "rollouts")
        made = store.case(case.name)
    return _keep(case, made, _computed(made, workspace, signal))


def _computed(case: GoldenCase, workspace: Path, signal: bool) -> Truth:
    truth = compute_truth(case, workspace)
    if signal:
        require_case_signal(case, truth)
    return truth


def _keep(case: GoldenCase, made: GoldenCase, truth: Truth) -> list[Path]:
    """Write the golden values of a case, with the inputs of a draft of it: all or nothing."""
    inputs = None if case.manifest is None else sorted({*case.manifest.inputs, *input_files(made.folder)})
    source = None if made is case else made.folder
    provenance = provenance_of(made)
    return commit(
        case.folder, truth=truth, inputs=inputs, inputs_from=source, provenance=provenance, replace=True
    )


def add(store: GoldenStore, name: str, quantities: Collection[str]) -> list[Path]:
    """Record quantities that a case lacks or has with other values, and keep the recorded values of all others.

    Returns:
        The files written, none when nothing changes.

    Raises:
        RegressError: for a name that is not a quantity, one that the case does not compute, or a recorded value
            of another quantity that is computed differently now: the added values would belong to another
            computation.
    """
    for quantity in quantities:
        quantity_named(quantity)
    case = store.case(name)
    if case.manifest is None:
        raise GoldenError(
            f"{case.folder} has no golden values yet; record the case: regress golden record {name}"
        )
    with Workspace() as workspace:
        found = propose_values(case, workspace, everything=False)
    others = (change for change in found.changes if change.quantity not in quantities)
    other = next((change for change in others if change.status is not Status.EXTRA), None)
    if other is not None:
        raise GoldenError(f"""case {name}: {other.quantity} {other.name} at {other.where} is not what was recorded
        ({other.status}), so nothing can be added beside it; find out why, or bring it up to date first: pytest
        --update-golden -k {shlex.quote(f"{name} and {other.quantity}")}""")
    for quantity in quantities:
        if not any(quantity in row for row in found.truth.values()):
            raise GoldenError(f"case {name} computes no {quantity}, so it cannot have golden values of it")
    chosen = {
        where: {quantity: tensors for quantity, tensors in row.items() if quantity in quantities}
        for where, row in found.changed.items()
    }
    return commit(case.folder, truth=chosen, provenance=provenance_of(case))


@dataclass(frozen=True)
class Calibration:
    """Measurements of a case; ``proof`` is None where it was not asked for, ``only`` for all quantities."""

    case: GoldenCase
    floors: list[Floor]
    proof: Proof | None = None
    only: Collection[str] | None = None

    @property
    def entries(self) -> dict[str, dict[str, ToleranceEntry]]:
        """Tolerances in the form of the manifest."""
        found: dict[str, dict[str, ToleranceEntry]] = {}
        for floor in self.floors:
            if self.only is not None and floor.quantity not in self.only:
                continue
            found.setdefault(floor.quantity, {})[str(floor.precision)] = floor.entry
        return found


def measure(
    store: GoldenStore,
    name: str,
    *,
    seeds: int,
    proof: bool = False,
    only: Collection[str] | None = None,
    advance: Callable[[], None] = lambda: None,
    processes: int = 1,
) -> Calibration:
    """Measure the tolerances of a recorded case; nothing is written.

    Args:
        proof: replay held-out variants and the corpus of faults, too.
        only: keep the tolerances of these quantities; None for all.
        advance: called after each replay.
        processes: number of processes that replay, which changes no value.
    """
    case = store.case(name)
    for quantity in only or ():
        quantity_named(quantity)
    with Workspace() as workspace:
        measured = None if proof else only  # held-out variants are judged by all tolerances
        floors = calibrate(case, workspace, seeds=seeds, only=measured, advance=advance, processes=processes)
        missing = sorted({*(only or ())} - {floor.quantity for floor in floors})
        if missing:
            raise GoldenError(f"""case {name} has no golden values of {missing[0]} to measure; add them: regress golden
            record {name} --quantity {missing[0]}""")
        shown = prove(case, floors, workspace, advance, processes) if proof else None
        return Calibration(case, floors, shown, only)


def keep(found: Calibration) -> list[Path]:
    """Write the tolerances into the manifest; return the files written, none where they are those recorded."""
    case = found.case
    return commit(case.folder, tolerances=found.entries, provenance=provenance_of(case))


def surroundings(cases: Iterable[GoldenCase]) -> dict[str, str]:
    """Return the environment of replays of some cases, and its changes since each recording, as lines for a
    reader.
    """
    lines: dict[str, str] = {}
    for case in cases:
        now = provenance_of(case)
        address = hub_address(case.folder.parent)
        lines = lines or ({} if address is None else {"golden": address}) | environment_lines(now)
        if case.manifest is not None and (changed := differences(case.manifest.provenance, now)):
            lines[case.name] = ", ".join(changed)
    return lines


TRIES, HOPELESS = 40, 8
"""Seeds that are tried for a case in which some faults could not show; fewer, if none of so many had a signal."""

_SEED = re.compile(r"^(?P<before>(?P<indent> +)seed: *)[^\s#]+", re.MULTILINE)
_CONFIG = re.compile(r"^config: *\n", re.MULTILINE)


def seeds_of(case: GoldenCase) -> list[int]:
    """Return the seeds that its inputs are made with until it has every signal, its own first.

    A case that takes the inputs of another has those whatever its seed.
    """
    own = case.config.get("seed", 0)
    if not isinstance(own, int) or "inputs_of" in case.recipe:
        return [own] if isinstance(own, int) else [0]
    return [own, *(seed for seed in range(1, TRIES + 1) if seed != own)][:TRIES]


@contextmanager
def draft(case: GoldenCase, root: Path, seed: int) -> Iterator[GoldenStore]:
    """Yield a golden directory below ``root`` that holds a copy of a case, without its recording, under a seed.

    What an error says of the draft's folders it says of the case's.
    """
    folder = root / case.name
    for name in input_files(case.folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(case.folder / name, folder / name)
    other = case.recipe.get("inputs_of")
    if isinstance(other, str) and other and (source := case.folder.parent / other).is_dir():
        (root / other).symlink_to(source.absolute())
    if case.config.get("seed", 0) != seed:
        path = folder / CASE_FILE
        path.write_text(with_seed(path.read_text(encoding="utf-8"), seed), encoding="utf-8")
    try:
        yield GoldenStore(root)
    except RegressError as error:
        own = str(case.folder.parent)
        texts = (str(one).replace(str(root.resolve()), own).replace(str(root), own) for one in error.args)
        error.args = tuple(texts)
        raise


def with_seed(text: str, seed: int) -> str:
    """Return a ``case.yaml`` with another seed and all else as it is written there, comments too."""
    tree: dict[str, Any] = yaml.safe_load(text)
    seeded = {**tree, "config": {**tree.get("config", {}), "seed": seed}}
    for found in (
        _SEED.sub(rf"\g<before>{seed}", text, count=1),
        _CONFIG.sub(f"config:\n  seed: {seed}\n", text, count=1),
    ):
        if _holds(found, seeded):
            return found
    return str(yaml.safe_dump(seeded, sort_keys=False))


def _holds(text: str, content: Mapping[str, Any]) -> bool:
    try:
        return bool(yaml.safe_load(text) == content)
    except yaml.YAMLError:
        return False


MARGIN = 1e-6
"""Least probability between a decision and another outcome: what rounds differently in float64 differs by 1e-12."""


def sample_rollouts(case: GoldenCase, workspace: Path) -> float:
    """Write ``trajectories/`` and ``greedy/`` of a case, and return the least margin of a decision.

    Raises:
        ReplayError: if a draw, an argmax, or a cut of top-k or top-p lies within `MARGIN` of another outcome.
    """
    config = replay_config(case, BASE, Precision.FLOAT64, Recipe.of(case).steps, workspace)
    with margins() as found:
        run_steps(config)
    least = min(found)
    if least < MARGIN:
        raise ReplayError(f"""case {case.name}: a decision of the sampler lies within {least:.1e} of another outcome,
        and of {len(found)} none may within {MARGIN:g}, as rounding would decide it; choose another seed in
        {case.folder / "case.yaml"}""")
    dump = DumpReader(config.debug.dump_dir)
    for folder in ("trajectories", GREEDY):
        shutil.rmtree(case.folder / folder, ignore_errors=True)
    for record in dump.records("trajectory"):
        write_rollouts(case.folder / "trajectories", record)
    for path in sorted((Path(config.output_dir) / GREEDY).iterdir()):
        (record,) = read_all(path)
        write_rollouts(case.folder / GREEDY, record)
    return least
