"""Hooks on a model that observe its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regress.capture.expert_routing import routed, routers
from regress.capture.forward_inputs import arguments_of, arrangement_of
from regress.capture.forward_pass import Pass, open_pass, open_slice, token_values
from regress.capture.layout_inference import Arrangement, infer_layout
from regress.capture.model_structure import Anatomy, last_hidden_state, plain_name, whole
from regress.capture.optimizer_hooks import shard_of
from regress.capture.output_head import check_logits, make_head
from regress.capture.recording_settings import CLASSES, Settings, segment_keys
from regress.capture.sequence_slices import gather_sequence
from regress.capture.trainer_precision import Precision
from regress.capture.trainer_ranks import World
from regress.dump.module_selection import first_tensor, matching_modules
from regress.dump.numpy_arrays import to_numpy
from regress.dump.tensor_placements import local
from regress.errors import CaptureError

ABSOLUTE = ("wpe", "embed_positions", "position_embeddings", "pos_emb", "position_embedding")
"""Names of position embedding tables."""


@dataclass(eq=False)
class Forwards:
    """Turns forward passes of a model into `Pass` objects.

    Attributes:
        opened: is called with each pass with gradients and its hidden state (plain and whole, and as computed);
            ``classified`` with each pass that `classify` names.
        begin: is called before a pass is looked at; returns whether passes are wanted now.
        count: passes with gradients so far.
    """

    anatomy: Anatomy
    settings: Settings
    world: World
    precision: Precision
    begin: Callable[[], bool]
    opened: Callable[[Pass, Tensor, Tensor], None]
    classified: Callable[[str, Pass], None]
    count: int = 0
    active: bool = True
    checked: bool = False
    latest: Pass | None = None
    next_values: dict[str, Any] = field(default_factory=dict)
    read_from: str = "hidden_states"
    _graded: bool = False
    _outer: dict[str, Any] = field(default_factory=dict)
    _outputs: dict[str, Any] = field(default_factory=dict)
    _orders: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    _probe: Tensor | None = None

    @contextmanager
    def hooked(self, eager: Callable[[Any], Any]) -> Iterator[None]:
        """Hook model and decoder inside; ``eager`` keeps a hook out of compiled graphs."""
        root, decoder = self.anatomy.root, self.anatomy.parts[0]
        pattern = self.settings.activations
        modules = {} if pattern is None else matching_modules(root, pattern, "record(activations=...)")
        gates = routers(root) if self.settings.routing else {}
        modules = {name: module for name, module in modules.items() if name not in gates}
        around = {name: root.get_submodule(name) for name in _enclosing((*modules, *gates)) if name}
        with ExitStack() as stack:
            handles: list[Any] = [
                *(
                    m.register_forward_pre_hook(eager(self._notes_order(n)), with_kwargs=True)
                    for n, m in around.items()
                ),
                root.register_forward_pre_hook(eager(self._before_model), with_kwargs=True, prepend=True),
                decoder.register_forward_pre_hook(eager(self._before_decoder), prepend=True),
                *(m.register_forward_hook(eager(self._keeps(plain_name(n)))) for n, m in modules.items()),
                *(m.register_forward_hook(eager(self._routes(plain_name(n)))) for n, m in gates.items()),
                decoder.register_forward_hook(eager(self._after_decoder), with_kwargs=True, prepend=True),
                root.register_forward_hook(eager(self._after_model), with_kwargs=True, always_call=True),
            ]
            for handle in handles:
                stack.callback(handle.remove)
            try:
                yield
            finally:
                self.active = False
                self._forget()

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of the model, some of which do not reach its decoder."""
        if self._looks():
            self._outer = arguments_of(module, args, kwargs)
            self.latest, self._graded = None, torch.is_grad_enabled()
            self.precision.begin(module)

    def _before_decoder(self, module: nn.Module, args: Any) -> None:
        """Note whether gradients are asked for: a checkpoint turns them off inside."""
        if self._looks():
            self._graded = torch.is_grad_enabled()

    def _keeps(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if not self._looks() or not self._graded or tensor is None or not tensor.is_floating_point():
                return
            known = self._outputs if self.latest is None else self.latest.activations
            label, repeats = name, 0
            while label in known:
                repeats += 1
                label = f"{name}#{repeats}"
            known[label] = to_numpy(local(tensor), label), shard_of(label, tensor), self._order(name, args)

        return hook

    def _notes_order(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._looks():
                self._orders[name] = _leading((*args, *kwargs.values()))

        return hook

    def _order(self, name: str, args: Any) -> tuple[int, int] | None:
        """Return the first two dimensions of what a module gets, or the nearest around it: rows or columns first."""
        found = _leading(args)
        while found is None and name:
            name = name.rpartition(".")[0]
            found = self._orders.get(name)
        return found

    def _routes(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._looks() or not self._graded:
                return
            found = routed(output)
            if found is None:
                raise CaptureError(f"""record(routing=True): {name} does not return logits, weights and the numbers of
                the chosen experts as one tuple, so its choice is unknown; leave routing out""")
            known = self._outputs if self.latest is None else self.latest.activations
            order = self._order(name, args)
            for label, tensor in found.named(name).items():
                known[label] = to_numpy(local(tensor), label), shard_of(label, tensor), order

        return hook

    def _after_decoder(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a forward pass, whose last hidden state is at hand."""
        if not self._looks():
            return
        hidden = args[0] if self.anatomy.at_input else last_hidden_state(output)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            return
        arguments = arguments_around(self.anatomy, self._outer, module, args, kwargs)
        kind = self._kind(hidden, arguments)
        if kind is None or not self.begin():
            self._outputs, self.latest = {}, None
            return
        with torch.no_grad():
            p, states = self._open(hidden, arguments)
        if kind != "policy":
            self.classified(kind, p)
            return
        self.count += 1
        self.latest = p
        self.opened(p, states, hidden)

    def _kind(self, hidden: Tensor, arguments: Mapping[str, Any]) -> str | None:
        """Return ``policy`` for a pass with gradients, the record type of a named one, None for any other."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            return "policy"
        classify = self.settings.classify
        if classify is None or arguments.get("past_key_values") is not None:
            return None
        kind = classify(arguments)
        if kind is not None and kind not in CLASSES:
            raise CaptureError(
                f"classify= gave {kind!r} for a pass without gradients: choose one of {', '.join(CLASSES)}"
            )
        return None if kind is None else CLASSES[kind]

    def _open(self, hidden: Tensor, arguments: Mapping[str, Any]) -> tuple[Pass, Tensor]:
        states = whole(hidden.detach())
        root = self.anatomy.root
        self.world.look(root)
        self.precision.look(states, self.anatomy.parts[0])
        found = arrangement_of(arguments, self.settings.finders, pad_token(root))
        states = states.reshape(found.input_ids.shape[0], -1, states.shape[-1])
        p = self._described(found, states.shape[1])
        p.samples = segment_keys(self.settings.samples, arguments, len(p.contents))
        p.activations, self._outputs = self._outputs, {}
        head = make_head(self.anatomy)
        p.divisor = self.settings.temperature or 1.0
        p.values = token_values(p, states, head, p.divisor)
        if not self.checked:
            self._probe = head(states[-1:, -1].clone())  # now, as autocast may end with the forward pass
        return p, states

    def _described(self, found: Arrangement, width: int) -> Pass:
        """Return a pass described by its inputs, which are joined over the ranks that share its sequences."""
        absolute, group = is_absolute(self.anatomy.root), self.settings.sequence_group
        own = found.input_ids.shape[1]
        if group is None:
            return open_pass(found, infer_layout(found), own - width, absolute)
        if width != own:
            raise CaptureError(f"""the last hidden states have {width} columns for {own} token ids, which slices of
            sequences do not allow: name the decoder that gives a state for each token with record(decoder=...)""")
        whole_found, offset = gather_sequence(found, group)
        return open_slice(whole_found, infer_layout(whole_found), offset, own, absolute)

    def _after_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Compare the model's own logits with the head, once, and forget its arguments."""
        self.precision.end()
        probe = self._probe
        self._forget()
        if not self._looks() or probe is None or self.checked:
            return
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() == 3 and logits.numel():
            with torch.no_grad():
                check_logits(whole(logits.detach()), probe, type(self.anatomy.root).__name__)
            self.checked = True

    def _looks(self) -> bool:
        """Return True if a hook has to act: not while a checkpoint recomputes within a backward pass."""
        return self.active and torch._C._current_graph_task_id() == -1

    def _forget(self) -> None:
        self._outer, self._outputs, self._orders, self._probe = {}, {}, {}, None


def _enclosing(names: Iterable[str]) -> list[str]:
    """Return the names of the modules around some modules, each once."""
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(own[:depth]) for own in parts for depth in range(1, len(own))))


def _leading(values: Iterable[Any]) -> tuple[int, int] | None:
    """Return the first two dimensions of the first states ``[., ., H]`` among some arguments."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
            return int(value.shape[0]), int(value.shape[1])
    return None


def arguments_around(
    anatomy: Anatomy, outer: Mapping[str, Any], module: nn.Module, args: Any, kwargs: Any
) -> dict[str, Any]:
    """Return the arguments of the decoder and those of the model around it, except those of an encoder."""
    arguments = {} if has_encoder(anatomy.root) else {**outer}
    if not anatomy.at_input:
        named = arguments_of(module, args, kwargs)
        arguments |= {k: v for k, v in named.items() if v is not None and _tells(v, arguments.get(k))}
    return arguments


def has_encoder(root: nn.Module) -> bool:
    """Return True if an encoder reads other tokens than the decoder."""
    return bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))


def _tells(value: Any, known: Any) -> bool:
    """Return True if an argument of the decoder tells as much as the model's; a mask of token pairs tells less."""
    return not (isinstance(value, Tensor) and isinstance(known, Tensor) and value.dim() > known.dim())


def pad_token(root: nn.Module) -> int | None:
    """Return the id of padding that a model's configuration tells."""
    config: Any = getattr(root, "config", None)
    found = getattr(config, "pad_token_id", None)
    return found if isinstance(found, int) else None


def is_absolute(root: nn.Module) -> bool:
    """Return True if the model looks positions up in a table of embeddings."""
    named = root.named_modules()
    return any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in ABSOLUTE for name, module in named
    )
