"""Invariants of every update, which need no golden values.

A golden recorded from a broken engine freezes its fault; these checks do not use the golden. Checks that depend on the
objective run only where the configuration tells the objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.record_keys import Key
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.metrics.ulps import spacing
from regress.compare.quantities import ROUTER, SHARES
from regress.compare.record_plan import Plan
from regress.compare.update_records import Records
from regress.compare.updates.contradictions import check_certain, check_token_ids
from regress.compare.updates.group_advantage_sums import GroupOf, check_group_sums
from regress.compare.updates.invariant_counts import Checked
from regress.compare.updates.invariant_statements import STATEMENTS
from regress.compare.updates.logit_recomputation import (
    TokenValues,
    check_given_logits,
    logits_at,
    temperature_of,
)
from regress.compare.updates.metric_invariants import TOKENS, check_combined, check_part, parts_of
from regress.compare.updates.model_parts import WEIGHTS, check_parts
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array, dtype_name
from regress.dump.record import Record
from regress.layout import Mesh, TokenFrame

_LOG_PROBS = ("log_probs", "old_log_probs", "ref_log_probs")
_NAMING = ("batch_inputs", "forward_data")
"""Types whose records name the ids of their tokens."""
_MEANS = ("token-mean", "seq-mean-token-mean")
_RATIO = 8
"""Spacings at the size of the numbers that a ratio is made of: its log-probs, and 1, which it is a change of.

Measured: healthy replays reach 0.5, and those with 1 + expm1(x) in place of exp(x) as much.
"""
_LOGITS = 64.0
"""Size of the largest logits that models have: soft caps are 15 to 50. A log-prob is off by their rounding.

