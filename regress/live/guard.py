"""`guard`: checks the rules of a healthy RL step while somebody's trainer runs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from regress.capture.gradient_hooks import Listener, listening
from regress.capture.trainer_ranks import World
from regress.errors import GuardError
from regress.live.group_sums import GroupSums
from regress.live.guard_rules import CHECKS, Violation, chosen_checks, refuse_options
from regress.live.guarded_microbatch import (
    EPS,
    Microbatch,
    Recompute,
    not_finite,
    off_policy,
    open_microbatch,
)
from regress.live.replica_checksums import differing, replica_groups
from regress.live.sampler_mismatch import EarlierWeights, mismatch
from regress.live.token_weights import alike, share_of, uneven
from regress.live.trainer_adapters import attach, model_of


class GuardWarning(UserWarning):
    """A rule of a healthy step does not hold, and `guard(action="warn")` lets training go on."""


def guard(
    trained: Any,
    *,
    action: Literal["raise", "warn"] = "raise",
    checks: Iterable[str] | None = None,
    sampler_dtype: str | None = None,
    centered: bool = True,
    group_size: int | None = None,
    data_rank: int | None = None,
    replica_group: Any = None,
) -> Guard:
    """Check the rules of a healthy RL step inside of a ``with`` block, and stop or warn at the first violation.

    A trainer of TRL (`GRPOTrainer`, `RLOOTrainer`) tells its values by itself. Any other loop calls `Guard.batch` after
    each forward pass of the policy. Rules whose values nobody tells are not checked, and `Guard.summary` lists them.
    All ranks of a job use it with the same arguments; a violation on one rank is raised on all.

    Args:
        trained: the model, or a trainer with a ``model``.
        action: ``"raise"`` a `GuardError`, before the update for rules about its inputs, or ``"warn"``.
        checks: names of the rules, by default all: finite, on_policy, group_sums, shares, sampler, replicas.
        sampler_dtype: float64, float32, float16 or bfloat16, in which the sampler computes; by default that of the
            log-probs that it is compared with.
        centered: False if advantages of a group do not add up to 0 by definition (REINFORCE++, GAE).
        group_size: rows of a group, which may lie in several microbatches, ranks and updates; needed for their sums.
        data_rank: first rank that holds the same samples as this one; by default this one.
        replica_group: process group whose ranks hold the same plain parameters, where DDP does not tell it.

    Raises:
        GuardError: for an unknown rule or dtype, an option of another type, or a trainer without a model.
    """
    chosen = chosen_checks(checks)
    refuse_options(action, sampler_dtype, centered, group_size, data_rank, replica_group)
    sums = GroupSums(group_size) if centered else None
    return Guard(trained, action, chosen, sampler_dtype, sums, data_rank, replica_group)


class Guard:
    """Rules of a trainer under watch; made by `guard`.

    Attributes:
        violations: what was found so far.
        step: number of the update under way, from 0; updates: those that were made.
    """

    def __init__(
        self,
        trained: Any,
        action: str,
        checks: tuple[str, ...],
        sampler_dtype: str | None,
        groups: GroupSums | None,
        data_rank: int | None,
        replica_group: Any,
    ) -> None:
        self.violations: list[Violation] = []
        self.step = self.updates = 0
        self.checked: Counter[str] = Counter()
        self._trained, self._model = trained, model_of(trained)
        self._action, self._checks, self._dtype = action, checks, sampler_dtype
        self._groups, self._data_rank, self._replica_group = groups, data_rank, replica_group
        self._micros: list[Microbatch] = []
        self._losses: list[Tensor] = []
        self._weights = EarlierWeights(self._model)
        self._wants_weights = False
        self._world = World()
        self._ddp = self._model if isinstance(self._model, nn.parallel.DistributedDataParallel) else None
        self._named: dict[str, nn.Parameter] = {}
        self._stepped: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Guard:
        stack = self._stack
        stack.enter_context(attach(self, self._trained))
        stack.callback(self._model.register_forward_pre_hook(self._look).remove)
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        stack.enter_context(listening(_BackwardPasses(self)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __deepcopy__(self, memo: object) -> Guard:
        """Return itself, as a copy of a watched model (a reference, say) holds its hook."""
        return self

    def batch(
        self,
        *,
        log_probs: Tensor,
        loss_mask: Tensor | None = None,
        old_log_probs: Tensor | None = None,
        sampler_log_probs: Tensor | None = None,
        advantages: Tensor | None = None,
        samples: Sequence[Any] | None = None,
        groups: Sequence[Any] | None = None,
        on_policy: bool = False,
        routing: Tensor | None = None,
        sampler_routing: Tensor | None = None,
        weight_versions: Tensor | None = None,
        weight_version: int | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """Give the guard the values of one forward pass of the policy, before its backward pass.

        Args:
            log_probs: ``[B, T]`` as the loss uses them, with their graph.
            loss_mask: ``[B, T]``, not 0 at tokens that the loss counts; by default all.
            old_log_probs, sampler_log_probs: ``[B, T]``, at the same places.
            advantages: ``[B]`` or ``[B, T]``.
            samples: an id for each row, the same whenever the row is used; groups: the group of each row.
            on_policy: True if no update lies between the rollouts, or ``old_log_probs``, and these. Without it the
                sampler is compared with ``old_log_probs`` only.
            routing, sampler_routing: ``[B, T, ...]`` experts of each token.
            weight_versions: ``[B, T]`` numbers of the weights that each token was sampled with, and ``weight_version``
                the number of those that the sampler should have had; tells stale weights token by token.
            recompute: returns the log-probs of the same tokens again, to prove stale weights; every rank
                gives it, or none.

        Raises:
            GuardError: if a value does not fit the log-probs.
        """
        tokens = {
            "old_log_probs": old_log_probs,
            "sampler_log_probs": sampler_log_probs,
            "routing": routing,
            "sampler_routing": sampler_routing,
            "weight_versions": weight_versions,
        }
        micro = open_microbatch(
            len(self._micros),
            log_probs,
            loss_mask,
            tokens=tokens,
            advantages=advantages,
            samples=samples,
            groups=groups,
        )
        micro.old, micro.sampler = _detached(old_log_probs), _detached(sampler_log_probs)
        micro.routing, micro.sampler_routing = routing, sampler_routing
        micro.weight_versions, micro.weight_version = weight_versions, weight_version
        micro.on_policy, micro.recompute = on_policy, recompute
        if log_probs.requires_grad:
            log_probs.register_hook(micro.reached)
        self._wants_weights |= sampler_log_probs is not None and recompute is not None
        self._micros.append(micro)

    def summary(self) -> str:
        """Return one line for each rule: how often it was checked, and how often it did not hold."""
        broken = Counter(violation.check for violation in self.violations)
        lines = []
        for name, rule in CHECKS.items():
            count = self.checked[name]
            outcome = f"checked {count} times, broken {broken[name]}" if count else "no values were told"
            lines.append(f"{name:12} {outcome if name in self._checks else 'not chosen'}: {rule}")
        return "\n".join(lines)

    # events

    def _look(self, module: nn.Module, args: Any) -> None:
        if self._ddp is None and self._world.joined:
            self._ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()

    def loss(self, value: Tensor) -> None:
        """Note the loss that a backward pass starts from."""
        self._losses.append(value.detach())

    def expect_groups(self, size: int) -> None:
        """Note the rows of a group, where the caller did not tell."""
        if self._groups is not None and self._groups.size is None:
            self._groups.size = size

    def skipped(self) -> None:
        """Note that an update was skipped, as a GradScaler does: its microbatches are forgotten."""
        self._micros, self._losses = [], []

    def _owns(self, optimizer: Optimizer) -> bool:
        own = {id(p) for p in self._named.values()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._named = dict(
            self._model.named_parameters()
        )  # once in an update: walking a model takes its time
        if not self._owns(optimizer):
            return
        if id(optimizer) in self._stepped:
            self.step += 1
            self._stepped.clear()
        with torch.no_grad():
            self._settle([*self._of_tokens(), *self._of_gradients(optimizer)], self._of_update())
            if self._wants_weights and "sampler" in self._checks:
                self._weights.keep()
        self._micros, self._losses = [], []

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._owns(optimizer):
            return
        self.updates += not self._stepped
        self._stepped.add(id(optimizer))
        with torch.no_grad():
            self._settle([*self._of_parameters()], [])

    # rules

    def _of_tokens(self) -> Iterator[tuple[str, str]]:
        for micro in self._micros:
            if self._checking("finite"):
                yield from (("finite", sentence) for sentence in not_finite(micro))
            if micro.on_policy and micro.old is not None and self._checking("on_policy"):
                sentence = off_policy(micro, EPS[micro.log_probs.dtype])
                if sentence:
                    yield "on_policy", sentence

    def _of_gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
        if not self._checking("finite"):
            return
        for number, value in enumerate(self._losses):
            if not bool(torch.isfinite(value).all()):
                yield "finite", f"the loss of backward pass {number} is {float(value.sum())}"
        yield from self._unbounded("the gradient", lambda p: p.grad)

    def _of_parameters(self) -> Iterator[tuple[str, str]]:
        if self._checking("finite"):
            yield from self._unbounded("the parameter", lambda p: p)
        if self._world.size > 1 and "replicas" in self._checks:
            groups = [*replica_groups(self._model, self._ddp, self._replica_group)]
            self.checked["replicas"] += bool(groups)
            yield from (("replicas", sentence) for sentence in differing(self._model, groups))

    def _unbounded(self, kind: str, of: Any) -> Iterator[tuple[str, str]]:
        found = {
            name: (value.to_local() if hasattr(value, "to_local") else value).detach()
            for name, p in self._named.items()
            if (value := of(p)) is not None and value.is_floating_point()
        }
        if not found:
            return
        norms = torch._foreach_norm([*found.values()])
        if bool(torch.isfinite(torch.stack(alike(norms)).sum())):  # one look at the device where all is well
            return
        wrong = [name for name, value in found.items() if not bool(torch.isfinite(value).all())]
        if wrong:  # a norm, or their sum, may overflow
            name = wrong[0]
            count = int((~torch.isfinite(found[name])).sum())
            yield (
                "finite",
                f"{kind} of {name} is not finite in {count} of {found[name].numel()} elements, as in {len(wrong)} of "
                f"{len(found)} tensors",
            )

    def _of_update(self) -> list[tuple[str, str]]:
        """Return violations of rules about the whole update, the same on every rank."""
        rank = self._data_rank if self._data_rank is not None else self._world.rank
        shares = [share_of(micro, rank) for micro in self._micros] if "shares" in self._checks else []
        sums = self._groups.parts(self._micros) if self._groups and "group_sums" in self._checks else []
        sampler = [self._differs(micro) for micro in self._micros] if "sampler" in self._checks else []
        gathered = self._world.gather((rank, shares, sums, any(sampler)))
        once = {root: (mine, parts) for root, mine, parts, _ in reversed(gathered)}
        found = []
        everywhere = [share for mine, _ in once.values() for share in mine]
        if any(share.samples or any(share.scales.values()) for share in everywhere) and self._checking(
            "shares"
        ):
            found += [("shares", sentence) for sentence in uneven(everywhere)]
        if self._groups and (
            complete := self._groups.add(part for _, parts in once.values() for part in parts)
        ):
            self.checked["group_sums"] += len(complete)
            found += [("group_sums", sentence) for sentence in complete if sentence]
        if any(differs for *_, differs in gathered):
            found += self._of_sampler()
        return found

    def _differs(self, micro: Microbatch) -> bool:
        if micro.sampler is None or micro.expected is None:
            return False
        self.checked["sampler"] += 1
        return mismatch(micro, self._sampler_dtype(micro), lambda _: None) is not None

    def _of_sampler(self) -> list[tuple[str, str]]:
        """Return the violations of this rank's sampler, after all ranks computed the earlier weights' log-probs."""
        older = self._earlier()
        sentences = [mismatch(micro, self._sampler_dtype(micro), older.get) for micro in self._micros]
        return [("sampler", sentence) for sentence in sentences if sentence]

    def _earlier(self) -> dict[Microbatch, Tensor]:
        if not self._weights.known:
            return {}
        with self._weights.used():
            return {
                micro: micro.recompute().detach() for micro in self._micros if micro.recompute is not None
            }

    def _sampler_dtype(self, micro: Microbatch) -> str:
        assert micro.sampler is not None
        coarsest = max((micro.sampler.dtype, micro.log_probs.dtype), key=EPS.__getitem__)
        return self._dtype or str(coarsest).removeprefix("torch.")

    def _checking(self, name: str) -> bool:
        if name not in self._checks:
            return False
        self.checked[name] += 1
        return True

    def _settle(self, own: list[tuple[str, str]], common: list[tuple[str, str]]) -> None:
        """Report violations on all ranks: raise the first one, or warn of each once.

        Raises:
            GuardError: the same on every rank.
        """
        rank = self._world.rank
        mine = [Violation(check, self.step, rank, sentence) for check, sentence in own + common]
        found = list(dict.fromkeys(one for each in self._world.gather(mine) for one in each))
        seen: set[tuple[str, str]] = set()
        for violation in found:
            if (violation.check, violation.message) in seen:
                continue
            seen.add((violation.check, violation.message))
            self.violations.append(violation)
            if self._action == "raise":
                raise GuardError(str(violation))
            if violation.rank == rank:
                warnings.warn(str(violation), GuardWarning, stacklevel=2)


def _detached(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach()


class _BackwardPasses(Listener):
    """Tells a guard of the losses that a loop calls backward on, and of updates that a GradScaler skipped."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def before_backward(self, root: Any, gradients: Any) -> None:
        """Note the loss."""
        if isinstance(root, Tensor):
            self._guard.loss(root)

    def stepped_by_scaler(self, optimizer: Any) -> None:
        """Forget the microbatches of an update that was skipped; those of one that was made are gone already."""
        self._guard.skipped()
