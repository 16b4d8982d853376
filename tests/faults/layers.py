"""Faults of single layers, in a run that was built and has not started."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regress.engine.build import Run
from tests.faults.fault import fault


@fault(
    category="T",
    source="Megatron#1503: a scale of attention",
    first="activations model.layers.1",
    place="step0/rank0/micro0",
    rules=("module",),
)
def attention_scale_of_layer_1(run: Run) -> None:
    run.trainer.policy.model.model.layers[1].self_attn.scaling *= 1.01


@fault(category="T", source="eps of one layer", first="activations model.layers.0", rules=("module",))
def norm_epsilon_of_layer_0(run: Run) -> None:
    run.trainer.policy.model.model.layers[0].post_attention_layernorm.variance_epsilon = 1e-5


@fault(category="T", source="eps of one layer", first="activations model.layers.1", rules=("module",))
def norm_epsilon_of_layer_1(run: Run) -> None:
    run.trainer.policy.model.model.layers[1].input_layernorm.variance_epsilon = 1e-5


@fault(category="T", source="eps of the final norm", first="activations model.norm", rules=("module",))
def final_norm_epsilon(run: Run) -> None:
    run.trainer.policy.model.model.norm.variance_epsilon = 1e-5


@fault(
    category="T",
    source="models that scale their embeddings",
    first="activations model.embed_tokens",
    rules=("embedding", "module-scale"),
)
def embeddings_doubled(run: Run) -> None:
    run.trainer.policy.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out * 2, prepend=True
    )


@fault(
    category="T",
    source="logit scaling of another family",
    first="activations lm_head",
    rules=("output-projection", "module-scale"),
)
def logits_scaled(run: Run) -> None:
    run.trainer.policy.model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5, prepend=True)


@fault(
    category="T",
    source="a kernel that leaves out the last rows",
    first="activations model.layers.1",
    rules=("module",),
)
def last_rows_of_a_batch_dropped_from_layer_1(run: Run) -> None:
    """The output of a layer at the last position of each row is that of the position before."""

    def wrong(module: Any, args: Any, out: Tensor) -> Tensor:
        changed = out.clone()
        changed[:, -1] = out[:, -2]
        return changed

    run.trainer.policy.model.model.layers[1].register_forward_hook(wrong, prepend=True)


@fault(
    category="T",
    source="a hook that was left on a weight",
    first="gradient model.layers.1.mlp.up_proj.weight",
    place="step0/rank0",
    rules=("gradient-of-one-tensor", "gradient-power-of-two"),
)
def gradient_of_one_weight(run: Run) -> None:
    weight = run.trainer.policy.model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: 2 * gradient)


@fault(
    category="T",
    source="TransformerEngine#1616: a wrong backward pass of a layer",
    first="gradient model.layers.0.mlp.down_proj.weight",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    place="step0/rank0",
    rules=("backward-of-a-module", "gradient-power-of-two"),
)
def backward_of_layer_0(run: Run) -> None:
    """The gradient that enters layer 0 from above is halved: its own parameters and the embeddings see it."""

    def halved(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: gradient / 2)

    run.trainer.policy.model.model.layers[0].register_forward_hook(halved)


@fault(
    category="T",
    source="Megatron#1446",
    first="gradient model.norm.weight",
    names=r".*norm.*",
    place="step0/rank0",
    rules=("gradient-power-of-two",),
)
def gradients_of_norms(run: Run) -> None:
    for name, parameter in run.trainer.policy.named_parameters():
        if "norm" in name:
            parameter.register_hook(lambda gradient: 2 * gradient)


@fault(
    category="T",
    source="an embedding without padding_idx",
    first="gradient model.embed_tokens.weight",
    names=r"model\.embed_tokens\.weight",
    place="step1/rank0",
    steps=2,
    rules=("gradient-of-one-tensor",),
    blind=(
        "loss 5 %",
        "loss 1 %",
        "allclose",
        "mean 1e-3",
    ),
)
def row_of_padding_trained(run: Run) -> None:
    """The embedding of the padding token, which stands in texts, too, gets a gradient."""
    embedding: Any = run.trainer.policy.model.get_input_embeddings()
    embedding.padding_idx = None


# @@new
