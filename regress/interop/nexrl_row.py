"""Rows of one file of NexRL: token ids, positions and masks, as far as it tells them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.dump.file_damage import Damage
from regress.dump.numpy_arrays import Array
from regress.interop.foreign_payloads import Payload, tensor
from regress.interop.row_matching import PaddedRow

TOKENS = (
    *("log_probs", "entropy", "response_mask", "old_log_probs", "advantages", "prob_ratio"),
    *("elementwise_loss", "effective_valid"),
)
MASKS = ("response_mask", "effective_valid")


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one file.

    Attributes:
        name: name for the rows where nothing tells their samples.
        ids: ``[b, W]`` token ids; None where they were not recorded.
        mask: ``[b, R]`` what counts in the loss.
        positions: ``[b, W]`` positions of the tokens; None where they were not recorded.
    """

    name: str
    ids: NDArray[np.int64] | None
    mask: NDArray[np.bool_]
    positions: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, payload: Payload, name: str, inputs: Payload | None = None) -> Batch:
        """Return the rows of a ``forward_data`` file; ``batch_inputs`` tell their tokens where it does not itself."""
        mask = tensor(payload["response_mask"], "response_mask")
        ids = tensor(payload["input_ids"], "input_ids") if "input_ids" in payload else None
        if ids is None and inputs is not None and mask.ndim == 2:
            ids = sequences_of(inputs, mask.shape)
        if mask.ndim != 2 or (ids is not None and (ids.ndim != 2 or ids.shape[0] != mask.shape[0])):
            raise Damage("its masks and token ids are not batches of the same rows")
        if ids is not None and ids.shape[1] < mask.shape[1]:
            raise Damage("its masks are wider than its token ids")
        stem = name.rpartition("/")[2].partition(".")[0]
        own = None if ids is None else ids.astype(np.int64)
        source = payload if "position_ids" in payload else inputs or {}
        places = tensor(source["position_ids"], "position_ids") if "position_ids" in source else None
        fits = places is not None and own is not None and places.shape == own.shape
        return cls(
            stem, own, mask.astype(bool), places.astype(np.int64) if fits and places is not None else None
        )

    @property
    def width(self) -> int:
        """Number of columns of a row; without token ids one more than the values have, as since commit 5bd3f78."""
        return self.mask.shape[1] + 1 if self.ids is None else int(self.ids.shape[1])

    @property
    def open_rows(self) -> list[PaddedRow]:
        """Its rows, as far as they are known without token ids."""
        named = ((f"{self.name} row", index) for index in range(len(self.mask)))
        return [PaddedRow(key, 0, self.width, known=False, open=True) for key in named]

    @property
    def wide_mask(self) -> NDArray[np.bool_]:
        """Mask ``[b, W]`` at the tokens' own columns."""
        out = np.zeros((self.mask.shape[0], self.width), bool)
        out[:, self.width - self.mask.shape[1] :] = self.mask
        return out


def sequences_of(inputs: Payload, shape: tuple[int, ...]) -> Array | None:
    """Return the token ids of rows from what the model read: inputs and targets, or inputs with the last token.

    Their keys are not documented: without targets, inputs as wide as the values leave open which token is the last.

    Args:
        shape: ``[b, R]`` of the values of the loss.
    """
    known = {name: tensor(inputs[name], name) for name in ("input_ids", *TARGETS) if name in inputs}
    ids = known.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.shape[0] != shape[0] or ids.dtype.kind not in "iu":
        return None
    targets = next((known[name] for name in TARGETS if name in known), None)
    if targets is not None and targets.shape == ids.shape == shape:
        nexts = np.concatenate([ids[:, 1:], ids[:, -1:]], axis=1)
        found: Array = np.concatenate([ids[:, :1], np.where(targets < 0, nexts, targets)], axis=1)
        return found
    return ids if targets is None and ids.shape[1] == shape[1] + 1 else None


TARGETS = ("target_tokens", "target_ids")
"""Names of the tokens to predict; labels may be shifted or not, so that they tell nothing."""


def mask_of(payload: Payload) -> NDArray[np.bool_]:
    """Return the mask of a batch, or True where it has other values of tokens only."""
    for name in (*MASKS, *TOKENS):
        if name in payload:
            array = tensor(payload[name], name)
            if array.ndim == 2:
                return array.astype(bool) if name in MASKS else np.ones(array.shape, bool)
    raise Damage("it has no batch of rows")
