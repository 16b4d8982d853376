"""Dumps that went wrong in the ways dumps go wrong: each must fail with its verdict and its coordinates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record, replace_tensors
from regress.dump.recorder import Recorder
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.layout import TokenLayout
from regress.replay.case_run import replay
from regress.replay.replay_judge import judge_by_bitwise_reference, judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[2] / "golden"
Mutation = Callable[[list[Record]], list[Record]]


@pytest.fixture(scope="module")
def case() -> GoldenCase:
    return GoldenStore(GOLDEN).case("dense")


@pytest.fixture(scope="module")
def padded(case: GoldenCase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Replay, DumpReader]:
    """Three microbatches of four samples each, right padded, in float32."""
    chosen = Replay(case, VARIANTS["mbs4"], Precision.FLOAT32)
    return chosen, replay(case, chosen.variant, chosen.precision, tmp_path_factory.mktemp("mbs4"))


def rewritten(dump: DumpReader, folder: Path, mutate: Mutation) -> DumpReader:
    """The dump as a faulty run would have written it."""
    recorder = Recorder(folder, options={}, provenance=dump.manifest.provenance)
    for record in mutate(list(dump)):
        recorder.put(record)
    recorder.close()
    return DumpReader(folder)


def at(type: str, step: int, micro: int | None = None) -> Callable[[Record], bool]:
    return lambda record: (record.type, record.step, record.micro) == (type, step, micro)


def changed(
    chosen: Callable[[Record], bool], name: str, change: Callable[[Array, TokenLayout | None], Array | None]
) -> Mutation:
    """A copy of the records in which one tensor of the chosen ones is changed, or dropped for None."""

    def mutate(records: list[Record]) -> list[Record]:
        return [edited(record) if chosen(record) else record for record in records]

    def edited(record: Record) -> Record:
        layout = TokenLayout.from_json(record.meta["layout"]) if "layout" in record.meta else None  # type: ignore[arg-type]  # JSON
        value = change(record.tensors[name].copy(), layout)
        if value is None:
            return replace(record, tensors={k: v for k, v in record.tensors.items() if k != name})
        return replace_tensors(record, {name: value})

    return mutate


def judged(padded: tuple[Replay, DumpReader], folder: Path, mutate: Mutation) -> list[Verdict]:
    chosen, dump = padded
    verdicts = judge_replay(chosen.case, rewritten(dump, folder, mutate), chosen.plan, chosen.precision)
    return [verdict for verdict in verdicts if not verdict.ok]


def invariant_of(verdict: Verdict) -> tuple[str, Place]:
    """Which invariant failed, and where: what the other recorded values say without the golden ones."""
    assert (verdict.status, verdict.quantity) == (Status.DRIFT, "invariants")
    return verdict.name, verdict.place


def loss_token(dump: DumpReader, step: int, micro: int, which: int) -> tuple[int, int, str]:
    """Row and column of a loss token, and its canonical name."""
    (record,) = (r for r in dump if at("batch_inputs", step, micro)(r))
    layout = TokenLayout.from_json(record.meta["layout"])  # type: ignore[arg-type]  # JSON
    row, col = np.argwhere(record.tensors["response_mask"])[which]
    group, run = record.meta["samples"][row]  # type: ignore[index,misc]  # JSON
    return int(row), int(col), f"sample {group}/{run}, position {layout.positions[row, col]}"


def test_an_intact_dump_passes(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    assert judged(padded, tmp_path / "dump", lambda records: records) == []


def test_a_token_off_by_one(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    row, col, where = loss_token(padded[1], 1, 2, 3)

    def bump(ids: Array, _: TokenLayout | None) -> Array:
        ids[row, col] += 1
        return ids

    mutate = changed(at("batch_inputs", 1, 2), "input_ids", bump)
    found, beside = judged(padded, tmp_path / "dump", mutate)
    assert invariant_of(beside) == ("token_ids", Place(1))  # forward_data names the other one
    assert (found.status, found.quantity, found.place) == (Status.MASK, "batch_inputs", Place(1, None, 0, 2))
    assert found.worst is not None
    assert found.worst.where.startswith(where)
    assert found.worst.index == (row, col)
    assert found.worst.actual == found.worst.golden + 1
    assert found.over == 1


def test_all_tokens_scaled_by_four_percent(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    mutate = changed(at("forward_data", 0, 1), "log_probs", lambda x, _: x * np.float32(1.04))
    found, given = judged(padded, tmp_path / "dump", mutate)
    assert invariant_of(given) == ("given_logits", Place(0))
    assert given.over == found.over
    assert (found.status, found.quantity, found.place) == (Status.DRIFT, "log_probs", Place(0, None, 0, 1))
    assert found.relative_l2 == pytest.approx(0.04, rel=1e-3)
    assert found.over > 0.9 * found.count


def test_one_ulp_in_the_bitwise_tier(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    chosen, dump = padded
    row, col, where = loss_token(dump, 2, 0, 0)

    def nudge(x: Array, _: TokenLayout | None) -> Array:
        x[row, col] = np.nextafter(x[row, col], np.float32(np.inf))
        return x

    moved = rewritten(dump, tmp_path / "dump", changed(at("forward_data", 2, 0), "log_probs", nudge))
    failed = [v for v in judge_by_bitwise_reference(chosen.case, moved, dump, chosen.plan) if not v.ok]
    assert [(v.status, v.quantity, v.name, v.place) for v in failed] == [
        (Status.DRIFT, "log_probs", "log_probs", Place(2, None, 0, 0))
    ]
    assert failed[0].worst is not None
    assert failed[0].worst.ulp == 1
    assert failed[0].worst.where.startswith(where)


def test_two_rows_swapped(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    mutate = changed(at("forward_data", 0, 0), "entropy", lambda x, _: x[[1, 0, *range(2, len(x))]])
    found, *invariants = judged(padded, tmp_path / "dump", mutate)
    assert [*map(invariant_of, invariants)] == [("given_logits", Place(0)), ("metrics", Place(0))]
    assert (found.status, found.quantity, found.place) == (Status.DRIFT, "entropy", Place(0, None, 0, 0))
    assert found.worst is not None
    assert found.worst.index[0] in (0, 1)
    assert "entropy" in invariants[0].detail
    assert "the sum of entropy of forward_data of rank 0 microbatch 0" in invariants[1].detail


def test_a_record_missing(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    drop = at("forward_data", 1, 1)
    failed = judged(padded, tmp_path / "dump", lambda records: [r for r in records if not drop(r)])
    missing = [v for v in failed if v.status is Status.MISSING]
    assert {v.quantity for v in missing} == {"log_probs", "entropy", "batch_inputs"}
    assert {v.place for v in missing} == {Place(1, None, 0, 1)}
    (uncovered,) = [v for v in failed if v.status is not Status.MISSING]
    assert (uncovered.status, uncovered.place) == (Status.COVERAGE, Place(1))
    assert "forward_data" in uncovered.name


def test_a_record_duplicated(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    def twice(records: list[Record]) -> list[Record]:
        return [*records, *(replace(r, micro=3) for r in records if at("forward_data", 0, 2)(r))]

    failed = judged(padded, tmp_path / "dump", twice)
    (extra,) = [v for v in failed if v.status is Status.EXTRA]
    assert extra.place == Place(0)
    assert "rank 0 microbatch 3" in extra.detail
    (twice_computed,) = [v for v in failed if v.status is not Status.EXTRA]
    assert twice_computed.status is Status.COVERAGE
    assert "twice" in twice_computed.detail


def test_a_mask_flipped(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    row, col, where = loss_token(padded[1], 0, 1, 5)

    def flip(mask: Array, _: TokenLayout | None) -> Array:
        mask[row, col] = 1 - mask[row, col]
        return mask

    (found,) = judged(padded, tmp_path / "dump", changed(at("batch_inputs", 0, 1), "response_mask", flip))
    assert (found.status, found.name, found.place) == (Status.MASK, "response_mask", Place(0, None, 0, 1))
    assert found.worst is not None
    assert found.worst.where.startswith(where)


def test_an_attention_mask_that_covers_padding(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    mutate = changed(at("batch_inputs", 0, 1), "attention_mask", lambda mask, _: np.ones_like(mask))
    (found,) = judged(padded, tmp_path / "dump", mutate)
    assert (found.status, found.name) == (Status.MASK, "attention_mask")


def test_an_off_by_one_shift(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    mutate = changed(at("forward_data", 2, 2), "log_probs", lambda x, _: np.roll(x, 1, axis=1))
    (found,) = judged(padded, tmp_path / "dump", mutate)
    assert (found.status, found.quantity, found.place) == (Status.DRIFT, "log_probs", Place(2, None, 0, 2))


def test_nan_on_both_sides_at_different_positions(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    chosen, dump = padded
    row, col, _ = loss_token(dump, 0, 0, 2)

    def break_one(x: Array, _: TokenLayout | None) -> Array:
        x[row, col] = np.nan
        return x

    def golden(update: str) -> dict[str, dict[str, Array]]:
        truth = {quantity: dict(tensors) for quantity, tensors in chosen.case.truth(update).items()}
        if update == "step_000000":
            values = truth["log_probs"]["log_probs"].copy()
            values[np.flatnonzero(values)[7]] = np.nan
            truth["log_probs"]["log_probs"] = values
        return truth

    broken = rewritten(dump, tmp_path / "dump", changed(at("forward_data", 0, 0), "log_probs", break_one))
    failed = [
        v for v in judge_replay(chosen.case, broken, chosen.plan, chosen.precision, truth=golden) if not v.ok
    ]
    (first, *_) = [v for v in failed if v.quantity == "log_probs"]
    assert (first.status, first.place) == (Status.NONFINITE, Place(0, None, 0, 0))


def test_nan_in_padding_is_reported(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    def break_padding(x: Array, layout: TokenLayout | None) -> Array:
        assert layout is not None
        x[~layout.attention_mask] = np.nan
        return x

    mutate = changed(at("forward_data", 0, 0), "log_probs", break_padding)
    (found,) = judged(padded, tmp_path / "dump", mutate)
    assert found.status is Status.NONFINITE
    assert "padding" in found.detail


def test_junk_in_padding_is_ignored(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    def junk(x: Array, layout: TokenLayout | None) -> Array:
        assert layout is not None
        x[~layout.attention_mask] = 1e30
        return x

    assert judged(padded, tmp_path / "dump", changed(at("forward_data", 0, 0), "log_probs", junk)) == []


def test_a_dtype_widened(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    mutate = changed(at("forward_data", 0, 2), "entropy", lambda x, _: x.astype(np.float64))
    found, given = judged(padded, tmp_path / "dump", mutate)
    assert invariant_of(given) == ("given_logits", Place(0))  # as float64 it claims digits that it has not
    assert (found.status, found.quantity, found.place) == (Status.DTYPE, "entropy", Place(0, None, 0, 2))
    assert "float32" in found.detail
    assert "float64" in found.detail


def test_a_dropped_key(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    (record,) = (r for r in padded[1] if at("gradient", 1)(r))
    name = list(record.tensors)[3]
    (found,) = judged(padded, tmp_path / "dump", changed(at("gradient", 1), name, lambda *_: None))
    assert (found.status, found.quantity, found.name) == (Status.MISSING, "gradient", name)
    assert found.place == Place(1, None, 0)


def test_a_key_too_many(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    def add(records: list[Record]) -> list[Record]:
        return [
            replace_tensors(r, {"ghost": np.zeros(2, np.float32)}) if at("gradient", 1)(r) else r
            for r in records
        ]

    (found,) = judged(padded, tmp_path / "dump", add)
    assert (found.status, found.quantity, found.name) == (Status.EXTRA, "gradient", "ghost")


def test_a_loss_halved(padded: tuple[Replay, DumpReader], tmp_path: Path) -> None:
    mutate = changed(at("loss", 1, 0), "loss", lambda x, _: x / 2)
    found, *invariants = judged(padded, tmp_path / "dump", mutate)
    assert (found.status, found.quantity, found.place) == (Status.DRIFT, "loss", Place(1, None, 0, 0))
    assert [*map(invariant_of, invariants)] == [("loss", Place(1)), ("metrics", Place(1))]
    assert "training_step/loss of rank 0" in invariants[1].detail


def test_the_last_microbatch_written_in_place_of_another(
    padded: tuple[Replay, DumpReader], tmp_path: Path
) -> None:
    def overwrite(records: list[Record]) -> list[Record]:
        last = {r.type: r for r in records if r.step == 0 and r.micro == 2}
        return [replace(last[r.type], micro=1) if r.step == 0 and r.micro == 1 else r for r in records]

    failed = judged(padded, tmp_path / "dump", overwrite)
    coverage = [v for v in failed if v.status is Status.COVERAGE]
    assert coverage
    assert {(v.place.step, v.quantity) for v in coverage} == {(0, "coverage")}
