"""`record`: puts any PyTorch trainer under test."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from regress.capture.forward_inputs import Find, Finders
from regress.capture.gradient_hooks import listening
from regress.capture.model_structure import Anatomy, Head, dissect, whole
from regress.capture.record_arguments import check_arguments
from regress.capture.recording_session import Session
from regress.capture.recording_settings import Classify, Samples, Settings
from regress.capture.tap_batch import sessions
from regress.capture.trainer_ranks import World, refuse_flat
from regress.dump.dump_location import Location
from regress.dump.dump_manifest import Provenance
from regress.dump.recorder import Recorder
from regress.dump.taps import recording
from regress.errors import CaptureError


@contextmanager
def record(
    folder: str | Path | Location,
    model: nn.Module,
    *,
    token_gradient: bool = False,
    activations: str | None = None,
    routing: bool = False,
    gradient: bool | str = True,
    param: bool | str = True,
    optimizer_state: bool | str = True,
    initial_weights: bool = False,
    temperature: float | None = None,
    samples: Samples = None,
    classify: Classify | None = None,
    every_n_steps: int = 1,
    decoder: str | nn.Module | None = None,
    head: str | nn.Module | Head | None = None,
    input_ids: Find = None,
    attention_mask: Find = None,
    position_ids: Find = None,
    cu_seq_lens: Find = None,
    pad_token_id: int | str | None = None,
    mesh: Mapping[str, int] | None = None,
    sequence_group: Any = None,
    backward_scale: float | None = None,
    read_from: str | None = None,
    system: str = "",
    format: str = "safetensors",
    overwrite: bool = False,
) -> Iterator[Recorder]:
    """Record what a trainer computes inside, without a change to it, as a dump that `regress compare` reads.

    It sees the logits that a softmax takes, or the last hidden state of each forward pass where no softmax tells the
    loss; the backward calls that reach them; and the steps of every optimizer of the model, wherever they are made. A
    microbatch is one backward call with the passes that it reached; a step ends with the optimizer's. Training is the
    same, bit for bit. All ranks of a job call it with the same arguments.

    Args:
        folder: folder of the dump; made if missing, and refused if it holds one.
        model: plain, or inside DDP, `fully_shard`, tensor parallel, torch.compile or peft; before or after it
            is wrapped.
        token_gradient: solve for d loss / d log-prob and d loss / d entropy of each token; from hidden states that
            costs about six products of the size of the head.
        activations: regular expression of module names whose outputs are kept.
        routing: keep logits, chosen experts and their weights of each router of a mixture of experts.
        gradient, param, optimizer_state: True to keep them, or a regular expression of parameter names.
        initial_weights: keep the weights as they are now, too, as a checkpoint of transformers in the dump, from which
            `regress oracle` computes what the trainer should have.
        temperature: divisor of the trainer's logits; by default it is found. Log-probs are the trainer's own, but those
            of this temperature (1.0 by default) where hidden states are read first.
        samples: name of a forward argument that holds an id for each sample, or a function of all forward
            arguments that returns them; by default an id is made of a sample's tokens.
        classify: function of the forward arguments of passes without gradients: ``"old"`` and ``"reference"``
            are recorded as log-probs before the update and of the reference, None is left out; generation with
            a cache always is.
        every_n_steps: steps whose number divides by it are recorded.
        decoder: module, or its name, that gives the last hidden state; head: module, its name, or a function
            from hidden states ``[K, H]`` to logits ``[K, V]``. Models of transformers tell both.
        input_ids, attention_mask, position_ids, cu_seq_lens: name of the forward argument, or a function of all
            of them, where the usual names do not hold.
        pad_token_id: id of padding for rows without a mask; ``"none"`` if every token counts.
        mesh: extent of ``pp, dp, fsdp, ep, cp, tp``, where wrappers and parameters do not tell how ranks share
            the work.
        sequence_group: process group whose ranks hold slices of the same sequences, in their order along the columns.
        backward_scale: factor between the loss of the mini-batch and the back-propagated one; by default the
            scale of a GradScaler times the ranks over which the wrapper averages.
        read_from: ``"logits"`` (wherever softmax, log_softmax, logsumexp or cross_entropy takes them: tokens are those
            that the loss looks at) or ``"hidden_states"`` (with decoder and head: all tokens). By default logits, and
            hidden states where no softmax tells the loss, as of a fused linear loss; hidden states alone if a decoder
            or head was given, or activations, routing, classify or sequence_group need them. The manifest says which.
        system: name of the trainer, for the manifest.
        format: safetensors, pt or jsonl.
        overwrite: remove an earlier dump in the folder.

    Yields:
        The recorder, which also takes `tap` inside of `at(step=...)`.

    Raises:
        CaptureError: for what cannot be found, is ambiguous or is not supported, at once or where it is met; at
            the end, if no forward pass was captured.
        DumpError: if the folder cannot be used or written.
    """
    check_arguments(locals())
    world = World(given=mesh, sequence=1 if sequence_group is None else sequence_group.size())
    states = activations is not None or routing or classify is not None or sequence_group is not None
    anatomy = dissect(model, decoder, head, read_from, states)
    refuse_flat(model)
    finders = Finders(input_ids, attention_mask, position_ids, cu_seq_lens, pad_token_id)
    settings = Settings(
        samples=samples,
        activations=activations,
        routing=routing,
        gradient=gradient,
        param=param,
        optimizer_state=optimizer_state,
        every_n_steps=every_n_steps,
        token_gradient=token_gradient,
        temperature=temperature,
        classify=classify,
        backward_scale=backward_scale,
        sequence_group=sequence_group,
        finders=finders,
    )
    provenance = Provenance()
    recorder = Recorder(
        str(folder) if isinstance(folder, Path) else folder,
        options=settings.options,
        format=format,
        every_n_steps=every_n_steps,
        provenance=provenance,
        overwrite=overwrite,
        rank=world.rank,
        gather=world.gather,
    )
    session = Session(anatomy, settings, world, recorder)
    weights = write_initial_weights(anatomy, world, recorder.folder) if initial_weights else {}
    with recording(recorder):
        with _hooked(session):
            yield recorder
            session.finish_step()
        _complete_manifest(session, provenance, system, weights)


@contextmanager
def _hooked(session: Session) -> Iterator[None]:
    """Hook model, optimizers and torch inside; everything is as before afterwards, whatever happens."""
    with ExitStack() as stack:
        stack.enter_context(session.forwards.hooked(_eager))
        stack.callback(register_optimizer_step_pre_hook(session.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(session.after_step).remove)
        stack.enter_context(listening(session))
        sessions.append(session)
        stack.callback(sessions.remove, session)
        yield


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook out of compiled graphs; nothing is compiled where torch's compiler was never loaded."""
    compiler: Any = sys.modules.get("torch._dynamo")
    return hook if compiler is None else compiler.disable(hook)


