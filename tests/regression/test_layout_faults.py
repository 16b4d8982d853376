"""Bugs of real parallel training, injected into the ranks of a replay: each must fail first where it broke first.

Nothing recorded is edited: ranks compute something else. One step on as few ranks as can show it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.errors import RankError
from regress.golden.store import GoldenStore
from regress.replay.judge import judge_replay
from regress.replay.layouts import LAYOUTS
from regress.replay.matrix import Replay
from regress.replay.parts import overrides_of
from regress.replay.run import replay
from regress.replay.variants import Precision, Variant

sys.path.insert(0, str(Path(__file__).parent))
import layout_faults as bugs  # by the name under which the ranks import it

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class Fault:
    """A bug, and how it has to show.

    Attributes:
        inject: breaks the engine on every rank.
        source: where it was met.
        case, variant: where it is looked for.
        quantity: what fails first.
        ranks: which ranks have failures of that quantity; none for a verdict on all of them together.
        names: pattern of the tensors of that quantity that fail; all others are right.
        status: of the first verdict.
        update: in which the first failure is.
        says: a part of what the first verdict says.
    """

    inject: bugs.Fault
    source: str
    case: str
    variant: str
    quantity: str
    ranks: Collection[int] = (0, 1)
    names: str = ".*"
    status: Status = Status.DRIFT
    update: int | None = None
    says: str = ""

    @property
    def name(self) -> str:
        return f"{self.inject.__name__}-{self.case}-{self.variant}"


AFTER_ATTENTION = r"model\.layers\..|model\.norm|lm_head"
"""Activations of all that comes after the first attention."""
HEAD_NORMS = r".*\.[qk]_norm\.weight"
EXPERTS = r".*\.experts\..*"
MOMENTS = r".*/exp_avg(_sq)?"
EMBEDDED = r"model\.embed_tokens\.weight"

FAULTS = (
    # samples, denominators, reduced inputs of the loss
    Fault(
        bugs.same_samples_on_every_rank,
        "TRL PR#2824, Megatron PR#5983: one seed for all ranks, the same samples on each",
        "dense",
        "dp2",
        "coverage",
        (),
        status=Status.COVERAGE,
        says="was produced by no microbatch",
    ),
    Fault(
        bugs.incomplete_microbatch_dropped,
        "prime-rl PR#1035, verl PR#5725: the place in the data of a rank is lost, and samples with it",
        "tools",
        "dp2-packed-budget48",
        "coverage",
        (),
        status=Status.COVERAGE,
        says="was produced by no microbatch",
    ),
    Fault(
        bugs.denominator_of_own_rank,
        "prime-rl PR#2359, TRL PR#3231: tokens counted per rank, then a mean over ranks",
        "dapo",
        "dp2-dealt",
        "weights",
        update=0,
    ),
    Fault(
        bugs.denominator_of_own_rank,
        "the same with a rank whose samples are all masked: it is counted in the mean",
        "dapo",
        "dp2",
        "weights",
        (1,),
        update=0,
    ),
    Fault(
        bugs.advantages_of_own_samples,
        "AReaL#1419, slime#2230: statistics of partial groups",
        "dense",
        "dp2-dealt",
        "advantages",
    ),
    Fault(
        bugs.log_probs_summed_over_all_ranks,
        "Megatron#7452 finding 10: an all-reduce over replicas doubles what each has whole",
        "dense",
        "tp2",
        "ref_log_probs",
    ),
    # replicas
    Fault(
        bugs.other_weights_on_a_rank,
        "NeMo Automodel PR#3822: ranks never synchronized",
        "dense",
        "dp2",
        "activations",
        (1,),
    ),
    Fault(
        bugs.last_bit_on_a_rank,
        "BLOOM-176B, DeepSpeed#1801: replicated norms drift apart over the tensor-parallel ranks",
        "dense",
        "tp2",
        "replicas",
        (),
        r"activations/model\.norm|param/model\.norm\.weight",
        says="of rank 1 microbatch 0 differs from that of rank 0",
    ),
    # sums of gradients over ranks
    Fault(
        bugs.averaged_over_ranks,
        "TRL PR#3938: a mean over ranks of shares that add up",
        "dense",
        "dp2",
        "gradient",
    ),
    Fault(
        bugs.averaged_over_ranks,
        "Megatron#673: loss not times cp before the mean",
        "dense",
        "cp2",
        "gradient",
    ),
    Fault(bugs.averaged_over_shards, "FSDP2's default divide factor", "dense", "fsdp2", "gradient"),
    Fault(
        bugs.averaged_over_shards,
        "the same over replicas of shards",
        "dense",
        "dp2-fsdp2-hsdp-mbs3",
        "gradient",
        (0, 1, 2, 3),
    ),
    Fault(
        bugs.averaged_by_ddp, "TRL PR#3938: DDP's mean left standing", "dense", "dp2-ddp", "token_gradient"
    ),
    Fault(
        bugs.loss_times_ranks,
        "NeMo Automodel PR#3830: times dp against a mean that is none",
        "dense",
        "dp2",
        "token_gradient",
    ),
    Fault(bugs.loss_times_ranks, "verl PR#4250: times cp", "dense", "cp2", "token_gradient"),
    Fault(
        bugs.sums_left_out,
        "VeOmni PR#1115: ranks of one sequence left out of the group",
        "dense",
        "cp2",
        "gradient",
    ),
    Fault(
        bugs.sums_left_out,
        "Megatron PR#3693: replicas of the sharded optimizer left out",
        "dense",
        "dp2-fsdp2",
        "gradient",
        range(4),
    ),
    Fault(
        bugs.sums_left_out,
        "torch 2.13 parallelize_module: head norms see their own heads",
        "dense",
        "tp2",
        "gradient",
        names=HEAD_NORMS,
    ),
    Fault(
        bugs.summed_twice,
        "torch.distributed.nn.functional.all_reduce sums again in its backward pass",
        "dense",
        "tp2",
        "gradient",
        names=HEAD_NORMS,
    ),
    Fault(
        bugs.summed_in_every_microbatch,
        "transformers 5.23 ReplicatedWithGradAllReduce: a hook sums what is accumulated",
        "dense",
        "tp2-mbs6",
        "gradient",
        names=HEAD_NORMS,
    ),
    Fault(
        bugs.summed_in_every_microbatch,
        "picotron PR#5: synchronization inside of accumulation",
        "tools",
        "dp2-packed-budget48",
        "gradient",
    ),
    Fault(
        bugs.ddp_bypassed,
        "minimind#853: the model is called past its wrapper",
        "dense",
        "dp2-ddp",
        "gradient",
    ),
    Fault(
        bugs.synchronized_first_instead_of_last,
        "FunASR PR#3472, build-nanogpt PR#30: no_sync around the wrong microbatches",
        "dense",
        "dp2-ddp-mbs2",
        "gradient",
    ),
    Fault(
        bugs.rank_without_samples_stays_away,
        "slime PR#73: a rank with nothing to train on",
        "dr_grpo",
        "dp5",
        "gradient",
        (4,),
    ),
    Fault(
        bugs.gradients_begin_with_something,
        "Megatron PR#4609: gathered parameters left in the buffer of gradients",
        "dense",
        "fsdp2",
        "gradient",
        (1,),
    ),
    Fault(
        bugs.divided_twice_by_torch,
        "torch 2.13 _fsdp_collectives.py: a divide factor counts twice in float64 and float16 with one shard",
        "dense",
        "dp2",
        "gradient",
    ),
    # norm and clipping
    Fault(bugs.norm_of_own_shard, "torchtitan#766: norm of the local shards", "dense", "fsdp2", "grad_norm"),
    Fault(
        bugs.replicas_counted_each,
        "NeMo-RL PR#3788: replicated gradients counted tp times",
        "dense",
        "tp2",
        "grad_norm",
    ),
    Fault(
        bugs.replicas_counted_each,
        "ROCm TransformerEngine PR#715: whole gradients counted once a rank",
        "dense",
        "dp2",
        "grad_norm",
    ),
    Fault(
        bugs.experts_left_out_of_the_norm,
        "DeepSpeed PR#5411, DeepSpeed#8475: experts not in the norm",
        "moe",
        "ep2",
        "grad_norm",
    ),
    Fault(
        bugs.clipped_by_own_norm,
        "AReaL#312: clipped by the norm of the local shards",
        "tied",
        "fsdp2",
        "optimizer",
        names=MOMENTS,
    ),
    Fault(
        bugs.epsilon_of_every_rank,
        "pytorch#149768: norm + 1e-6 on a partial DTensor adds it on every rank",
        "tied",
        "fsdp2",
        "optimizer",
        names=MOMENTS,
    ),
    # parameters and optimizer
    Fault(
        bugs.update_lost_on_a_rank,
        "Megatron PR#6920: updated parameters do not reach a rank",
        "dense",
        "dp2",
        "optimizer",
        (1,),
    ),
    Fault(
        bugs.update_lost_on_a_rank,
        "accelerate#2665: the optimizer has the parameters of before they were sharded",
        "dense",
        "fsdp2",
        "optimizer",
        (1,),
    ),
    Fault(
        bugs.decay_on_one_rank_only,
        "verl#5070: weight decay of the wrong parameters, here of one rank's",
        "dense",
        "dp2",
        "param",
        (1,),
    ),
    Fault(
        bugs.counter_ahead_on_a_rank,
        "Megatron PR#5976: a synthetic first step counts, here on one rank",
        "dense",
        "dp2",
        "optimizer",
        (1,),
        r".*/step",
    ),
    Fault(
        bugs.state_of_another_shard,
        "Megatron PR#6858: a rank resumes from the state of another",
        "dense",
        "fsdp2",
        "optimizer",
        names=r".*/exp_avg",
    ),
    Fault(
        bugs.shards_exchanged,
        "ROCm Megatron-LM PR#63: parts of a checkpoint put together in the wrong order",
        "dense",
        "fsdp2",
        "activations",
        names=AFTER_ATTENTION,
    ),
    Fault(
        bugs.stale_part_on_a_rank,
        "Megatron#950: a forward pass with parameters of before the update",
        "dapo",
        "fsdp2",
        "activations",
        update=1,
    ),
    # tensor and sequence parallelism
    Fault(
        bugs.norms_of_columns_not_summed,
        "Megatron#1446: gradients of norms not summed under sequence parallelism",
        "dense",
        "tp2-sp",
        "gradient",
        names=r".*layernorm\.weight|model\.norm\.weight",
    ),
    Fault(
        bugs.router_not_summed,
        "Megatron#599, torchtitan#2387: nor those of routers",
        "moe",
        "tp2-sp-left",
        "gradient",
        names=r".*\.gate\.weight",
    ),
    Fault(
        bugs.untied,
        "torch 2.13 parallelize_module unties embeddings",
        "tied",
        "tp2",
        "gradient",
        names=rf"{EMBEDDED}|lm_head\.weight",
    ),
    Fault(
        bugs.gradient_taken_for_whole,
        "torchtitan PR#2388: to_local without grad_placements=Partial",
        "dense",
        "tp2",
        "gradient",
        names=r"model\..*",
    ),
    Fault(
        bugs.columns_of_the_other_rank,
        "Megatron#7452 finding 7: scattered to the wrong ranks",
        "dense",
        "tp2-sp",
        "activations",
        names=AFTER_ATTENTION,
    ),
    # a vocabulary in parts
    Fault(
        bugs.offset_one_too_high,
        "Megatron#737: a part of the vocabulary taken for another",
        "dense",
        "tp2",
        "log_probs",
    ),
    Fault(
        bugs.maximum_of_own_part,
        "ROCm aiter PR#3334: parts merged that are relative to different shifts",
        "dense",
        "tp2",
        "log_probs",
    ),
    Fault(
        bugs.padding_ids_counted,
        "ColossalAI#5488, torchtitan PR#4319: a vocabulary filled up to a multiple of the ranks",
        "dense",
        "tp2",
        "log_probs",
    ),
    Fault(
        bugs.whole_logits_in_parallel,
        "Megatron#7452 finding 2: gathered logits in a parallel cross entropy",
        "dense",
        "tp2",
        "log_probs",
    ),
    Fault(
        bugs.sum_without_gradient,
        "ms-swift PR#9947: all_reduce without autograd",
        "dense",
        "tp2",
        "logit_gradient",
    ),
    Fault(
        bugs.entropy_of_changed_logits,
        "verl PR#1672, verl#2484: logits overwritten before their entropy is taken",
        "dr_grpo",
        "tp2",
        "entropy",
    ),
    # pipelines
    Fault(
        bugs.tied_gradient_not_summed,
        "Megatron#844: tied embeddings of first and last stage",
        "tied",
        "pp2",
        "gradient",
        names=EMBEDDED,
    ),
    Fault(
        bugs.tied_gradient_summed_twice,
        "the same, added in the hook and after it",
        "tied",
        "pp2",
        "gradient",
        names=EMBEDDED,
    ),
    Fault(
        bugs.averaged_over_microbatches,
        "torchtitan#1733: scale_grads=True",
        "tied",
        "pp2-mbs4",
        "gradient",
    ),
    Fault(
        bugs.last_microbatch_survives_on_a_stage,
        "Fast-LLM#550, NeMo Automodel PR#3530: gradients overwritten",
        "dense",
        "pp2-1f1b-packed-mbs3",
        "gradient",
        (0,),
        r"model\.(embed_tokens|layers\.0)\..*",
    ),
    Fault(
        bugs.microbatches_swapped_at_the_end,
        "verl#2185, SkyRL PR#2096: an order that is not undone",
        "tied",
        "pp2-mbs4",
        "activations",
        (1,),
        r"model\.layers\.1|model\.norm|lm_head",
    ),
    Fault(
        bugs.layer_on_two_stages,
        "transformers PR#24381: layers counted without the offset of the stage",
        "dense",
        "pp2",
        "activations",
        (1,),
        AFTER_ATTENTION,
    ),
    Fault(
        bugs.layer_on_no_stage,
        "mlx-lm#1688, Megatron#1304: layers that no stage has",
        "dense",
        "pp2",
        "coverage",
        (),
        r"\w+/model\.layers\.1\b.*",
        status=Status.MISSING,
        says="no rank holds model.layers.1",
    ),
    # context parallelism
    Fault(
        bugs.positions_restart_on_every_rank,
        "LlamaFactory PR#7318: position ids of the columns at hand",
        "gpt2",
        "cp2",
        "activations",
        (1,),
        r"transformer\.(wpe|h\..|ln_f)|lm_head",
    ),
    Fault(
        bugs.mask_of_the_first_columns,
        "transformers 5.23: masks made from the local hidden length",
        "dense",
        "cp2-gather",
        "activations",
        (1,),
        AFTER_ATTENTION,
    ),
    Fault(
        bugs.leak_over_the_border,
        "NeMo-RL#2105, maxtext#4476: cu_seqlens dropped",
        "dense",
        "cp2-ring-packed",
        "activations",
        (1,),
        AFTER_ATTENTION,
    ),
    Fault(
        bugs.zigzag_read_in_order,
        "ms-swift PR#10071: a zigzag taken for a contiguous split",
        "dense",
        "cp2-zigzag-packed-mbs4",
        "activations",
        names=AFTER_ATTENTION,
    ),
    Fault(
        bugs.partial_softmax_not_rescaled,
        "ROCm aiter PR#3334: wrong weights in the merge of a ring",
        "dense",
        "cp2-ring-packed",
        "activations",
        (1,),
        AFTER_ATTENTION,
    ),
    Fault(
        bugs.gradients_of_keys_stay_away,
        "Megatron#1464: wrong gradients of keys and values",
        "dense",
        "cp2-ring-packed",
        "gradient",
        names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(input_layernorm|self_attn\.[kv]).*",
    ),
    Fault(
        bugs.key_heads_tiled,
        "DeepSpeed PR#8316: heads of keys parted from those of their queries",
        "gspo",
        "cp4",
        "activations",
        range(4),
        AFTER_ATTENTION,
    ),
    Fault(
        bugs.labels_rolled_after_the_split,
        "verl PR#4250: labels shifted within a rank",
        "dense",
        "cp2",
        "log_probs",
        (0,),
    ),
    Fault(
        bugs.ratio_of_own_columns,
        "Megatron#7452 finding 9: a sequence's number from a rank's own tokens",
        "gspo",
        "cp2",
        "ratio",
    ),
    Fault(
        bugs.sum_across_without_gradient,
        "ms-swift PR#9947: all_reduce without autograd",
        "gspo",
        "cp2",
        "token_gradient",
    ),
    Fault(
        bugs.exchange_into_strided_memory,
        "pytorch#192920: gloo's all_to_all_single into a tensor that is not contiguous",
        "dense",
        "cp2",
        "activations",
        names=AFTER_ATTENTION,
    ),
    # experts
    Fault(
        bugs.rows_to_the_wrong_expert,
        "xtuner PR#2053: rows and local experts counted differently",
        "moe",
        "ep2",
        "activations",
        names=AFTER_ATTENTION,
    ),
    Fault(
        bugs.rows_of_later_experts_dropped,
        "vllm-gaudi PR#1796: global ids in a table of local ones, right on rank 0 only",
        "moe",
        "ep2",
        "activations",
        names=AFTER_ATTENTION,
    ),
    Fault(
        bugs.combined_without_weights,
        "PaddleFormers PR#3452: other weights in the combine than the router's",
        "moe",
        "ep2",
        "activations",
        names=AFTER_ATTENTION,
    ),
    Fault(
        bugs.weighted_twice,
        "the same, before and after the way",
        "moe",
        "ep2",
        "activations",
        names=AFTER_ATTENTION,
    ),
    Fault(
        bugs.router_without_gradient,
        "transformers#48687: loss right, gradient of the router wrong",
        "moe",
        "ep2",
        "gradient",
        names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.experts).*",
    ),
    Fault(
        bugs.experts_summed_over_their_owners,
        "Megatron#1628: experts reduced over the wrong group",
        "moe",
        "ep2",
        "gradient",
        names=EXPERTS,
    ),
    Fault(
        bugs.experts_times_ranks,
        "pytorch#160285, DeepSpeed PR#5259: gradients of experts times ep",
        "moe",
        "ep2",
        "gradient",
        names=EXPERTS,
    ),
)

NO_FAULT_THERE = (
    # an average is its own average: DDP may synchronize as often as it likes
    (bugs.synchronized_in_every_microbatch, "dense", "dp2-ddp-mbs2", Precision.FLOAT64),
    # that is true of float64 and float16 only, so float32 does not show it
    (bugs.divided_twice_by_torch, "dense", "dp2", Precision.FLOAT32),
    # 3e-7 of the gradient: less than the noise of float32, and why the mathematics is judged in float64
    (bugs.epsilon_of_every_rank, "tied", "fsdp2", Precision.FLOAT32),
)
"""Places where a fault changes nothing, or less than can be seen."""

NOT_RECORDED = (bugs.metrics_of_own_rank, "dense", "dp2", Precision.FLOAT64)
"""Fault of the metrics that a step reports, which are in no record, so no judge can see it; parameters do
not depend on them.
"""

IN_FLOAT32 = (
    "sums_left_out-dense-tp2",
    "padding_ids_counted-dense-tp2",
    "partial_softmax_not_rescaled-dense-cp2-ring-packed",
    "decay_on_one_rank_only-dense-dp2",
    "counter_ahead_on_a_rank-dense-dp2",
)
"""Selection of the faults above, from gross ones to the smallest."""

Broken = Callable[..., tuple[Replay, list[Verdict]]]


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    """``broken(inject, case, variant)``: the first step on ranks with a fault, and what is wrong with it, in order."""

    def run(
        inject: bugs.Fault, case: str, variant: str, precision: Precision = Precision.FLOAT64
    ) -> tuple[Replay, list[Verdict]]:
        chosen = Replay(GoldenStore(GOLDEN).case(case), variant_named(variant), precision)
        launch = bugs.Broken(inject)
        dump = replay(chosen.case, chosen.variant, precision, tmp_path / "replay", steps=1, launch=launch)
        plan = [update for update in chosen.plan if update.step == 0]
        verdicts = [v for v in judge_replay(chosen.case, dump, plan, precision) if v.place.step == 0]
        assert {v.place.update for v in verdicts} >= {update.update for update in plan}
        return chosen, [verdict for verdict in verdicts if not verdict.ok]

    return run


def variant_named(name: str) -> Variant:
    overrides = overrides_of(name)
    assert overrides is not None
    return LAYOUTS.get(name, Variant(name, "it shows a fault", overrides))


def with_the_first(failed: list[Verdict]) -> list[Verdict]:
    """The verdicts on the quantity that fails first, in the update in which it does."""
    first = failed[0]

    def where(verdict: Verdict) -> tuple[str, int | None]:
        return verdict.quantity, verdict.place.update

    return [verdict for verdict in failed if where(verdict) == where(first)]


def tensor(verdict: Verdict) -> str:
    """The name of its tensor, also where another stage repeats it."""
    return re.sub(r"^(is_loss_debug|forward_data)/", "", verdict.name)


def require_place(fault: Fault, chosen: Replay, failed: list[Verdict]) -> None:
    """Fail unless the first that failed is what the fault broke, where it broke it, and nothing beside."""
    assert failed, "not caught"
    first, found = failed[0], with_the_first(failed)
    assert (first.quantity, first.status, first.place.update) == (fault.quantity, fault.status, fault.update)
    assert {v.place.rank for v in found} == (set(fault.ranks) or {None})
    (update,) = (u for u in chosen.plan if u.step == 0 and u.update == fault.update)
    names = {tensor(verdict) for verdict in found}
    known = names | set(chosen.case.truth(update.where).get(fault.quantity, {}))
    assert names == {name for name in known if re.fullmatch(fault.names, name)}
    assert fault.says in first.detail


@pytest.mark.one_in(12)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fails_first_where_it_is(
    fault: Fault, broken: Broken, record_property: Callable[[str, object], None]
) -> None:
    chosen, failed = broken(fault.inject, fault.case, fault.variant)
    require_place(fault, chosen, failed)
    multiple = max(verdict.multiple for verdict in with_the_first(failed))
    record_property("multiple of tolerance", multiple)
    print(f"{fault.name}: {multiple:.2g} times the tolerance of {failed[0].quantity} ({fault.source})")
    assert multiple > 100 or fault.status is Status.MISSING


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_it_is_found_in_float32_too(name: str, broken: Broken) -> None:
    """Measured tolerances leave room for rounding, and not for these."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    chosen, failed = broken(fault.inject, fault.case, fault.variant, Precision.FLOAT32)
    require_place(fault, chosen, failed)
    assert max(verdict.multiple for verdict in with_the_first(failed)) > 3


