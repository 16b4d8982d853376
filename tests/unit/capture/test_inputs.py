"""Arguments of a forward pass: the layout they tell, and the masks that are refused rather than ignored."""

from __future__ import annotations

import pytest
import torch

from regress.capture.forward_inputs import Finders, arrangement_of
from regress.errors import CaptureError

IDS = torch.arange(2, 10).reshape(2, 4)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize("name", ["mask", "padding_mask", "attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_of_another_name_is_not_ignored(name: str, dtype: torch.dtype) -> None:
    """Ignored, it would count padding as tokens, and two paddings of the same samples would differ."""
    arguments = {"x": IDS, name: MASK.to(dtype)}
    with pytest.raises(CaptureError, match=rf"argument '{name}' .* give record\(attention_mask='{name}'\)"):
        arrangement_of(arguments, Finders(), None)
    found = arrangement_of(arguments, Finders(attention_mask=name), None)
    assert found.attention_mask is not None
    assert found.attention_mask.tolist() == MASK.tolist()


@pytest.mark.parametrize(
    "others",
    [
        {"loss_mask": MASK},
        {"completion_mask": MASK},
        {"mask": torch.ones_like(MASK)},
        {"mask": MASK[None]},
        {"mask": MASK * 3},
        {"mask": MASK, "attention_mask": torch.ones_like(MASK)},
    ],
)
def test_what_tells_no_padding_is_no_reason_to_refuse(others: dict[str, torch.Tensor]) -> None:
    arrangement_of({"input_ids": IDS, **others}, Finders(), None)
