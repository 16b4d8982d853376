"""Updates of a captured trainer, which counts steps of its optimizer, beside those that are counted within steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from regress.compare.dumps.comparison import compare_dumps
from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.update_numbering import counted_otherwise
from regress.dump.dump_manifest import Provenance
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap
from regress.layout import Segment, TokenLayout

TYPES = ("batch_inputs", "gradient", "param")
Place = tuple[int, int | None]
LAYOUT = TokenLayout((1, 4), (Segment(0, 0, 4, 0, 0),))


def dump(folder: Path, places: Sequence[Place], *, captured: bool = False, wrong: int | None = None) -> str:
    """Record updates of one sample, each rollout batch with tokens of its own; a wrong one has another gradient."""
    config = {"capture": {"system": "trainer"}} if captured else {}
    recorder = Recorder(
        folder, options=dict.fromkeys(TYPES, True), provenance=Provenance(config=config), rank=0
    )
    with recording(recorder):
        for number, (step, update) in enumerate(places):
            ids = np.array([[7, 8, 9, 10]]) + number // 2
            factor = 2.0 if number == wrong else 1.0
            with at(step=step, update=update, rank=0):
                with at(micro=0):
                    tap(
                        "batch_inputs",
                        {"input_ids": ids},
                        layout=LAYOUT,
                        meta={"samples": [[f"g{number // 2}", 0]]},
                    )
                tap("gradient", {"w": np.full(3, number + 1.0) * factor})
                tap("param", {"w": np.full(3, 10.0 - number)})
    return str(folder)


WITHIN: Sequence[Place] = ((0, 0), (0, 1), (1, 0), (1, 1))
OWN: Sequence[Place] = ((0, None), (1, None), (2, None), (3, None))


def test_steps_of_an_optimizer_are_matched_with_updates_within_steps(tmp_path: Path) -> None:
    golden = dump(tmp_path / "golden", WITHIN)
    found = compare_dumps(golden, dump(tmp_path / "actual", OWN, captured=True))
    assert not found.failed
    judged = {(v.place.step, v.quantity) for v in found.verdicts if v.quantity in ("gradient", "param")}
    assert judged == {(step, kind) for step in range(4) for kind in ("gradient", "param")}
    assert any("step 1 with step 0 update 1 of the golden dump" in note for note in found.notes)


def test_a_wrong_update_is_told_by_the_step_of_the_trainer(tmp_path: Path) -> None:
    golden = dump(tmp_path / "golden", WITHIN)
    found = compare_dumps(golden, dump(tmp_path / "actual", OWN, captured=True, wrong=3))
    assert {(v.place.step, v.quantity) for v in found.failed} == {(3, "gradient")}


def test_updates_that_the_trainer_did_not_make_are_told(tmp_path: Path) -> None:
    golden = dump(tmp_path / "golden", WITHIN)
    found = compare_dumps(golden, dump(tmp_path / "actual", OWN[:3], captured=True))
    assert not found.failed
    assert any("step 1 update 1 of the golden dump has no counterpart" in note for note in found.notes)


def test_only_a_captured_trainer_counts_otherwise(tmp_path: Path) -> None:
    golden = open_side(dump(tmp_path / "golden", WITHIN))
    own, captured = dump(tmp_path / "own", OWN), dump(tmp_path / "captured", OWN, captured=True)
    within = dump(tmp_path / "within", WITHIN, captured=True)
    assert counted_otherwise(golden, open_side(captured))
    assert not counted_otherwise(golden, open_side(own))
    assert not counted_otherwise(golden, open_side(within))
    assert not counted_otherwise(open_side(own), open_side(captured))
    assert compare_dumps(str(tmp_path / "golden"), own).failed
