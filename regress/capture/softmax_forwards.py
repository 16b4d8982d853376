"""Forward passes seen at the softmax, whatever a model's modules look like; its last hidden state helps where known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regress.capture.forward_hooks import arguments_around, has_encoder, is_absolute, pad_token
from regress.capture.forward_inputs import arguments_of, arrangement_of
from regress.capture.hidden_states import HiddenStates
from regress.capture.model_structure import Anatomy, last_hidden_state, whole
from regress.capture.recording_settings import Settings, segment_keys
from regress.capture.softmax_calls import SeenRows, SoftmaxCalls, SoftmaxMode
from regress.capture.softmax_passes import SoftmaxPass
from regress.capture.trainer_precision import Precision
from regress.capture.trainer_ranks import World
from regress.errors import CaptureError

_MARK = "regress.pass"
"""Name of the pass in the metadata of a node of the graph."""
_NEAR = 64
"""Most nodes of the graph between logits and what the model returned."""


@dataclass(eq=False)
class SoftmaxForwards:
    """Turns what the softmax shows into `SoftmaxPass` objects.

    Attributes:
        begin: is called before a pass is looked at; returns whether passes are wanted now.
        opened: is called with each pass, ``reached`` with each that a backward call reaches.
        counts: passes that a backward call reached so far, by what showed their loss.
    """

    anatomy: Anatomy
    settings: Settings
    world: World
    precision: Precision
    begin: Callable[[], bool]
    opened: Callable[[SoftmaxPass], None]
    reached: Callable[[SoftmaxPass], None]
    counts: Counter[str] = field(default_factory=Counter)
    active: bool = True
    latest: SoftmaxPass | None = None
    next_values: dict[str, Any] = field(default_factory=dict)
    _outer: dict[str, Any] = field(default_factory=dict)
    _around: dict[str, Any] = field(default_factory=dict)
    _within: bool = False
    _calls: SoftmaxCalls | None = None
    _looked_up: bool = True
    _other: bool = False

    @contextmanager
    def hooked(self, eager: Callable[[Any], Any]) -> Iterator[None]:
        """Observe the calls of softmax and of the embeddings inside.

        Raises:
            CaptureError: for what only hidden states give.
        """
        root, asked = self.anatomy.root, self.settings
        for name in ("activations", "routing", "classify", "sequence_group"):
            if getattr(asked, name) not in (None, False):
                raise CaptureError(f"""record({name}=...) takes hooks on the last hidden state, and
                {type(root).__name__} is read from its logits: name both modules with record(decoder=..., head=...)""")
        modules = [module for module in root.modules() if isinstance(module, nn.Embedding)]
        tables: set[tuple[int, ...]] = {(each.num_embeddings, each.embedding_dim) for each in modules}
        self._looked_up = bool(modules)
        if not modules:  # rows of a parameter, or products with it
            matrices = (tuple(p.shape) for p in root.parameters() if p.dim() == 2)
            tables = {max(matrices, default=(0, 0))}
        calls = SoftmaxCalls(
            tables, self._owns, self._embedded, self._seen, self._read, self._following, self._computed
        )
        self._calls = calls
        decoder = self.anatomy.decoder
        with ExitStack() as stack:
            handles: list[Any] = [
                root.register_forward_pre_hook(eager(self._before_model), with_kwargs=True, prepend=True),
                root.register_forward_hook(eager(self._after_model), always_call=True),
            ]
            if decoder is not None:
                handles += [
                    decoder.register_forward_pre_hook(
                        eager(self._before_decoder), with_kwargs=True, prepend=True
                    ),
                    decoder.register_forward_hook(eager(self._after_decoder), prepend=True),
                ]
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(SoftmaxMode(calls))
            try:
                yield
            finally:
                self.active = calls.active = False
                calls.clear()

    @property
    def count(self) -> int:
        """Passes that a backward call reached so far."""
        return sum(self.counts.values())

    @property
    def read_from(self) -> str:
        """Name the source of the losses: logits, hidden states, or each of them for some passes."""
        return " and ".join(sorted(self.counts)) or "logits"

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of the model."""
        if self._looks():
            self._within, self.latest = True, None
            self._outer = {} if has_encoder(module) else arguments_of(module, args, kwargs)
            self.precision.begin(module)
            if not self._looked_up and torch.is_grad_enabled():
                self._embedded(None)

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self.precision.end()
        self._outer, self._within = {}, False
        if self._looks() and self.latest is not None:
            for part in _parts(output):
                _mark(part, self.latest)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if (
            self._looks()
            and self._calls is not None
            and isinstance(logits, Tensor)
            and self.latest is not None
        ):
            if self.anatomy.decoder is not None and logits.dim() == 3 and logits.numel():
                self.latest.last_logits = whole(logits.detach()[-1:, -1])
            self._calls.returned(logits)

    def _before_decoder(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of the decoder, and begin a pass if it is called by itself."""
        if self._looks():
            if not self._within:
                self.latest = None
            self._around = self._outer
            self._outer = arguments_around(self.anatomy, self._outer, module, args, kwargs)

    def _after_decoder(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hold the last hidden state of a pass, in case no softmax tells its loss."""
        hidden = last_hidden_state(output)
        if self._looks() and hidden is not None and hidden.requires_grad:
            if self.latest is None:  # its embeddings were compiled, or looked up by somebody else
                self._embedded(None)
            if self.latest is not None:
                self.precision.look(hidden, module)
                _mark(hidden, self.latest)
                device = hidden.device.type
                autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                hidden.register_hook(
                    HiddenStates(
                        self.anatomy,
                        self.settings,
                        self.latest,
                        hidden.detach(),
                        partial(self._reach, "hidden_states"),
                        self._computed,
                        autocast,
                    )
                )
        self._outer, self._around = self._around, {}

    def _embedded(self, ids: Tensor | None) -> None:
        """Open a pass: token ids are looked up, with gradients; None if only the arguments tell them."""
        if has_encoder(self.anatomy.root) and not self._outer:  # those of the encoder
            return
        if not self._looks() or not self.begin():
            self.latest = None
            return
        if self._calls is not None:
            self._calls.clear()
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
        self.latest = SoftmaxPass(found, is_absolute(root), settings.temperature, self._computed, samples)
        self.opened(self.latest)

    def _owns(self, weight: nn.Parameter) -> bool:
        """Return True for a parameter of the model; rows that come after another model's may be that one's."""
        owns = any(each is weight for each in self.anatomy.root.parameters())
        if torch.is_grad_enabled():  # without gradients another model has no rows
            self._other = not owns
        return owns

    def _seen(self, rows: SeenRows, logits: Tensor) -> bool:
        owner = _marked(logits)
        if owner is None and not self._other:
            owner = self.latest
        if owner is not None:
            self.precision.look(logits, self.anatomy.root)
            owner.seen.append(rows)
            rows.owner = owner
        return owner is not None

    def _read(self, rows: SeenRows) -> None:
        owner: SoftmaxPass | None = rows.owner
        if owner is not None:
            self._reach("logits", owner)

    def _reach(self, by: str, p: SoftmaxPass) -> None:
        if p.told_by != by:
            self.counts[by] += 1
            if p.told_by:
                self.counts[p.told_by] -= 1
                self.counts += Counter()  # those above 0
            p.told_by = by
        self.reached(p)

    def _computed(self) -> torch.dtype:
        return self.precision.torch_dtype

    def _following(self, rows: SeenRows) -> Tensor | None:
        owner: SoftmaxPass | None = rows.owner
        found = None if owner is None else owner.following(rows)
        return None if found is None else torch.from_numpy(found).to(rows.targets.device)

    def _looks(self) -> bool:
        """Return True if a call is one of a forward pass that trains."""
        return self.active and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _parts(output: Any) -> Iterable[Any]:
    """Return what a model returned, one by one: a tensor, a tuple, or a mapping as of transformers."""
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, tuple | list) else (output, getattr(output, "logits", None))


def _mark(output: Any, p: SoftmaxPass) -> None:
    """Note in the graph which pass an output of the model belongs to, if it is a tensor."""
    node: Any = output.grad_fn if isinstance(output, Tensor) else None
    if node is not None:
        node.metadata[_MARK] = p


def _marked(logits: Tensor) -> SoftmaxPass | None:
    """Return the pass whose output is the nearest that logits were made of."""
    nodes: list[Any] = [logits.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _NEAR:
            continue
        found: SoftmaxPass | None = node.metadata.get(_MARK)
        if found is not None:
            return found
        nodes += [each for each, _ in node.next_functions]
    return None
