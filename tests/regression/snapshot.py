"""Snapshot of the verdicts on every fault and on healthy replays, short enough to be kept in a file.

``python tests/regression/snapshot.py`` judges all of them anew and writes the file; the tests compare with it.
``--missing`` judges only those that the file lacks, and leaves the others as they are; so does ``--only PATTERN``, of
those whose names match.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regress.compare.diagnosis.first_divergence import Divergence, find_divergence
from regress.compare.diagnosis.probable_cause import Diagnosis, diagnose
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.dumps.comparison import compare_dumps
from regress.compare.verdicts.verdict import Verdict
from regress.dump.dump_reader import DumpReader
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.replay_context import run_context_of
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.report.comparison_report import run_context_of as run_context_of_comparison
from tests.faults.registry import corpus, installed
from tests.faults.trials.trial import variant_named

GOLDEN = Path(__file__).parents[2] / "golden"
FILE = Path(__file__).parent / "snapshot.json"

HEALTHY = (
    *((case, "mbs4") for case in ("dense", "gpt2", "tied", "moe", "tools")),
    *((case, "packed-dynamic") for case in ("dapo", "dr_grpo", "gspo", "cispo")),
    *(
        ("dense", variant)
        for variant in ("base", "left", "reversed", "dp2", "tp2-sp", "pp2-1f1b-packed-mbs3")
    ),
)
WORDS = ("formula", "equals", "fitted", "class:")
"""Patterns whose words have no measured numbers in them."""


@dataclass(frozen=True)
class Subject:
    """A replay that is judged, broken or healthy.

    Attributes:
        fault: name of a fault of the registry; None for a healthy replay.
    """

    case: str
    variant: str
    precision: Precision = Precision.FLOAT64
    fault: str | None = None

    @property
    def name(self) -> str:
        """As in test ids."""
        return f"{self.fault or 'healthy'}-{self.case}-{self.variant}{self.precision.suffix}"

    @property
    def chosen(self) -> Replay:
        """The case under the variant."""
        return Replay(GoldenStore(GOLDEN).case(self.case), variant_named(self.variant), self.precision)

    def dump(self, folder: Path, *, steps: int | None = 1) -> DumpReader:
        """Run it: the first step, or all of them."""
        one = self.chosen
        return replay(
            one.case, one.variant, one.precision, folder, steps=steps, around=partial(installed, self.fault)
        )


def of_faults() -> Iterator[Subject]:
    """Every fault of the registry in the replays in which it shows."""
    for name, fault in corpus().items():
        if fault.wrong:
            for shown in fault.shown:
                yield Subject(shown.case, shown.variant, fault=name)
    yield Subject("dense", "tp2-sp", fault="averaged_over_ranks")


def subjects() -> list[Subject]:
    """All that the file tells of, one for each name."""
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    faults = [one for one in of_faults() if not known or one.name in known]
    healthy = [
        Subject(case, variant, precision) for case, variant in HEALTHY for precision in _precisions(variant)
    ]
    return [*{one.name: one for one in (*faults, *healthy)}.values()]


def _precisions(variant: str) -> tuple[Precision, ...]:
    return (Precision.FLOAT64, Precision.FLOAT32) if variant in ("mbs4", "dp2") else (Precision.FLOAT64,)


def judged(one: Subject, dump: DumpReader) -> tuple[RunContext, list[Verdict]]:
    """The verdicts on the steps that a dump has."""
    chosen = one.chosen
    steps = {entry.where.step for entry in dump.manifest.files.values()}
    plan = [update for update in chosen.plan if update.step in steps]
    verdicts = judge_replay(chosen.case, dump, plan, one.precision)
    scene = run_context_of(chosen, dump.manifest.provenance.config)
    return scene, [verdict for verdict in verdicts if verdict.place.step in steps]


def told(verdicts: Sequence[Verdict], scene: RunContext) -> dict[str, Any]:
    """Return the kept facts: numbers of verdicts, the first divergence, its patterns, and its causes."""
    counts: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        row = counts.setdefault(verdict.quantity, {})
        row[str(verdict.status)] = row.get(str(verdict.status), 0) + 1
    found = find_divergence(verdicts, scene)
    return {"counts": counts} | ({} if found is None else divergence(found, diagnose(found, scene)))


def divergence(found: Divergence, diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """The first divergence without measured numbers."""
    first = found.first
    patterns = [
        f"{pattern.id}: {pattern.words}" if pattern.id.startswith(WORDS) else pattern.id
        for pattern in found.patterns
    ]
    return {
        "first": f"{first.quantity} {first.name} {first.status} at {first.place}",
        "held": [*found.held],
        "broken": [*found.broken],
        "patterns": sorted(patterns),
        "rules": [diagnosis.rule for diagnosis in diagnoses],
    }


def compared(golden: str, actual: str) -> tuple[RunContext, list[Verdict]]:
    """The verdicts of ``regress compare``."""
    found = compare_dumps(golden, actual)
    assert not found.problems
    return run_context_of_comparison(found), found.verdicts


def main() -> None:
    """Judge all anew, or what is missing, and write the file."""
    some = re.compile(sys.argv[sys.argv.index("--only") + 1]) if "--only" in sys.argv[1:] else None
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    wanted = subjects()
    rows = {one.name: known[one.name] for one in wanted if one.name in known}
    for one in wanted:
        if one.name in rows and (some is not None and not some.search(one.name)):
            continue
        if one.name in rows and "--missing" in sys.argv[1:]:
            continue
        for steps in (1, None):  # what does not show in the first step may do so in a later one
            with tempfile.TemporaryDirectory() as folder:
                scene, verdicts = judged(one, one.dump(Path(folder), steps=steps))
            rows[one.name] = {"steps": steps, **told(verdicts, scene)}
            if one.fault is None or "first" in rows[one.name]:
                break
        print(one.name, rows[one.name].get("first", "-"), rows[one.name].get("rules", ""), flush=True)
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