Measured: a log-softmax in base 2, as fused kernels have it, is above 0 by up to 1.0 spacings at the largest logit.
"""
_TERMS = {
    "loss": "elementwise_loss",
    "pg_loss": "policy_loss",
    "kl_loss": "kl",
    "entropy_loss": "entropy_loss",
}


def judge_invariants(
    records: Records,
    *,
    place: Place,
    planned: Plan,
    config: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    groups: GroupOf | None = None,
    leave: Callable[[str, str], None] = lambda name, why: None,
) -> list[Verdict]:
    """Return one verdict for each invariant that an update's records tell anything of.

    Args:
        place: the update.
        planned: which ranks repeat each other's tokens.
        config: configuration of the run, nested; without it no invariant of the objective is checked.
        mesh: ranks that had to split the model; None if that is not known.
        groups: those of the samples, as the rollouts of the step tell them.
        leave: called with the name of each invariant of which a part was not checked, and why.
    """
    update = _Update(records, records.frame, place, planned, config or {}, mesh or Mesh(), groups or {})
    return update.verdicts(leave)


@dataclass(frozen=True)
class _Update:
    placed: Records
    frame: TokenFrame
    place: Place
    plan: Plan
    config: Mapping[str, Any]
    mesh: Mesh
    groups: GroupOf

    def verdicts(self, leave: Callable[[str, str], None]) -> list[Verdict]:
        checks = {
            "masks": self._masks,
            "tokens": self._tokens,
            "weight_sum": self._weights,
            "advantages": self._advantages,
            "token_ids": self._token_ids,
            "log_probs": self._log_probs,
            "certain": self._certain,
            "entropy": self._entropies,
            "given_logits": self._given_logits,
            "on_policy": self._on_policy,
            "ratio": self._ratios,
            "loss": self._losses,
            "parts": self._parts,
            "metrics": self._metrics,
        }
        found = []
        for name, (sentence, _) in STATEMENTS.items():
            known = Checked()
            checks[name](known)
            if known.count:
                found.append(known.verdict(name, self.place, sentence))
            for why in known.left:
                leave(name, f"{self.place}: {why}")
        return found

    @cached_property
    def _words(self) -> Locator:
        return Locator(self.frame)

    @property
    def _objective(self) -> Mapping[str, Any]:
        return self.config.get("algorithm") or {}

    def _records(self, record_type: str, *, once: bool = True) -> Iterator[tuple[Key, Record]]:
        """Yield the records of a type, only the first of ranks that repeat each other's tokens."""
        seen = set()
        for key in sorted(self.placed.of_types([record_type]), key=lambda k: (k.micro or 0, k.rank or 0)):
            record = self.placed.get(key)
            mine = self.plan.root(key.rank), key.micro
            if record is not None and self.placed.placed(key) and not (once and mine in seen):
                seen.add(mine)
                yield key, record

    def _loss_tokens(self, key: Key, record: Record) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return canonical and local indices of the loss tokens of a record ``[B, T]``."""
        canonical, local = self.placed.layout(key).indices(self.frame.offsets)
        mask = record.tensors.get("effective_valid", record.tensors.get("response_mask"))
        if mask is None or mask.shape != self.placed.layout(key).shape:
            return canonical, local
        kept = mask.reshape(-1)[local].astype(bool)
        return canonical[kept], local[kept]

    def _values(
        self, record_type: str, names: Sequence[str]
    ) -> Iterator[tuple[Key, NDArray[np.int64], list[Array]]]:
        """Yield values ``[K]`` of some tensors at the loss tokens, record by record, with their canonical indices."""
        for key, record in self._records(record_type, once=False):
            if all(name in record.tensors for name in names):
                shape = self.placed.layout(key).shape
                if any(record.tensors[name].shape != shape for name in names):
                    continue
                canonical, local = self._loss_tokens(key, record)
                yield key, canonical, [record.tensors[name].reshape(-1)[local] for name in names]

    def _token(self, canonical: NDArray[np.int64], name: str) -> Callable[[int], str]:
        return lambda index: f"{name} at {self._words.token(int(canonical[index]))}"

    # masks and counts

    def _masks(self, known: Checked) -> None:
        record_types = ("batch_inputs", "forward_data", "is_loss_debug")
        for key, record in (
            row for record_type in record_types for row in self._records(record_type, once=False)
        ):
            padding = ~self.placed.layout(key).attention_mask
            visible = record.tensors.get("attention_mask")
            if visible is not None and visible.shape == padding.shape:
                padding = padding | ~visible.astype(bool)
            for name in ("response_mask", "effective_valid"):
                mask = record.tensors.get(name)
                if mask is not None and mask.shape == padding.shape:
                    wrong = mask.astype(bool) & padding
                    first = np.argwhere(wrong)[:1].tolist()
                    words = f"{name} of {key} at {first} (row, column)"
                    known.number(0.0, float(wrong.any()), 0.0, words)

    def _tokens(self, known: Checked) -> None:
        totals: dict[float, float] = {}
        for _, record in self._records("loss"):
            own, whole = record.meta.get("num_loss_tokens"), record.meta.get("mini_batch_loss_tokens")
            if isinstance(own, int | float) and isinstance(whole, int | float):
                totals[float(whole)] = totals.get(float(whole), 0.0) + float(own)
        for whole, total in totals.items():
            known.number(whole, total, 0.0, "their sum")

    def _weights(self, known: Checked) -> None:
        found = [record.meta for _, record in self._records("loss")]
        if not found or any(meta.get("aggregation") not in _MEANS for meta in found):
            return
        total = self._total_weight(found)
        sums = [float(s) for meta in found if isinstance(s := meta.get("weight_sum"), int | float)]
        if total is None or len(sums) != len(found) or not any(meta.get("num_loss_tokens") for meta in found):
            return
        known.number(total, math.fsum(sums), 64 * len(sums) * spacing(np.dtype(np.float32)), "their sum")

    def _total_weight(self, found: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the sum of all weights: 1, less where samples without loss tokens count.

        None if it is not known: a dump without a configuration does not tell whether those count.
        """
        scope = found[0].get("denominator_scope")
        if scope == "microbatch_sum":
            return None
        empty_rows = self._objective.get("count_empty_rows", True) is not False
        if found[0].get("aggregation") == "seq-mean-token-mean" and empty_rows:
            values = self._values("is_loss_debug", ["weights"])
            offsets = self.frame.offsets
            samples = {int(n) for _, at, _ in values for n in np.searchsorted(offsets, at, side="right") - 1}
            count = len(self.frame.samples)
            if len(samples) == count:
                return 1.0
            return len(samples) / count if scope != "microbatch" and self._objective else None
        if scope == "microbatch" and not all(meta.get("num_loss_tokens") for meta in found):
            return None
        return 1.0

    def _advantages(self, known: Checked) -> None:
        found = self._values("is_loss_debug", ["advantages"])
        values = ((canonical, advantages) for _, canonical, (advantages,) in found)
        check_group_sums(known, values, self.frame, self.groups, self.config)

    @property
    def _computed(self) -> list[str]:
        """Dtype that the model computes in, where the configuration tells it."""
        dtype = (self.config.get("model") or {}).get("dtype")
        return [dtype] if isinstance(dtype, str) else []

    # log-probs, entropies, ratios

    def _log_probs(self, known: Checked) -> None:
        for record_type in ("forward_data", "is_loss_debug"):
            for name in _LOG_PROBS:
                for _, canonical, (values,) in self._values(record_type, [name]):
                    wide, bound = values.astype(np.float64), _LOGITS * _eps(values)
                    known.elements(np.minimum(wide, 0.0), wide, bound, self._token(canonical, name))

    def _token_ids(self, known: Checked) -> None:
        rows = (row for record_type in _NAMING for row in self._records(record_type, once=False))
        found = []
        for key, record in rows:
            ids = record.tensors.get("input_ids")
            if ids is not None and ids.shape == self.placed.layout(key).shape and ids.dtype.kind in "iu":
                canonical, local = self.placed.layout(key).indices(self.frame.offsets)
                found.append((str(key), canonical, ids.reshape(-1)[local]))
        check_token_ids(known, found, self.frame.size, self._token)

    def _certain(self, known: Checked) -> None:
        both = {key: pair for key, _, pair in self._values("forward_data", ["log_probs", "entropy"])}
        found = self._values("forward_data", ["log_probs"])
        check_certain(
            known, ((str(key), values, both[key][1] if key in both else None) for key, _, (values,) in found)
        )

    def _entropies(self, known: Checked) -> None:
        vocabulary = self._vocabulary
        top = math.inf if vocabulary is None else math.log(vocabulary)
        for _, canonical, (values,) in self._values("forward_data", ["entropy"]):
            wide = values.astype(np.float64)
            slack = (
                4 * _eps(values) * math.sqrt(vocabulary or 1) * max(1.0, float(np.abs(wide).max(initial=0.0)))
            )
            known.elements(np.clip(wide, 0.0, top), wide, slack, self._token(canonical, "entropy"))

    @cached_property
    def _vocabulary(self) -> int | None:
        """Number of vocabulary entries, if logits were recorded whole."""
        sizes = set()
        for _, record in self._records("activations", once=False):
            for name, values in record.tensors.items():
                if name.endswith("lm_head") and not record.meta.get("shards"):
                    sizes.add(int(values.shape[-1]))
        return sizes.pop() if len(sizes) == 1 else None

    def _given_logits(self, known: Checked) -> None:
        temperature = temperature_of(self.config)
        if temperature is None:
            return
        groups: dict[tuple[int, int | None], list[Key]] = {}
        for key in self.placed.of_types(["activations"]):
            groups.setdefault((self.plan.root(key.rank), key.micro), []).append(key)
        found = {place: logits_at(self.placed, keys) for place, keys in groups.items()}
        for key, record in self._records("forward_data", once=False):
            logits = found.get((self.plan.root(key.rank), key.micro))
            names = [name for name in ("log_probs", "entropy") if name in record.tensors]
            shape = self.placed.layout(key).shape
            read = [*names, "input_ids"]
            if logits is None or "log_probs" not in names:
                continue
            if any(n not in record.tensors or record.tensors[n].shape != shape for n in read):
                continue
            canonical, local = self._loss_tokens(key, record)
            values = {name: record.tensors[name].reshape(-1)[local] for name in read}
            tokens = TokenValues(canonical, values.pop("input_ids").astype(np.int64), values)
            check_given_logits(
                known, *logits, tokens, temperature, self._token(canonical, "given its logits")
            )

    def _on_policy(self, known: Checked) -> None:
        source = self._objective.get("old_log_probs")
        if source != "current" and (source != "recompute" or (self.place.update or 0) > 0):
            return
        for _, canonical, (new, old) in self._values("is_loss_debug", ["log_probs", "old_log_probs"]):
            wide = [array.astype(np.float64) for array in (new, old)]
            relative = Bounds().of("log_probs", [*self._computed, *(dtype_name(a.dtype) for a in (new, old))])
            bound = np.expm1(relative.relative * float(np.abs(wide).max(initial=0.0)))
            ratio = np.exp(wide[0] - wide[1])
            known.elements(np.ones(ratio.shape), ratio, bound, self._token(canonical, "the ratio"))

    def _ratios(self, known: Checked) -> None:
        objective = self._objective
        if objective.get("importance_level") != "token":
            return
        low, high = (objective.get(f"log_ratio_{end}") for end in ("min", "max"))
        names = ["log_probs", "old_log_probs", "prob_ratio"]
        for _, canonical, (new, old, ratio) in self._values("is_loss_debug", names):
            wide = [array.astype(np.float64) for array in (new, old, ratio)]
            gap = np.maximum(wide[0] - wide[1], -np.inf if low is None else low)
            expected = np.exp(np.minimum(gap, np.inf if high is None else high))
            size = (1 + np.abs(wide[0]) + np.abs(wide[1])) * np.maximum(expected, 1.0)
            bound = _RATIO * max(map(_eps, (new, old, ratio))) * size
            known.elements(expected, wide[2], bound, self._token(canonical, "the ratio"))

    # the loss

    def _losses(self, known: Checked) -> None:
        shares = {(key.rank, key.micro): record for key, record in self._records("loss", once=False)}
        for share, term in _TERMS.items():
            for key, _, (weights, terms) in self._values("is_loss_debug", ["weights", term]):
                record = shares.get((key.rank, key.micro))
                if record is None or share not in record.tensors or record.tensors[share].size != 1:
                    continue
                products = weights.astype(np.float64) * terms.astype(np.float64)
                total, actual = math.fsum(products.tolist()), record.tensors[share].reshape(-1)
                beside = record.tensors.get(ROUTER)
                if share == "loss" and beside is not None and beside.size == 1:  # no sum over loss tokens
                    total += float(beside.reshape(-1)[0])
                scale = math.fsum(np.abs(weights.astype(np.float64)).tolist()) * float(
                    np.abs(terms).max(initial=0.0)
                )
                bound = 4 * (len(products) + 4) * max(map(_eps, (terms, actual))) * scale
                known.number(total, float(actual[0]), bound, f"{share} of {key} ({SHARES[share]})")

    def _metrics(self, known: Checked) -> None:
        reports = {
            f"of rank {key.rank}": record
            for key in self.placed.of_types(["metrics"])
            if (record := self.placed.get(key)) is not None
        }
        check_combined(known, [record for _, record in self._records("loss")], reports)
        parts = {(key.rank, key.micro): parts_of(record) for key, record in self._records("loss", once=False)}
        for name, (record_type, tensor) in TOKENS.items():
            for key, _, (values,) in self._values(record_type, [tensor]):
                part = parts.get((key.rank, key.micro), {}).get(name)
                if part is not None:
                    check_part(known, name, part, values, f"of {key}")

    # the model

    def _parts(self, known: Checked) -> None:
        found = (self.placed.get(key) for key in self.placed.of_types(WEIGHTS))
        check_parts(known, (record for record in found if record is not None), self.mesh, self.config)


def _eps(array: Array) -> float:
    return spacing(array.dtype)
