"""Quantities of a training step: their meaning, the tensors that hold them, and the order in which they arise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from regress.errors import CompareError, meant


class Kind(StrEnum):
    """Relation of a local tensor to the canonical one.

    EXACT: ids and masks ``[B, T]``. TOKEN: values ``[B, T]`` at the loss tokens. HIDDEN: a module's output
    ``[B, T, ...]`` (or its rows ``[B * T, ...]``) at all tokens, or ``[1, K, V]`` (``[K, V]``) at the loss tokens.
    SHARE: a microbatch's part of a sum. WHOLE: a full tensor of an update. SCALAR: a number of an update.
    STRUCTURE: not of a tensor.
    """

    EXACT = "exact"
    TOKEN = "token"
    HIDDEN = "hidden"
    SHARE = "share"
    WHOLE = "whole"
    SCALAR = "scalar"
    STRUCTURE = "structure"


PER_MICROBATCH = frozenset((Kind.EXACT, Kind.TOKEN, Kind.HIDDEN, Kind.SHARE))
AT_TOKENS = frozenset((Kind.EXACT, Kind.TOKEN, Kind.HIDDEN))


@dataclass(frozen=True)
class Quantity:
    """A quantity under the name that test ids, goldens and tolerances use.

    Attributes:
        level: scope of its tensors, ``"step"``, ``"update"`` or ``"micro"``.
        native: True if its values have the dtype of the model; log-probs and all that is made of them are at least
            float32.
        eps: tolerance of values that nobody measured, in spacings of their dtype, relative to the largest: four times
            the largest noise floor of the golden cases (weights moved by one unit in the last place, and the error
            against float64), but one degenerate model; rounded up to a power of two.
        coarse: the same for dtypes of less than 24 bits, whose spacing is nearly all of the noise: twice the largest
            difference between layouts of the golden cases in bfloat16 (padding side, packing, microbatches of one and
            of three, reversed rows), rounded up to a power of two. Gradients of tokens that rounding carries over the
            clip are left out there: they are 0 on one side of it, however fine the dtype. So are shares of clipped
            tokens, which move by whole tokens. Metrics of updates differ by up to 11.3 spacings (the least ratio of
            dapo; 4.4 on dense, gpt2, moe and tools), those of steps by 4.9.
    """

    name: str
    kind: Kind
    help: str
    level: str = "micro"
    native: bool = False
    eps: int = 32
    coarse: int = 4

    @property
    def per_microbatch(self) -> bool:
        """True if every microbatch has its own tensors of it."""
        return self.level == "micro"

    @property
    def exact(self) -> bool:
        """True if it is compared exactly, so that it needs no tolerance."""
        return self.kind in (Kind.EXACT, Kind.STRUCTURE)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "trajectory", Kind.STRUCTURE, "recorded rollouts: tokens, masks, rewards, sampler log-probs", "step"
    ),
    Quantity("sampler_log_probs", Kind.WHOLE, "log-probs that the sampler drew the tokens with", "step"),
    Quantity(
        "mismatch",
        Kind.WHOLE,
        "sampler's log-probs less those of the first update's forward pass, which has the same weights",
        "step",
    ),
    Quantity(
        "coverage",
        Kind.STRUCTURE,
        "every token computed exactly once, every element held, every record written once",
        "update",
    ),
    Quantity("batch_inputs", Kind.EXACT, "token ids, position ids and masks that the model reads"),
    Quantity("advantages", Kind.TOKEN, "advantage of each token"),
    Quantity("weights", Kind.TOKEN, "weight of each token in the loss: aggregation and denominators"),
    Quantity(
        "activations",
        Kind.HIDDEN,
        "outputs of modules, and logits of the loss tokens",
        native=True,
        eps=64,
        coarse=32,
    ),
    Quantity("log_probs", Kind.TOKEN, "log-probs under the policy that is updated", eps=16),
    Quantity("entropy", Kind.TOKEN, "entropy of the distribution each token was drawn from", coarse=8),
    Quantity(
        "old_log_probs", Kind.TOKEN, "log-probs under the policy before the first update of the step", eps=16
    ),
    Quantity("ref_log_probs", Kind.TOKEN, "log-probs under the reference model", eps=16),
    Quantity("sampler_weights", Kind.TOKEN, "correction for a sampler that differs from the policy"),
    Quantity("kl", Kind.TOKEN, "estimate of the divergence from the reference", eps=128, coarse=8),
    Quantity("ratio", Kind.TOKEN, "importance ratio before any clip", eps=64, coarse=16),
    Quantity("policy_loss", Kind.TOKEN, "policy loss of each token", eps=64, coarse=8),
    Quantity("entropy_loss", Kind.TOKEN, "entropy of each token as it enters the loss", coarse=8),
    Quantity("token_loss", Kind.TOKEN, "loss of each token, all terms", eps=64, coarse=8),
    Quantity("loss", Kind.SHARE, "a microbatch's share of the loss and of its terms"),
    Quantity(
        "token_gradient",
        Kind.TOKEN,
        "gradient of the loss with respect to the log-prob of each token",
        eps=256,
        coarse=64,
    ),
    Quantity(
        "entropy_gradient", Kind.TOKEN, "gradient of the loss with respect to the entropy of each token"
    ),
    Quantity(
        "token_residual", Kind.TOKEN, "part of a token's gradient that log-prob and entropy leave unexplained"
    ),
    Quantity(
        "logit_gradient",
        Kind.HIDDEN,
        "gradient of the loss with respect to the logits of the loss tokens",
        native=True,
        eps=256,
        coarse=64,
    ),
    Quantity(
        "gradient",
        Kind.WHOLE,
        "gradients after full accumulation, before clipping",
        "update",
        native=True,
        eps=512,
        coarse=32,
    ),
    Quantity(
        "gradient_clipped",
        Kind.WHOLE,
        "gradients that were changed before anything could see them",
        "update",
        eps=512,
        coarse=32,
    ),
    Quantity("grad_norm", Kind.SCALAR, "norm of the gradient before clipping", "update", eps=256),
    Quantity(
        "optimizer", Kind.WHOLE, "optimizer state after the update", "update", native=True, eps=512, coarse=32
    ),
    Quantity("param", Kind.WHOLE, "parameters after the update", "update", native=True, eps=256, coarse=8),
    Quantity(
        "metrics",
        Kind.SCALAR,
        "metrics of the update, combined over microbatches and ranks",
        "update",
        eps=512,
        coarse=32,
    ),
    Quantity(
        "step_metrics",
        Kind.SCALAR,
        "metrics of the rollout step, at its last update",
        "update",
        eps=512,
        coarse=16,
    ),
    Quantity("other", Kind.HIDDEN, "tensors of microbatches under names that belong to no quantity"),
    Quantity("replicas", Kind.STRUCTURE, "what several ranks hold is the same bit for bit", "update"),
    Quantity("invariants", Kind.STRUCTURE, "what is true of every update, whatever was recorded", "update"),
)
"""All quantities, in the order of computation: an optimizer makes the new parameters from its new state."""

_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
_ORDER = {quantity.name: index for index, quantity in enumerate(QUANTITIES)}


@dataclass(frozen=True)
class QuantitySource:
    """A recorded tensor and the golden tensor that it must equal.

    Attributes:
        record_type, tensor: type of the record, and name of the tensor in it.
        quantity, name: quantity and name of its golden values.
        primary: True if it is the first place to look for them; other record types repeat them.
    """

    record_type: str
    tensor: str
    quantity: str
    name: str
    primary: bool = True

    @property
    def label(self) -> str:
        """The name in verdicts: repetitions name their record type."""
        return self.name if self.primary else f"{self.record_type}/{self.tensor}"


TOKEN_GRADIENTS = ("token_gradient", "entropy_gradient", "token_residual", "logit_gradient")
"""Quantities of the record type ``token_gradient``, each a tensor of the same name."""

EVERYWHERE = ("token_gradient", "entropy_gradient")
"""Quantities of tokens that are 0 at every token that the loss leaves out: they are compared there, too."""

RECOVERABLE = QuantitySource("token_gradient", "recoverable", "token_residual", "recoverable")
"""Mask of the tokens whose derivatives rounding does not hide; others are recorded as 0, and not compared."""

ROUTER = "router_loss"
"""A microbatch's part of the load-balancing loss of routers, which is in its loss and no sum over loss tokens."""

