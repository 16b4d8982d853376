"""Limits and keys of the application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request may ask for; all sizes are taken after expansion unless said otherwise.

    Attributes:
        body_bytes: bytes of a body as it is sent.
        expanded_bytes: bytes of a body after its content encoding is undone.
        held_bytes: bytes of all bodies that are held at one moment, half of them for what arrives, half for what was
            expanded; further clients wait, but for the first large body of each owner of a key.
        body_seconds: seconds in which a body must arrive.
        nesting: depth of lists and objects in JSON.
        data: datums of a request.
        tokens: tokens of all datums, or of a prompt times the number of completions.
        tensors: tensors of one datum.
        tensor_elements: elements of one tensor of a datum, as its shape says.
        samples: completions of a sampling request.
        text: characters of a name or an id.
        metadata_bytes: bytes of a client's own metadata.
        decoders: requests that are decoded at one moment.
        answer_seconds: seconds that an accepted request waits for its operation before it answers ``pending``, on wires
            whose clients may be answered at once.
        poll_seconds: seconds that a question for an operation waits; clients give up after 45.
        waiting: questions that wait in a thread of their own; the others look every few milliseconds.
        connections: connections at one moment; beyond them the server answers 503.
    """

    body_bytes: int = 64 * MIB
    expanded_bytes: int = 128 * MIB
    held_bytes: int = 256 * MIB
    body_seconds: float = 60.0
    nesting: int = 32
    data: int = 8192
    tokens: int = 1 << 22
    tensors: int = 16
    tensor_elements: int = 1 << 20
    samples: int = 1024
    text: int = 256
    metadata_bytes: int = 16384
    decoders: int = 2
    answer_seconds: float = 8.0
    poll_seconds: float = 30.0
    waiting: int = 32
    connections: int = 1000


@dataclass(frozen=True)
class Settings:
    """Settings of the application.

    Attributes:
        api_keys: API keys by the name of their owner; clients see sessions and models of their own name alone.
        wires: names of the protocols that are served, None: all.
    """

    api_keys: Mapping[str, str] = field(repr=False)
    wires: Sequence[str] | None = None
    limits: Limits = field(default_factory=Limits)
