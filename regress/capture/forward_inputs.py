"""Inputs of a forward pass found among its arguments: ids, masks, positions and borders."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from regress.capture.layout_inference import Arrangement
from regress.errors import CaptureError

Find = str | Callable[[Mapping[str, Any]], Any] | None
"""Name of a forward argument, or a function of all of them that returns the tensor."""

IDS = ("input_ids", "input", "inputs", "tokens", "ids", "idx", "x")
OTHERS = re.compile(
    "mask|position|label|target|type|len|cache|keep|ind(ex|ices)|seq_idx|sample|uid|group|rout"
)
"""Integer arguments that are not token ids, whatever their shape."""

OF_THE_LOSS = re.compile("encoder|cross|loss|completion|response|label|action|assistant|answer")
"""Names of masks of the loss or of an encoder, which tell nothing about padding."""

BORDERS = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_padded")


@dataclass(frozen=True)
class Finders:
    """Names or finders of the arguments that tell the layout, where they are not the usual ones.

    Attributes:
        pad_token_id: id of padding; ``"none"`` if every token counts; None for that of the model's configuration.
    """

    input_ids: Find = None
    attention_mask: Find = None
    position_ids: Find = None
    cu_seq_lens: Find = None
    pad_token_id: int | str | None = None


def arguments_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward call by name; unnamed positional ones as ``arg0``, ``arg1`` ..."""
    try:
        bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{f"arg{number}": value for number, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:
        if isinstance(value, dict) and name not in kwargs:
            found |= value
        elif isinstance(value, tuple) and name not in kwargs:
            found |= {f"arg{number}": item for number, item in enumerate(value)}
        else:
            found[name] = value
    return found


def arrangement_of(arguments: Mapping[str, Any], finders: Finders, pad_token_id: int | None) -> Arrangement:
    """Find what tells the layout among the arguments of a forward pass.

    Raises:
        CaptureError: if there are no token ids, or a named argument is not there.
    """
    ids = _ids(arguments, finders.input_ids)
    mask = _optional("attention_mask", arguments, finders.attention_mask, ("attention_mask",))
    positions = _optional("position_ids", arguments, finders.position_ids, ("position_ids",))
    borders = _optional("cu_seq_lens", arguments, finders.cu_seq_lens, BORDERS)
    flat = ids.ndim == 1
    grid = ids.reshape(1, -1) if flat else ids
    if mask is None and borders is None:
        _refuse_other_masks(arguments, ids)
    if finders.attention_mask is None and mask is not None and mask.ndim != 2 and not flat:
        if positions is None and borders is None:
            _refuse_blocks(mask)
        mask = None  # a mask of token pairs tells no layout
    pad = finders.pad_token_id
    pad_id = pad_token_id if pad is None else (None if isinstance(pad, str) else pad)
    return Arrangement(
        grid,
        _like(mask, grid),
        _like(positions, grid),
        None if borders is None else borders.reshape(-1),
        pad_id,
    )


def _refuse_blocks(mask: NDArray[np.int64]) -> None:
    """Refuse a mask of pairs that hides more than the future, which may be other samples or padding.

    Raises:
        CaptureError: if it does.
    """
    T = mask.shape[-1]
    seen = mask >= 0 if mask.min(initial=0) < 0 else mask != 0  # added to scores, or multiplied
    if mask.shape[-2] == T and not seen[..., *np.tril_indices(T)].all():
        raise CaptureError(f"""the attention mask of shape {list(mask.shape)} hides pairs of tokens, which may be
        padding, other samples of a packed row or a window: name a mask with one value for each token with
        record(attention_mask=...), or position ids that restart with record(position_ids=...)""")


def _refuse_other_masks(arguments: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
    """Raise `CaptureError` if an argument of another name could be the mask that tells padding from tokens."""
    for name, value in arguments.items():
        if "mask" not in name or OF_THE_LOSS.search(name) or not isinstance(value, Tensor):
            continue
        if (
            value.shape == ids.shape
            and not bool(value.bool().all())
            and bool(((value == 0) | (value == 1)).all())
        ):
            raise CaptureError(f"""the forward argument {name!r} has a 0 or 1 for each token, and nothing says whether 0
            is padding: give record(attention_mask={name!r}), or a function of all arguments that returns the mask""")


def _ids(arguments: Mapping[str, Any], find: Find) -> NDArray[np.int64]:
    if find is not None:
        return _found("input_ids", arguments, find)
    for name in IDS:
        value = arguments.get(name)
        if _is_ids(value):
            return _numpy(value, name)
    others = [name for name, value in arguments.items() if _is_ids(value) and not OTHERS.search(name)]
    if len(others) == 1:
        return _numpy(arguments[others[0]], others[0])
    raise CaptureError(f"""the token ids are not among the forward arguments ({", ".join(arguments) or "none"}): name
    the argument that holds them, or give a function of all arguments, with record(input_ids=...)""")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() in (1, 2)
        and not value.is_floating_point()
        and value.numel() > 0
    )


def _optional(
    name: str, arguments: Mapping[str, Any], find: Find, usual: Sequence[str]
) -> NDArray[np.int64] | None:
    if find is not None:
        return _found(name, arguments, find)
    value = next((arguments[key] for key in usual if isinstance(arguments.get(key), Tensor)), None)
    return None if value is None else _numpy(value, name)


def _found(name: str, arguments: Mapping[str, Any], find: str | Callable[..., Any]) -> NDArray[np.int64]:
    value = arguments.get(find) if isinstance(find, str) else find(arguments)
    if value is None:
        raise CaptureError(f"""record({name}={find!r}) names no argument of the forward pass, which has
        {", ".join(arguments)}: correct it""")
    return _numpy(value, name)


def _numpy(value: Any, name: str) -> NDArray[np.int64]:
    """Return an argument as integers; raise `CaptureError` for what is not an array of numbers."""
    local = value.full_tensor() if hasattr(value, "full_tensor") else value
    if isinstance(local, Tensor) and local.is_floating_point():  # a mask, added to scores or multiplied
        local = local.detach().float().clamp(-1e9, 1e9)
    try:
        array = local.detach().cpu().numpy() if isinstance(local, Tensor) else np.asarray(local)
        if array.dtype.kind in "USO":
            raise ValueError("no numbers")
        return np.array(array, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"{name} is not an array of integers ({error}): give a tensor, an array or lists of equal length"
        ) from None


def as_ids(value: Any, name: str) -> NDArray[np.int64]:
    """Return ids, a mask or positions as ``[B, T]``; one packed row may be ``[T]``.

    Raises:
        CaptureError: for what is not an array of numbers, or has another number of dimensions.
    """
    array = _numpy(value, name)
    if array.ndim not in (1, 2):
        raise CaptureError(
            f"{name} has the shape {list(array.shape)}, but a batch has rows of tokens: give [B, T], or [T] for one row"
        )
    return array.reshape(1, -1) if array.ndim == 1 else array


def _like(value: NDArray[np.int64] | None, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return one value for each token, from those of a flat batch or from positions that all rows share."""
    if value is None:
        return None
    if value.ndim == 3:  # positions of several axes, as of images: the first axis counts
        value = value[0]
    if value.size == ids.size:
        return value.reshape(ids.shape)
    if value.ndim <= 2 and value.shape[-1] == ids.shape[-1] and value.size == ids.shape[-1]:
        return np.broadcast_to(value.reshape(1, -1), ids.shape).copy()
    return value