SOURCES: tuple[QuantitySource, ...] = (
    *(
        QuantitySource("batch_inputs", name, "batch_inputs", name)
        for name in ("input_ids", "position_ids", "attention_mask", "response_mask")
    ),
    QuantitySource("forward_data", "input_ids", "batch_inputs", "input_ids", primary=False),
    QuantitySource("forward_data", "response_mask", "batch_inputs", "response_mask", primary=False),
    QuantitySource("forward_data", "log_probs", "log_probs", "log_probs"),
    QuantitySource("forward_data", "entropy", "entropy", "entropy"),
    QuantitySource("is_loss_debug", "effective_valid", "batch_inputs", "response_mask", primary=False),
    QuantitySource("is_loss_debug", "log_probs", "log_probs", "log_probs", primary=False),
    QuantitySource("is_loss_debug", "prob_ratio", "ratio", "prob_ratio"),
    QuantitySource("is_loss_debug", "elementwise_loss", "token_loss", "elementwise_loss"),
    *(
        QuantitySource("is_loss_debug", name, name, name)
        for name in (
            *("advantages", "weights", "old_log_probs", "ref_log_probs", "sampler_weights"),
            *("kl", "policy_loss", "entropy_loss"),
        )
    ),
    *(
        QuantitySource("loss", name, "loss", name)
        for name in ("loss", "pg_loss", "kl_loss", "entropy_loss", ROUTER)
    ),
    QuantitySource("is_loss_debug", "loss", "loss", "loss", primary=False),
    *(QuantitySource("token_gradient", name, name, name) for name in TOKEN_GRADIENTS),
    RECOVERABLE,
    QuantitySource("old_log_probs", "old_log_probs", "old_log_probs", "old_log_probs", primary=False),
    QuantitySource("ref_log_probs", "ref_log_probs", "ref_log_probs", "ref_log_probs", primary=False),
)
"""Tensors with a name of their own; activations, gradients, parameters and optimizer states go by the model's."""

