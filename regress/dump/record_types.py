"""Record types, in the order in which a training step computes them."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from regress.errors import DumpError


@dataclass(frozen=True)
class RecordType:
    """One record type. `per_update` is True if it belongs to an optimizer update, False if to the whole step."""

    name: str
    per_update: bool
    help: str


RECORD_TYPES: tuple[RecordType, ...] = (
    RecordType("trajectory", False, "sampled completions with masks, rewards and sampler log-probs"),
    RecordType("batch_inputs", True, "model inputs as packed or padded: input_ids, position_ids, masks"),
    RecordType("old_log_probs", False, "log-probs under the policy before the first update of the step"),
    RecordType("ref_log_probs", False, "log-probs under the reference model"),
    RecordType("activations", True, "outputs of the modules that target_module_pattern names"),
    RecordType("forward_data", True, "log-probs and entropy of the training forward pass"),
    RecordType("is_loss_debug", True, "intermediate values of the loss, token by token"),
    RecordType("loss", True, "the loss of a microbatch, its parts and metrics"),
    RecordType(
        "token_gradient", True, "gradient of the loss with respect to each token's log-prob and entropy"
    ),
    RecordType("gradient", True, "gradients after full accumulation"),
    RecordType(
        "gradient_clipped",
        True,
        "gradients that were changed after the backward pass before anything saw them",
    ),
    RecordType("param", True, "parameters after the optimizer update"),
    RecordType("optimizer", True, "optimizer state after the update"),
    RecordType(
        "metrics", True, "metrics of an update: loss, gradient norm, learning rate, means over loss tokens"
    ),
    RecordType("step_metrics", True, "metrics of a rollout step, recorded with its last update"),
)
FOLDERS = (*(one.name for one in RECORD_TYPES), "train", "val", "val_samples")
"""Sub-folders of a dump: one for each type, and those of recorded rollouts by use."""

_INDEX = {one.name: index for index, one in enumerate(RECORD_TYPES)}
_LATER = ("token_gradient", "gradient_clipped", "metrics", "step_metrics")
"""Types added after the first release, in the order in which they were added."""
_NUMBERS = {
    name: number
    for number, name in enumerate((*(one.name for one in RECORD_TYPES if one.name not in _LATER), *_LATER))
}


def type_number(name: str) -> int:
    """Return the number of a record type in files, which later types do not change; raises `DumpError` if unknown."""
    type_index(name)
    return _NUMBERS[name]


def type_index(name: str) -> int:
    """Return the position of a record type in the dataflow; raises `DumpError` for an unknown one."""
    if name not in _INDEX:
        near = get_close_matches(name, _INDEX, n=1) or [", ".join(_INDEX)]
        raise DumpError(f"record type {name!r} does not exist: did you mean {near[0]}?")
    return _INDEX[name]
