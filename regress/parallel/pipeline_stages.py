"""Pipeline stages cut from a Hugging Face model, which keep its forward and its parameter names.

Modules of other stages are replaced in place by modules that return their input. So a stage is still a whole
model for code that calls it, wraps it or looks up a parameter by name: it starts from ``inputs_embeds``
unless it is the first one, and its "logits" are hidden states unless it is the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.errors import ConfigError
from regress.parallel import split_requirements


@dataclass(frozen=True)
class _Family:
    """Names of the parts of a base model, in the order in which they run."""

    embedding: str
    positions: str | None
    after_embedding: tuple[str, ...]
    blocks: str
    norm: str


_ROTARY = _Family("embed_tokens", None, (), "layers", "norm")
_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(split_requirements.FAMILIES, _ROTARY),
    "gpt2": _Family("wte", "wpe", ("drop",), "h", "ln_f"),
}
"""Families by ``model_type``. A family is listed when its forward does nothing between these parts that
depends on where the hidden states come from (others scale their embeddings, which every stage would do
again).
"""


class Absent(nn.Module):
    """Replaces a module of another stage: returns its first argument, and runs no hooks, as nothing runs here."""

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class AbsentPositions(Absent):
    """Replaces an embedding that is added to hidden states which contain it already."""

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return a zero without dimensions, so that neither shape nor dtype of the sum changes."""
        return hidden.new_zeros(())


class AbsentHead(Absent):
    """Replaces the output projection, and returns a tensor that is not a view of the hidden states:
    zero-bubble schedules detach the output of a stage in place.
    """

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden.clone()


@dataclass(frozen=True)
class Stages:
    """Stages of a model that lie on one rank.

    Attributes:
        models: one for each of ``indices``.
        indices: their places in the pipeline, ascending.
        count: stages of the whole pipeline.
        owners: the stage of each parameter of the whole model; of a tied one the first stage.
        tied: trained parameters that the last stage holds too, and whose gradients are summed over both.
    """

    models: tuple[PreTrainedModel, ...]
    indices: tuple[int, ...]
    count: int
    owners: Mapping[str, int]
    tied: tuple[str, ...]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank, each once, under their logical names."""
        known: set[int] = set()
        for model in self.models:
            for name, parameter in trained_parameters(model):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    yield name, parameter

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules whose outputs are made on this rank, by name; each lies on one stage of the pipeline."""
        return {
            name: module
            for stage, model in zip(self.indices, self.models, strict=True)
            for name, module in model.named_modules()
            if name and not isinstance(module, Absent) and _owns(stage, self.count, name, model)
        }


def split(model: PreTrainedModel, indices: Sequence[int], count: int) -> Stages:
    """Return the stages ``indices`` out of ``count``; parameters are shared with ``model``, which becomes one
    of them.

    Raises:
        ConfigError: see :func:`cut`.
    """
    owners, shared = owners_of(model, count), {id(tensor): tensor for tensor in model.parameters()}
    tied = tuple(name for name in tied_parameters(model) if model.get_parameter(name).requires_grad)
    copies = [copy.deepcopy(model, dict(shared)) for _ in indices[1:]]  # memo: parameters are not copied
    models = tuple(cut(part, stage, count) for part, stage in zip((*copies, model), indices, strict=True))
    return Stages(models, tuple(indices), count, owners, tied)


def cut(model: PreTrainedModel, stage: int, count: int) -> PreTrainedModel:
    """Turn a model, in place, into the ``stage``-th of ``count`` stages.

    Embedding, blocks, and final norm with output projection are assigned to stages in this order, blocks as
    evenly as possible. Tied weights lie on first and last stage, under the name of the embedding.

    Raises:
        ConfigError: if the family cannot be cut, or there are more stages than parts.
    """
    if count == 1:
        return model
    family, base = _family(model), model.base_model
    blocks = getattr(base, family.blocks)
    own = blocks_of_stage(len(blocks), stage, count)
    tied = bool(tied_parameters(model))
    for index in set(range(len(blocks))) - set(own):
        blocks[index] = Absent()
    if stage > 0:
        if not (tied and stage == count - 1):
            setattr(base, family.embedding, Absent())
        if family.positions is not None:
            setattr(base, family.positions, AbsentPositions())
        for name in family.after_embedding:
            setattr(base, name, Absent())
    if stage < count - 1:
        setattr(base, family.norm, Absent())
        model.set_output_embeddings(AbsentHead())
    return model


def owners_of(model: PreTrainedModel, count: int) -> dict[str, int]:
    """Return the stage of each parameter of a whole model cut into ``count``; the first stage for tied ones.

    Raises:
        ConfigError: see :func:`cut`.
    """
    if count == 1:
        return dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    family, prefix = _family(model), model.base_model_prefix
    blocks = getattr(model.base_model, family.blocks)
    first = {f"{prefix}.{name}" for name in (family.embedding, family.positions) if name is not None}
    inside = {
        f"{prefix}.{family.blocks}.{block}": stage
        for stage in range(count)
        for block in blocks_of_stage(len(blocks), stage, count)
    }
    inside |= dict.fromkeys(first, 0)

    def owner(name: str) -> int:
        return next((stage for part, stage in inside.items() if name.startswith(f"{part}.")), count - 1)

    return {name: owner(name) for name, _ in model.named_parameters()}


def tied_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the weights that embedding and output projection share: none or one."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        return ()
    return tuple(name for name, parameter in model.named_parameters() if parameter is embedding)


def blocks_of_stage(blocks: int, stage: int, count: int) -> range:
    """Return the blocks, out of ``blocks``, that lie on a stage.

    With more stages than blocks the output projection gets a stage of its own, then the embedding.

    Raises:
        ConfigError: if there are more than ``blocks + 2`` stages.
    """
    refusal = split_requirements.stages_refusal(blocks, count)
    if refusal is not None:
        raise ConfigError(refusal)
    before = 1 if count == blocks + 2 else 0
    holders = min(blocks, count)
    if not before <= stage < before + holders:
        return range(0)
    size, larger = divmod(blocks, holders)
    place = stage - before
    start = place * size + min(place, larger)
    return range(start, start + size + (place < larger))


def _family(model: PreTrainedModel) -> _Family:
    kind = model.config.model_type
    refusal = split_requirements.family_refusal(kind)
    if refusal is not None:
        raise ConfigError(refusal)
    return _FAMILIES[kind]


def _owns(stage: int, count: int, name: str, model: PreTrainedModel) -> bool:
    """Return True if a module computes on this stage, and on no other, what it computes in the whole model.

    Rotary embeddings run on every stage, and a tied embedding lies on the last one for its weight only. The
    output of the base model is that of the final norm.
    """
    if count == 1:
        return True  # of any family
    family, prefix = _family(model), model.base_model_prefix
    if name == prefix:
        return stage == count - 1
    outside = not name.startswith(f"{prefix}.")
    inside = tuple(f"{prefix}.{part}" for part in (family.blocks, family.norm))
    return stage == 0 or outside or name.startswith(inside)
