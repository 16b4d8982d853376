"""Faults of what a resumed run reads: halves of a matrix, and a reference in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regress.engine.checkpoint import resume
from regress.engine.checkpoint.weights import load_weights
from regress.engine.policy import LocalPolicy
from regress.engine.reference import Reference
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded


@fault(
    category="N",
    fresh=True,
    source="shards of a fused matrix that are joined in the order of their files' names",
    variants=("resume-at2-fsdp2-to-pp2",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    steps=None,
    # both name weights: those that are loaded anew, and those that a stage holds
    rules=("stale-weights", "pipeline-exchange", "module", "inputs-hold"),
)
def shards_of_gates_joined_in_reverse(patch: Patch) -> None:
    """A resumed run has the two halves of each gate's weight in the reverse order."""

    def wrong(owner: LocalPolicy, weights: Mapping[str, Tensor]) -> None:
        found = {name: w.roll(len(w) // 2, 0) for name, w in weights.items() if "gate_proj" in name}
        assert found
        load_weights(owner, {**weights, **found})

    patch.setattr(resume, "load_weights", wrong)


@fault(
    category="N",
    kind="precision",
    fresh=True,
    source="OpenTau#185: a frozen model that a checkpoint holds in half precision",
    cases=("cispo_kl",),
    variants=("resume-at2",),
    precisions=("float64",),
    first="ref_log_probs",
    steps=None,
    rules=("reference", "precision", "inputs-hold"),
)
def reference_restored_in_bfloat16(patch: Patch) -> None:
    """The reference, which had moved, comes out of the checkpoint in half precision."""
    right: Any = Reference.load

    def wrong(self: Reference, weights: Mapping[str, Tensor]) -> None:
        right(self, {name: rounded(value) for name, value in weights.items()})

    patch.setattr(Reference, "load", wrong)
