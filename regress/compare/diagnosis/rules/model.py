"""Rules for the forward pass: modules, logits, log-probs and entropies."""

from __future__ import annotations

from regress.compare.diagnosis.divergence import Divergence
from regress.compare.diagnosis.rule import Rule
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.verdict import Status

_LAYER = r"\.(layers|h|blocks?)\."


def _split_sequences(divergence: Divergence, scene: RunContext) -> bool:
    return scene.mesh.get("cp", 1) > 1


def _split_tensors(divergence: Divergence, scene: RunContext) -> bool:
    return scene.mesh.get("tp", 1) > 1


def _split_layers(divergence: Divergence, scene: RunContext) -> bool:
    return scene.mesh.get("pp", 1) > 1


def _split_experts(divergence: Divergence, scene: RunContext) -> bool:
    return scene.mesh.get("ep", 1) > 1


def _experts(divergence: Divergence, scene: RunContext) -> bool:
    return "experts" in divergence.kinds


def _later(divergence: Divergence, scene: RunContext) -> bool:
    place = divergence.first.place
    return bool(place.step or place.update)


def _rounding(divergence: Divergence, scene: RunContext) -> bool:
    """Return True for errors of at most 16 units in the last place: the same mathematics in another order."""
    ulp = divergence.first.max_ulp
    return divergence.first.status is Status.DRIFT and ulp is not None and 0 < ulp <= 16


