"""Updates of trainers whose configuration nobody knows: what the dumps of a run tell of one another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from regress import DumpReader, Recorder, Segment, TokenLayout, at, recording, tap
from regress.cli import main
from regress.dump.dump_location import location
from regress.dump.dump_manifest import Provenance, read_manifest, write_manifest

LAYOUT = TokenLayout((1, 12), (Segment(0, 0, 12, 0, 0),))


def gradients(folder: Path, carried: float, *, skipped: bool = False) -> str:
    """Write gradients of two steps, of which the second holds so much of the first one's."""
    rng = np.random.default_rng(0)
    options = {"gradient": True, "param": True}
    first, second = (
        {n: torch.from_numpy(rng.standard_normal((4, 5))) for n in ("a.weight", "b.weight")} for _ in range(2)
    )
    with recording(Recorder(str(folder), options=options)):
        for step, values in ((0, first), (2 if skipped else 1, second)):
            with at(step=step, rank=0):
                tap("param", {name: torch.ones(4, 5, dtype=torch.float64) for name in values})
                left = {n: v + carried * first[n] if step else v for n, v in values.items()}
                tap("gradient", left, meta={"grad_norm": 1.0})
    return str(folder)


def token_gradient(folder: Path, *temperatures: float, rest: float = 1e-7) -> str:
    """Write the derivative of a loss by each log-prob, solved at a temperature."""
    values = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)[None]
    meta: dict[str, Any] = {"samples": [["g", 0]], "temperatures": list(temperatures)}
    with recording(Recorder(str(folder), options={"token_gradient": True})), at(step=0, rank=0, micro=0):
        tensors = {"token_gradient": values, "token_residual": torch.full_like(values, rest)}
        tap("token_gradient", tensors, layout=LAYOUT, meta=meta)
    return str(folder)


def told(golden: str, actual: str, code: int) -> str:
    """Return what the command line says of two dumps, and require its exit code."""
    found = CliRunner().invoke(main, ["compare", golden, actual])
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


@pytest.mark.parametrize("carried", [1.0, 0.0393])
def test_gradients_that_hold_what_is_left_of_the_last_update(tmp_path: Path, carried: float) -> None:
    text = told(gradients(tmp_path / "golden", 0.0), gradients(tmp_path / "actual", carried), 1)
    assert "rule gradient-of-the-last-update" in text


def test_an_update_that_was_not_recorded_is_none_before(tmp_path: Path) -> None:
    golden = gradients(tmp_path / "golden", 0.0, skipped=True)
    text = told(golden, gradients(tmp_path / "actual", 0.5, skipped=True), 1)
    assert "rule gradient-of-the-last-update" not in text


def test_the_same_derivatives_at_another_temperature(tmp_path: Path) -> None:
    golden = token_gradient(tmp_path / "golden", 0.9)
    text = told(golden, token_gradient(tmp_path / "actual", 1.0), 1)
    assert "divisor of the logits: golden 0.9, actual 1" in text
    assert "rule token-gradient-temperature" in text


def test_a_temperature_of_gradients_that_nothing_explains_is_no_difference(tmp_path: Path) -> None:
    """A value head, or rounding to bfloat16, leaves a rest that any temperature fits about as well."""
    golden = token_gradient(tmp_path / "golden", 0.97, rest=0.2)
    told(golden, token_gradient(tmp_path / "actual", 1.0, rest=0.2), 0)


@pytest.mark.parametrize("temperatures", [(), (0.90001,), (0.9, 0.90001)])
def test_temperatures_that_are_the_same_or_not_told(tmp_path: Path, temperatures: tuple[float, ...]) -> None:
    golden = token_gradient(tmp_path / "golden", 0.9)
    told(golden, token_gradient(tmp_path / "actual", *temperatures), 0)


def states(folder: Path, *names: str, unused: str = "-") -> str:
    """Write the states of an optimizer as they are captured of a foreign trainer."""
    told = Provenance(config={"capture": {"system": "a trainer"}})
    with (
        recording(Recorder(str(folder), options={"optimizer": True}, provenance=told)),
        at(step=0, rank=0),
    ):
        tap("optimizer", {name: torch.full((3, 4), float(unused not in name)) for name in names})
    return str(folder)


