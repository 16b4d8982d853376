"""Differences of a split model from the whole one, as numbers by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from batches import Micro, logits_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from regress.parallel import parameter_shards
from regress.parallel.tensor_parallel import TensorPlan


class Differences:
    """Largest difference relative to the largest element of the whole tensor.

    Attributes:
        errors: by tensor.
        unsummed: of the partial gradients before they are summed.
        replicas: tensors that are not bit for bit the same on all ranks that hold the same part.
        split: modules whose outputs were parts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh["tp"].get_group()
        self.errors: dict[str, float] = {}
        self.unsummed: dict[str, float] = {}
        self.replicas: list[str] = []
        self.split: list[str] = []

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "group"}

    def tokens(self, name: str, actual: Tensor | None, expected: Tensor | None) -> None:
        """Values of tokens, which all ranks of a group have."""
        assert actual is not None
        assert expected is not None
        self.errors[name] = _relative(actual, expected, expected)
        self._compare_replicas(name, actual.detach())

    def outputs(
        self, plan: TensorPlan | None, model: PreTrainedModel, whole: PreTrainedModel, micro: Micro
    ) -> None:
        """The outputs of all modules, each as the part that the plan says it is."""
        actual, expected = _outputs(model, micro), _outputs(whole, micro)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            layout = None if plan is None else plan.output_layout(name, tuple(value.shape))
            wanted = expected[name]
            if layout is not None:
                self.split.append(name)
                assert layout.shape == wanted.shape, name
                wanted = parameter_shards.project(layout, wanted)
            elif value.shape != wanted.shape:
                assert ".mlp." in name, name  # inside a mixture of experts, flat over a part of the tokens
                continue
            self.errors[f"output of {name}"] = _relative(value, wanted, expected[name])

    def gradients(self, plan: TensorPlan | None, model: nn.Module, whole: nn.Module) -> None:
        """All gradients; the parameters themselves have to lie where their layout says."""
        parameters, expected = dict(model.named_parameters()), dict(whole.named_parameters())
        assert list(parameters) == list(expected)
        self.sum_partial(plan, parameters, expected)
        for name, parameter in parameters.items():
            weight = parameter_shards.project(parameter_shards.of(parameter), expected[name].detach())
            assert torch.equal(parameter_shards.local(parameter), weight), name
            again = parameter_shards.like(parameter, expected[name].detach())
            assert torch.equal(parameter_shards.local(again), weight), name
            assert getattr(again, "placements", None) == getattr(parameter, "placements", None), name
            self.gradient(name, parameter, expected[name])

    def sum_partial(
        self, plan: TensorPlan | None, parameters: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> None:
        for name in () if plan is None else plan.partial:
            assert parameters[name].grad is not None
            self.unsummed[name] = self._error(parameters[name], expected[name])
            dist.all_reduce(parameter_shards.local(parameters[name].grad), group=self.group)

    def gradient(self, name: str, parameter: Tensor, expected: Tensor) -> None:
        assert parameter.grad is not None
        if isinstance(parameter.grad, type(parameter.data)):
            assert parameter_shards.of(parameter.grad) == parameter_shards.of(parameter), name
        self.errors[name] = max(self.errors.get(name, 0.0), self._error(parameter, expected))
        self._compare_replicas(
            f"gradient of {name}", parameter_shards.local(parameter.grad), parameter_shards.of(parameter)
        )

    def _error(self, parameter: Tensor, expected: Tensor) -> float:
        assert parameter.grad is not None
        assert expected.grad is not None
        wanted = parameter_shards.project(parameter_shards.of(parameter), expected.grad)
        return _relative(parameter_shards.local(parameter.grad), wanted, expected.grad)

    def _compare_replicas(self, name: str, value: Tensor, layout: object = None) -> None:
        held: list[Any] = [None] * self.group.size()
        dist.all_gather_object(held, (layout, value.numpy().tobytes()), group=self.group)
        if any(other == layout and data != held[self.group.rank()][1] for other, data in held):
            self.replicas.append(name)


def _relative(actual: Tensor, wanted: Tensor, whole: Tensor) -> float:
    assert actual.shape == wanted.shape, f"{actual.shape} {wanted.shape}"
    return ((actual - wanted).abs().max() / whole.abs().max()).item() if wanted.numel() else 0.0


def _outputs(model: PreTrainedModel, micro: Micro) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor):
                found[name] = value.detach().clone()

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if name]
    with torch.no_grad():
        logits_of(model, micro)
    for handle in handles:
        handle.remove()
    return found
