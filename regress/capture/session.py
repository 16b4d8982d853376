"""A recording under way: forward passes, the backward calls that reach them, and the steps of the optimizer.

A microbatch is one backward call and the forward passes that it reached; a step ends with the optimizer's. What a
step computed is written when the next one begins, or recording ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regress.capture.anatomy import Anatomy, last_hidden_state
from regress.capture.gradients import versions
from regress.capture.head import check_logits, make_head, solver_head
from regress.capture.inference import infer_layout
from regress.capture.inputs import arguments_of, arrangement_of
from regress.capture.passes import Pass, content_key, open_pass, stacked, together, token_values
from regress.capture.precision import Precision
from regress.capture.settings import Settings, sample_key
from regress.capture.shares import add_token_gradient, told_of, unscaled
from regress.capture.world import World
from regress.dump.arrays import to_numpy
from regress.dump.coordinates import Coordinates
from regress.dump.placements import local, of
from regress.dump.recorder import Recorder
from regress.errors import CaptureError
from regress.layout import SampleKey, TokenLayout

OTHER_RANKS = 1_000_000
"""Identical samples are numbered; those of each further rank that holds other samples start this much higher."""


@dataclass(eq=False)
class Micro:
    """One backward call: the passes that it reached, and the loss that it started from."""

    task: int
    passes: list[Pass] = field(default_factory=list)
    loss: float | None = None


class Session:
    """Collects what the hooks see and hands it to the recorder."""

    def __init__(self, anatomy: Anatomy, settings: Settings, world: World, recorder: Recorder | None) -> None:
        self.anatomy = anatomy
        self.settings = settings
        self.world = world
        self.recorder = recorder
        self.precision = Precision()
        self.forwards = 0
        self.step = 0
        self.active = True
        self._outer: dict[str, Any] = {}
        self._micros: list[Micro] = []
        self._loose: list[Micro] = []
        self._stepped = False
        self._root_loss: float | None = None
        self._scale = 1.0
        self._versions: dict[str, tuple[int, int]] | None = None
        self._snapshot: dict[str, Any] | None = None
        self._norm: float | None = None
        self._written: set[str] = set()
        self._probe: tuple[Tensor, Any] | None = None
        self._checked = False
        self._backwards = 0

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of the model, some of which do not reach its decoder."""
        if self.active and torch._C._current_graph_task_id() == -1:
            self._outer = arguments_of(module, args, kwargs)

    def after_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Compare the model's own logits with the head, once, and forget its arguments."""
        self._outer = {}
        probe, self._probe = self._probe, None
        logits = getattr(output, "logits", None) if not isinstance(output, Tensor) else output
        if (
            self.active
            and probe is not None
            and isinstance(logits, Tensor)
            and logits.dim() == 3
            and not self._checked
        ):
            hidden, head = probe
            with torch.no_grad():
                check_logits(logits, hidden, head, type(self.anatomy.root).__name__)
            self._checked = True

    def after_decoder(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a forward pass, whose last hidden state is at hand."""
        if not self.active or torch._C._current_graph_task_id() != -1:
            return
        hidden = args[0] if self.anatomy.at_input else last_hidden_state(output)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or not self._wanted():
            return
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return
        arguments = {**self._outer}
        if not self.anatomy.at_input:
            told = arguments_of(module, args, kwargs)
            arguments |= {k: v for k, v in told.items() if v is not None and _more(v, arguments.get(k))}
        with torch.no_grad():
            self._open(hidden, arguments)

    def _wanted(self) -> bool:
        assert self.recorder is not None
        return self.recorder.wanted("forward_data", self.step + self._stepped)

    def _open(self, hidden: Tensor, arguments: Mapping[str, Any]) -> None:
        states = hidden.detach()
        if hasattr(states, "full_tensor"):
            states = states.full_tensor()
        self.world.look(self.anatomy.root)
        self.precision.look(states, self.anatomy.decoder)
        found = arrangement_of(arguments, self.settings.finders, _pad_token(self.anatomy.root))
        layout = infer_layout(found)
        states = states.reshape(*layout.shape[:1], -1, states.shape[-1])
        first = layout.shape[1] - states.shape[1]
        p = open_pass(found, layout, first, _absolute(self.anatomy.root))
        p.samples = self._samples(arguments, layout)
        head = make_head(self.anatomy)
        p.values = token_values(p, states, head, self.settings.temperature or 1.0, self.settings.chunk)
        self.forwards += 1
        if not self._checked:
            self._probe = (states[-1:, -1:].clone(), head)
        if hidden.requires_grad:
            kept = states if self.settings.token_gradient else None
            hidden.register_hook(_Reached(self, p, kept))

    def _samples(self, arguments: Mapping[str, Any], layout: TokenLayout) -> list[SampleKey] | None:
        """Keys of the segments, where the caller names the samples."""
        told = self.settings.samples
        if told is None:
            return None
        if isinstance(told, str):
            found = arguments.get(told)
            if found is None:
                raise CaptureError(
                    f"record(samples={told!r}) names no argument of the forward pass, which has "
                    f"{', '.join(arguments)}: "
                    "correct it, or give a function of them"
                )
        elif callable(told):
            found = told(arguments)
        else:
            raise CaptureError("samples= must be the name of a forward argument or a function of them")
        keys = [sample_key(value) for value in found]
        if len(keys) != len(layout.segments):
            raise CaptureError(
                f"samples= tells {len(keys)} ids, but the batch holds {len(layout.segments)} samples: give "
                "one for each, by "
                "row and column"
            )
        return keys

    def before_backward(self, roots: Any, gradients: Any) -> None:
        """A backward call begins: what was taken for the final gradient was not."""
        self._snapshot, self._norm = None, None
        root = roots[0] if isinstance(roots, tuple | list) and len(roots) == 1 else roots
        self._root_loss = None
        if isinstance(root, Tensor) and root.numel() == 1 and (gradients is None or gradients == (None,)):
            self._root_loss = float(root.detach())

    def after_backward(self) -> None:
        """It has ended: the loss belongs to its microbatch, and gradients are as it left them."""
        if self._micros and self._micros[-1].loss is None and self._backwards == len(self._micros):
            self._micros[-1].loss = self._root_loss
        self._root_loss = None
        self._versions = versions(self._gradients())

    def reached(self, p: Pass, hidden: Tensor | None, gradient: Tensor) -> None:
        """A backward call reached a forward pass."""
        if not self.active:
            return
        if self._stepped:
            self.finish_step()
        task = torch._C._current_graph_task_id()
        if p.reached is None:
            p.reached = task
            if not self._micros or self._micros[-1].task != task:
                self._micros.append(Micro(task))
                self._backwards = len(self._micros)
            self._micros[-1].passes.append(p)
        if hidden is not None and self._wanted_here("token_gradient"):
            head = solver_head(self.anatomy)
            add_token_gradient(
                p, hidden, _plain(gradient), head, self.settings.temperature, self.precision.eps
            )

    def scaled(self, scaler: Any) -> None:
        """The loss was multiplied by the scale of a GradScaler."""
        self._scale = float(scaler.get_scale())

    def unscaled(self, optimizer: Any) -> None:
        """The gradients were divided by it."""
        self._scale_left = 1.0
        self._versions = versions(self._gradients())

    def stepped_by_scaler(self, optimizer: Any) -> None:
        """A GradScaler made or skipped a step."""

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.anatomy.parameters() if p.grad is not None}

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Gradients are about to be clipped: this is how they were accumulated."""
        if self._snapshot is not None or not self._micros:
            return
        own = self._gradients()
        known = {id(grad) for grad in own.values()}
        if any(id(tensor) in known for tensor in tensors):
            self._snapshot = self._copied(own)

    def clip_norm(self, norm: Any) -> None:
        """The trainer's own total norm; a distributed one would need a collective."""
        if isinstance(norm, Tensor) and not hasattr(norm, "placements") and norm.numel() == 1:
            self._norm = float(norm.detach())

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """An optimizer of the model is about to step."""
        if not self.active or not self._owns(optimizer) or not self._micros:
            return
        self._write_gradients()

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """It has stepped: parameters and state are new."""
        if not self.active or not self._owns(optimizer) or not self._micros:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in self.anatomy.parameters() if id(p) in mine}
        self._write_parameters(named)
        self._write_state(optimizer, named)
        self._stepped = True

    def _owns(self, optimizer: Optimizer) -> bool:
        mine = {id(p) for _, p in self.anatomy.parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _copied(self, gradients: Mapping[str, Tensor]) -> dict[str, Any]:
        """Local copies of gradients with the part of the whole that each is."""
        found = {}
        for name, grad in gradients.items():
            if _matches(self.settings.gradient, name):
                found[name] = (to_numpy(_local(name, grad), name), _shard(name, grad))
        return found

    def _write_gradients(self) -> None:
        if "gradient" in self._written or not self._wanted_here("gradient"):
            return
        self._written.add("gradient")
        found, clipped = self._snapshot, False
        if found is None:
            own = self._gradients()
            clipped = self._backwards > 0 and versions(own) != self._versions
            found = self._copied(own)
        tensors = {name: array for name, (array, _) in found.items()}
        shards = {name: shard.to_json() for name, (_, shard) in found.items() if shard is not None}
        meta: dict[str, Any] = {"shards": shards} if shards else {}
        norm = _norm(tensors, shards) if not shards else self._norm
        if norm is not None and self.settings.gradient is True:
            meta["grad_norm"] = norm
        self._add("gradient_clipped" if clipped else "gradient", None, tensors, meta)

    def _write_parameters(self, named: Mapping[str, nn.Parameter]) -> None:
        if self._wanted_here("param"):
            wanted = {
                n: p
                for n, p in named.items()
                if _matches(self.settings.param, n) and f"param {n}" not in self._written
            }
            self._written |= {f"param {name}" for name in wanted}
            self._add_parts("param", {name: (p, p) for name, p in wanted.items()})

    def _write_state(self, optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        if not self._wanted_here("optimizer"):
            return
        state = {
            f"{name}/{key}": (p, value)
            for name, p in named.items()
            if _matches(self.settings.optimizer_state, name)
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor | int | float)
        }
        self._add_parts("optimizer", state)

    def _add_parts(self, type: str, values: Mapping[str, tuple[Tensor, Any]]) -> None:
        tensors = {name: _local(name, value) for name, (_, value) in values.items()}
        parts = {
            name: _shard(name, value) for name, (_, value) in values.items() if isinstance(value, Tensor)
        }
        shards = {name: part.to_json() for name, part in parts.items() if part is not None}
        if tensors:
            self._add(type, None, tensors, {"shards": shards} if shards else {})

    def _wanted_here(self, type: str) -> bool:
        assert self.recorder is not None
        return self.recorder.wanted(type, self.step)

    def _add(self, type: str, micro: int | None, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        assert self.recorder is not None
        where = Coordinates(self.step, rank=self.world.rank, micro=micro)
        self.recorder.add(type, where, tensors, meta)

    def finish_step(self) -> None:
        """Write what the step computed, and begin the next one."""
        if self._micros:
            if not self._stepped:
                self._write_gradients()
            keys = self._keys()
            for number, micro in enumerate(self._micros):
                self._write_micro(number, micro, keys)
            assert self.recorder is not None
            self.recorder.flush()
            self.step += 1
        self._micros, self._stepped, self._backwards = [], False, 0
        self._written, self._snapshot, self._norm, self._versions = set(), None, None, None

    def _keys(self) -> dict[int, list[SampleKey]]:
        """Keys of the samples of each pass: as given, or made of their tokens and the number of their repetition."""
        seen: Counter[str] = Counter()
        base = self.world.root(self.anatomy.root) * OTHER_RANKS
        found = {}
        for p in (p for micro in self._micros for p in micro.passes):
            if p.samples is not None:
                found[id(p)] = p.samples
                continue
            keys = []
            for s in p.layout.segments:
                key = content_key(p.inputs["input_ids"][s.row, s.col : s.col + s.stop - s.start])
                keys.append((key, base + seen[key]))
                seen[key] += 1
            found[id(p)] = keys
        return found

    def _write_micro(self, number: int, micro: Micro, keys: Mapping[int, list[SampleKey]]) -> None:
        layout, targets, places = stacked(micro.passes)
        samples = [key for p in micro.passes for key in keys[id(p)]]
        meta = {"layout": layout.to_json(), "samples": [samples[s.sample] for s in layout.segments]}
        at_targets = {"layout": targets.to_json(), "samples": [samples[s.sample] for s in targets.segments]}

        def gathered(name: str, of: str) -> Any:
            return together([getattr(p, of).get(name) for p in micro.passes], places, layout.shape)

        inputs = {name: gathered(name, "inputs") for name in micro.passes[0].inputs}
        self._add("batch_inputs", number, inputs, meta)
        values = {name: gathered(name, "values") for name in micro.passes[0].values}
        values["input_ids"] = np.where(targets.attention_mask, inputs["input_ids"], 0)
        told = {"temperature": self.settings.temperature or 1.0}
        self._add("forward_data", number, values, {**at_targets, **told})
        scale = self._backward_scale()
        if micro.loss is not None:
            loss = torch.tensor(micro.loss / scale, dtype=_loss_dtype(values["log_probs"]))
            self._add("loss", number, {"loss": loss}, {**at_targets, "backward_scale": scale})
        names = dict.fromkeys(name for p in micro.passes for name in p.gradients)
        if names:
            found = {name: gathered(name, "gradients") for name in names}
            self._add(
                "token_gradient",
                number,
                unscaled(found, scale),
                {**at_targets, **told_of(micro.passes, scale)},
            )

    def _backward_scale(self) -> float:
        """The factor between the loss of the mini-batch and what is back-propagated."""
        given = self.settings.backward_scale
        return self._scale * self.world.averaged if given is None else given


class _Reached:
    """The hook on a hidden state's gradient; holds the state only as long as the graph does."""

    def __init__(self, session: Session, p: Pass, hidden: Tensor | None) -> None:
        self._session, self._pass, self._hidden = session, p, hidden

    def __call__(self, gradient: Tensor) -> None:
        self._session.reached(self._pass, self._hidden, gradient)


def _more(value: Any, known: Any) -> bool:
    """Whether an argument of the decoder tells more than that of the model: a mask of pairs of tokens tells less."""
    return not (isinstance(value, Tensor) and isinstance(known, Tensor) and value.dim() > known.dim())


def _matches(wanted: bool | str, name: str) -> bool:
    return bool(wanted) if isinstance(wanted, bool) else re.search(wanted, name) is not None


def _local(name: str, value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _shard(name: str, value: Any) -> Any:
    if not hasattr(value, "placements"):
        return None
    try:
        return of(value)
    except ValueError:
        raise CaptureError(
            f"{name} is placed as {value.placements}, a partial sum that no part of the whole tensor is "
            "equal to: reduce it "
            "over the ranks before the optimizer steps"
        ) from None


def _norm(tensors: Mapping[str, Any], shards: Mapping[str, Any]) -> float | None:
    """Norm of all gradients; None where they lie on several ranks."""
    if shards or not tensors:
        return None
    return float(np.sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in tensors.values())))


def _loss_dtype(values: Any) -> torch.dtype:
    return torch.float64 if values.dtype == np.float64 else torch.float32


def _pad_token(root: nn.Module) -> int | None:
    config: Any = getattr(root, "config", None)
    found = getattr(config, "pad_token_id", None)
    return found if isinstance(found, int) else None


def _absolute(root: nn.Module) -> bool:
    """Whether positions are looked up in a table of embeddings."""
    names = ("wpe", "embed_positions", "position_embeddings", "pos_emb", "position_embedding")
    return any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in names
        for name, module in root.named_modules()
    )
