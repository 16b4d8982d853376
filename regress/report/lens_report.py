"""Log-probs by layer, as a terminal and a page show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from regress.report.text_table import Table

if TYPE_CHECKING:
    from regress.compare.logit_lens import LogitLens

LENS = "Log-probs of trained tokens that the state after each layer implies, in nats, by the last norm and the head."


def lens_table(lens: LogitLens) -> Table:
    """Return the layers in the order of computation; those from the first that differs on are marked as failures."""
    rows = [
        (
            layer.layer,
            f"{layer.golden:.5g}",
            f"{layer.actual:.5g}",
            f"{layer.largest:.2g}",
            f"{layer.where}: {layer.golden_there:.5g}, {layer.actual_there:.5g}" if layer.largest else "",
        )
        for layer in lens.layers
    ]
    names = [layer.layer for layer in lens.layers]
    start = len(names) if lens.first is None else names.index(lens.first)
    columns = ("after", "golden", "actual", "largest difference", "where")
    return Table(columns, rows, words=("after", "where"), bad=range(start, len(names)), folded=("where",))


def lens_lines(lens: LogitLens) -> Iterator[str]:
    """Yield the lens as plain text."""
    share = (
        f"{lens.tokens} tokens"
        if lens.tokens == lens.of
        else f"the {lens.tokens} of {lens.of} tokens that are furthest apart"
    )
    yield f"log-probs that the state after each layer implies, in nats ({lens.place}, mean of {share}):"
    yield from (f"  {line}" for line in lens_table(lens).lines())
    if lens.first is not None:
        yield f"they first differ after {lens.first}"
