"""A recording under way: forward passes, the backward calls that reach them, and the steps of the optimizer.

A microbatch is one backward call and the forward passes that it reached; a step ends with the optimizer's. Values of a
step are written when the next one begins, or recording ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.capture.forward_hooks import Forwards
from regress.capture.forward_pass import Pass
from regress.capture.gradient_hooks import Listener
from regress.capture.microbatch_records import Micro, Naming, write_classified, write_micro, write_rewards
from regress.capture.model_structure import Anatomy, whole
from regress.capture.optimizer_hooks import Updates
from regress.capture.output_head import solver_head
from regress.capture.recording_settings import Settings
from regress.capture.softmax_forwards import SoftmaxForwards
from regress.capture.softmax_passes import SoftmaxPass
from regress.capture.token_gradient_of_pass import add_token_gradient
from regress.capture.trainer_precision import Precision
from regress.capture.trainer_ranks import World
from regress.dump.coordinates import Coordinates
from regress.dump.recorder import Recorder


class Session(Listener):
    """Collects what the hooks see and hands it to the recorder."""

    def __init__(self, anatomy: Anatomy, settings: Settings, world: World, recorder: Recorder) -> None:
        self.anatomy, self.settings, self.world, self.recorder = anatomy, settings, world, recorder
        self.precision = Precision()
        self.step = 0
        self.left_out: dict[str, None] = {}
        self.updates = Updates(anatomy, settings, self._keeps, lambda *record: self._add(None, *record))
        self.forwards: Forwards | SoftmaxForwards
        if anatomy.first == "hidden_states":
            self.forwards = Forwards(
                anatomy, settings, world, self.precision, self._begin, self._opened, self._classified
            )
        else:
            self.forwards = SoftmaxForwards(
                anatomy, settings, world, self.precision, self._begin, self._held, self._reached
            )
        self._micros: list[Micro] = []
        self._others: list[tuple[str, Pass]] = []
        self._live = False
        self._stepped = False
        self._root: float | None = None
        self._touched: int | None = None
        self._scale = 1.0
        self._fillers = Counter[int]()

    def _keeps(self, type: str) -> bool:
        return self.recorder.wanted(type, self.step)

    def _begin(self) -> bool:
        """Begin a forward pass, and the next step if an optimizer has stepped; return True if it is recorded."""
        if self._stepped:
            self.finish_step()
        self._live = True
        return self._keeps("forward_data")

    def _held(self, p: Pass | SoftmaxPass) -> None:
        p.hold(self.forwards.next_values)
        self.forwards.next_values = {}

    def _opened(self, p: Pass, states: Tensor, hidden: Tensor) -> None:
        self._held(p)
        if hidden.requires_grad:
            hidden.register_hook(_Reached(self, p, states if self._keeps("token_gradient") else None))

    def hold(self, values: Mapping[str, Any]) -> None:
        """Keep values that were tapped for the forward pass that ran last, or else for the next one."""
        if not self.recorder.wanted("forward_data", self.step + self._stepped):
            return
        latest = self.forwards.latest
        if latest is not None and latest.reached is None and not self._stepped:
            latest.hold(values)
        else:
            self.forwards.next_values |= values

    def _classified(self, kind: str, p: Pass) -> None:
        self._others.append((kind, p))

    def reached(self, p: Pass, hidden: Tensor | None, gradient: Tensor) -> None:
        """Note that a backward call reached a forward pass, and read its token gradient."""
        if not self.forwards.active:
            return
        self._reached(p)
        if hidden is not None:
            head, temperature = solver_head(self.anatomy), self.settings.temperature
            add_token_gradient(
                p, hidden, whole(gradient.detach()), head, temperature, self.precision.torch_dtype
            )

    def _reached(self, p: Pass | SoftmaxPass) -> None:
        """Give a forward pass to the microbatch of the backward call that reached it first."""
        task = torch._C._current_graph_task_id()
        if p.reached is None:
            if not self._micros or self._micros[-1].task != task:
                self._micros.append(Micro(task))
            self._micros[-1].reached.append(p)
            p.reached = len(self._micros) - 1
        self._touched = p.reached

    def before_backward(self, root: Any, gradients: Any) -> None:
        """Note the loss that a backward call starts from.

        A step whose gradients were clipped and then discarded ends without an update.
        """
        if self._live and not self._stepped and self.updates.dropped():
            self.finish_step()
            self._live = True
        self.updates.backward_begins()
        plain = gradients is None or (isinstance(gradients, tuple | list) and gradients[0] is None)
        self._root = (
            float(root.detach()) if isinstance(root, Tensor) and root.numel() == 1 and plain else None
        )

    def after_backward(self) -> None:
        """Give the loss to the microbatch that the call belongs to."""
        if self._touched is not None and self._root is not None:
            micro = self._micros[self._touched]
            micro.loss = self._root + (micro.loss or 0.0)
        self._root = self._touched = None
        self.updates.backward_ended()

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Note that gradients are about to be measured or clipped."""
        if self._live:
            self.updates.before_clip(tensors)

    def clip_norm(self, norm: Any, limit: Any) -> None:
        """Note the trainer's own total norm, and the largest one that it allows."""
        self.updates.clip_norm(norm, limit)

    def scaled(self, scaler: Any) -> None:
        """Note that a GradScaler multiplied the loss."""
        self._scale = self.updates.factor = float(scaler.get_scale())

    def unscaled(self, optimizer: Any) -> None:
        """Note that a GradScaler divided the gradients of an optimizer."""
        if optimizer is not None and self.updates.owns(optimizer):
            self.updates.unscaled()

    def stepped_by_scaler(self, optimizer: Any) -> None:
        """Note that a GradScaler made the step of an optimizer, or skipped it, which ends a step all the same."""
        if optimizer is not None and self._live and not self._stepped and self.updates.owns(optimizer):
            self.before_step(optimizer)
            self.after_step(optimizer)

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Note that an optimizer is about to step."""
        if self.forwards.active and self._live and self.updates.owns(optimizer):
            if torch._C._current_graph_task_id() != -1:
                self.updates.write_ready(optimizer)
            else:
                self.updates.write_gradients(getattr(optimizer, "grad_scale", None))

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Note that an optimizer has stepped: parameters and state are new."""
        if self.forwards.active and self._live and self.updates.owns(optimizer):
            self.updates.write_gradients()  # a closure computed them within the step
            self.updates.write_update(optimizer)
            self._stepped = True

    def finish_step(self) -> None:
        """Write what the step computed, and begin the next one."""
        if self._live:
            if self._stepped:
                self.updates.write_update(None)
            elif self._micros:
                self.updates.write_gradients()
            if self._keeps("forward_data"):
                self._write()
            self.recorder.flush()
            self.step += 1
        self.updates.finished()
        self._micros, self._others = [], []
        self._stepped = self._live = False

    def _write(self) -> None:
        naming = Naming(self.world.root(self.anatomy.root))
        for p in (p for micro in self._micros for p in micro.reached if isinstance(p, SoftmaxPass)):
            self._fillers.update(p.fillers)
        filler = next((token for token, _ in self._fillers.most_common(1)), None)
        for number, micro in enumerate(self._micros):
            micro.place(filler)
            left_out = write_micro(micro, number, naming, self._backward_scale(), self._add)
            self.left_out |= dict.fromkeys(left_out)
        write_classified(self._others, naming, self._add)
        write_rewards(self._micros, naming, self._add)

    def _backward_scale(self) -> float:
        """Return the factor between the loss of the mini-batch and the one that is back-propagated."""
        given = self.settings.backward_scale
        return self._scale * self.world.averaged if given is None else given

    def _add(self, micro: int | None, type: str, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        if self._keeps(type):
            where = Coordinates(self.step, rank=self.world.rank, micro=micro)
            self.recorder.add(type, where, tensors, meta)


class _Reached:
    """The hook on a hidden state's gradient; holds the state only as long as the graph does."""

    def __init__(self, session: Session, p: Pass, hidden: Tensor | None) -> None:
        self._session, self._pass, self._hidden = session, p, hidden

    def __call__(self, gradient: Tensor) -> None:
        self._session.reached(self._pass, self._hidden, gradient)
