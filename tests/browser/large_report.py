"""A report of 10,000 records and the tokens of a microbatch, for a page that a browser opens."""

from __future__ import annotations

import math

from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.coordinates import Place
from regress.report.token_values import TokenTable, TokenValues
from regress.report.verdict_entries import Call

QUANTITIES = ("batch_inputs", "activations", "log_probs", "ratio", "gradient")
RANKS, MICROS, RECORDS = 8, 5, 10_000
BROKEN_RANK = 3
ROWS = 60  # more than a table of 27rem can show


def call(index: int) -> Call:
    """One of 10,000 records, which cover steps, ranks, microbatches and quantities; log_probs of rank 3 are wrong."""
    rest, quantity = divmod(index, len(QUANTITIES))
    rest, micro = divmod(rest, MICROS)
    step, rank = divmod(rest, RANKS)
    name = QUANTITIES[quantity]
    bad = name == "log_probs" and rank == BROKEN_RANK
    multiple = 2.0 + step if bad else 1 / (2 + index)
    where = f"sample g{step}/0, position {micro}, token 5 '</script>'"
    verdict = Verdict(
        Status.DRIFT if bad else Status.OK,
        name,
        "model.layers.1.mlp" if name == "activations" else name,
        Place(step, None, rank, None if name == "gradient" else micro),
        worst=Worst((micro,), where, -1.5, -1.25 if bad else -1.5, 0.25, 3.0),
        multiple=multiple,
        max_error=multiple * 1e-6,
        tolerance=1e-6,
        count=12,
        reason="four times the floor",
    )
    layers = {"0": multiple / 2, "1": multiple} if name == "activations" else {}
    return Call("dense/dp8", "float32", verdict, layers, f"test_golden.py::test_golden[{index}]")


CALLS = [call(index) for index in range(RECORDS)]
FAILED = sum(not call.verdict.ok for call in CALLS)
TOKENS = TokenTable(
    *("dense/dp8", Place(0), ("g/0", "g/1"), (3, 2), (5, 6, 7, 8, 9), (False, True, True, False, True)),
    values=[
        TokenValues("log_probs", (None, -1.0, -2.0, None, -3.0), (None, -1.0, -1.75, None, math.nan), 1e-6),
        TokenValues("advantages", (None, 1.0, 1.0, None, -1.0), (None, 1.0, 1.0, None, -1.0), 1e-6),
    ],
    text=("<b>", " what", " is", "<", " it"),
)
