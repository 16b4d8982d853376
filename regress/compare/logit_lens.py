"""The log-prob that the state after each layer implies for a trained token: one picture of a step, in nats.

The last norm and the output head, applied to the state of an earlier layer, give a distribution of the next token
(nostalgebraist, "interpreting GPT: the logit lens", 2020). Head and norm come from the dump itself: the head is that of
the weights before the update, the scale of the norm is what turns the last layer's state into its output. Both have to
give the recorded log-probs at the end; where they do not, there is no lens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.dumps.comparison import Comparison
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.weight_files import tensors_in
from regress.errors import RegressError
from regress.layout import SampleKey, TokenLayout

Floats = NDArray[np.float64]
Key = tuple[SampleKey, int]
"""Sample, and position of a token in it."""
WORK = 20_000_000_000
"""Most products of the heads of all layers; fewer tokens are looked at where there would be more."""
_ELEMENTS = 1 << 24
"""Most elements of a head that are held in float64."""
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.\d+")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed)")
_NORM = re.compile(r"(?:.*\.)?(?:norm|ln_f|norm_f|final_layer_?norm)")
_HEADS = (re.compile(r"(?:.*\.)?lm_head\.weight"), re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed)\.weight"))
_EXACT, _HALF = 5e-3, 0.1
"""Largest difference of the last layer's log-probs from the recorded ones, of float32 and of halves, in nats."""
Kind = tuple[bool, float]
"""Kind of a norm: it subtracts the mean or not, and adds so much to the mean square."""
KINDS: tuple[Kind, ...] = tuple(product((False, True), (1e-6, 1e-5, 1e-8)))


@dataclass(frozen=True)
class LayerLogProbs:
    """Hold what the state after one layer implies for the tokens of a lens.

    Attributes:
        layer: name of the module; ``log_probs`` for the recorded values themselves.
        golden, actual: mean log-prob, in nats.
        largest: largest difference of a token, in nats; ``where`` names it, with its two values.
    """

    layer: str
    golden: float
    actual: float
    largest: float
    where: str
    golden_there: float
    actual_there: float


@dataclass(frozen=True)
class LogitLens:
    """Log-probs by layer on both sides.

    Attributes:
        place: step and update.
        tokens: how many trained tokens were looked at, ``of`` all: those whose log-probs differ most.
        layers: in the order of computation; ``first`` is the first that differs by more than log-probs may.
    """

    place: str
    tokens: int
    of: int
    layers: tuple[LayerLogProbs, ...]
    first: str | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "layers": [vars(layer) for layer in self.layers]}


def logit_lens(comparison: Comparison) -> LogitLens | None:
    """Return the lens on the first update in which activations or log-probs differ; None without what it needs.

    It needs activations of the layers and of the last norm, and the weights before the update: initial weights, or the
    parameters after the update before.
    """
    apart = [v for v in comparison.failed if v.quantity in ("activations", "log_probs")]
    compared = [v for v in comparison.verdicts if v.quantity == "log_probs" and v.count]
    if not apart or not compared:
        return None
    at = apart[0].place.step, apart[0].place.update
    try:
        golden, actual = (_Side.read(path, *at) for path in (comparison.golden, comparison.actual))
        return None if golden is None or actual is None else _lens(golden, actual, apart[0], compared)
    except (RegressError, OSError, ValueError, TypeError):  # another kind of source, or of another shape
        return None