@pytest.mark.parametrize(
    ("inject", "case", "variant", "precision"),
    [*NO_FAULT_THERE, NOT_RECORDED],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_where_it_changes_nothing_it_is_no_fault(
    inject: bugs.Fault, case: str, variant: str, precision: Precision, broken: Broken
) -> None:
    assert broken(inject, case, variant, precision)[1] == []


def in_matrix(fault: Fault) -> bool:
    variant = LAYOUTS.get(fault.variant)
    return variant is not None and variant.applies_to(fault.case)


HEALTHY = dict.fromkeys((f.case, f.variant) for f in FAULTS if not in_matrix(f))
"""Replays of the faults' cases and variants that the matrix does not already prove right without a fault."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "variant"), HEALTHY)
def test_without_a_fault_everything_passes(case: str, variant: str, broken: Broken) -> None:
    assert broken(bugs.none, case, variant)[1] == []


def test_rolled_labels_are_wrong_at_the_border_alone(broken: Broken) -> None:
    chosen, failed = broken(bugs.labels_rolled_after_the_split, "dense", "cp2")
    update = chosen.plan[0]
    targets = update.layouts[0][0].targets
    last = targets.shape[1] - 1
    positions = [
        (segment.sample, segment.start + last - segment.col)
        for segment in targets.segments
        if segment.col <= last < segment.col + segment.stop - segment.start
    ]
    wanted = [
        f"sample {update.frame.samples[sample][0]}/{update.frame.samples[sample][1]}, position {position},"
        for sample, position in positions
        if update.loss_mask[update.frame.offsets[sample] + position]
    ]
    first = failed[0]
    assert first.place == Place(0, None, 0, 0)
    assert (first.over, len(wanted) > 0) == (len(wanted), True)
    assert first.worst is not None
    assert first.worst.where.startswith(tuple(wanted))


def test_blocks_that_compute_in_the_dtype_of_the_weights_are_not_mixed(broken: Broken) -> None:
    """As under accelerate on CPUs: the policy is configured, and never reaches FSDP (docs/findings.md)."""
    _, failed = broken(bugs.precision_policy_ignored, "tied", "fsdp2", Precision.MIXED)
    assert (failed[0].quantity, failed[0].status) == ("activations", Status.DTYPE)
    assert failed[0].detail == "golden bfloat16, actual float32"


def test_a_wrong_offset_is_refused_by_the_engine_itself(broken: Broken) -> None:
    with pytest.raises(RankError, match="lies in 0 parts of the vocabulary"):
        broken(bugs.offset_checked, "dense", "tp2")


def test_faults_have_a_source_and_a_place_of_their_own() -> None:
    assert len({(f.inject, f.case, f.variant) for f in FAULTS}) == len(FAULTS)
    assert all(fault.source for fault in FAULTS)
