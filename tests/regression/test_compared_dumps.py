"""Real dumps of one computation under different layouts are equal; one changed log-prob is found where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.verdicts.verdict import Status
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, write_manifest
from regress.dump.dump_reader import DumpReader
from regress.dump.formats import FORMATS
from regress.dump.record import Record, replace_tensors
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.command_replays import spelled_out, variant_table
from regress.replay.variant import Precision
from regress.report.comparison_report import comparison_tables, run_context_of
from regress.report.token_values import TokenTable

GOLDEN = Path(__file__).parents[2] / "golden"
LAYOUTS = ("packed", "cp2-zigzag-packed")
MORE = ("left", "mbs4", "reversed", "dp2", "tp2-sp", "fsdp2", "pp2-mbs4", "dp2-fsdp2", "packed-dynamic")
"""Layouts of extended tests; that the first four change nothing, a test of pairs says by default."""

Dumps = Callable[..., Path]
Change = Callable[[Record], Record | None]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Record one step of the dense case under a variant, once."""
    known: dict[tuple[str, Precision], Path] = {}
    case = GoldenStore(GOLDEN).case("dense")
    table = variant_table()

    def record(name: str, precision: Precision) -> Path:
        if (name, precision) not in known:
            variant = (table | spelled_out(name, table))[name]
            folder = tmp_path_factory.mktemp(name)
            known[name, precision] = Path(str(replay(case, variant, precision, folder, steps=1).folder))
        return known[name, precision]

    return record


def rewritten(dump: Path, folder: Path, change: Change) -> Path:
    """A complete dump that holds the records of another one, some of them changed or left out."""
    reader = DumpReader(dump)
    encode, entries = FORMATS[reader.manifest.format].encode, {}
    for name in reader.names():
        record = change(reader.read(name))
        if record is not None:
            stamp = write_atomically(folder / name, encode(record))
            entries[name] = Entry(record.type, record.where, stamp)
    write_manifest(folder, Manifest(reader.manifest.provenance, reader.manifest.format, entries))
    return folder


def one_token_off(by: float) -> tuple[Change, list[str]]:
    """Move the log-prob of the third loss token of the first microbatch that has so many; and which token that is."""
    told: list[str] = []

    def change(record: Record) -> Record:
        if record.type != "forward_data" or told:
            return record
        places = np.argwhere(record.tensors["response_mask"])
        if len(places) < 3:
            return record
        row, column = places[2]
        array = record.tensors["log_probs"].copy()
        array[row, column] += by
        for segment, (group, run) in zip(
            record.meta["layout"]["segments"], record.meta["samples"], strict=True
        ):
            _, start, stop, at, col = segment
            if at == row and col <= column < col + stop - start:
                told.append(f"sample {group}/{run}, position {start + column - col}")
        return replace_tensors(record, {"log_probs": array})

    return change, told


def compared(golden: Path, actual: Path) -> Comparison:
    return compare_dumps(str(golden), str(actual))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", [Precision.FLOAT64, Precision.FLOAT32], ids=str)
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE)]
)
def test_a_layout_changes_nothing_and_one_token_is_found_in_it(
    dump: Dumps, tmp_path: Path, layout: str, precision: Precision
) -> None:
    base, other = dump("base", precision), dump(layout, precision)
    for golden, actual in ((base, other), (other, base)):
        healthy = compared(golden, actual)
        assert (healthy.failed, healthy.problems) == ([], [])
        assert healthy.exit_code == 0
        assert {v.quantity for v in healthy.verdicts} >= {
            "log_probs",
            "loss",
            "gradient",
            "param",
            "trajectory",
        }
    change, told = one_token_off(1e-4)
    faulty = compared(base, rewritten(other, tmp_path / "changed", change))
    assert faulty.exit_code == 1
    copies = [one for one in faulty.failed if one.quantity == "replicas"]
    assert all(one.name.endswith("/log_probs") and "in 1 of " in one.detail for one in copies)
    verdict, given = (one for one in faulty.failed if one not in copies)
    assert (verdict.status, verdict.quantity, verdict.over) == (Status.DRIFT, "log_probs", 1)
    assert (given.quantity, given.name, given.over) == ("invariants", "given_logits", 1)
    assert f"log_probs given its logits at {told[0]} is " in given.detail
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(told[0])
    assert verdict.affected is not None
    assert (verdict.affected.unit, verdict.affected.total.hits) == ("token", 1)
    assert told[0].startswith(f"sample {verdict.affected.samples[0]}, ")
    scene = run_context_of(faulty)
    divergence = find_divergence(faulty.verdicts, scene)
    assert divergence is not None
    assert "activations" in divergence.held
    # of log-probs that ranks put together from parts of the vocabulary, the step in between is told
    rule = "vocabulary-parts" if "tp2" in layout else "single-tokens"
    assert [cause.rule for cause in diagnose(divergence, scene)][:1] == [rule]
    (table,) = comparison_tables("compare", faulty, Options())
    known = [record.tensors["input_ids"] for record in DumpReader(base).records("batch_inputs")]
    assert set(table.ids) <= set(np.concatenate(known, axis=None).tolist())
    assert over_tolerance(table) == [("log_probs", told[0])]


