"""Faults of attention: its masks, its heads, its positions and its way round the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.layout import Segment, TokenLayout
from regress.parallel.policy import ParallelPolicy
from regress.parallel.segments import ContextSegments
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded

AFTER_BLOCK_0 = r"transformer\.(h\.|ln_f).*|lm_head"


@fault(
    category="D",
    fresh=True,
    source="a ring of n - 1 hops that counts the rank's own block as one of them",
    cases=("gpt2",),
    variants=("cp4-ring-zigzag",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    rules=("context-exchange", "module"),
)
def ring_ends_one_hop_early(patch: Patch) -> None:
    """Keys of the rank that is met last are left out, on the way forward and back."""
    right: Any = ContextSegments.blocks.func  # type: ignore[attr-defined]  # a cached property

    def wrong(self: ContextSegments) -> tuple[Tensor | None, ...]:
        last = (self.rank + 1) % self.ranks
        return tuple(None if at == last else block for at, block in enumerate(right(self)))

    patch.setattr(ContextSegments, "blocks", property(wrong))


@fault(
    category="E",
    fresh=True,
    source="a mask that a later stage keeps, by the shape of the row",
    variants=("pp2-1f1b-packed-mbs3",),
    first="activations model.layers.1",
    names=r"model\.layers\.1|model\.norm|lm_head",
    ranks=(1,),
    # tokens see samples before them, besides missing some of their own; pipeline-exchange names masks of a stage
    rules=("module", "packed-leak", "pipeline-exchange"),
)
def mask_of_the_first_microbatch_on_a_later_stage(patch: Patch) -> None:
    """The second stage masks every packed row as it did the first one of that shape."""
    run: Any = ParallelPolicy._run
    attention: Any = ParallelPolicy._attention
    later = [False]
    known: dict[tuple[int, tuple[int, int]], Microbatch] = {}

    def noted(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        later[0] = hidden is not None
        return run(self, model, micro, hidden)

    def wrong(self: ParallelPolicy, micro: Microbatch) -> Any:
        kept = known.setdefault((id(self), micro.layout.shape), micro) if later[0] else micro
        return attention(self, kept)

    patch.setattr(ParallelPolicy, "_run", noted)
    patch.setattr(ParallelPolicy, "_attention", wrong)


@fault(
    category="G",
    fresh=True,
    source="cu_seqlens that are made from end tokens, which completions at the limit lack",
    variants=("dp4-packed-mbs2",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(3,),
    place="step0/rank3/micro0",
    rules=("packed-leak", "module", "one-sample"),  # sample 10 alone lies behind one without an end token
)
def boundaries_at_end_tokens(patch: Patch) -> None:
    """A sample of a packed row begins behind an end token, and sees the one before it if that was cut off."""
    right: Any = LocalPolicy._attention

    def wrong(self: LocalPolicy, micro: Microbatch) -> Any:
        end = self.model.config.eos_token_id
        segments: list[Segment] = []
        for one in micro.layout.segments:
            if segments and segments[-1].row == one.row and int(micro.input_ids[one.row, one.col - 1]) != end:
                before = segments[-1]
                segments[-1] = before._replace(stop=before.stop + one.stop - one.start)
            else:
                segments.append(one)
        joined = TokenLayout(micro.layout.shape, tuple(segments))
        return right(self, replace(micro, place=replace(micro.place, tokens=joined)))

    patch.setattr(LocalPolicy, "_attention", wrong)


@fault(
    category="T",
    fresh=True,
    source="repeat in place of repeat_interleave",
    variants=("packed-eager",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("heads", "module"),
)
def key_heads_tiled_in_eager_attention(patch: Patch) -> None:
    """Heads of keys are repeated one after the other, so that queries meet keys of another group."""
    patch.setattr(modeling_qwen3, "repeat_kv", lambda states, times: states.repeat(1, times, 1, 1))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="TransformerEngine#1245: a table of rotary embeddings in half precision",
    cases=("tied",),
    variants=("packed-mbs3",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("rotary", "module", "precision"),
)
def rotary_tables_in_bfloat16(run: Run) -> None:
    """Sines and cosines are rounded to half precision; the frequencies are not."""
    model: Any = run.trainer.policy.model
    model.model.rotary_emb.register_forward_hook(lambda _, __, out: tuple(rounded(table) for table in out))
