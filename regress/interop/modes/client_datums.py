"""Datums and metrics of a step as a client of a training service dumped them, values at their own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from regress.compare.dumps.opened_dump import Side
from regress.dump.request_index import REQUESTED
from regress.errors import DumpError
from regress.interop.modes.mode_rows import MASK, OLD, ModeRow

SURROGATE = "surrogate_weights"
INPUTS = {"loss_mask": MASK, "logprobs": OLD, "advantages": "advantages", SURROGATE: SURROGATE}


@dataclass(frozen=True)
class Client:
    """A client's side of a step.

    Attributes:
        rows: its datums in the order in which they were sent; the run of a key is the number of the datum.
        metrics: what it reports of the step, empty where it dumped none.
        optimizer: metrics that the optimizer step returned to it, which may name the settings that took effect.
        asked: loss, configuration and optimizer settings that it asked for, empty where they were not dumped.
    """

    rows: list[ModeRow]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def custom(self) -> bool:
        """True if it computed the loss itself, and sent the derivative by each log-prob."""
        return any(SURROGATE in row.values for row in self.rows)

    @cached_property
    def sent(self) -> list[ModeRow]:
        """Rows with what the service is to compute with, which of a custom loss is the derivative."""
        return [_as_surrogate(row) for row in self.rows] if self.custom else self.rows

    def setting(self, name: str) -> Mapping[str, Any]:
        """Return a section of what was asked for."""
        return _mapping(self.asked.get(name))


def client_of(side: Side, step: int) -> Client:
    """Return what a client dumped of a step.

    Raises:
        DumpError: if a datum is none.
    """
    datums, reported = side.raw("datums", step) or {}, side.raw("training_metrics", step) or {}
    items = datums.get("datums") or []
    sent, info = _mapping(datums.get("extra_info")), _mapping(reported.get("extra_info"))
    metrics = _mapping(reported.get("metrics"))
    asked = {key: sent[key] for key in ("loss_fn", "loss_fn_config") if key in sent}
    return Client(
        [_row(side, step, number, item) for number, item in enumerate(items)],
        metrics,
        _mapping(info.get("optim_step")) or metrics,
        {**asked, **_mapping(info.get(REQUESTED))},
    )


def _as_surrogate(row: ModeRow) -> ModeRow:
    """Return a row whose advantages are minus the weights of log-probs, and whose tokens are those with any."""
    weights = row.values.get(SURROGATE)
    values = {} if weights is None else {"advantages": -weights, MASK: (np.nan_to_num(weights) != 0) * 1.0}
    return ModeRow(row.key, row.tokens, values, id=row.id)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _row(side: Side, step: int, number: int, item: Any) -> ModeRow:
    try:
        ids, inputs = [*item["input_tokens"]], item["loss_fn_inputs"]
        row = ModeRow(("datum", number), np.array([*ids, inputs["target_tokens"][-1]], np.int64))
        row.id = None if item.get("datum_id") is None else str(item["datum_id"])
        for source, name in INPUTS.items():
            if source in inputs:
                values = np.asarray(inputs[source], np.float64)
                if values.shape != (len(ids),):
                    raise ValueError(f"{source} has {values.size} values for {len(ids)} tokens")
                row.values[name] = np.concatenate([[np.nan], values])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DumpError(
            f"{side.folder}: datum {number} of step {step} is none ({error}): copy the dump again"
        ) from None
    return row