SHARES = {"loss": "token_loss", "pg_loss": "policy_loss", "kl_loss": "kl", "entropy_loss": "entropy_loss"}
"""Sum -> quantity whose weighted sum over a microbatch's loss tokens is its share of that sum."""

METRICS = ("metrics", "step_metrics")
"""Record types and quantities of the numbers that an update and a rollout step report, each under its metric's name."""
NEW = "new: the golden side has nothing of this name, so it was not judged"
"""Words for what was added since: what is reported besides changes nothing that is computed."""

OPEN_TYPES = ("activations", "gradient", "gradient_clipped", "param", "optimizer", *METRICS)
"""Record types whose tensors are named after modules, parameters and metrics."""

MASKS = {"batch_inputs": "response_mask", "forward_data": "response_mask", "is_loss_debug": "effective_valid"}
"""The tensor of each record type that tells the loss tokens."""

MICRO_TYPES = ("batch_inputs", "activations", "forward_data", "is_loss_debug", "loss", "token_gradient")
LOSS_TYPES = ("forward_data", "is_loss_debug", "loss", "token_gradient")
"""Record types of loss values, which the first token of a sample does not have."""
UPDATE_TYPES = ("gradient", "gradient_clipped", "optimizer", "param", *METRICS)
STEP_TYPES = ("old_log_probs", "ref_log_probs")

ADDED = (*TOKEN_GRADIENTS, *METRICS)
"""Quantities that cases recorded by the first release lack."""

