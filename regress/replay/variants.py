"""Variants: the same training step computed in another way, as a name and overrides of the configuration.

The table is the project's; users add rows of their own as ``[tool.regress.variants.NAME]`` in pyproject.toml, or with
the hook ``pytest_regress_variants`` in conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any


class Precision(StrEnum):
    """Precision that a replay computes in.

    ``MIXED`` is FSDP's policy: float32 weights, blocks that compute in bfloat16, gradients summed in float32.
    ``BITWISE`` is float32 compared byte for byte with the replay of a bitwise reference.
    """

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    MIXED = "mixed"
    BITWISE = "bitwise"

    @property
    def dtype(self) -> str:
        """Value of ``model.dtype`` in the replay: weights, gradients, optimizer state."""
        return "float32" if self in (Precision.MIXED, Precision.BITWISE) else str(self)

    @property
    def computes_in(self) -> str:
        """The dtype of activations."""
        return "bfloat16" if self is Precision.MIXED else self.dtype

    @property
    def measured_as(self) -> str:
        """Precision whose tolerances apply: its activations are as coarse, and nothing else is coarser."""
        return self.computes_in if self is Precision.MIXED else str(self)

    @property
    def overrides(self) -> dict[str, Any]:
        """Dotted configuration key -> value, over those of a variant."""
        found: dict[str, Any] = {"model.dtype": self.dtype}
        if self is Precision.MIXED:
            found |= {"parallel.fsdp_param_dtype": "bfloat16", "parallel.fsdp_reduce_dtype": "float32"}
        return found

    @property
    def suffix(self) -> str:
        """Suffix that a test id adds to the variant's name."""
        return {"float64": "", "float32": "-fp32", "bfloat16": "-bf16"}.get(self, f"-{self}")


TIERS: Mapping[str, tuple[Precision, ...]] = {
    "semantics": (Precision.FLOAT64,),
    "precision": (Precision.FLOAT32, Precision.BFLOAT16, Precision.MIXED),
    "bitwise": (Precision.BITWISE,),
    "all": tuple(Precision),
}
"""Precisions of ``--regress-tier``: is it the same mathematics, is it accurate enough, are the bytes the same."""


class Extent(StrEnum):
    """Part of the matrix of cases and variants that is replayed.

    ``REDUCED``: every variant on the first of its cases, and the cases that come first nowhere under the first of their
    variants, in the first of its precisions; but none of the variants that only combine what others show.
    ``DEFAULT``: every variant on the cases that can reveal the faults it is for. ``FULL``: on every case on which it is
    possible.
    """

    REDUCED = "reduced"
    DEFAULT = "default"
    FULL = "full"


SEMANTICS = (Precision.FLOAT64,)
BOTH = (Precision.FLOAT64, Precision.FLOAT32)
EVERY = (*BOTH, Precision.BFLOAT16)


@dataclass(frozen=True)
class Variant:
    """One way to compute a golden case.

    Attributes:
        name: name as in test ids.
        why: fault that it could reveal.
        overrides: dotted configuration key -> value, over those of the case.
        precisions: precisions that it is replayed in.
        cases: patterns (``fnmatch``) of the cases that it is replayed on, the most telling first.
        possible: patterns of those that it can be replayed on at all.
        resume_at: optimizer updates after which one process ends and another goes on from its checkpoint, both with
            the loop of ``regress train``; None: one process makes the bare steps.
        before: overrides of the first of the two processes, in place of ``overrides``; None: the same.
        combines: it only combines settings that other variants show one by one: no part of the reduced matrix.
        program: the replay runs the loop of ``regress train``, as one that resumes does, too. Evaluations that it
            asks for are made on problems of the case's task that are not trained on. With ``curriculum.enable`` the
            stage of each step is told by the recording.
        twin: bitwise reference, the variant whose bytes it has to reproduce, if ``precisions`` has ``bitwise``.

    A variant with ``trainer.type=remote`` trains through a service, and ``parallel``, ``batching`` and ``model`` are
    those of the service. Its reference, in float64 and bit for bit, is the step of its twin fed with the datums that
    the client sent, which wires round to float32.
    """

    name: str
    why: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    precisions: tuple[Precision, ...] = SEMANTICS
    cases: tuple[str, ...] = ("*",)
    twin: str | None = None
    possible: tuple[str, ...] = ("*",)
    resume_at: int | None = None
    before: Mapping[str, Any] | None = None
    program: bool = False
    combines: bool = False

    @property
    def wire(self) -> str | None:
        """Protocol of the service that it trains through, None where the engine trains in its own process."""
        if self.overrides.get("trainer.type") != "remote":
            return None
        return str(self.overrides.get("service.train_service.backend", "weaver"))

    def applies_to(self, case: str, extent: Extent = Extent.DEFAULT) -> bool:
        """Return True if the variant is replayed on the case of that name."""
        patterns = self.possible if extent is Extent.FULL else self.cases
        return any(fnmatchcase(case, pattern) for pattern in patterns)

    def first_of(self, cases: Iterable[str]) -> str | None:
        """Return the most telling of these cases, or None."""
        names = list(cases)
        found = (name for pattern in self.cases for name in names if fnmatchcase(name, pattern))
        return next(found, None)


