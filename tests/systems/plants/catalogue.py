"""The plants: six faults and five harmless changes of each system, fixed before the first of them ran.

A fault has the number of its kind among real defects (A: normalisation, B: reduction over data ranks, C: over tensor
ranks, D: over sequence ranks, E: pipeline, G: masks and positions, H: log-probs, I: advantages, J: KL, K: ratio and
clipping, L: gradient norm, M: optimizer, O: precision, Q: tokens of the loss), and the quantity that has to diverge
first: of those that are recorded, the first that the fault changes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """A change of a system around one cell.

    Attributes:
        name: context manager in the module of the system.
        cell: name of the cell.
        kind: kind of the fault; empty for a harmless change.
        first: quantity that has to diverge first; where: part of the name of its tensor.
    """

    system: str
    name: str
    cell: str
    kind: str = ""
    first: str = ""
    where: str = ""

    @property
    def location(self) -> str:
        """Where the context manager is, as ``--plant`` takes it."""
        return f"plants.{self.system}:{self.name}"

    def located(self, first: str) -> bool:
        """Return True if the quantity and tensor that diverged first are those expected."""
        quantity, _, tensor = first.partition(" ")
        return quantity == self.first and self.where in tensor


FAULTS = (
    Plant("trainer", "denominator_of_the_microbatch", "accumulation/sft/dense", "A01", "loss"),
    Plant("trainer", "last_microbatch_not_reduced", "ddp2-accumulation/sft/tied", "B02", "gradient"),
    Plant("trainer", "positions_from_one", "padded/sft/gpt2", "G06", "batch_inputs", "position_ids"),
    Plant("trainer", "clipped_to_half", "padded/sft/dense", "L05", "optimizer"),
    Plant("trainer", "weights_decay", "ddp2/sft/dense", "M06", "param"),
    Plant("trainer", "last_label_masked", "short-last-batch/sft/dense", "Q05", "loss"),
    Plant("trl", "tokens_of_this_rank_only", "ddp2-accumulation/trl:dapo/dense", "A03", "loss"),
    Plant("trl", "temperature_left_out", "padded/trl:dapo T=1.3/dense", "H01", "token_gradient"),
    Plant("trl", "baseline_of_the_batch", "padded/trl:dapo/dense", "I03", "loss"),
    Plant("trl", "k1_as_a_loss", "padded/trl:grpo beta=0.05/dense", "J01", "loss"),
    Plant("trl", "sequence_ratio_summed", "one-sample-accumulation/trl:gspo/dense", "K04", "token_gradient"),
    Plant("trl", "tool_tokens_trained", "padded/trl:dapo/tools", "Q02", "loss"),
    Plant("deepspeed", "accumulation_not_divided", "zero1-dp2-batches/grpo/dense", "A02", "gradient"),
    Plant("deepspeed", "gradients_not_reduced", "zero2-dp2/grpo/dense", "B01", "gradient"),
    Plant("deepspeed", "replicated_norms_not_summed", "autotp2/grpo/dense", "C01", "gradient", "_norm"),
    Plant("deepspeed", "norm_of_this_rank_only", "zero1-dp2/grpo/dense", "L01", "grad_norm"),
    Plant("deepspeed", "parameters_not_gathered", "zero2-dp2/sft/dense", "M02", "param"),
    Plant("deepspeed", "reduced_in_bfloat16", "zero2-dp4/grpo/tied", "O02", "gradient"),
    Plant("verl", "tokens_of_this_rank_only", "fsdp2-micro3/verl:token-mean/dense", "A03", "loss"),
    Plant(
        "verl",
        "sequence_ranks_not_scaled",
        "ulysses2-flash-micro3/verl:token-mean/dense",
        "D02",
        "token_gradient",
    ),
    Plant("verl", "log_probs_of_the_next_token", "padded/verl:token-mean/dense", "H05", "loss"),
    Plant("verl", "deviation_of_the_population", "nested/verl:token-mean/dense", "I07", "loss"),
    Plant("verl", "dual_clip_of_gains", "packed/verl:token-mean/dense", "K02", "loss"),
    Plant("verl", "norm_of_this_rank_only", "fsdp2/verl:dr_grpo/dense", "L01", "grad_norm"),
    Plant("megatron", "tokens_of_this_rank_only", "dp2/grpo/dense", "A03", "gradient"),
    Plant("megatron", "gradients_not_reduced", "dp4/grpo/dense", "B01", "gradient"),
    Plant("megatron", "norms_not_reduced", "tp2-sp/grpo/dense", "C01", "gradient", "norm"),
    Plant("megatron", "tied_weights_not_reduced", "pp2/grpo/tied", "E01", "gradient", "embed_tokens"),
    Plant("megatron", "replicas_counted_in_the_norm", "tp2/sequence-mean/dense", "L02", "grad_norm"),
    Plant("megatron", "parameters_not_gathered", "dp2-distributed-optimizer/grpo/dense", "M02", "param"),
)

HARMLESS = (
    Plant("trainer", "rows_reversed", "accumulation/sft/dense"),
    Plant("trainer", "wider_padding", "padded/sft/gpt2"),
    Plant("trainer", "evaluated_between", "ddp2-accumulation/sft/dense"),
    Plant("trainer", "loss_in_float64", "padded/sft/tied"),
    Plant("trainer", "gradients_zeroed_in_place", "ddp2/sft/dense"),
    Plant("trl", "rows_reversed", "accumulation/trl:dapo/dense"),
    Plant("trl", "old_log_probs_computed", "padded/trl:grpo/dense"),
    Plant("trl", "forward_in_pieces", "padded/trl:dapo/tied"),
    Plant("trl", "advantages_in_float64", "ddp2/trl:grpo/dense"),
    Plant("trl", "maximum_of_losses", "ddp2/trl:luspo/dense"),
    Plant("deepspeed", "reduced_and_broadcast", "zero2-dp2/grpo/dense"),
    Plant("deepspeed", "norm_in_float64", "zero1-dp2/grpo/dense"),
    Plant("deepspeed", "evaluated_between", "zero2-dp2-batches/grpo/tied"),
    Plant("deepspeed", "gathered_and_added", "autotp2/grpo/dense"),
    Plant("deepspeed", "gradients_of_other_strides", "zero2-dp2-overlap/grpo/dense"),
    Plant("verl", "microbatches_reversed", "packed-micro3/verl:token-mean/dense"),
    Plant("verl", "entropy_computed", "padded/verl:token-mean/dense"),
    Plant("verl", "logits_in_float64", "fsdp2-micro3/verl:gspo/dense"),
    Plant("verl", "log_ratio_not_clamped", "packed/verl:token-mean/tied"),
    Plant("verl", "reduced_each_time", "fsdp2-micro3/verl:token-mean/dense"),
    Plant("megatron", "reduced_and_broadcast", "dp2/grpo/dense"),
    Plant("megatron", "norm_in_float64", "tp2/grpo/dense"),
    Plant("megatron", "likelihood_in_float64", "pp2/grpo/dense"),
    Plant("megatron", "norms_reduced_one_by_one", "tp2-sp/grpo/dense"),
    Plant("megatron", "parameters_gathered_twice", "dp2-distributed-optimizer/grpo/dense"),
)
