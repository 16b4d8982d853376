"""Tensor parallelism as transformers does it, from the model's own plan.

With several microbatches its gradients of ``q_norm`` and ``k_norm`` are wrong (transformers 5.23, see
docs/findings.md); `regress.parallel.tensor_parallel` computes them correctly.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from regress.errors import ConfigError, reason
from regress.parallel.model_families import heads_of, require_divisor
from regress.parallel.tensor_parallel import TensorPlan


def apply(model: PreTrainedModel, mesh: DeviceMesh) -> TensorPlan:
    """Split a model in place; every rank gets all logits, and all gradients are complete.

    Raises:
        ConfigError: if the ranks cannot share its heads, or the installed transformers cannot split it.
    """
    require_divisor(model, heads_of(model), mesh.size())
    try:
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        known = {
            name for name, _ in (*model.named_modules(), *model.named_parameters())
        }  # a tied weight has one name
        apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in known})
        model.tie_weights()
    except Exception as error:  # any error of a plan that does not match the model
        raise ConfigError(f"""parallel.tp_implementation=transformers cannot split this {model.config.model_type} model
        over parallel.tp={mesh.size()} ranks ({reason(error)}); set parallel.tp_implementation=torch""") from error
    return TensorPlan(partial=(), vocabulary=None, outputs={})