BASE = Variant(
    "base",
    "right padded, one microbatch: the golden values were computed so, in float64",
    precisions=(*EVERY, Precision.BITWISE),
    twin="base",
)


def _rows(*variants: Variant) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants}


def _resumed(
    at: int,
    why: str,
    *cases: str,
    name: str = "",
    overrides: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None,
) -> Variant:
    """Return a variant that goes on from a checkpoint: bit for bit, unless the layout changes there."""
    same = overrides is None and before is None
    return Variant(
        f"resume-at{at}{name}",
        why,
        overrides or {},
        (Precision.BITWISE,) if same else SEMANTICS,
        cases,
        "base" if same else None,
        ("dapo", "cispo") if at > RESUMABLE else ("*",),
        at,
        before or {},
        True,
    )


RESUMABLE = 2
"""Updates that every case makes at least, with one more after them."""


def _batching(**values: Any) -> dict[str, Any]:
    return {f"batching.{key}": value for key, value in values.items()}


PACKED = {"layout": "packed"}

CURRICULUM = {
    "curriculum.enable": True,
    "evaluation.every_n_steps": 1,
    "rollout_worker.need_llm_inference": True,
}
"""Overrides of variants whose rollouts are retold as those of a curriculum, see `regress.replay.staged`."""

VARIANTS: Mapping[str, Variant] = _rows(
    BASE,
    # padding
    Variant(
        "left",
        "position ids and masks that count from the left",
        _batching(padding_side="left"),
        BOTH,
        cases=("dense", "gpt2"),
    ),
    Variant("pad8", "columns that hold no token", _batching(pad_to_multiple_of=8), cases=("gpt2",)),
    Variant("pad64", "rows far longer than the samples", _batching(pad_to_length=64), cases=("moe",)),
    Variant(
        "pad60-pad8",
        "a least length that is no multiple",
        _batching(pad_to_length=60, pad_to_multiple_of=8),
        cases=("gpt2",),
        combines=True,
    ),
    Variant("left-pad8", "both", _batching(padding_side="left", pad_to_multiple_of=8), cases=("gpt2",)),
    # gradient accumulation
    Variant(
        "mbs1",
        "one sample a microbatch: no padding at all",
        _batching(micro_batch_size=1),
        cases=("gpt2",),
    ),
    Variant(
        "mbs3",
        "a last microbatch that is smaller",
        _batching(micro_batch_size=3),
        cases=("dr_grpo", "cispo"),
    ),
    Variant(
        "mbs4",
        "denominators of the mini-batch, not of the microbatch",
        _batching(micro_batch_size=4),
        BOTH,
        cases=("dr_grpo", "gspo"),
    ),
    Variant(
        "left-mbs3",
        "left padding of unequal width",
        _batching(padding_side="left", micro_batch_size=3),
        cases=("tools", "gpt2"),
    ),
    # packing
    Variant(
        "packed",
        "attention and positions across sample boundaries",
        _batching(**PACKED),
        BOTH,
        cases=("dense", "gpt2", "tools"),
    ),
    Variant(
        "packed-pad16",
        "padding after the last sample",
        _batching(**PACKED, pad_to_multiple_of=16),
        cases=("moe",),
    ),
    Variant(
        "packed-mbs3",
        "several packed rows",
        _batching(**PACKED, micro_batch_size=3),
        cases=("gpt2", "cispo"),
    ),
    Variant(
        "varlen",
        "attention that never sees another sample",
        {**_batching(**PACKED), "model.attn_implementation": "varlen"},
        BOTH,
        cases=("gpt2",),
    ),
    Variant(
        "varlen-mbs4",
        "the same with heads that share keys",
        {**_batching(**PACKED, micro_batch_size=4), "model.attn_implementation": "varlen"},
        BOTH,
        cases=("dense",),
    ),
    # dynamic batches
    Variant(
        "dynamic",
        "microbatches of unequal numbers of samples",
        _batching(max_tokens_per_microbatch=96),
        cases=("dr_grpo", "tools"),
    ),
    Variant(
        "packed-dynamic",
        "token budgets and packing",
        _batching(**PACKED, max_tokens_per_microbatch=48),
        BOTH,
        cases=("dense",),
    ),
    # row order
    Variant(
        "reversed",
        "samples told apart by their row",
        _batching(row_order="reversed", micro_batch_size=5),
        cases=("dapo", "gspo"),
    ),
    Variant(
        "longest-first",
        "samples sorted into microbatches by length",
        _batching(row_order="longest_first", max_tokens_per_microbatch=96),
        cases=("dr_grpo",),
    ),
    Variant(
        "packed-shortest-first",
        "sorting and packing",
        _batching(**PACKED, row_order="shortest_first", max_tokens_per_microbatch=48),
        cases=("moe",),
    ),
    Variant(
        "packed-longest-first",
        "the longest rows first",
        _batching(**PACKED, row_order="longest_first", max_tokens_per_microbatch=48),
        cases=("dr_grpo",),
        combines=True,
    ),
    Variant(
        "packed-reversed",
        "rows that end with the first samples",
        _batching(**PACKED, row_order="reversed", micro_batch_size=5),
        cases=("dense",),
        combines=True,
    ),
    # kernels and memory
    Variant(
        "eager",
        "attention with an additive mask",
        {"model.attn_implementation": "eager"},
        EVERY,
        cases=("moe",),
    ),
    Variant(
        "packed-eager",
        "the same on packed rows",
        {**_batching(**PACKED), "model.attn_implementation": "eager"},
        cases=("gpt2", "tied"),
    ),
    Variant(
        "checkpointing",
        "activations computed twice",
        {"model.gradient_checkpointing": True},
        (*SEMANTICS, Precision.BITWISE),
        twin="base",
        cases=("dense", "moe"),
    ),
    Variant(
        "chunked",
        "log-probs of a few tokens at a time",
        _batching(log_prob_chunk_size=7),
        BOTH,
        cases=("dense", "tied"),
    ),
    Variant(
        "packed-chunked-mbs4",
        "chunks that end inside a microbatch",
        _batching(**PACKED, log_prob_chunk_size=16, micro_batch_size=4),
        cases=("dr_grpo",),
    ),
    Variant(
        "vocab8",
        "softmax of a vocabulary larger than a piece, rows that are more than a block",
        _batching(vocab_chunk_size=8, softmax_block_size=64),
        EVERY,
        cases=("dr_grpo", "dense"),
    ),
    Variant(
        "chunked-vocab8",
        "both kinds of chunks",
        _batching(log_prob_chunk_size=7, vocab_chunk_size=8, softmax_block_size=64),
        cases=("kl_cov", "tied"),
    ),
    Variant(
        "threads2",
        "sums split over two threads",
        {"threads": 2},
        BOTH,
        cases=("gpt2",),
    ),
    # torch.compile
    Variant(
        "compiled",
        "fused kernels in other orders of arithmetic",
        {"model.compile": "inductor"},
        BOTH,
        cases=("dense",),
    ),
    Variant(
        "traced",
        "the graphs of torch.compile, run by eager kernels",
        {"model.compile": "aot_eager", **_batching(**PACKED, micro_batch_size=4)},
        cases=("gpt2",),
    ),
    # optimizer implementations
    Variant(
        "adamw-for-loop",
        "the plain update",
        {"optimizer.implementation": "for_loop"},
        cases=("tied", "on_policy"),
    ),
    Variant(
        "adamw-foreach",
        "many tensors at once",
        {"optimizer.implementation": "foreach"},
        (*SEMANTICS, Precision.BITWISE),
        twin="adamw-for-loop",
        cases=("tied", "on_policy"),
    ),
    Variant(
        "adamw-fused",
        "one kernel",
        {"optimizer.implementation": "fused"},
        BOTH,
        cases=("dense", "on_policy"),
    ),
    # the whole program: what goes on between the steps
    Variant(
        "eval-on",
        "evaluation that draws from the training's generator, or leaves the model changed",
        {
            "evaluation.every_n_steps": 1,
            "evaluation.samples_per_prompt": 2,
            "rollout_worker.need_llm_inference": True,
        },
        (Precision.BITWISE,),
        ("tools",),
        "base",
        program=True,
    ),
    Variant(
        "tracking-on",
        "a tracker that changes or stops the training",
        {"tracking.trackers": ["tensorboard"]},
        (Precision.BITWISE,),
        ("dense",),
        "base",
        program=True,
    ),
    Variant(
        "curriculum",
        "a stage that the program chooses by its own evaluations although a recording has gone elsewhere",
        CURRICULUM,
        (Precision.BITWISE,),
        ("dense",),
        "base",
        program=True,
    ),
    Variant(
        "resume-at2-curriculum",
        "the stage of a step after a resume",
        CURRICULUM,
        (Precision.BITWISE,),
        ("tools",),
        "base",
        resume_at=2,
        before=CURRICULUM,
        program=True,
    ),
    # two processes: everything that the second one needs is in the checkpoint
    _resumed(2, "state of the optimizer lost between two processes", "dense"),
    _resumed(3, "log-probs and advantages of an unfinished step computed again", "dapo"),
    _resumed(
        3,
        "an unfinished step laid out over other ranks",
        "cispo",
        name="-dp2-to-tp2",
        overrides={"parallel.tp": 2},
        before={"parallel.dp": 2},
    ),
    _resumed(
        2,
        "shards of the optimizer put together and split otherwise",
        "dense",
        name="-fsdp2-to-pp2",
        overrides={"parallel.pp": 2},
        before={"parallel.fsdp": 2},
    ),
    _resumed(2, "whole parameters split", "tied", name="-to-cp2", overrides={"parallel.cp": 2}),
    _resumed(2, "shards of experts put together", "moe", name="-from-ep2", before={"parallel.ep": 2}),
)
"""Variants on one process, by name."""
