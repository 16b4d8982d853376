"""Tensor parallelism of Hugging Face models: attention heads, MLP columns and the vocabulary split over ranks.

The styles are torch's own (`parallelize_module`), on plain hidden states: what enters and leaves a block is a plain
tensor, whole on every rank, or under sequence parallelism the rank's part of the columns. Norms, routers and experts
then see a part of the tokens, and norms of queries and keys see a part of the heads: the gradients of their weights
are partial sums. Sources: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel

from regress.layout import ShardLayout
from regress.parallel.model_families import family_of
from regress.parallel.sequence_parallel import SEQUENCE, work_on_own_columns
from regress.parallel.split_outputs import OutputPart
from regress.parallel.vocabulary_embedding import rows_of


@dataclass(frozen=True)
class TensorPlan:
    """Result of splitting a model.

    Attributes:
        partial: names of the parameters whose gradient on a rank is a part of the sum; it has to be summed over the
            group once, after the last microbatch.
        vocabulary: ``(start, stop)`` of the token ids whose logits lie on this rank; ``None`` where the model
            ends before its output projection.
        outputs: part of each module's output on this rank, for modules whose output is not whole.
    """

    partial: tuple[str, ...]
    vocabulary: tuple[int, int] | None
    outputs: Mapping[str, OutputPart]

    def output_layout(self, module: str, local_shape: tuple[int, ...]) -> ShardLayout | None:
        """Return the layout of a module's output of this shape within the whole output; ``None`` if it is
        the whole one.
        """
        part = self.outputs.get(module)
        return None if part is None else part.layout(local_shape)


def apply(model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> TensorPlan:
    """Split a model in place; every rank must hold the same whole weights before.

    Tied embeddings stay tied. Modules that a pipeline stage has replaced are left unchanged. The output
    projection gives the logits of a part of the vocabulary, cut as `torch.chunk` does (unequal and even empty
    parts), for :func:`regress.parallel.vocabulary_log_probs.vocab_parallel_log_probs`.

    Args:
        model: a causal language model of a known family, on one device.
        mesh: one-dimensional mesh.
        sequence_parallel: blocks pass on ``[B, T / tp, H]``; ``T`` has to be a multiple of the mesh's size.

    Raises:
        ConfigError: if the family is not known, or the mesh's size does not divide its heads or MLP columns.
    """
    family = family_of(model, mesh.size())
    tied = _tied(model)
    residual: Placement = SEQUENCE if sequence_parallel else Replicate()
    parallelize_module(model, mesh, family.styles(model, residual), src_data_rank=None)
    if tied:  # torch gives each of the two modules a parameter of its own
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    family.adjust(model, mesh.size())
    if sequence_parallel and (names := family.sequence(model)):
        work_on_own_columns(model.get_submodule(names[0]), model.get_submodule(names[-1]), mesh)
    return TensorPlan(
        partial=tuple(family.partial(model, sequence_parallel)),
        vocabulary=_vocabulary(model),
        outputs=family.outputs(model, mesh, sequence_parallel),
    )


def _tied(model: PreTrainedModel) -> bool:
    weight = _weight(model.get_input_embeddings())
    return weight is not None and weight is _weight(model.get_output_embeddings())


def _weight(module: nn.Module | None) -> Tensor | None:
    return getattr(module, "weight", None)


def _vocabulary(model: PreTrainedModel) -> tuple[int, int] | None:
    weight = _weight(model.get_output_embeddings())
    return None if weight is None else rows_of(weight)