def over_tolerance(table: TokenTable) -> list[tuple[str, str]]:
    """Quantity and place of each token that is further off than is tolerated."""
    places = [
        f"sample {sample}, position {position}"
        for sample, length in zip(table.samples, table.lengths, strict=True)
        for position in range(length)
    ]
    return [
        (column.quantity, place)
        for column in table.values
        for place, golden, actual in zip(places, column.golden, column.actual, strict=True)
        if golden is not None and actual is not None and abs(actual - golden) > column.tolerance
    ]


@pytest.mark.parametrize("layout", ["packed", "reversed"])
def test_what_wrong_tokens_have_in_common_is_found_in_any_layout(
    dump: Dumps, tmp_path: Path, layout: str
) -> None:
    golden, other = dump("base", Precision.FLOAT64), dump(layout, Precision.FLOAT64)
    faulty = compared(golden, rewritten(other, tmp_path / "changed", last_tokens_off))
    *wrong, given = faulty.failed
    assert {v.quantity for v in wrong} == {"log_probs"}
    assert (given.quantity, given.name) == ("invariants", "given_logits")
    assert given.over == sum(v.over for v in wrong)
    for verdict in wrong:
        assert verdict.affected is not None
        assert verdict.affected.total.hits == verdict.over
        assert verdict.affected.classes["last_trained"].hits == verdict.over
    divergence = find_divergence(faulty.verdicts, run_context_of(faulty))
    assert divergence is not None
    assert "class:last_trained" in {pattern.id for pattern in divergence.patterns}


def test_the_factor_between_two_deviations_is_named(dump: Dumps, tmp_path: Path) -> None:
    golden, other = dump("base", Precision.FLOAT64), dump("mbs4", Precision.FLOAT64)
    faulty = compared(golden, rewritten(other, tmp_path / "changed", other_deviation))
    assert {verdict.quantity for verdict in faulty.failed} == {"advantages"}
    scene = run_context_of(faulty)
    divergence = find_divergence(faulty.verdicts, scene)
    assert divergence is not None
    assert [cause.rule for cause in diagnose(divergence, scene)][:1] == ["deviation-ddof"]


def other_deviation(record: Record) -> Record:
    """Advantages of groups of three over the deviation of the population, not of the sample."""
    if record.type != "is_loss_debug":
        return record
    return replace_tensors(record, {"advantages": record.tensors["advantages"] * np.sqrt(3 / 2)})


def last_tokens_off(record: Record) -> Record:
    """Move the log-prob of the last loss token of each sample."""
    if record.type != "forward_data":
        return record
    array = record.tensors["log_probs"].copy()
    for _, start, stop, row, col in record.meta["layout"]["segments"]:
        loss = np.flatnonzero(record.tensors["response_mask"][row, col : col + stop - start])
        array[row, col + loss[-1:]] -= 0.25
    return replace_tensors(record, {"log_probs": array})


@pytest.mark.parametrize("pair", [("cp2-zigzag-packed", "mbs4"), ("dp2", "left"), ("reversed", "packed")])
def test_no_layout_is_the_one_that_counts(dump: Dumps, pair: tuple[str, str]) -> None:
    found = compared(*(dump(name, Precision.FLOAT64) for name in pair))
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)
