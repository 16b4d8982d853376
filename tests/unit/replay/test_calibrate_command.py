"""`regress golden calibrate`: what it shows, and how tolerances come into force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_recording import Calibration
from regress.replay.noise_floor import Floor, Response
from regress.replay.tolerance_proof import Proof, rows_of
from regress.replay.validation_run import ValidationRun
from regress.replay.variant import Precision

FLOORS = [
    Floor.of("loss", Precision.FLOAT64, {"loss": Response(1e-15, 0.0, 1e-15)}, 3),
    Floor.of("loss", Precision.FLOAT32, {"loss": Response(2e-5, 1e-5, 1e-5)}, 3),
    Floor.of("kl", Precision.FLOAT32, {"kl": Response(9.0, 1.0, 0.25)}, 3),
]


def trial(name: str, precision: Precision, multiple: float, first: str | None = None) -> ValidationRun:
    return ValidationRun(
        name, precision, {"loss": multiple * 8e-5}, {"loss": multiple}, first, f"loss of {name}"
    )


PROOF = Proof(
    [trial("left", Precision.FLOAT32, 0.25), trial("eager", Precision.FLOAT32, 0.5)],
    [
        trial(name, precision, multiple, first)
        for name, first, multiples in (
            ("large", "loss", (1e9, 1e3)),
            ("small", "loss", (1e7, 12.0)),
            ("elsewhere", "kl", (1e5, 2.0)),  # shows in the loss, but begins before it
            ("nothing here", None, (0.1, 0.1)),
        )
        for precision, multiple in zip((Precision.FLOAT64, Precision.FLOAT32), multiples, strict=True)
    ],
)


@pytest.fixture
def typed(store: GoldenStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``typed(code, ...)``: a command on a case for which the measurement is known."""

    def measure(_: GoldenStore, name: str, *, proof: bool, **__: object) -> Calibration:
        return Calibration(store.case(name), FLOORS, PROOF if proof else None)

    monkeypatch.setattr("regress.replay.case_recording.measure", measure)

    def run(code: int, *arguments: str) -> list[str]:
        result = CliRunner().invoke(main, [*arguments, "--golden-dir", str(store.root)])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result.output.splitlines()

    return run


def test_tolerances_come_into_force(typed: Callable[..., list[str]], store: GoldenStore) -> None:
    before = store.case("dense").manifest
    typed(0, "golden", "calibrate", "dense", "--dry-run")
    assert store.case("dense").manifest == before
    lines = typed(0, "golden", "calibrate", "dense", "--no-proof")
    assert lines[-1] == f"written: {store.root / 'dense' / 'manifest.json'}"
    assert not any("healthy spread" in line for line in lines)
    entry = store.case("dense").tolerance("kl", "float32")
    assert entry is not None
    assert (entry.relative, entry.absolute) == (0.0, 1.0)
    assert typed(0, "golden", "calibrate", "dense")[-1] == "dense: the tolerances are those that are recorded"


def test_the_table_shows_what_tolerances_are_worth(typed: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = typed(0, "golden", "calibrate", "dense", "--report", str(tmp_path / "out"))
    (line,) = (line for line in lines if line.startswith("loss") and "float32" in line)
    assert line.split() == [
        *("loss", "float32", "2.0e-05", "weights", "moved", "by", "one", "ulp", "8.0e-05"),
        *("4.0e-05", "50%", "small", "12"),
    ]
    assert "ill-conditioned, so bounded absolutely: kl in float32: 1" in lines
    assert (tmp_path / "out" / "calibration.html").is_file()


def test_a_healthy_variant_that_fails_is_told() -> None:
    proof = Proof([trial("left", Precision.FLOAT32, 2.5, "loss")], [])
    assert proof.alarms == ["left in float32 is healthy, but fails: loss of left, 2.5 x tolerance"]
    assert rows_of(FLOORS, None)[0].closest is None
