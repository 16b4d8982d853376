"""Splits of each model family's modules over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from regress.dump.adapter_names import plain_adapter_name
from regress.errors import ConfigError
from regress.parallel import split_requirements
from regress.parallel.adapter_factor_styles import InputFactor, OutputFactor, WholeFactor
from regress.parallel.conv1d_styles import ColwiseConv, RowwiseConv
from regress.parallel.split_outputs import OutputPart
from regress.parallel.vocabulary_embedding import SplitEmbedding, SplitProjection

HEAD = "lm_head"
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")
_ROWS = ("o_proj", "down_proj", "c_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_ACTIVATIONS = ("act_fn", "act")


@dataclass(frozen=True)
class Family:
    """Names in an architecture: its embedding, list of blocks, last norm, and the size of its MLP."""

    embedding: str
    blocks: str
    norm: str
    mlp_size: str

    def styles(self, model: PreTrainedModel, residual: Placement) -> dict[str, ParallelStyle]:
        """Return a style for every module that is split or borders on one that is; absent or replaced modules
        get none.

        ``residual`` is the placement of the hidden states between the modules of a block.
        """
        styles = dict(self._block_styles(model, residual))
        modules = dict(model.named_modules())
        if isinstance(modules.get(self.embedding), nn.Embedding):
            styles[self.embedding] = SplitEmbedding()
        if isinstance(modules.get(HEAD), nn.Linear):
            styles[HEAD] = SplitProjection()
        return styles

    def _block_styles(
        self, model: PreTrainedModel, residual: Placement
    ) -> Iterator[tuple[str, ParallelStyle]]:
        for name, module in self.inside(model):
            leaf = name.rpartition(".")[2]
            layer, place = base_layer(module), name if base_layer(module) is module else f"{name}.base_layer"
            if isinstance(layer, nn.Linear) and leaf in _COLUMNS:
                yield place, ColwiseParallel()
                yield from self._factor(name, module, "lora_A", WholeFactor())
                yield from self._factor(name, module, "lora_B", OutputFactor(Replicate()))
            elif isinstance(layer, nn.Linear) and leaf in _ROWS:
                yield place, RowwiseParallel(output_layouts=residual)
                yield from self._factor(name, module, "lora_A", InputFactor(residual))
            elif isinstance(layer, Conv1D) and leaf in _COLUMNS:
                fused = 3 if leaf == "c_attn" else 1
                yield place, ColwiseConv(residual, fused=fused)
                yield from self._factor(name, module, "lora_B", OutputFactor(residual, fused=fused))
            elif isinstance(layer, Conv1D) and leaf in _ROWS:
                yield place, RowwiseConv(residual)
                yield from self._factor(name, module, "lora_A", InputFactor(residual))
            elif isinstance(base_layer(getattr(module, "q_proj", None)), nn.Linear):
                yield (
                    name,
                    PrepareModuleInput(
                        input_kwarg_layouts={"hidden_states": residual},
                        desired_input_kwarg_layouts={"hidden_states": Replicate()},
                    ),
                )
            elif isinstance(base_layer(getattr(module, "gate_proj", None)), nn.Linear):
                yield name, PrepareModuleInput(input_layouts=residual, desired_input_layouts=Replicate())

    def _factor(
        self, name: str, module: nn.Module, factor: str, style: ParallelStyle
    ) -> Iterator[tuple[str, ParallelStyle]]:
        """Yield the style of the split factor of a module's adapters."""
        for adapter in getattr(module, factor, ()):
            yield f"{name}.{factor}.{adapter}", style

    def adjust(self, model: PreTrainedModel, count: int) -> None:
        """Adjust the sizes that modules hold besides their weights."""
        for _, module in self.inside(model):
            if isinstance(base_layer(getattr(module, "c_attn", None)), Conv1D):
                module.split_size //= count  # type: ignore[operator, assignment]  # an int

    def sequence(self, model: PreTrainedModel) -> list[str]:
        """Return the modules that work on a part of the columns under sequence parallelism, in order.

        These are the blocks and the final norm, or those of them on this pipeline stage; none without blocks.
        """
        blocks = list(self.own_blocks(model))
        norm = [self.norm] if _has_parameters(model.get_submodule(self.norm)) else []
        return blocks and blocks + norm

    def partial(self, model: PreTrainedModel, sequence_parallel: bool) -> Iterator[str]:
        """Yield the parameters that see a part of the heads or, under sequence parallelism, a part of the tokens."""
        of_columns = tuple(f"{name}." for name in self.sequence(model)) if sequence_parallel else ()
        whole = tuple(self._factors_of_gathered(model))
        for name, parameter in model.named_parameters():
            plain = not isinstance(parameter, DTensor) and not name.startswith(whole)
            if name.split(".")[-2] in _HEAD_NORMS or (plain and name.startswith(of_columns)):
                yield plain_adapter_name(name)

    def _factors_of_gathered(self, model: PreTrainedModel) -> Iterator[str]:
        """Yield the beginning of the names of factors A whose layer gets all tokens, also under sequence
        parallelism.
        """
        for name, module in self.inside(model):
            columns = name.rpartition(".")[2] in _COLUMNS and isinstance(base_layer(module), nn.Linear)
            if columns and base_layer(module) is not module:
                yield f"{name}.lora_A."

    def outputs(
        self, model: PreTrainedModel, mesh: DeviceMesh, sequence_parallel: bool
    ) -> Mapping[str, OutputPart]:
        """Return the part of its output that each module has on this rank; outputs that are flat over rows
        are left out.
        """
        index, count = mesh.get_local_rank(), mesh.size()
        found: dict[str, OutputPart] = {}
        whole = tuple(self._factors_of_gathered(model))
        sparse = tuple(f"{name}." for name, module in self.inside(model) if hasattr(module, "experts"))
        for name, _ in self.inside(model):
            leaf = name.rpartition(".")[2]
            if name.startswith(sparse) or name.startswith(whole):
                continue
            if ".base_layer" in name or ".lora_B." in name:  # it has the part of its layer
                leaf = name.partition(".base_layer")[0].partition(".lora_B.")[0].rpartition(".")[2]
            if leaf in (*_COLUMNS, *_ACTIVATIONS):
                found[name] = OutputPart(-1, index, count, fused=3 if leaf == "c_attn" else 1)
            elif leaf in _HEAD_NORMS:
                found[name] = OutputPart(-2, index, count)
            elif sequence_parallel:
                found[name] = OutputPart(1, index, count)
        for name in self.sequence(model)[-1:]:
            found.pop(name, None)  # gathered
        head = getattr(model.get_output_embeddings(), "weight", None)
        if isinstance(head, DTensor):
            found[HEAD] = OutputPart(-1, index, count, size=head.shape[0])
        return found

    def own_blocks(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """Return the blocks by name, without those on other pipeline stages."""
        blocks = model.get_submodule(self.blocks).named_children()
        return {f"{self.blocks}.{index}": block for index, block in blocks if _has_parameters(block)}

    def inside(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules of the blocks, and the blocks themselves."""
        for name, block in self.own_blocks(model).items():
            yield from block.named_modules(prefix=name)


def base_layer(module: nn.Module | None) -> nn.Module | None:
    """Return the layer inside of an adapter, and any other module as it is."""
    found = getattr(module, "base_layer", None)
    return found if isinstance(found, nn.Module) else module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


_ROPE = Family("model.embed_tokens", "model.layers", "model.norm", "intermediate_size")
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(split_requirements.FAMILIES, _ROPE),
    "gpt2": Family("transformer.wte", "transformer.h", "transformer.ln_f", "n_inner"),
}


def family_of(model: PreTrainedModel, count: int) -> Family:
    """Return the family of a model that ``count`` ranks can split.

    Raises:
        ConfigError: if its family is not known, or ``count`` does not divide its heads or MLP columns.
    """
    name = model.config.model_type
    family = FAMILIES.get(name)
    if family is not None:
        _require_plain_vocabulary(model, count)
    sizes = heads_of(model)
    if family is not None and any(name.endswith(("gate_proj", "c_fc")) for name, _ in family.inside(model)):
        sizes[family.mlp_size] = getattr(model.config, family.mlp_size) or 4 * model.config.hidden_size
    refusal = split_requirements.tensor_refusal(name, sizes, count)
    if refusal is not None or family is None:
        raise ConfigError(refusal)
    return family


def require_divisor(model: PreTrainedModel, sizes: Mapping[str, int], count: int) -> None:
    """Raise `ConfigError` if ``count`` ranks cannot share one of these sizes of a model."""
    refusal = split_requirements.divisor_refusal(model.config.model_type, sizes, count)
    if refusal is not None:
        raise ConfigError(refusal)


def _require_plain_vocabulary(model: PreTrainedModel, count: int) -> None:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if base_layer(module) is not module:
            name = next(name for name, found in model.named_modules() if found is module)
            raise ConfigError(f"""parallel.tp={count} splits the vocabulary, and model.lora.target_modules adapts
            {name}; leave it out there, or set parallel.tp=1""")


def heads_of(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of attention heads of a model, by the keys of its configuration."""
    keys = ("num_attention_heads", "num_key_value_heads")
    return {key: getattr(model.config, key) for key in keys if hasattr(model.config, key)}
