"""Faults of single layers, in a run that was built and has not started."""

from tests.faults.fault import FORWARD_CHECKS, fault, met_in


@fault("T", "activations model.layers.1", "module", place="step0/rank0/micro0")
@met_in("Megatron#1503: a scale of attention")
def attention_scale_of_layer_1(run):
    run.trainer.policy.model.model.layers[1].self_attn.scaling *= 1.01


@fault("T", "activations model.layers.0", "module")
@met_in("eps of one layer")
def norm_epsilon_of_layer_0(run):
    run.trainer.policy.model.model.layers[0].post_attention_layernorm.variance_epsilon = 1e-5


@fault("T", "activations model.layers.1", "module")
@met_in("eps of one layer")
def norm_epsilon_of_layer_1(run):
    run.trainer.policy.model.model.layers[1].input_layernorm.variance_epsilon = 1e-5


@fault("T", "activations model.norm", "module")
@met_in("eps of the final norm")
def final_norm_epsilon(run):
    run.trainer.policy.model.model.norm.variance_epsilon = 1e-5


@fault("T", "activations model.embed_tokens", "embedding module-scale")
@met_in("models that scale their embeddings")
def embeddings_doubled(run):
    run.trainer.policy.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out * 2, prepend=True
    )


@fault("T", "activations lm_head", "output-projection module-scale")
@met_in("logit scaling of another family")
def logits_scaled(run):
    run.trainer.policy.model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5, prepend=True)


@fault("T", "activations model.layers.1", "module")
@met_in("a kernel that leaves out the last rows")
def last_rows_of_a_batch_dropped_from_layer_1(run):
    """The output of a layer at the last position of each row is that of the position before."""

    def wrong(module, args, out):
        changed = out.clone()
        changed[:, -1] = out[:, -2]
        return changed

    run.trainer.policy.model.model.layers[1].register_forward_hook(wrong, prepend=True)


@fault(
    "T",
    "gradient model.layers.1.mlp.up_proj.weight",
    "gradient-of-one-tensor gradient-power-of-two",
    place="step0/rank0",
)
@met_in("a hook that was left on a weight")
def gradient_of_one_weight(run):
    weight = run.trainer.policy.model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: 2 * gradient)


@fault(
    "T",
    "gradient model.layers.0.mlp.down_proj.weight",
    "backward-of-a-module gradient-power-of-two",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    place="step0/rank0",
)
@met_in("TransformerEngine#1616: a wrong backward pass of a layer")
def backward_of_layer_0(run):
    """The gradient that enters layer 0 from above is halved: its own parameters and the embeddings see it."""

    def halved(module, args, out):
        out.register_hook(lambda gradient: gradient / 2)

    run.trainer.policy.model.model.layers[0].register_forward_hook(halved)


@fault("T", "gradient model.norm.weight", "gradient-power-of-two", names=r".*norm.*", place="step0/rank0")
@met_in("Megatron#1446")
def gradients_of_norms(run):
    for name, parameter in run.trainer.policy.named_parameters():
        if "norm" in name:
            parameter.register_hook(lambda gradient: 2 * gradient)


@fault(
    "T",
    "gradient model.embed_tokens.weight",
    "gradient-of-one-tensor",
    names=r"model\.embed_tokens\.weight",
    place="step1/rank0",
    steps=2,
    blind=FORWARD_CHECKS,
)
@met_in("an embedding without padding_idx")
def row_of_padding_trained(run):
    """The embedding of the padding token, which stands in texts, too, gets a gradient."""
    embedding = run.trainer.policy.model.get_input_embeddings()
    embedding.padding_idx = None
