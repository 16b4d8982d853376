"""Forward passes seen at the softmax, for models that no hook can be put on: no head, no last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from regress.capture.anatomy import Anatomy
from regress.capture.forwards import is_absolute, pad_token
from regress.capture.inputs import arguments_of, arrangement_of
from regress.capture.precision import Precision
from regress.capture.settings import Settings, segment_keys
from regress.capture.softmax_calls import SeenRows, SoftmaxCalls, SoftmaxMode
from regress.capture.softmax_passes import SoftmaxPass
from regress.capture.world import World
from regress.errors import CaptureError


@dataclass(eq=False)
class SoftmaxForwards:
    """Turns what the softmax shows into `SoftmaxPass` objects.

    Attributes:
        begin: is called before a pass is looked at; returns whether passes are wanted now.
        opened: is called with each pass, ``reached`` with each that a backward call reaches.
        count: passes that a backward call reached so far.
    """

    anatomy: Anatomy
    settings: Settings
    world: World
    precision: Precision
    begin: Callable[[], bool]
    opened: Callable[[SoftmaxPass], None]
    reached: Callable[[SoftmaxPass], None]
    count: int = 0
    active: bool = True
    latest: SoftmaxPass | None = None
    next_values: dict[str, Any] = field(default_factory=dict)
    _outer: dict[str, Any] = field(default_factory=dict)
    _calls: SoftmaxCalls | None = None
    _looked_up: bool = True
    _outputs: list[tuple[ReferenceType[Tensor], SoftmaxPass]] = field(default_factory=list)

    @contextmanager
    def hooked(self, eager: Callable[[Any], Any]) -> Iterator[None]:
        """See the calls of softmax and of the embeddings inside.

        Raises:
            CaptureError: for what only hidden states give.
        """
        root, asked = self.anatomy.root, self.settings
        for name in ("activations", "routing", "classify", "sequence_group"):
            if getattr(asked, name) not in (None, False):
                raise CaptureError(
                    f"record({name}=...) takes hooks on the last hidden state, and {type(root).__name__} is read from "
                    "its logits: name both modules with record(decoder=..., head=...)"
                )
        modules = [module for module in root.modules() if isinstance(module, nn.Embedding)]
        tables: set[tuple[int, ...]] = {(each.num_embeddings, each.embedding_dim) for each in modules}
        self._looked_up = bool(modules)
        if not modules:  # rows of a parameter, or products with it
            matrices = (tuple(p.shape) for p in root.parameters() if p.dim() == 2)
            tables = {max(matrices, default=(0, 0))}
        calls = SoftmaxCalls(tables, self._embedded, self._seen, self._read, self._following, self._computed)
        self._calls = calls
        with ExitStack() as stack:
            before = root.register_forward_pre_hook(eager(self._before_model), with_kwargs=True, prepend=True)
            after = root.register_forward_hook(eager(self._after_model), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
            stack.enter_context(SoftmaxMode(calls))
            try:
                yield
            finally:
                self.active = calls.active = False
                calls.forget()

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of the model."""
        if self._looks():
            self._outer = arguments_of(module, args, kwargs)
            self.precision.begin(module)
            if not self._looked_up and torch.is_grad_enabled():
                self._embedded(None)

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self.precision.end()
        self._outer = {}
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if (
            self._looks()
            and self._calls is not None
            and isinstance(logits, Tensor)
            and self.latest is not None
        ):
            self._outputs = [each for each in self._outputs if each[0]() is not None]
            self._outputs.append((ref(logits), self.latest))
            self._calls.returned(logits)

    def _embedded(self, ids: Tensor | None) -> None:
        """Open a pass: token ids are looked up, with gradients; None if only the arguments tell them."""
        if not self._looks() or not self.begin():
            self.latest = None
            return
        if self._calls is not None:
            self._calls.forget()
        root, settings = self.anatomy.root, self.settings
        self.world.look(root)
        arguments = self._outer or {"input_ids": ids}
        try:
            found = arrangement_of(arguments, settings.finders, pad_token(root))
        except CaptureError:
            if settings.finders.input_ids is not None or ids is None:
                raise
            found = arrangement_of({**arguments, "input_ids": ids}, settings.finders, pad_token(root))
        samples = (
            None if settings.samples is None else partial(segment_keys, settings.samples, dict(arguments))
        )
        self.latest = SoftmaxPass(
            found, is_absolute(root), settings.temperature or 1.0, self._computed, samples
        )
        self.opened(self.latest)

    def _seen(self, rows: SeenRows, logits: Tensor) -> bool:
        whole = logits if logits._base is None else logits._base
        owner = next((p for output, p in self._outputs if output() is whole), self.latest)
        if owner is not None:
            self.precision.look(logits, self.anatomy.root)
            owner.seen.append(rows)
            rows.owner = owner
        return owner is not None

    def _read(self, rows: SeenRows) -> None:
        owner: SoftmaxPass | None = rows.owner
        if owner is not None:
            self.count += owner.reached is None
            self.reached(owner)

    def _computed(self) -> torch.dtype:
        return self.precision.torch_dtype

    def _following(self, rows: SeenRows) -> Tensor | None:
        owner: SoftmaxPass | None = rows.owner
        found = None if owner is None else owner.following(rows)
        return None if found is None else torch.from_numpy(found).to(rows.targets.device)

    def _looks(self) -> bool:
        """Return True if a call is one of a forward pass that trains."""
        return self.active and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
