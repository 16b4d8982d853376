"""A fault: a small, reversible change of the engine, and what is known of it before it is tried.

How one is written says `regress.replay.fault_injection`; its name decides whether it is held out, so a name stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from regress.replay.fault_injection import Inject, injected, of_run
from regress.replay.run_changes import Prepare

KINDS: Mapping[str, str] = {
    "semantic": "other mathematics: judged in float64",
    "precision": "the same mathematics with fewer bits: judged in float32",
    "equivalent": "a change that was proven to compute the same: must not be flagged",
    "harmless": "a refactoring: must not be flagged",
}
CATEGORIES: Mapping[str, str] = {
    "A": "loss normalization",
    "B": "data-parallel reduction",
    "C": "tensor and sequence parallelism",
    "D": "context parallelism",
    "E": "pipeline parallelism",
    "F": "experts",
    "G": "packing, masks, positions, order",
    "H": "log-probs, temperature, shifts",
    "I": "advantages and groups",
    "J": "KL",
    "K": "clipping and ratios",
    "L": "gradient norm and clipping",
    "M": "optimizer and parameters",
    "N": "checkpoints and resuming",
    "O": "precision",
    "P": "weights of sampler and trainer",
    "Q": "tokens, rewards, masks",
    "R": "backward passes",
    "S": "adapters",
    "T": "layers of the model",
    "U": "reported metrics",
    "V": "sampling",
}
"""Letter -> category; those up to Q are of bugs of real systems that were collected."""
COMMON: Mapping[str, str] = {
    "loss 5 %": "loss within 5 %",
    "loss 1 %": "loss within 1 %",
    "norm 3 %": "norm of the gradient within 3 %",
    "cosine 0.99": "cosine of every gradient at least 0.99",
    "L2 8.3 %": "relative L2 error of every gradient at most 8.3 %",
    "allclose": "log-probs by torch.allclose with its defaults",
    "mean 1e-3": "mean log-prob within 1e-3",
}
"""Checks of common practice, which are measured on the same replays."""
EVERY_CHECK = tuple(COMMON)
LOG_PROB_CHECKS = ("allclose", "mean 1e-3")
FORWARD_CHECKS = ("loss 5 %", "loss 1 %", *LOG_PROB_CHECKS)
SCALE_BLIND_CHECKS = ("loss 5 %", "loss 1 %", "cosine 0.99", *LOG_PROB_CHECKS)
"""Checks that often miss a fault together: in the backward pass, and of a scale."""

REFUSED = "refused"
"""Value of ``first`` for a fault that the engine itself refuses or cannot survive."""


@dataclass(frozen=True)
class Shown:
    """A replay in which a fault shows, and how; written before the first run.

    Attributes:
        case, variant: the replay; `REFUSED` faults end it.
        first: quantity that fails first, and its first tensor where that is known: ``gradient lm_head.weight``.
        names: pattern of the tensors of that quantity that fail in that update; all others hold.
        ranks: ranks that have failures of it; () for a verdict on all of them together, None for any.
        place: place of the first verdict, such as ``step0/rank0/micro1``; "" for any.
        update: update of its step in which it shows first.
        status: status of the first verdict; "" for any.
        says: part of what the first verdict says.
        tokens: which loss tokens fail, in the words of the tests of faults; "" for any.
        probe: the tensor of these tokens, if not the first one.
        steps: steps that are replayed; None for all.
    """

    case: str
    variant: str
    first: str
    names: str = ".*"
    ranks: tuple[int, ...] | None = None
    place: str = ""
    update: int | None = None
    status: str = ""
    says: str = ""
    tokens: str = ""
    probe: str = ""
    steps: int | None = 1

    @property
    def quantity(self) -> str:
        """The quantity that fails first."""
        return self.first.partition(" ")[0]

    @property
    def tensor(self) -> str:
        """The tensor that fails first, "" where any of ``names`` may."""
        return self.first.partition(" ")[2]


@dataclass(frozen=True)
class Fault:
    """A fault of the registry.

    Attributes:
        inject: the function.
        category: letter of `CATEGORIES`.
        source: where it was met: repository and number; "" if nowhere that is known.
        kind: one of `KINDS`.
        shown: the replays in which it shows; of one that must not be flagged, those that are tried.
        rules: diagnoses that are right; () where silence is.
        silent: replay ``case/variant`` or case that cannot show it, and why.
        blind: checks of `COMMON` that are known to miss it.
        precisions: those in which it is tried.
        proof: why it computes the same, of an equivalent one.
    """

    inject: Inject
    title: str
    category: str
    source: str
    mechanism: str
    kind: str
    shown: tuple[Shown, ...]
    rules: tuple[str, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    blind: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("float64",)
    proof: str = ""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.inject.__name__

    @property
    def words(self) -> str:
        """Name as in tables: ``population deviation``."""
        return self.name.replace("_", " ")

    @property
    def variant(self) -> str:
        """Variant of the first replay in which it shows."""
        return self.shown[0].variant

    @property
    def fresh(self) -> bool:
        """True if it was written from descriptions of bugs and the engine alone, before its first run."""
        return ".fresh." in self.inject.__module__

    @property
    def wrong(self) -> bool:
        """True if it must be flagged."""
        return self.kind in ("semantic", "precision")

    @property
    def of_run(self) -> bool:
        """True if it breaks a run that was built; False if the code that builds and drives it."""
        return of_run(self.inject)

    @property
    def held_out(self) -> bool:
        """True for a third of the faults, by a hash of the name: their diagnoses are looked at last."""
        return self.wrong and int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0

    @contextmanager
    def injected(self) -> Iterator[Prepare | None]:
        """Break the engine inside the context; yield the function that breaks each run, if any."""
        with injected(self.inject) as prepare:
            yield prepare


REGISTERED: dict[str, Fault] = {}
"""Faults of all modules that were imported, by name; `tests.faults.registry.corpus` imports all of them."""
SOURCES: dict[Inject, str] = {}
"""Where faults were met."""


def met_in(source: str) -> Callable[[Inject], Inject]:
    """Say where the decorated function, which `fault` registers, was met: repository and number."""

    def note(inject: Inject) -> Inject:
        SOURCES[inject] = source
        return inject

    return note


def fault(
    category: str,
    first: str = "",
    rules: str = "",
    *,
    on: str = "dense/mbs4",
    kind: str = "semantic",
    precisions: str = "",
    also: Sequence[Shown] = (),
    title: str = "",
    mechanism: str = "",
    silent: Mapping[str, str] | None = None,
    blind: Sequence[str] = (),
    proof: str = "",
    **how: Any,
) -> Callable[[Inject], Inject]:
    """Register the decorated function as a fault; the function itself stays what it is.

    Args:
        first: as in `Shown`, for each replay of ``on``.
        rules: diagnoses that are right, with spaces between them; none where silence is.
        on: replays in which it shows, ``case/variant``, with spaces between them.
        precisions: those in which it is tried, with spaces between them; by default float64, for a precision fault
            float32.
        also: other replays in which it shows, otherwise.
        title: one line; by default the name in words.
        mechanism: one or two sentences; by default the docstring of the function.
        how: the other fields of `Shown`.

    The other arguments are fields of `Fault`.

    Raises:
        ValueError: for a name that is taken, an unknown kind, category or check, or a field that its kind asks for.
    """

    def register(inject: Inject) -> Inject:
        name = inject.__name__
        replays = [replay.partition("/") for replay in on.split()]
        shown = tuple(Shown(case, variant, first, **how) for case, _, variant in replays)
        found = Fault(
            inject,
            title or name.replace("_", " "),
            category,
            SOURCES.get(inject, ""),
            mechanism or " ".join((inject.__doc__ or f"{name.replace('_', ' ').capitalize()}.").split()),
            kind,
            (*shown, *also),
            tuple(rules.split()),
            dict(silent or {}),
            tuple(blind),
            tuple(precisions.split()) or (("float32",) if kind == "precision" else ("float64",)),
            proof,
        )
        _check(found)
        REGISTERED[name] = found
        return inject

    return register


harmless, equivalent = partial(fault, kind="harmless"), partial(fault, kind="equivalent")


def _check(found: Fault) -> None:
    known = REGISTERED.get(found.name)
    problem = ""
    if known is not None and known.inject.__module__ != found.inject.__module__:
        problem = f"is the name of one in {known.inject.__module__}, too; choose another name"
    elif found.kind not in KINDS:
        problem = f"is of kind {found.kind!r}; choose one of {', '.join(KINDS)}"
    elif found.category not in CATEGORIES:
        problem = f"has category {found.category!r}; choose one of {', '.join(CATEGORIES)}"
    elif unknown := [name for name in found.blind if name not in COMMON]:
        problem = f"names the check {unknown[0]!r}; choose one of {', '.join(COMMON)}"
    elif found.wrong and not all(shown.first for shown in found.shown):
        problem = "says nowhere what fails first; give first"
    elif (found.kind == "equivalent") != bool(found.proof):
        problem = "has a proof and is not of kind equivalent, or the reverse; give both or none"
    if problem:
        raise ValueError(f"fault {found.name} {problem}")