def _complete_manifest(
    session: Session, provenance: Provenance, system: str, weights: Mapping[str, str]
) -> None:
    """Complete what the manifest tells of the run.

    Raises:
        CaptureError: if no rank captured a forward pass.
    """
    anatomy, world, precision = session.anatomy, session.world, session.precision
    if not sum(world.gather(session.forwards.count)):
        raise CaptureError(_nothing_captured(anatomy))
    precision.count(anatomy.parameters())
    facts: dict[str, Any] = {
        "system": system or type(anatomy.root).__module__.partition(".")[0],
        **precision.to_json(),
        "read_from": session.forwards.read_from,
        "kept": session.settings.kept,
        "every_n_steps": session.settings.every_n_steps,
    }
    if weights:
        facts["initial_weights"] = {"folder": FOLDER, "sha256": dict(weights)}
    if any(_exceeds_float32(buffer) for buffer in anatomy.root.buffers()):
        facts["buffers"] = "float64"
    if session.left_out:
        facts["activations_left_out"] = list(session.left_out)
    provenance.config = {"model": {"dtype": precision.dtype}, "capture": facts}
    provenance.mesh = {"world_size": world.size, **world.sizes(anatomy.root)}


def _nothing_captured(anatomy: Anatomy) -> str:
    """Return what to do where nothing was captured."""
    inside = "give record the model that is trained (before or after it is wrapped), and train inside of the with block"
    if anatomy.decoder is None:
        name = type(anatomy.root).__name__
        return (
            f"no softmax, log_softmax, logsumexp or cross_entropy of logits of {name} was reached by a backward pass: "
            f"{inside}; if its loss is fused with its head, name both by record(decoder=..., "
            "head=...)"
        )
    past = (
        ""
        if anatomy.first == "logits"
        else '; if its modules are called past their hooks (.forward(...)), say record(read_from="logits")'
    )
    return f"no forward pass of {type(anatomy.decoder).__name__} with gradients was captured: {inside}{past}"


def _exceeds_float32(values: Tensor) -> bool:
    """Return True for numbers that were computed in float64, such as rotary frequencies: no checkpoint holds them."""
    if values.dtype != torch.float64:
        return False
    array = values.detach().cpu().numpy()  # a cast of torch may be widened by `true_float64`
    return bool((array != array.astype(np.float32)).any())


FOLDER = "initial_weights"
"""Folder of the checkpoint within the dump, which is not a record type."""


def write_initial_weights(anatomy: Anatomy, world: World, folder: Any) -> dict[str, str]:
    """Write the model as it is now; all ranks call this together, and the first one writes.

    Returns:
        The folder within the dump, and the SHA-256 of its files by name, for the manifest.

    Raises:
        CaptureError: if the model is none of transformers, has an adapter, or has no weights yet.
    """
    root = anatomy.root
    save = getattr(root, "save_pretrained", None)
    if not callable(save) or not hasattr(root, "config"):
        raise CaptureError(f"""initial_weights=True keeps a checkpoint of transformers, and {type(root).__name__} is not
        a model of it: keep your own, and give it to regress oracle as --model""")
    if getattr(root, "peft_config", None) or getattr(root, "_hf_peft_config_loaded", False):
        raise CaptureError(f"""initial_weights=True keeps all weights of a model, and {type(root).__name__} trains an
        adapter (LoRA): merge it, or record without initial_weights""")
    if not isinstance(folder, Path):
        raise CaptureError(
            f"initial_weights=True writes into a folder of this machine, not {folder}: give one"
        )
    weights = {name: _held(name, parameter) for name, parameter in anatomy.parameters()}
    target = folder / FOLDER
    if world.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        save(target, state_dict=weights)
    found = {} if world.rank else {path.name: _digest(path) for path in sorted(target.iterdir())}
    return {key: value for own in world.gather(found) for key, value in own.items()}


def _held(name: str, parameter: Tensor) -> Tensor:
    if parameter.is_meta:
        raise CaptureError(f"""initial_weights=True finds no weights yet: {name} is on the meta device; enter
        record(...) after they are loaded""")
    found: Tensor = whole(parameter.detach())
    return found.cpu()


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
