"""Module outputs split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from regress.layout import ShardLayout
from regress.parallel.parameter_shards import part


@dataclass(frozen=True)
class OutputPart:
    """Part ``index`` of ``count`` along ``dim`` (counted from the end if negative), as `torch.chunk` cuts it.

    Args:
        fused: number of equal pieces side by side, of each of which the rank holds its part.
        size: size of the whole dimension; ``None`` where all parts are equal.
    """

    dim: int
    index: int
    count: int
    fused: int = 1
    size: int | None = None

    def layout(self, local_shape: tuple[int, ...]) -> ShardLayout:
        """Return the layout of an output of this shape within the whole output.

        Raises:
            ValueError: if the shape is not that of the part.
        """
        dim = self.dim % len(local_shape)
        size = local_shape[dim] * self.count if self.size is None else self.size
        whole = ShardLayout.whole((*local_shape[:dim], size, *local_shape[dim + 1 :]))
        layout = part(whole, dim, index=self.index, count=self.count, fused=self.fused)
        if layout.local_shape != tuple(local_shape):
            raise ValueError(
                f"an output of shape {list(local_shape)} is not part {self.index} of {self.count} of a dimension of "
                f"{size}"
            )
        return layout
