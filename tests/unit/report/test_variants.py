"""Headroom of many variants on one page."""

from __future__ import annotations

from rich.console import Console

from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.report.headroom import QUANTITY_COLUMNS, VariantRow, variant_rows, variants_table
from regress.report.report_model import Report
from regress.report.verdict_entries import Call


def call(where: str, quantity: str, multiple: float, status: Status = Status.OK) -> Call:
    verdict = Verdict(
        status, quantity, quantity, Place(0), count=4, multiple=multiple, max_error=multiple, tolerance=1.0
    )
    return Call(where, "float64", verdict)


CALLS = {
    "dense/dp2": [call("dense/dp2", "log_probs", 0.5), call("dense/dp2", "entropy", 0.25)],
    "gpt2/dp2": [call("gpt2/dp2", "log_probs", 0.1), call("gpt2/dp2", "gradient", 3.0, Status.DRIFT)],
    "dense/tp2-fp32": [call("dense/tp2-fp32", "batch_inputs", 0.0)],
}
ERRORS = {"gpt2/tp2-fp32": "rank 1 is gone", "gpt2/cp2": "no"}


def rows() -> list[VariantRow]:
    return variant_rows(CALLS, ERRORS)


def test_a_row_is_a_variant_over_its_cases_with_the_least_headroom() -> None:
    first, second, third = rows()
    assert (first.name, first.replays, first.failed) == ("dp2", 2, 1)
    assert first.cell(["log_probs"]) == "2 x"
    assert first.cell(["log_probs", "entropy"]) == "2 x"
    assert first.cell(["gradient", "grad_norm"]) == "1 failed"
    assert first.cell(["param"]) == ""
    assert second.cell(["param"]) == "not run"
    assert (second.name, second.replays, second.errors) == ("tp2-fp32", 2, ("gpt2/tp2-fp32: rank 1 is gone",))
    assert second.cell(["batch_inputs"]) == "equal"
    assert (third.name, third.replays) == ("cp2", 1)


def test_the_table_has_a_column_for_each_stage() -> None:
    table = variants_table(rows(), QUANTITY_COLUMNS)
    assert [dict(zip(table.columns, row, strict=True))["log-probs"] for row in table.rows] == [
        "2 x",
        "not run",
        "not run",
    ]
    console = Console(width=120, record=True)
    console.print(variants_table(rows(), QUANTITY_COLUMNS).rich())
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == [
        "variant",
        *("tokens", "weights", "hidden", "log-probs", "loss", "gradient", "update"),
        "replays",
    ]
    assert lines[2] == ["dp2", "2", "x", "1", "failed", "2"]


def test_it_fits_a_terminal() -> None:
    console = Console(width=100, record=True)
    console.print(variants_table(rows(), QUANTITY_COLUMNS).rich())
    assert "…" not in console.export_text()


def test_a_report_holds_every_quantity_of_every_variant() -> None:
    table, tree = variants_table(rows()), Report("x", variants=rows()).to_json()["variants"]
    assert table.columns == ("variant", "batch_inputs", "log_probs", "entropy", "gradient", "replays")
    assert [row["variant"] for row in tree] == ["dp2", "tp2-fp32", "cp2"]
    cells = tree[0]["quantities"]
    assert list(cells) == ["log_probs", "entropy", "gradient"]
    assert cells["log_probs"]["headroom"] == 2.0
    assert cells["log_probs"]["closest"]["where"] == "dense/dp2"
    assert tree[1]["errors"] == ["gpt2/tp2-fp32: rank 1 is gone"]