OTHER = "other"
"""Quantity of tensors unknown to all others, where two dumps are compared."""

ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("per_token_loss", "token_loss", "loss_per_token"), "elementwise_loss"),
    **dict.fromkeys(("coef_1", "ratio", "importance_ratio", "importance_weights"), "prob_ratio"),
    **dict.fromkeys(("per_token_logps", "logps", "logprobs", "token_logprobs"), "log_probs"),
    **dict.fromkeys(("old_per_token_logps", "old_logps", "old_logprobs"), "old_log_probs"),
    **dict.fromkeys(("ref_per_token_logps", "ref_logps", "ref_logprobs", "ref_log_prob"), "ref_log_probs"),
    **dict.fromkeys(("per_token_kl", "kld", "kl_div"), "kl"),
    **dict.fromkeys(("completion_mask", "loss_mask"), "response_mask"),
    **dict.fromkeys(("entropies", "token_entropy"), "entropy"),
}
"""Names that other trainers give to known tensors."""

_SOURCES = {(source.record_type, source.tensor): source for source in SOURCES}
_TYPES: dict[tuple[str, str], set[str]] = {}
"""Record types of an update that repeat a golden tensor, by its quantity and name."""
for _source in SOURCES:
    if _source.record_type not in STEP_TYPES:
        _TYPES.setdefault((_source.quantity, _source.name), set()).add(_source.record_type)


def quantity_named(name: str) -> Quantity:
    """Return the quantity of that name; raises `CompareError` for none."""
    if name not in _BY_NAME:
        raise CompareError(
            f"{meant(name, _BY_NAME)}{name!r} is not a quantity; choose one of {', '.join(_BY_NAME)}"
        )
    return _BY_NAME[name]


def order_of(quantity: str) -> int:
    """Return the place of a quantity in the order of computation; unknown ones come last."""
    return _ORDER.get(quantity, len(_ORDER))


def source_of(record_type: str, tensor: str) -> QuantitySource | None:
    """Return the source of the golden values of a recorded tensor, or None if no quantity knows it."""
    if record_type in OPEN_TYPES:
        return QuantitySource(record_type, tensor, record_type, tensor)
    return _SOURCES.get((record_type, tensor))


def source_or_other(record_type: str, tensor: str) -> QuantitySource:
    """Return the source of a recorded tensor; one of quantity `OTHER` for a tensor that no quantity knows."""
    return source_of(record_type, tensor) or QuantitySource(
        record_type, tensor, OTHER, f"{record_type}/{tensor}"
    )


def nearest_tensor(record_type: str, tensor: str) -> str | None:
    """Return the known tensor with the closest name, with its type if that is another one; None if none is close."""
    here = {source.tensor for source in SOURCES if source.record_type == record_type}
    everywhere = {source.tensor: source.record_type for source in reversed(SOURCES)}
    for names in (here, everywhere):
        alias = ALIASES.get(tensor, tensor)
        found = [alias] if alias in names else get_close_matches(tensor, sorted(names), n=1)
        if found:
            return found[0] if found[0] in here else f"{everywhere[found[0]]}/{found[0]}"
    return None


def primary_source(quantity: str, name: str) -> QuantitySource:
    """Return the first place to look for a golden tensor of a microbatch."""
    if quantity in OPEN_TYPES:
        return QuantitySource(quantity, name, quantity, name)
    found = [source for source in SOURCES if (source.quantity, source.name) == (quantity, name)]
    return next(
        (source for source in found if source.primary), QuantitySource(quantity, name, quantity, name)
    )


def exclusive_types(names: Iterable[tuple[str, str]]) -> set[str]:
    """Return the types without which these golden tensors (quantity, name) could not have been recorded."""
    found = set()
    for quantity, name in names:
        record_types = {quantity} if quantity in OPEN_TYPES else _TYPES.get((quantity, name), set())
        if len(record_types) == 1:
            found |= record_types
    return found


def sources_in(record_type: str, quantity: str, names: list[str]) -> Iterator[QuantitySource]:
    """Yield the tensors that a record of a type has to hold, of a quantity with these golden names."""
    if record_type in OPEN_TYPES:
        if quantity == record_type:
            yield from (QuantitySource(record_type, name, quantity, name) for name in names)
        return
    for source in SOURCES:
        if source.record_type == record_type and source.quantity == quantity and source.name in names:
            yield source