def test_a_parameter_that_the_optimizer_of_one_side_does_not_have(tmp_path: Path) -> None:
    """The optimizer has moments of other parameters, so it lacks those of this one: no other kind of optimizer."""
    golden = states(tmp_path / "golden", "a/exp_avg", "b/exp_avg")
    assert "optimizer b/exp_avg: only in the golden dump" in told(
        golden, states(tmp_path / "one", "a/exp_avg"), 1
    )
    idle = states(tmp_path / "idle", "a/exp_avg", "b/exp_avg", unused="b/")
    assert "b/exp_avg is in the golden dump only" in told(idle, str(tmp_path / "one"), 0)
    plain = states(tmp_path / "plain", "a/momentum", "b/momentum", "a/step")
    other = states(tmp_path / "other", "a/step")
    assert "a/momentum is in the golden dump only" in told(plain, other, 0)


def test_a_version_that_is_a_text_is_told_as_one(tmp_path: Path) -> None:
    path = Path(token_gradient(tmp_path / "golden", 0.9)) / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": "1"'))
    assert "schema version '1', this release reads 1" in told(str(path.parent), str(path.parent), 2)


def trained(
    folder: Path, *names: str, kept: bool | str | None = True, zero: tuple[str, ...] = (), steps: int = 2
) -> str:
    """Write what `record` keeps of a trainer that trains some parameters."""
    told = {} if kept is None else {"kept": {"gradient": kept, "param": kept, "optimizer": kept}}
    origin = Provenance(config={"capture": {"system": "loop", "every_n_steps": 1, **told}})
    options = dict.fromkeys(("batch_inputs", "forward_data", "gradient", "param"), True)
    at_tokens = {"samples": [["g", 0]]}
    with recording(Recorder(folder, options=options, provenance=origin)):
        for step in range(steps):
            with at(step=step, rank=0, micro=0):
                ids = torch.arange(12)[None]
                tap("batch_inputs", input_ids=ids, layout=LAYOUT, meta=at_tokens)
                tap("forward_data", log_probs=-torch.ones(1, 12), layout=LAYOUT, meta=at_tokens)
            with at(step=step, rank=0):
                tap("gradient", {n: torch.zeros(3) if n in zero else torch.ones(3) for n in names})
                tap("param", {n: torch.ones(3) for n in names})
    return str(folder)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_parameter_that_one_trainer_freezes_is_a_failure(tmp_path: Path, swapped: bool) -> None:
    sides = [trained(tmp_path / "all", "a", "b"), trained(tmp_path / "frozen", "a")]
    text = told(*(reversed(sides) if swapped else sides), 1)
    here, other = ("actual", "golden") if swapped else ("golden", "actual")
    assert (
        f"gradient b: only in the {here} dump; the {other} trainer has no gradient of b: it is frozen" in text
    )
    assert f"param b: only in the {here} dump; the {other} trainer has no trained value of b" in text


def test_a_gradient_of_zero_is_as_good_as_none(tmp_path: Path) -> None:
    """Some trainers have zeros where others have nothing, as for an expert without tokens."""
    golden = trained(tmp_path / "golden", "a", "b", zero=("b",))
    text = told(golden, trained(tmp_path / "actual", "a"), 0)
    assert "gradient/b is in the golden dump only" in text


@pytest.mark.parametrize("kept", ["^a$", None])
def test_a_parameter_that_one_recording_left_out_is_none_that_is_frozen(
    tmp_path: Path, kept: str | None
) -> None:
    golden = trained(tmp_path / "golden", "a", "b")
    text = told(golden, trained(tmp_path / "actual", "a", kept=kept), 0)
    assert "gradient/b is in the golden dump only" in text


def without(folder: str, *parts: str) -> str:
    """Remove records from a dump as if they had never been written."""
    place = Path(folder)
    manifest = read_manifest(location(folder))
    files = {name: entry for name, entry in manifest.files.items() if not any(p in name for p in parts)}
    for name in manifest.files.keys() - files.keys():
        (place / name).unlink()
    write_manifest(location(folder), replace(manifest, files=files))
    return folder


