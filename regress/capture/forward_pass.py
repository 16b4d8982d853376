"""One forward pass: its inputs, the places of its tokens, and the values that the recorder computes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regress.capture.layout_inference import Arrangement, predicted
from regress.capture.model_structure import Head
from regress.capture.recording_settings import as_keys
from regress.capture.sequence_slices import sliced
from regress.dump.numpy_arrays import to_numpy
from regress.errors import CaptureError
from regress.grpo.selective_log_softmax import token_log_probs
from regress.layout import SampleKey, Segment, TokenLayout

Array = NDArray[Any]
LOGITS = 1 << 24
"""Most elements of the logits that are held at once."""


@dataclass(eq=False)
class Pass:
    """A forward pass of the policy.

    Attributes:
        layout: places of its tokens; ``targets`` those that a hidden state of this pass predicts.
        inputs: ``[B, T]`` ids, positions and mask, by tensor name.
        target_ids: ``[B, T]`` ids of the predicted tokens, at the places of ``targets``.
        contents: an id for each sample, made of its tokens.
        own_place: True if values lie at the token they belong to, and not, as in slices of sequences, at the state
            that predicts it.
        values: ``[B, T]`` token quantities; ``divisor`` the temperature that they are of, None where nothing tells it.
        extra: ``[B, T]`` values that were tapped for this pass, by name; ``rewards`` those of its samples.
        samples: key of each segment of the layout, where given.
        activations: module name -> output.
        gradients: token gradients, by tensor name; ``temperatures`` those that they were solved at,
            ``accuracy`` bounds of their errors.
        shifts: parts left unexplained by targets other than the next tokens, where these do not explain the loss.
        strays: rows that predict no token and have a gradient.
        reached: number of the microbatch whose backward call reached it first.
    """

    layout: TokenLayout
    targets: TokenLayout
    inputs: dict[str, Array]
    target_ids: Array
    contents: list[str]
    own_place: bool = True
    values: dict[str, Array] = field(default_factory=dict)
    divisor: float | None = 1.0
    extra: dict[str, Array] = field(default_factory=dict)
    rewards: list[float] | None = None
    samples: list[SampleKey] | None = None
    activations: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)
    temperatures: list[float] = field(default_factory=list)
    accuracy: dict[str, float] = field(default_factory=dict)
    shifts: dict[str, float] = field(default_factory=dict)
    strays: int = 0
    reached: int | None = None

    def hold(self, values: Mapping[str, Any]) -> None:
        """Keep values that were tapped for this pass: of tokens ``[B, T']``, or one for each sample.

        Raises:
            CaptureError: if they have another shape.
        """
        for name, value in values.items():
            if name == "samples":
                self.samples = as_keys(value, len(self.contents))
                continue
            if not self.own_place:
                raise CaptureError(
                    f"tap_batch({name}=...) cannot be placed in slices of sequences: tap it before they are split"
                )
            if name == "rewards":
                self.rewards = [float(one) for one in per_sample(name, value, self.layout)]
            else:
                self.extra[name] = on_tokens(name, value, self.layout)


def per_sample(name: str, value: Any, layout: TokenLayout) -> Array:
    """Return one number for each sample, in the order of rows and columns."""
    array = _numbers(name, value)
    if array.shape != (len(layout.segments),):
        raise CaptureError(f"""{name} has the shape {list(array.shape)}, but the batch holds {len(layout.segments)}
        samples: give one value for each, by row and column""")
    return array


def _numbers(name: str, value: Any) -> Array:
    """Return a value that was tapped as an array; raise `CaptureError` for what is none."""
    try:
        array = value if hasattr(value, "shape") else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"{name} is not an array of numbers ({error}): give a tensor, an array or lists of equal length"
        ) from None
    return to_numpy(array, name)


def on_tokens(name: str, value: Any, layout: TokenLayout) -> Array:
    """Return ``[B, T]`` token values: as given, aligned from the right, or spread from one for each sample."""
    array = _numbers(name, value)
    B, T = layout.shape
    if array.ndim == 1 and B == 1 and array.size == T != len(layout.segments):
        array = array[None]
    if array.ndim == 2 and array.shape == (len(layout.segments), 1):
        array = array[:, 0]  # of completions of one token, too: nothing is asked of the other places
    if array.ndim == 2 and array.shape[0] == B and array.shape[1] <= T:
        out = np.zeros((B, T), array.dtype)
        out[:, T - array.shape[1] :] = array
        return np.where(layout.attention_mask, out, np.zeros((), array.dtype))
    if array.ndim != 1 or array.size != len(layout.segments):
        raise CaptureError(f"""{name} has the shape {list(array.shape)}, but the batch has {B} rows of {T} tokens and
        {len(layout.segments)} samples: give [B, T] values (fewer columns count from the right), or one for each
        sample""")
    out = np.zeros((B, T), array.dtype)
    for s in layout.segments:
        out[s.row, s.col : s.col + s.stop - s.start] = array[s.sample]
    return out


def open_pass(found: Arrangement, layout: TokenLayout, first: int, absolute: bool) -> Pass:
    """Describe a forward pass by its inputs.

    Args:
        first: the first column whose hidden state is known.
        absolute: True if the model has position embeddings, so that not only distances between positions matter.
    """
    inputs = inputs_of(found, layout, absolute)
    targets = predicted(layout, first)
    ids = np.where(targets.attention_mask, inputs["input_ids"], 0)
    return Pass(layout, targets, inputs, ids, contents_of(inputs["input_ids"], layout))


def open_slice(found: Arrangement, whole: TokenLayout, offset: int, width: int, absolute: bool) -> Pass:
    """Describe a forward pass over some columns of the sequences, the others of which lie on other ranks.

    Args:
        found: the whole batch, and ``whole`` its layout.
        offset: first column that lies here, of ``width``.
    """
    complete = inputs_of(found, whole, absolute)
    layout, targets = sliced(whole, offset, width)
    here = slice(offset, offset + width)
    inputs = {name: value[:, here].copy() for name, value in complete.items()}
    following = np.concatenate([complete["input_ids"][:, 1:], np.zeros((whole.shape[0], 1), np.int64)], 1)
    ids = np.where(targets.attention_mask, following[:, here], 0)
    contents = contents_of(complete["input_ids"], whole)
    return Pass(layout, targets, inputs, ids, contents, own_place=False)


def inputs_of(found: Arrangement, layout: TokenLayout, absolute: bool) -> dict[str, Array]:
    """Return ids, positions and mask of a batch."""
    return {
        "input_ids": np.where(layout.attention_mask, found.input_ids, 0),
        "position_ids": positions_of(found, layout, absolute),
        "attention_mask": layout.attention_mask.copy(),
    }


def contents_of(ids: Array, layout: TokenLayout) -> list[str]:
    """Return an id for each sample, made of its tokens."""
    return [content_key(ids[s.row, s.col : s.col + s.stop - s.start]) for s in layout.segments]


def positions_of(found: Arrangement, layout: TokenLayout, absolute: bool) -> Array:
    """Return ``[B, T]`` positions as the model sees them, 0 on padding.

    Without learned position embeddings only distances count, so each sample starts at 0.
    """
    B, T = layout.shape
    given = found.position_ids
    if given is None and found.cu_seq_lens is not None:
        return layout.position_ids.copy()
    actual = np.broadcast_to(np.arange(T), (B, T)) if given is None else given
    out = np.zeros((B, T), np.int64)
    for s in layout.segments:
        here = actual[s.row, s.col : s.col + s.stop - s.start]
        out[s.row, s.col : s.col + here.size] = here if absolute else here - here[0] + s.start
    return out


def content_key(tokens: Array) -> str:
    """Return an id made of the tokens of a sample, the same in every layout."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int64).tobytes()).hexdigest()[:16]


def source_rows(p: Pass, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return paired flat indices: rows of hidden states ``[B * width, H]``, and tokens ``[B * T]`` that they predict.

    Args:
        width: columns of the hidden states; fewer than those of the ids are aligned from the right.
    """
    T = p.layout.shape[1]
    shift = T - width
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for s in p.targets.segments:
        columns = np.arange(s.col, s.col + s.stop - s.start)
        sources.append(s.row * width + columns - p.own_place - shift)
        targets.append(s.row * T + columns)
    return np.concatenate(sources), np.concatenate(targets)


def token_values(
    p: Pass, hidden: Tensor, head: Head, temperature: float, chunk: int | None = None
) -> dict[str, Array]:
    """Compute log-prob and entropy of each predicted token, ``[B, T]``, at its own place; 0 where there is none.

    Args:
        hidden: ``[B, T', H]`` last hidden states.
        chunk: rows of logits held at once.

    Raises:
        CaptureError: if a token lies outside of the vocabulary.
    """
    rows, places = source_rows(p, hidden.shape[1])
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    ids = p.target_ids.reshape(-1)[places]
    parts: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    step = chunk or 64
    start = 0
    while start < rows.size:
        here = torch.from_numpy(rows[start : start + step]).to(flat.device)
        logits = head(flat.index_select(0, here))
        if chunk is None and start == 0:
            step = max(64, LOGITS // max(logits.shape[-1], 1))
        targets = torch.from_numpy(ids[start : start + here.numel()]).to(flat.device)
        if targets.numel() and int(targets.max()) >= logits.shape[-1]:
            raise CaptureError(f"""token id {int(targets.max())} lies outside of the {logits.shape[-1]} logits of the
            head: check that record(head=...) and the input ids belong to one model""")
        found = token_log_probs(logits, targets, temperature=temperature, entropy="no_grad")
        assert found.entropy is not None
        parts["log_probs"].append(found.log_probs.cpu())
        parts["entropy"].append(found.entropy.cpu())
        start += here.numel()
    return {
        name: scattered(torch.cat(found) if found else None, places, p.layout.shape)
        for name, found in parts.items()
    }


def scattered(values: Tensor | None, places: NDArray[np.int64], shape: tuple[int, int]) -> Array:
    """Scatter values ``[K]`` to flat places of a ``[B, T]`` array of zeros."""
    array = np.zeros(0, np.float32) if values is None else values.detach().cpu().numpy()
    out = np.zeros(shape[0] * shape[1], array.dtype)
    out[places] = array
    return out.reshape(shape)


def stacked(passes: Sequence[Pass]) -> tuple[TokenLayout, TokenLayout, list[tuple[int, int]]]:
    """Join the passes of a microbatch: one layout with their rows under one another, first row and width of each."""
    width = max(p.layout.shape[1] for p in passes)
    tokens: list[Segment] = []
    targets: list[Segment] = []
    places: list[tuple[int, int]] = []
    row = number = 0
    for p in passes:
        places.append((row, p.layout.shape[1]))
        for found, out in ((p.layout, tokens), (p.targets, targets)):
            out += [s._replace(sample=s.sample + number, row=s.row + row) for s in found.segments]
        row += p.layout.shape[0]
        number += len(p.contents)
    return TokenLayout((row, width), tuple(tokens)), TokenLayout((row, width), tuple(targets)), places


def together(
    arrays: Sequence[Array | None], places: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> Array:
    """Stack ``[B, T, ...]`` arrays of several passes by rows; zeros where a pass has none."""
    known = [array for array in arrays if array is not None]
    if len(arrays) == 1 and known and known[0].shape[:2] == shape:
        return known[0]
    out = np.zeros((*shape, *known[0].shape[2:]), np.result_type(*known))
    for array, (row, width) in zip(arrays, places, strict=True):
        if array is not None:
            out[row : row + array.shape[0], :width] = array
    return out
