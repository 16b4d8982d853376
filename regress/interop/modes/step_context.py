"""Rows of one step from the dumps of the three modes, each pair of modes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from regress.compare.dumps.opened_dump import Side, open_side
from regress.dump.request_index import DumpedRequest, Operation
from regress.interop.modes.client_datums import Client, client_of
from regress.interop.modes.discrepancy import CLIENT, SERVICE, TRAINER
from regress.interop.modes.mode_rows import ModeRow, pairs_of, rows_of
from regress.interop.service_dumps import ServiceDump

WEIGHTS = "weights of log-probs"
LOSSES = ("loss", "pg_loss", "entropy_loss")


@dataclass(frozen=True)
class Link:
    """Rows of two modes with the same tokens: what is expected, and what was found.

    Attributes:
        whose: who passes values on to whom.
        close: relative distance at which two numbers are the same: those of one computation in float32, or of two.
        what: meaning of the advantages of the rows: they, or what a client derived from a loss of its own.
    """

    whose: tuple[str, str]
    pairs: Sequence[tuple[ModeRow, ModeRow]]
    close: float
    what: str = "advantages"


@dataclass(frozen=True)
class StepContext:
    """One step.

    Attributes:
        trainer: rows of the self-hosted dump.
        service: rows of the service; None without its dump.
        index: the service's dump, if it has an index.
        config: configuration of the self-hosted run.
        losses: mode -> sums of the shares of its losses.
    """

    step: int
    trainer: Sequence[ModeRow]
    client: Client | None = None
    service: Sequence[ModeRow] | None = None
    index: ServiceDump | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: int, trainer: Side, client: Side | None, service: Side | None) -> StepContext:
        """Read one step of all dumps."""
        sides = {TRAINER: trainer, SERVICE: service}
        found = cls(
            step,
            rows_of(trainer, step),
            None if client is None else client_of(client, step),
            None if service is None else _computed(service, step),
            service if isinstance(service, ServiceDump) else None,
            trainer.config,
            {name: _losses(side, step) for name, side in sides.items() if side is not None},
        )
        if found.custom and found.service and (found.client is None or not found.client.rows):
            return replace(found, service=[row.bare() for row in found.service])
        return found

    @cached_property
    def links(self) -> list[Link]:
        """Pairs of modes that pass values on, each with the rows that both have."""
        found = []
        if self.client is not None and self.client.rows:
            found.append(Link((TRAINER, CLIENT), pairs_of(self.trainer, self.client.rows), 1e-4))
            if self.service:
                what = WEIGHTS if self.client.custom else "advantages"
                pairs = pairs_of(self.client.sent, self.service)
                found.append(Link((CLIENT, SERVICE), pairs, 1e-6, what))
        elif self.service:
            found.append(Link((TRAINER, SERVICE), pairs_of(self.trainer, self.service), 1e-4))
        return found

    @property
    def custom(self) -> bool:
        """True if the service computed with derivatives of a loss that its client computed."""
        surrogate = any(one.loss == "surrogate" for one in self.passes)
        return surrogate or (self.client is not None and self.client.custom)

    @property
    def passes(self) -> list[DumpedRequest]:
        """Requests of the step with a backward pass, in the order of execution."""
        return list(self._requests(Operation.FORWARD_BACKWARD))

    @property
    def optim_step(self) -> DumpedRequest | None:
        """The request for the optimizer step."""
        return next(self._requests(Operation.OPTIM_STEP), None)

    def _requests(self, operation: Operation) -> Iterator[DumpedRequest]:
        for one in self.index.requests if self.index is not None else ():
            if (one.step, one.operation) == (self.step, operation):
                yield one

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the self-hosted configuration, None if it is unknown."""
        return (self.config.get(section) or {}).get(key)


def is_indexed(path: str) -> bool:
    """Return True for the dump of a service with an index of its requests."""
    return isinstance(open_side(path), ServiceDump)


def _computed(service: Side, step: int) -> list[ModeRow]:
    """Return the datums of a service, those that only its index tells of among them."""
    found = {row.key: row.weighed() for row in rows_of(service, step)}
    for one in service.passes if isinstance(service, ServiceDump) else ():
        for number, datum in enumerate(one.datums if one.step == step else ()):
            row = found.setdefault(one.key(number), ModeRow(one.key(number)))
            row.tokens, row.id = np.array(datum.tokens, np.int64), datum.id
    return [*found.values()]


def _losses(side: Side, step: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (type, where) in side.entries.items():
        if (type, where.step) == ("loss", step) and side.root(where.rank or 0) == (where.rank or 0):
            for key, value in side.read(name).tensors.items():
                if key in LOSSES and value.size == 1:
                    found[key] = found.get(key, 0.0) + float(value.reshape(()))
    return found
