"""Known findings in released trainers: the red cells that are expected, each until it is mended upstream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from regress.systems.conformance_row import RED, ConformanceRow

DOCUMENT = "reference/finding-details.md"
"""Page of the documentation, beside that of the table, with a section for each finding."""


@dataclass(frozen=True)
class Finding:
    """A defect of a released system that the table shows.

    Attributes:
        name: short name, printed in the red cell.
        system: name of the adapter.
        cells: patterns of the names of the cells that show it; each of them has to be red.
        versions: versions of the system in which it was seen.
        title: what is wrong, in a few words.
        anchor: section of `DOCUMENT`.
        shown: pattern of what the red cell tells, by which this defect is known from another one.
        also: adapters of the same package in other environments, whose cells of these names show it, too.
    """

    name: str
    system: str
    cells: tuple[str, ...]
    versions: tuple[str, ...]
    title: str
    anchor: str
    shown: str
    also: tuple[str, ...] = ()

    def meets(self, row: ConformanceRow) -> bool:
        """Return True if the cell of a row is one that shows the defect."""
        return row.system in (self.system, *self.also) and any(
            fnmatchcase(row.cell.name, one) for one in self.cells
        )


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "transformers-tp-norms",
        "trainer",
        ("tp2-accumulation/sft/dense",),
        ("5.23.0",),
        "tensor parallelism counts the gradients of q_norm and k_norm of all microbatches but the last several times",
        "transformers-tensor-parallel-gradients-of-q_norm-and-k_norm",
        "drift: gradient *.self_attn.[qk]_norm.weight:*",
    ),
    Finding(
        "trl-left-padded-positions",
        "trl",
        ("padded/trl:dapo/gpt2",),
        ("1.16.0",),
        "left-padded prompts without position ids, which models with absolute positions need",
        "trl-left-padded-prompts-without-position-ids",
        "mask: batch_inputs position_ids:*",
    ),
    Finding(
        "megatron-interleaved-two-stages",
        "megatron",
        ("pp2-vpp2-batched/grpo/dense",),
        ("0.16.1",),
        "the interleaved schedule on two stages crosses activations and gradients",
        "megatron-core-the-interleaved-schedule-on-two-stages",
        "drift: log_probs:*",
    ),
    Finding(
        "deepspeed-round-robin",
        "deepspeed",
        ("zero2-dp2-round-robin/grpo/dense",),
        ("0.19.8",),
        "with round_robin_gradients the functions for whole parameters and gradients return other parameters'",
        "deepspeed-round_robin_gradients-and-whole-parameters",
        "*raised RuntimeError: The size of tensor a*",
    ),
    Finding(
        "deepspeed-ulysses-zero3",
        "deepspeed",
        ("ulysses2-zero3/grpo/dense",),
        ("0.19.8",),
        "ZeRO 3 divides gradients by the parts of a sequence, too; stages 0 to 2 do not",
        "deepspeed-ulysses-under-zero-3",
        "drift: gradient *",
    ),
    Finding(
        "deepspeed-ulysses-packed",
        "deepspeed",
        ("ulysses2-zero1-packed/grpo/dense",),
        ("0.19.8",),
        "Ulysses over sdpa lets the samples of a packed row attend to each other",
        "deepspeed-ulysses-over-sdpa-and-packed-rows",
        "drift: log_probs:*",
    ),
    Finding(
        "verl-ulysses-without-flash",
        "verl",
        ("ulysses2-sdpa/*", "ulysses2-eager/*"),
        ("0.9.1",),
        "Ulysses with sdpa or eager attention exchanges nothing: each rank attends within its own piece",
        "verl-ulysses-with-any-attention-but-flash-attention",
        "drift: activations model.layers.0:*",
        also=("verl-pins",),
    ),
    Finding(
        "verl-norm-of-the-microbatch",
        "verl",
        ("nested-micro1/verl:seq-mean-token-sum-norm/dense",),
        ("0.9.1",),
        "seq-mean-token-sum-norm without loss_scale_factor divides by the longest response of each microbatch",
        "verl-seq-mean-token-sum-norm-and-the-microbatch",
        "drift: loss:*",
    ),
    Finding(
        "verl-sft-mask-over-borders",
        "verl",
        ("*/sft first-token/dense",),
        ("0.9.1",),
        "sft_loss shifts the loss mask over the borders of samples",
        "verl-sft_loss-and-the-borders-of-samples",
        "drift: loss:*",
        also=("verl-pins",),
    ),
)
"""One row for each finding; a cell that meets one and is not red makes a run fail."""


def marked(row: ConformanceRow, findings: Sequence[Finding] = FINDINGS) -> ConformanceRow:
    """Return a row with the name of the known finding that its cell shows, or does not show any more.

    A cell that is red by something else has none. A row that was marked before is marked anew.
    """
    own = [one for one in findings if one.meets(row)]
    if row.result in RED:
        own = [one for one in own if fnmatchcase(row.told, one.shown)]
    return replace(row, finding=own[0].name if own else "")


def gone(finding: Finding) -> str:
    """Return what is to be done about a finding that its cell does not show any more."""
    return (
        f"{finding.name} ({finding.title}), seen in {', '.join(finding.versions)}, is not there any more: say so in "
        f"docs/{DOCUMENT}, and take its row out of regress/systems/known_findings.py"
    )


def finding_named(name: str, findings: Sequence[Finding] = FINDINGS) -> Finding | None:
    """Return the finding of a name, None if there is none."""
    return next((one for one in findings if one.name == name), None)
