"""Start and result of an optimizer's step: gradients before clipping, parameters, state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from regress.capture.gradient_hooks import versions
from regress.capture.model_structure import Anatomy
from regress.capture.recording_settings import Settings
from regress.dump.numpy_arrays import Array, to_numpy
from regress.dump.tensor_placements import local, of
from regress.errors import CaptureError
from regress.layout import ShardLayout

Emit = Callable[[str, Mapping[str, Any], Mapping[str, Any]], None]
"""Function that takes type, tensors and metadata of a record of the current step."""

Part = tuple[Array, ShardLayout | None]


@dataclass(eq=False)
class Updates:
    """Follows the gradients of one step from the backward calls to the optimizer.

    Gradients count as final when something is about to clip them, or the optimizer is about to step, unless a backward
    call follows. Version counters reveal changes in place that nobody announced; the gradients that the optimizer then
    gets are recorded as ``gradient_clipped``.

    Attributes:
        wanted: tells whether a record type is kept in the current step.
        factor: divisor of gradients: the scale of a GradScaler that has not been divided out.
    """

    anatomy: Anatomy
    settings: Settings
    wanted: Callable[[str], bool]
    emit: Emit
    factor: float = 1.0
    _versions: dict[str, tuple[int, int]] | None = None
    _before: dict[str, tuple[int, int]] = field(default_factory=dict)
    _snapshot: dict[str, Part] | None = None
    _norm: float | None = None
    _limit: float | None = None  # of the norm that the trainer allows
    _done: set[str] = field(default_factory=set)
    _settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # setting -> parameter -> value

    def dropped(self) -> bool:
        """Return True if gradients were measured or clipped and are gone, and no optimizer has stepped."""
        if self._snapshot is None or not self._versions:
            return False
        now = self._gradients()
        if not now:
            return True
        found = versions(now)
        return all(found[n] != self._versions.get(n) for n in found) and not any(
            local(g).any() for g in now.values()
        )

    def backward_begins(self) -> None:
        """Note the gradients before a backward call."""
        self._before = versions(self._gradients())

    def backward_ended(self) -> None:
        """Discard the gradients taken as final if the backward call changed any; calls of other models do not.

        After this call only announced changes of gradients are expected.
        """
        now = versions(self._gradients())
        if self._versions is None or now != self._before:
            self._snapshot, self._norm, self._versions = None, None, now

    def unscaled(self) -> None:
        """Note that a GradScaler divided its scale out."""
        self.factor = 1.0
        self._versions = versions(self._gradients())

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Keep all gradients as they are before some of these tensors are measured or clipped."""
        if self._snapshot is not None or self._versions is None or not self.wanted("gradient"):
            return
        own = self._gradients()
        known = {id(grad) for grad in own.values()}
        if any(id(tensor) in known for tensor in tensors):
            self._snapshot = self._copied(own)

    def clip_norm(self, norm: Any, limit: Any) -> None:
        """Note the trainer's own total norm; to read one that is not yet reduced would take a collective.

        Args:
            limit: the largest norm that it allows.
        """
        if isinstance(limit, int | float):
            self._limit = float(limit)
        whole = all(placement.is_replicate() for placement in getattr(norm, "placements", ()))
        if isinstance(norm, Tensor) and norm.numel() == 1 and whole:
            self._norm = float(local(norm.detach()))

    def owns(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer updates parameters of the model."""
        mine = {id(p) for _, p in self.anatomy.parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def write_ready(self, optimizer: Optimizer) -> None:
        """Record the gradients of an optimizer that steps within the backward call, as soon as they are complete."""
        if not self.wanted("gradient"):
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = {name: p.grad for name, p in self.anatomy.parameters() if id(p) in mine and p.grad is not None}
        found = self._copied({n: grad for n, grad in own.items() if f"gradient/{n}" not in self._done})
        self._done |= {"gradient", *(f"gradient/{name}" for name in found)}
        shards = {name: shard.to_json() for name, (_, shard) in found.items() if shard is not None}
        if found:
            tensors = {name: array for name, (array, _) in found.items()}
            self.emit("gradient", tensors, {"shards": shards} if shards else {})

    def write_gradients(self, scale: Any = None) -> None:
        """Record the gradients of the step, once.

        Args:
            scale: scale of a GradScaler, for an optimizer that divides by it within its step.
        """
        if "gradient" in self._done or not self.wanted("gradient"):
            return
        self._done.add("gradient")
        found, changed = self._snapshot, False
        if found is None:
            own = self._gradients()
            changed = self._versions is None or versions(own) != self._versions
            found = self._copied(own, None if scale is None else float(scale))
        tensors = {name: array for name, (array, _) in found.items()}
        shards = {name: shard.to_json() for name, (_, shard) in found.items() if shard is not None}
        meta: dict[str, Any] = {"shards": shards} if shards else {}
        norm = self._norm if shards else _norm(tensors)
        if norm is not None and self.settings.gradient is True:
            meta["grad_norm"] = norm
        self._snapshot = None
        if tensors:
            self.emit("gradient_clipped" if changed else "gradient", tensors, meta)

    def write_update(self, optimizer: Optimizer | None) -> None:
        """Record parameters and state that an optimizer updated; with None the parameters that no optimizer did."""
        mine = (
            None
            if optimizer is None
            else {id(p) for group in optimizer.param_groups for p in group["params"]}
        )
        named = {
            name: p
            for name, p in self.anatomy.parameters()
            if name not in self._done and (p.requires_grad if mine is None else id(p) in mine)
        }
        self._done |= named.keys()
        if self.wanted("param"):
            self._emit_parts("param", {n: p for n, p in named.items() if _matches(self.settings.param, n)})
        if optimizer is not None and self.wanted("optimizer"):
            state = {
                f"{name}/{key}": value
                for name, p in named.items()
                if _matches(self.settings.optimizer_state, name)
                for key, value in optimizer.state.get(p, {}).items()
                if isinstance(value, Tensor | int | float)
            }
            for key, values in _settings(optimizer, named).items():
                self._settings.setdefault(key, {}).update(values)
            self._emit_parts("optimizer", state)
        elif self._settings:
            self.emit("optimizer", {}, self._settings_of_step())

    def _settings_of_step(self) -> dict[str, Any]:
        """Return settings of all optimizers of the step: one value, or where parameters differ one for each name."""
        rates: Any = self._settings.pop("learning_rates", {})
        settings = {"learning_rates": rates, **{key: _one(values) for key, values in self._settings.items()}}
        return settings if self._limit is None else {**settings, "max_grad_norm": self._limit}

    def finished(self) -> None:
        """End the step."""
        self._versions, self._snapshot, self._norm, self.factor = None, None, None, 1.0
        self._limit = None
        self._before, self._settings = {}, {}
        self._done = set()

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.anatomy.parameters() if p.grad is not None}

    def _copied(self, gradients: Mapping[str, Tensor], scale: float | None = None) -> dict[str, Part]:
        """Return copies of the local part of each gradient, with the part of the whole that it is."""
        factor, found = self.factor if scale is None else scale, {}
        for name, grad in gradients.items():
            if _matches(self.settings.gradient, name):
                here = local(grad)
                found[name] = (to_numpy(here if factor == 1.0 else here / factor, name), shard_of(name, grad))
        return found

    def _emit_parts(
        self, type: str, values: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> None:
        tensors = {
            name: local(value) if isinstance(value, Tensor) else value for name, value in values.items()
        }
        parts = {name: shard_of(name, value) for name, value in values.items()}
        shards = {name: part.to_json() for name, part in parts.items() if part is not None}
        if tensors:
            self.emit(type, tensors, {**(meta or {}), **({"shards": shards} if shards else {})})


def shard_of(name: str, value: Any) -> ShardLayout | None:
    """Return the part of the whole that a distributed tensor has here; None for any other value.

    Raises:
        CaptureError: for a partial sum, which is not a part of anything.
    """
    if not hasattr(value, "placements"):
        return None
    try:
        return of(value)
    except ValueError:
        raise CaptureError(f"""{name} is placed as {value.placements}, a partial sum, which is not a part of the whole
        tensor: reduce it over the ranks before the optimizer steps""") from None


_SETTINGS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
"""Settings of AdamW."""


def _settings(optimizer: Optimizer, named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return class, learning rate and settings of an optimizer for each of these parameters."""
    names = {id(p): name for name, p in named.items()}
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        own = [names[id(p)] for p in group["params"] if id(p) in names]
        settings = {key: plain_number(group[key]) for key in _SETTINGS if group.get(key) is not None}
        settings["optimizer_type"] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if group.get("lr") is not None:
            settings["learning_rates"] = float(group["lr"])
        for key, value in settings.items():
            found.setdefault(key, {}).update(dict.fromkeys(own, value))
    return {key: values for key, values in found.items() if values}


def _one(values: Mapping[str, Any]) -> Any:
    """Return the value that all parameters share, else the mapping."""
    first = next(iter(values.values()))
    return first if all(value == first for value in values.values()) else dict(values)


def plain_number(value: Any) -> Any:
    """Return a setting of an optimizer as JSON."""
    if isinstance(value, tuple | list):
        return [plain_number(part) for part in value]
    return value if isinstance(value, bool) else float(value)


def _matches(wanted: bool | str, name: str) -> bool:
    return wanted if isinstance(wanted, bool) else re.search(wanted, name) is not None


def _norm(tensors: Mapping[str, Array]) -> float | None:
    """Return the Euclidean norm of all gradients together."""
    if not tensors:
        return None
    return float(np.sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in tensors.values())))
