"""Limits of a service: lengths of queues, sizes, and times."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("text", "json", "none")


@dataclass(frozen=True)
class Limits:
    """Limits of a service; times in s, sizes in bytes.

    Attributes:
        queue_length: operations of one model or sampler that may wait; also how far a ``seq_id`` may be ahead.
        queue_bytes: size of all requests that wait.
        results_bytes: size of the results that are kept; while they are unread and exceed it, requests are refused.
        result_ttl: time for which an unread result is kept.
        read_ttl: time for which a result is kept after it was first read, for clients that lost the reply.
        hole_timeout: time for which operations wait for one with a lower ``seq_id`` that has not arrived.
        operation_timeout: time that one operation may run.
        session_ttl: time after which a session that nobody touches is finished, and its models closed.
        sessions: sessions that are open at the same time.
        models: models that are open at the same time.
        samplers: samplers whose weights are in memory at the same time; others are opened again when they are used.
        unnamed: saves without a name that are kept for each model.
        remembered: finished operations of the service, and sequence numbers of a model, that are remembered.
    """

    queue_length: int = 1024
    queue_bytes: int = 2 << 30
    results_bytes: int = 1 << 30
    result_ttl: float = 3600.0
    read_ttl: float = 300.0
    hole_timeout: float = 60.0
    operation_timeout: float = 1800.0
    session_ttl: float = 14400.0
    sessions: int = 1000
    models: int = 16
    samplers: int = 4
    unnamed: int = 8
    remembered: int = 100_000
