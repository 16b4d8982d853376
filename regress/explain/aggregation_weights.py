"""Weights of tokens under every rule by which trainers reduce token losses to one number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regress.explain.loss_tokens import Mask
from regress.explain.update_tokens import Floats, Ints

INTEGER = 3e-6
"""Relative error up to which a length that is read off a weight counts as a whole number (and at least 1e-4)."""

RESAMPLED = "resampled"
"""Aggregation of samples that count as often as they are drawn, which no `Objective` expresses."""


@dataclass(frozen=True)
class AggregationRule:
    """One way to weigh tokens.

    Attributes:
        aggregation: one of the names of an `Objective`.
        scope: tokens that the denominator counts: "global" (the update), "rank", "microbatch" (of each rank alone) or
            "microbatch over ranks".
        words: the weight in words.
        values: the weight of each token of the frame; up to the constant length where `length` is "free".
        length: constant length that divides a sum over tokens besides the number of samples: None, "longest", "free".
            Of each microbatch, under a denominator of the whole update: "longest of the microbatch".
    """

    aggregation: str
    scope: str
    words: str
    values: Floats
    length: str | None = None

    @property
    def name(self) -> str:
        """Aggregation and scope, as one word."""
        return f"{self.aggregation}/{self.scope}"


@dataclass(frozen=True)
class Blocks:
    """Microbatches of the update, and those of them that share a denominator under a scope.

    ``part[token]`` is the index of the part that the token's denominator counts; ``parts`` is the number of parts,
    whose means are averaged.
    """

    part: Ints
    parts: int


def scopes(mask: Mask) -> dict[str, tuple[str, Blocks]]:
    """Return words and parts of each scope; every scope is there, even where several are the same."""
    blocks = mask.update.blocks
    block = np.maximum(mask.update.block, 0)
    ranks = {rank: i for i, rank in enumerate(sorted({rank for rank, _ in blocks}))}
    micros = {micro: i for i, micro in enumerate(sorted({micro for _, micro in blocks}))}
    of_rank = np.array([ranks[rank] for rank, _ in blocks], np.int64)
    of_micro = np.array([micros[micro] for _, micro in blocks], np.int64)
    return {
        "global": ("the whole update", Blocks(np.zeros_like(block), 1)),
        "microbatch": ("each microbatch", Blocks(block, len(blocks))),
        "rank": ("each rank", Blocks(of_rank[block], len(ranks))),
        "microbatch over ranks": ("each microbatch of all ranks", Blocks(of_micro[block], len(micros))),
    }


def rules(mask: Mask) -> list[AggregationRule]:
    """Return every rule whose weights follow from the tokens of the update, or from how often samples are drawn."""
    drawn = [*_drawn(mask)]
    if drawn or not mask.complete:
        return drawn
    return [
        rule
        for note, lengths in mask.counts().items()
        for scope, (words, blocks) in scopes(mask).items()
        for rule in _of_scope(mask, lengths.astype(np.float64), scope, words + note, blocks)
    ]


def _drawn(mask: Mask) -> Iterator[AggregationRule]:
    """Yield the recorded weights of a run that says that samples count as often as they are drawn by their rewards."""
    trainer = mask.update.config.get("trainer")
    method = trainer.get("resampling", "none") if isinstance(trainer, dict) else "none"
    weights = mask.update.get("is_loss_debug/weights")
    if method != "none" and weights is not None:
        words = f"as recorded, as often as its sample is drawn (trainer.resampling={method})"
        yield AggregationRule(RESAMPLED, "global", words, weights)


def _of_scope(
    mask: Mask, lengths: Floats, scope: str, words: str, blocks: Blocks
) -> Iterator[AggregationRule]:
    token_sample = mask.update.sample
    seen = mask.update.block >= 0
    part_of_sample = np.zeros(len(lengths), np.int64)
    part_of_sample[token_sample[seen]] = blocks.part[seen]

    def total(values: Floats) -> Floats:
        return np.asarray(np.bincount(part_of_sample, values, minlength=blocks.parts), np.float64)

    longest = np.zeros(blocks.parts)
    np.maximum.at(longest, part_of_sample, mask.spans)
    samples, filled = total(np.ones_like(lengths)), total((lengths > 0).astype(np.float64))

    def rule(
        name: str, text: str, divisor: Floats, each: Floats | None = None, length: str | None = None
    ) -> AggregationRule:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = 1.0 / (divisor[blocks.part] * blocks.parts)
            return AggregationRule(
                name, scope, text, values if each is None else values / each[token_sample], length
            )

    mean, norm, sums = "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum"
    yield rule("token-mean", f"1 / tokens of {words}", total(lengths))
    yield rule(mean, f"1 / (samples of {words} x tokens of the sample)", samples, lengths)
    yield rule(sums, f"1 / samples of {words}", samples)
    yield rule(norm, f"1 / (samples of {words} x a constant length)", samples, None, "free")
    yield rule(norm, f"1 / (samples of {words} x its longest completion)", samples * longest, None, "longest")
    if (filled != samples).any():
        kept = f"samples with loss tokens of {words}"
        yield rule(mean, f"1 / ({kept} x tokens of the sample)", filled, lengths)
        yield rule(sums, f"1 / {kept}", filled)
        yield rule(norm, f"1 / ({kept} x a constant length)", filled, None, "free")
    if scope == "global":
        yield rule("token-sum", "1", np.ones(1))
        if len(mask.update.blocks) > 1:
            own = np.zeros(len(mask.update.blocks))
            block = np.maximum(mask.update.block, 0)
            np.maximum.at(own, block, mask.spans[token_sample])
            words = f"1 / (samples of {words} x the longest completion of the microbatch)"
            values = 1.0 / (samples[blocks.part] * own[block])
            yield AggregationRule(norm, scope, words, values, "longest of the microbatch")


def whole_length(value: float) -> int | None:
    """Return a length read off a weight as an integer; None if it is not whole."""
    nearest = round(value)
    near = abs(value - nearest) <= max(1e-4, INTEGER * value)
    return nearest if near and nearest >= 1 else None