def _most_tokens(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if most of what was compared is off, as it is wherever weights are others."""
    return 2 * divergence.first.over >= divergence.first.count


def _few_tokens(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if a single value is off, or at most one in twenty."""
    return divergence.first.over <= max(1, divergence.first.count // 20)


MODEL: tuple[Rule, ...] = (
    Rule(
        "positions-not-passed",
        "the model is not given the position ids of the batch, and counts the columns of the row itself",
        at=("activations",),
        tensor=r"wpe|pos_emb|position",
        holds=("batch_inputs",),
        variants="base,packed,left",
    ),
    Rule(
        "packed-leak",
        "tokens of a packed row see the samples before them: cu_seqlens dropped, or no block-causal mask",
        at=("activations", "log_probs"),
        tensor=f"{_LAYER}|log_probs",
        patterns=("class:packed_behind",),
        variants="base,packed,varlen",
        look="activations",
    ),
    Rule(
        "padding-seen",
        "tokens see the padding before them: the attention mask is not passed on, or only the causal one is",
        at=("activations", "log_probs"),
        tensor=f"{_LAYER}|log_probs",
        patterns=("class:behind_padding",),
        variants="base,left",
        look="activations",
    ),
    Rule(
        "padding-neighbours",
        "something reaches over the edge of padding: a convolution, a shift of labels, or a mask that is off by one",
        at=("activations", "log_probs", "entropy"),
        patterns=("class:beside_padding",),
        variants="base,left",
    ),
    Rule(
        "rotary",
        "rotary embeddings: every position but the first is off, so it is their frequencies (theta, scaling, "
        "or a table "
        "rounded to half precision)",
        at=("activations",),
        tensor=_LAYER,
        any_of=("positions_from",),
    ),
    Rule(
        "long-context",
        "only what lies beyond a length is wrong: a table of positions, a window or a cache that ends there, or "
        "a scaling of rotary embeddings that begins there",
        at=("activations", "log_probs", "entropy"),
        any_of=("long_samples",),
        look="activations",
    ),
    Rule(
        "one-sample",
        "one sample alone is wrong: look at its tokens, its place in its row and its neighbours",
        at=("activations", "log_probs", "entropy", "advantages"),
        patterns=("sample",),
        look="batch_inputs",
    ),
    Rule(
        "module-dtype",
        "this module computes in another dtype than the rest: its values fit into the narrower one",
        at=("activations",),
        patterns=("rounded",),
    ),
    Rule(
        "module-scale",
        "the output of this module is multiplied by a number: a scale of attention (1/sqrt of the head), of "
        "residuals or "
        "of logits, a dropout that is not off, or a sum that is taken over ranks once too often",
        at=("activations",),
        patterns=("scaled",),
        variants="base",
    ),
    Rule(
        "heads",
        "one head or shard alone is wrong: heads of keys parted from those of their queries, a head dimension that is "
        "read in another order, or the part of one rank",
        at=("activations", "gradient", "param"),
        any_of=("shard",),
        variants="base,tp2",
    ),
    Rule(
        "weights-of-a-rank",
        "one rank computes with other weights: they were not broadcast, or it did not take the last update",
        at=("activations", "log_probs"),
        tensor=r"embed|wte|log_probs",
        patterns=("rank",),
        without=("micro", "sample", "class:*"),
        holds=("batch_inputs",),
        when=_most_tokens,
        look="param",
        variants="base,dp2",
    ),
    Rule(
        "stale-weights",
        "the first module is off, and only after an update: the forward pass uses weights from before it (prefetched, "
        "cached, not gathered), or the update went elsewhere",
        at=("activations", "log_probs"),
        tensor=r"embed|wte|log_probs|layers\.0$|h\.0$",
        when=_later,
        look="param",
    ),
    Rule(
        "embedding",
        "the embedding itself is off: other weights than recorded, a vocabulary that is split at the wrong ids, or a "
        "factor on embeddings",
        at=("activations",),
        tensor=r"embed|wte",
        holds=("batch_inputs",),
        look="param",
    ),
    Rule(
        "context-exchange",
        "the exchange of keys and values among the ranks of a sequence: the order of zigzag parts, the mask of local "
        "columns, or partial softmaxes that are merged with wrong weights",
        at=("activations",),
        tensor=_LAYER,
        when=_split_sequences,
        variants="base,cp2,cp2-zigzag",
    ),
    Rule(
        "tensor-exchange",
        "the sum or scatter among ranks that share a layer: a sum left out, tokens handed to the wrong rank, or a part "
        "taken for the whole",
        at=("activations",),
        tensor=_LAYER,
        when=_split_tensors,
        variants="base,tp2,tp2-sp",
    ),
    Rule(
        "pipeline-exchange",
        "what stages hand to each other: microbatches in another order, or a layer on the wrong stage",
        at=("activations",),
        tensor=_LAYER,
        when=_split_layers,
        variants="base,pp2",
    ),
    Rule(
        "expert-exchange",
        "tokens and experts are counted differently: rows sent to the wrong expert, dropped, or weighted "
        "other than the "
        "router says",
        at=("activations",),
        tensor=_LAYER,
        when=_split_experts,
        variants="base,ep2",
    ),
    Rule(
        "router",
        "the router of this layer: weights of the chosen experts that are not normalized, another number of them, or a "
        "softmax before in place of after the choice",
        at=("activations",),
        tensor=_LAYER,
        when=_experts,
        without=("class:*", "rank", "positions_from"),
    ),
    Rule(
        "module",
        "this module is the first that is off, and its inputs hold: its weights, the eps of its norm, its scale of "
        "attention, its activation function, or the kernel that computes it",
        at=("activations",),
        tensor=_LAYER,
        without=("class:packed_behind", "class:behind_padding"),
        variants="base,eager",
    ),
    Rule(
        "logits-shifted",
        "the logits at a token in place of those that predict it (or the reverse): shifted once too often or "
        "too little",
        at=("activations",),
        tensor="lm_head|logits",
        patterns=("shifted",),
    ),
    Rule(
        "output-projection",
        "hidden states hold and logits do not: the output projection is another one than recorded (an untied or stale "
        "copy of the embeddings), is computed in another dtype, or has a scale or a cap",
        at=("activations",),
        tensor="lm_head|logits",
        look="param",
    ),
    # log-probs and entropies
    Rule(
        "temperature",
        "log-probs or entropies are taken at another temperature than the rollouts were sampled at: "
        "rollout_worker.temperature must divide the trainer's logits, too",
        at=("log_probs", "entropy", "old_log_probs"),
        patterns=("tempered",),
    ),
    Rule(
        "targets-off-by-one",
        "log-probs of the neighbouring token: targets are shifted by one against the logits",
        at=("log_probs", "old_log_probs", "ref_log_probs"),
        what="log-probs of the token",
    ),
    Rule(
        "log-probs-shifted",
        "log-probs are stored one position off: those of a token stand where it is read, not where it is predicted, or "
        "the reverse",
        at=("log_probs", "old_log_probs", "ref_log_probs", "entropy"),
        patterns=("shifted",),
    ),
    Rule(
        "labels-at-border",
        "labels are rolled within a row or a rank: the target of the last token before a border comes from "
        "the other end",
        at=("log_probs", "entropy"),
        any_of=("class:before_boundary", "class:after_boundary", "class:first_trained"),
        variants="base,packed,cp2",
    ),
    Rule(
        "not-normalized",
        "these are logits: the logarithm of the sum of exponentials is not taken off",
        at=("log_probs", "old_log_probs", "ref_log_probs"),
        what="not normalized",
    ),
    Rule(
        "logarithm",
        "another base of the logarithm: bits in place of nats",
        at=("log_probs", "entropy", "kl"),
        patterns=("scaled:logarithm",),
    ),
    Rule(
        "softmax-dtype",
        "the log-softmax is computed or stored in half precision: its values fit into the narrower dtype",
        at=("log_probs", "entropy", "old_log_probs", "ref_log_probs"),
        patterns=("rounded",),
    ),
    Rule(
        "vocabulary-parts",
        "logits hold and log-probs do not, with a vocabulary in parts: an offset of the ids, a maximum or a sum of one "
        "part alone, or padding of the vocabulary that counts",
        at=("log_probs", "entropy"),
        holds=("activations",),
        when=_split_tensors,
        variants="base,tp2",
    ),
    Rule(
        "entropy-of-changed-logits",
        "log-probs hold and entropies do not: the logits are overwritten (by a temperature, a softmax in place) before "
        "their entropy is taken",
        at=("entropy",),
        without=("scaled",),
        holds=("activations",),
    ),
    Rule(
        "log-softmax",
        "logits hold and log-probs do not: temperature, targets, the dtype of the log-softmax, or a mask of the "
        "vocabulary",
        at=("log_probs",),
        holds=("activations",),
    ),
    Rule(
        "single-tokens",
        "single tokens are off and those around them hold, so it is neither the model nor its weights: a value that "
        "was changed after it was computed, an edge of a block or a row in a kernel, or the target of these tokens",
        at=("log_probs", "entropy", "old_log_probs", "ref_log_probs"),
        without=("all_tokens", "rounded", "scaled", "tempered", "class:*"),
        when=_few_tokens,
    ),
    Rule(
        "no-activations",
        "log-probs are off, and nothing before them was recorded: record activations "
        "(debug.dump_options.activations, debug.target_module_pattern) to see the first module that is",
        at=("log_probs", "entropy"),
        when=lambda divergence, _: "activations" in divergence.unjudged,
    ),
    Rule(
        "old-is-current",
        "old log-probs are computed again after an update, so every ratio is 1: they must be those from before the "
        "step's first update",
        at=("old_log_probs",),
        what="equal to log_probs",
    ),
    Rule(
        "reference-is-the-policy",
        "the reference is the policy itself: its weights are shared, updated, or never loaded (reference.path)",
        at=("ref_log_probs",),
        what="equal to (log_probs|old_log_probs)",
    ),
    Rule(
        "order-not-restored",
        "each value belongs to another token of the batch: microbatches are reordered, and the order is not undone",
        at=("old_log_probs", "ref_log_probs", "log_probs", "advantages", "weights"),
        patterns=("permuted",),
        variants="base,reversed",
    ),
    Rule(
        "old-log-probs",
        "old log-probs are others than recorded: those of the sampler in place of recomputed ones (or the reverse; "
        "algorithm.old_log_probs), or of other weights",
        at=("old_log_probs",),
    ),
    Rule(
        "reference",
        "another reference model, or one that is synchronized otherwise: reference.path, reference.sync_every_n_steps",
        at=("ref_log_probs",),
    ),
    Rule(
        "determinism",
        "a few units in the last place: the same mathematics in another order of arithmetic (threads, "
        "processor, kernels, "
        "library versions; see OMP_NUM_THREADS, ATEN_CPU_CAPABILITY, CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO)",
        when=_rounding,
        variants="base",
    ),
)