def _lens(golden: _Side, actual: _Side, first: Verdict, verdicts: list[Verdict]) -> LogitLens | None:
    keys = [key for key, row in golden.tokens.items() if golden.ids[row] == actual.id_of(key)]
    layers = [name for name in golden.layers if name in actual.layers]
    norms = [golden.norm()]
    norms.append(actual.norm([norms[0].kind]))  # the same kind, so that rounding does not choose
    if not keys or not layers or not golden.holds(norms[0]) or not actual.holds(norms[1]):
        return None
    sides = [side.rows(keys) for side in (golden, actual)]
    recorded = [side.log_probs[rows] for side, rows in zip((golden, actual), sides, strict=True)]
    most = max(16, WORK // max(1, 2 * len(layers) * golden.head.size))
    chosen = np.argsort(-np.abs(recorded[1] - recorded[0]), kind="stable")[:most]
    found = []
    for name in (*layers, "log_probs"):
        pair = [
            recorded[n][chosen] if name == "log_probs" else side.implied(name, sides[n][chosen], norms[n])
            for n, side in enumerate((golden, actual))
        ]
        found.append(_layer(name, [keys[n] for n in chosen], *pair))
    bound = max(verdict.tolerance for verdict in verdicts)
    leaves = next((layer.layer for layer in found if layer.largest > bound), None)
    place = f"step{first.place.step}" + ("" if first.place.update is None else f"/update{first.place.update}")
    return LogitLens(place, len(chosen), len(keys), tuple(found), leaves)


def _layer(name: str, keys: list[Key], golden: Floats, actual: Floats) -> LayerLogProbs:
    apart = np.abs(actual - golden)
    at = int(np.argmax(apart))
    (group, run), position = keys[at]
    return LayerLogProbs(
        name,
        float(golden.mean()),
        float(actual.mean()),
        float(apart[at]),
        f"sample {group}/{run}, position {position}",
        float(golden[at]),
        float(actual[at]),
    )


@dataclass(frozen=True)
class _Side:
    """States of the trained tokens of one update: of each the state that predicts it.

    Attributes:
        tokens: key -> row of the arrays; ``ids`` ``[N]`` and recorded ``log_probs`` ``[N]`` of the tokens.
        layers: name -> ``[N, H]`` states, in the order of computation; ``normed`` that of the last norm.
        head: ``[V, H]``, as it was recorded.
        most: largest difference that rounding of the states explains, in nats.
        temperature: divisor of the logits.
    """

    tokens: Mapping[Key, int]
    ids: NDArray[np.int64]
    log_probs: Floats
    layers: Mapping[str, Floats]
    normed: Floats
    head: Array
    most: float
    temperature: float

    @classmethod
    def read(cls, path: str, step: int | None, update: int | None) -> _Side | None:
        dump = DumpReader(path, mapped=True)
        head = _head_before(dump, Place(step, update))
        records = {
            (record.rank, record.micro): record
            for record in dump.records("activations", step)
            if record.update == update and "shards" not in record.meta
        }
        others = {
            type: {(r.rank, r.micro): r for r in dump.records(type, step) if r.update == update}
            for type in ("batch_inputs", "forward_data", "token_gradient")
        }
        parts = [
            part
            for place, record in records.items()
            if (part := _states(record, {type: found.get(place) for type, found in others.items()}))
            is not None
        ]
        if head is None or not parts:
            return None
        names = [name for name in parts[0].states if all(name in part.states for part in parts)]
        norm = next((name for name in reversed(names) if _NORM.fullmatch(name)), None)
        layers = [name for name in names if _LAYER.fullmatch(name) or _EMBEDDING.fullmatch(name)]
        if norm is None or not layers:
            return None
        joined = {name: np.concatenate([part.states[name] for part in parts]) for name in (*layers, norm)}
        keys = [key for part in parts for key in part.keys]
        return cls(
            {key: row for row, key in enumerate(keys)},
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            {name: joined[name] for name in layers},
            joined[norm],
            head,
            max(part.most for part in parts),
            parts[0].temperature,
        )

    def norm(self, kinds: Iterable[Kind] = KINDS) -> _Norm:
        """Return the norm of these kinds that fits the last layer best."""
        state = [*self.layers.values()][-1]
        return min((_Norm.fitted(kind, state, self.normed) for kind in kinds), key=lambda norm: norm.error)

    def holds(self, norm: _Norm) -> bool:
        """Return True if head and norm give the recorded log-probs after the last layer."""
        found = self.implied([*self.layers][-1], np.arange(min(len(self.ids), 64)), norm)
        return bool(np.abs(found - self.log_probs[: len(found)]).max() <= self.most)

    def id_of(self, key: Key) -> int:
        """Return a token by its key, -1 if it is not there."""
        return int(self.ids[self.tokens[key]]) if key in self.tokens else -1

    def rows(self, keys: list[Key]) -> NDArray[np.int64]:
        """Return the rows of tokens."""
        return np.array([self.tokens[key] for key in keys], np.int64)

    def implied(self, layer: str, rows: NDArray[np.int64], norm: _Norm) -> Floats:
        """Return the log-probs of some tokens that the states after a layer imply, in nats."""
        states, ids = norm(self.layers[layer][rows]) / self.temperature, self.ids[rows]
        total, chosen = np.full(len(rows), -np.inf), np.full(len(rows), np.nan)
        size = max(1, _ELEMENTS // self.head.shape[1])
        for start in range(0, len(self.head), size):
            logits = states @ self.head[start : start + size].astype(np.float64).T
            total = np.logaddexp(total, np.logaddexp.reduce(logits, -1))
            here = np.flatnonzero((ids >= start) & (ids < start + logits.shape[1]))
            chosen[here] = logits[here, ids[here] - start]
        found: Floats = chosen - total
        return found


@dataclass(frozen=True)
class _Norm:
    """A norm with its scale and shift ``[H]``; ``error`` is what it leaves of the recorded output, squared."""

    kind: Kind
    scale: Floats
    shift: Floats
    error: float

    @classmethod
    def fitted(cls, kind: Kind, state: Floats, output: Floats) -> _Norm:
        unit = _unit(state, *kind)
        mean, target = (unit.mean(0), output.mean(0)) if kind[0] else (0.0, 0.0)
        spread = np.square(unit - mean).sum(0).clip(1e-30)
        scale = ((unit - mean) * (output - target)).sum(0) / spread
        shift = target - scale * mean
        return cls(kind, scale, shift, float(np.square(unit * scale + shift - output).sum()))

    def __call__(self, state: Floats) -> Floats:
        found: Floats = _unit(state, *self.kind) * self.scale + self.shift
        return found


def _unit(state: Floats, centred: bool, eps: float) -> Floats:
    shifted = state - state.mean(-1, keepdims=True) if centred else state
    found: Floats = shifted / np.sqrt(np.square(shifted).mean(-1, keepdims=True) + eps)
    return found


@dataclass(frozen=True)
class _States:
    keys: list[Key]
    ids: NDArray[np.int64]
    log_probs: Floats
    states: Mapping[str, Floats]
    most: float
    temperature: float


def _states(record: Record, beside: Mapping[str, Record | None]) -> _States | None:
    """Return the states of a microbatch that predict its trained tokens; None where their records are not there."""
    inputs, forward, gradient = (beside[type] for type in ("batch_inputs", "forward_data", "token_gradient"))
    if inputs is None or forward is None or not {"layout", "samples"} <= record.meta.keys():
        return None
    meta: Any = record.meta
    layout = TokenLayout.from_json(meta["layout"])
    ids, log_probs = inputs.tensors.get("input_ids"), forward.tensors.get("log_probs")
    if ids is None or log_probs is None:
        return None
    trained = forward.tensors.get("response_mask")
    if trained is None and gradient is not None:
        trained = gradient.tensors["token_gradient"]
    if ids.shape != layout.shape or log_probs.shape != layout.shape or trained is None:
        return None
    keys: list[Key] = []
    places: list[tuple[int, int]] = []
    for s, (group, run) in zip(layout.segments, meta["samples"], strict=True):
        for position in range(s.start + 1, s.stop):
            column = s.col + position - s.start
            if trained[s.row, column]:
                keys.append(((group, run), position))
                places.append((s.row, column))
    if not places:
        return None
    row, column = np.array(places).T
    states = {
        name: array[row, column - 1].astype(np.float64)
        for name, array in record.tensors.items()
        if array.ndim == 3 and array.shape[:2] == layout.shape
    }
    half = any(array.dtype.itemsize < 4 for array in record.tensors.values())
    temperature: Any = forward.meta.get("temperature", 1.0)
    return _States(
        keys,
        ids[row, column].astype(np.int64),
        log_probs[row, column].astype(np.float64),
        states,
        _HALF if half else _EXACT,
        float(temperature),
    )


def _head_before(dump: DumpReader, place: Place) -> Array | None:
    """Return the weights of the head before an update, ``[V, H]``; None where they were not recorded whole."""
    recorded = {
        name: where.of_update.counted for name, (type, where) in dump.entries.items() if type == "param"
    }
    last = max((one for one in recorded.values() if one < place.counted), default=None)
    if last is not None:
        here = [name for name, one in recorded.items() if one == last]
        return _head_of(
            (name, array)
            for n in here
            if "shards" not in (record := dump.read(n)).meta
            for name, array in record.tensors.items()
        )
    folder = dump.folder / "initial_weights"
    if not isinstance(folder, Path) or not folder.is_dir():
        return None
    files = sorted(folder.glob("*.safetensors"))
    return _head_of(pair for file in files for pair in tensors_in(file).items())


def _head_of(tensors: Iterator[tuple[str, Array]]) -> Array | None:
    known = {name: array for name, array in tensors if any(head.fullmatch(name) for head in _HEADS)}
    for pattern in _HEADS:
        for name, array in known.items():
            if pattern.fullmatch(name) and array.ndim == 2:
                return array
    return None
