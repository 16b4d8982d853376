"""Hooked parts of a model: the decoder, whose output is the last hidden state, and the output head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regress.dump.adapter_names import plain_adapter_name
from regress.errors import CaptureError

Head = Callable[[Tensor], Tensor]
"""Function from hidden states ``[K, H]`` to logits ``[K, V]``."""

_INNER = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


@dataclass(frozen=True)
class Anatomy:
    """A model, taken out of its wrappers.

    Attributes:
        root: the model itself, whose parameter names are recorded.
        decoder: the module whose output (or, with ``at_input``, whose input) is the last hidden state.
        head: the output embedding, or a function that makes logits of hidden states. Both are None for a model that
            tells neither, and is seen at the softmax.
        at_input: True if the hidden state is read at the input of the head, for models without a separate decoder.
        first: what is looked at first, ``"logits"`` or ``"hidden_states"``; with logits, decoder and head tell what no
            softmax does.
    """

    root: nn.Module
    decoder: nn.Module | None
    head: nn.Module | Head | None
    at_input: bool = False
    first: str = "hidden_states"

    @property
    def parts(self) -> tuple[nn.Module, nn.Module | Head]:
        """Decoder and head, where the model tells both."""
        assert self.decoder is not None
        assert self.head is not None
        return self.decoder, self.head

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the names of the unwrapped model, and of the files of its adapters, each once."""
        for name, parameter in self.root.named_parameters():
            yield plain_adapter_name(plain_name(name)), parameter


def plain_name(name: str) -> str:
    """Strip what wrappers inside a model add to the names of its parameters and modules."""
    return _INNER.sub("", name + ".").removesuffix(".") if "_" in name else name


def unwrapped(model: nn.Module) -> nn.Module:
    """Take a model out of torch.compile, DDP, FSDP1, peft and other wrappers that hold it as their only content."""
    while True:
        inner = _inside(model)
        if inner is None:
            return model
        model = inner


def _inside(model: nn.Module) -> nn.Module | None:
    for name in ("_orig_mod", "_fsdp_wrapped_module"):
        found = model._modules.get(name)
        if found is not None:
            return found
    if list(model._modules) == ["module"] and not hasattr(model, "get_output_embeddings"):
        return model._modules["module"]
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]  # torch does not annotate it
    get_base = getattr(model, "get_base_model", None)  # peft
    if callable(get_base) and hasattr(model, "peft_config"):
        found = get_base()
        return found if isinstance(found, nn.Module) and found is not model else None
    return None


def dissect(
    model: nn.Module,
    decoder: str | nn.Module | None,
    head: str | nn.Module | Head | None,
    read_from: str | None = None,
    hidden_states: bool = False,
) -> Anatomy:
    """Find decoder and head, by the API of Hugging Face models or as given, and decide what is looked at first.

    Args:
        decoder: module, or its name, whose output is the last hidden state.
        head: module, its name, or a function from hidden states ``[K, H]`` to logits ``[K, V]``.
        read_from: ``"logits"`` for neither, ``"hidden_states"`` if both have to be found; None finds them or does
            without, and looks at logits first unless one was given.
        hidden_states: True if something is asked for that only hooks on hidden states give.

    Raises:
        CaptureError: if one of the two cannot be found that has to be, or the model is none.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"{model!r} is not torch.nn.Module: give the model that is trained, wrapped or not"
        )
    root = unwrapped(model)
    if head is None and decoder is None and _output_embeddings(root) is None:
        root = _inner_language_model(root)
    neither = Anatomy(root, None, None, first="logits")
    if read_from == "logits":
        return neither
    found_head = _named(root, head, "head") if isinstance(head, str) else head
    found_decoder = _named(root, decoder, "decoder") if isinstance(decoder, str) else decoder
    if found_head is None:
        found_head = _output_embeddings(root)
    if found_decoder is None:
        found_decoder = _decoder(root)
    if found_head is None and decoder is None and read_from is None:
        return neither
    if found_head is None:
        raise CaptureError(
            f"{type(root).__name__} does not tell its output head (get_output_embeddings() is missing or "
            "gives none): name "
            'it with record(head="lm_head"), or give a function from hidden states to logits'
        )
    first = (
        "hidden_states" if read_from or hidden_states or decoder is not None or head is not None else "logits"
    )
    if found_decoder is not None:
        return Anatomy(root, found_decoder, found_head, first=first)
    if first == "logits":
        return neither
    if isinstance(found_head, nn.Module):
        return Anatomy(root, found_head, found_head, at_input=True)
    raise CaptureError(
        f"{type(root).__name__} does not tell its decoder, and the head that was given is a function and "
        "no module: name "
        'the module that gives the last hidden state with record(decoder="model")'
    )


def _inner_language_model(root: nn.Module) -> nn.Module:
    """Return the one language model that is trained within a module, such as that of a trainer's step; else the module.

    Raises:
        CaptureError: if it trains several.
    """
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and _output_embeddings(module) is not None and _trains(module):
            found[name] = unwrapped(module)
    if len(found) > 1:
        raise CaptureError(f"""{type(root).__name__} trains several language models ({", ".join(found)}): give record
        the one that is under test""")
    for name, module in found.items():
        own = {id(p) for p in module.parameters()}
        other = next((n for n, p in root.named_parameters() if p.requires_grad and id(p) not in own), None)
        if other is not None:
            raise CaptureError(
                f"{type(root).__name__} trains {other} beside the language model {name}: give record that model alone, "
                f'or name its parts with record(head="{name}.lm_head", decoder="{name}.model")'
            )
        return module
    return root


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _named(root: nn.Module, name: str, what: str) -> nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError:
        near = ", ".join(list(dict(root.named_children()))[:8])
        raise CaptureError(
            f"{what}={name!r} is not a module of {type(root).__name__}: its children are {near}"
        ) from None


def _output_embeddings(root: nn.Module) -> nn.Module | None:
    get = getattr(root, "get_output_embeddings", None)
    found = get() if callable(get) else None
    return found if isinstance(found, nn.Module) else None


def _decoder(root: nn.Module) -> nn.Module | None:
    """Return the decoder of a Hugging Face model; None for a plain module, whose head is hooked at its input."""
    for name in ("get_decoder",):
        get = getattr(root, name, None)
        if callable(get):
            found = get()
            if isinstance(found, nn.Module) and found is not root:
                return unwrapped_compile(found)
    base = getattr(root, "base_model", None)
    if isinstance(base, nn.Module) and base is not root:
        return base
    return None


def unwrapped_compile(module: nn.Module) -> nn.Module:
    """Return the module inside of a torch.compile wrapper."""
    found = module._modules.get("_orig_mod")
    return module if found is None else found


def last_hidden_state(output: Any) -> Tensor | None:
    """Return the hidden states among what a decoder returns: ``last_hidden_state``, or the first tensor."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "last_hidden_state", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    return None


def whole(tensor: Tensor) -> Tensor:
    """Gather a distributed tensor on every rank of its mesh; return any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return full() if callable(full) else tensor


def is_distributed(tensor: Any) -> bool:
    """Return True for a `DTensor`, without importing torch.distributed."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")