GAPS = {
    "all forward_data": (
        ("forward_data/",),
        "no forward_data was recorded of the update, though batch_inputs was",
    ),
    "all inputs of a step": (
        ("batch_inputs/step_000001",),
        "no batch_inputs was recorded of the update, though forward_data was",
    ),
    "the parameters of a step": (("gradient/step_000001",), "gradient is missing, though param"),
    "a step": (("step_000001",), "step 1 is missing among those that were recorded"),
    "the first step": (("step_000000",), "step 0 is missing among those that were recorded"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_a_single_dump_says_what_it_lacks(tmp_path: Path, gap: str) -> None:
    parts, words = GAPS[gap]
    folder = without(trained(tmp_path / "dump", "a", steps=3), *parts)
    found = CliRunner().invoke(main, ["dump", "check", folder])
    assert found.exit_code == 1, found.output
    assert words in " ".join(found.output.split())


@pytest.mark.parametrize(("record_type", "rank"), [("forward_data", 1), ("batch_inputs", 0)])
def test_a_single_dump_says_what_a_microbatch_lacks(tmp_path: Path, record_type: str, rank: int) -> None:
    options = dict.fromkeys(("batch_inputs", "forward_data"), True)
    with recording(Recorder(str(tmp_path / "dump"), options=options)):
        for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
            with at(step=0, rank=place[0], micro=place[1]):
                told_of = {"samples": [["g", 2 * place[0] + place[1]]]}
                tap("batch_inputs", input_ids=torch.arange(12)[None], layout=LAYOUT, meta=told_of)
                tap("forward_data", log_probs=-torch.ones(1, 12), layout=LAYOUT, meta=told_of)
    folder = without(str(tmp_path / "dump"), f"{record_type}/step_000000_rank{rank}_micro1")
    found = CliRunner().invoke(main, ["dump", "check", folder])
    assert found.exit_code == 1, found.output
    text = " ".join(found.output.split())
    assert f"{record_type} of microbatch 1 is missing" in text
    assert f"rank{rank}/micro1" in text


def microbatches(folder: Path, *factors: float, bad: float | None = None) -> str:
    """Write microbatches of a captured trainer, whose losses and token gradients have a factor each."""
    origin = Provenance(config={"capture": {"system": "loop", "every_n_steps": 1}})
    options = dict.fromkeys(("batch_inputs", "forward_data", "loss", "token_gradient"), True)
    with recording(Recorder(folder, options=options, provenance=origin)):
        for micro, factor in enumerate(factors):
            of = {"samples": [["g", micro]]}
            log_probs = -torch.linspace(1.0, 2.0, 12)[None]
            if bad is not None:
                log_probs[0, 3] = bad
            with at(step=0, rank=0, micro=micro):
                tap("batch_inputs", input_ids=torch.arange(12)[None] + micro, layout=LAYOUT, meta=of)
                tap("forward_data", log_probs=log_probs, layout=LAYOUT, meta=of)
                tap("loss", loss=torch.tensor(factor), layout=LAYOUT, meta=of)
                values = torch.linspace(0.5, 1.5, 12)[None] * factor
                tap("token_gradient", token_gradient=values, layout=LAYOUT, meta=of)
    return str(folder)


def test_token_gradients_prove_what_the_loss_of_a_microbatch_only_shows(tmp_path: Path) -> None:
    golden = microbatches(tmp_path / "golden", 1.0, 1.0, 1.0)
    text = told(golden, microbatches(tmp_path / "actual", 1.1, 1.1, 0.8), 1)
    assert "compare: first loss" in text
    assert "rule token-gradient-denominators; because token_gradient breaks" in text


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_log_probs_of_a_captured_trainer_are_finite(tmp_path: Path, bad: float) -> None:
    found = CliRunner().invoke(main, ["dump", "check", microbatches(tmp_path / "dump", 1.0, bad=bad)])
    assert found.exit_code == 1, found.output
    assert "1 of 12 values are NaN or infinite" in found.output


def test_records_that_were_exchanged_between_microbatches(tmp_path: Path) -> None:
    """Each value is at its own sample, and in the record of another microbatch."""
    golden, actual = microbatches(tmp_path / "golden", 1.0, 1.0), tmp_path / "actual"
    dump = DumpReader(golden)
    options = dict.fromkeys(("batch_inputs", "forward_data", "loss", "token_gradient"), True)
    with recording(Recorder(str(actual), options=options, provenance=dump.manifest.provenance)) as recorder:
        for name in dump.names():
            record = dump.read(name)
            other = record.micro if record.type != "forward_data" else 1 - (record.micro or 0)
            recorder.put(replace(record, micro=other))
    for text in (
        told(golden, str(actual), 1),
        " ".join(CliRunner().invoke(main, ["dump", "check", str(actual)]).output.split()),
    ):
        assert "forward_data of rank 0 microbatch 0 holds sample g/1, which its batch_inputs do not" in text
