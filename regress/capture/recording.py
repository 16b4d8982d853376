"""`record`: puts any PyTorch trainer under test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from regress.capture.anatomy import Head, dissect
from regress.capture.gradients import listening
from regress.capture.inputs import Find, Finders
from regress.capture.session import Session
from regress.capture.settings import Classify, Samples, Settings
from regress.capture.world import World, refuse_flat
from regress.dump.location import Location
from regress.dump.manifest import Provenance
from regress.dump.recorder import Recorder
from regress.errors import CaptureError


@contextmanager
def record(
    folder: str | Path | Location,
    model: nn.Module,
    *,
    samples: Samples = None,
    activations: str | None = None,
    gradient: bool | str = True,
    param: bool | str = True,
    optimizer_state: bool | str = True,
    token_gradient: bool = False,
    temperature: float | None = None,
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
    backward_scale: float | None = None,
    system: str = "",
    format: str = "safetensors",
    overwrite: bool = False,
) -> Iterator[Recorder]:
    """Record what a trainer computes inside, without a change to it, as a dump that `regress compare` reads."""
    world = World(given=mesh)
    anatomy = dissect(model, decoder, head)
    refuse_flat(model)
    finders = Finders(input_ids, attention_mask, position_ids, cu_seq_lens, pad_token_id)
    settings = Settings(
        samples,
        activations,
        gradient,
        param,
        optimizer_state,
        token_gradient,
        temperature,
        classify,
        backward_scale,
        None,
        finders,
    )
    provenance = Provenance()
    recorder = Recorder(
        folder if isinstance(folder, str) else str(folder),
        options=settings.options,
        format=format,
        every_n_steps=every_n_steps,
        provenance=provenance,
        overwrite=overwrite,
        rank=world.rank,
        gather=world.gather,
    )
    session = Session(anatomy, settings, world, recorder)
    try:
        with _hooks(session):
            yield recorder
            session.finish_step()
    except BaseException:
        session.active = False
        recorder.close(complete=False)
        raise
    session.active = False
    if not sum(world.gather(session.forwards)):
        recorder.close(complete=False)
        raise CaptureError(
            f"no forward pass of {type(anatomy.decoder).__name__} with gradients was captured: give record "
            "the model that "
            "is trained (before or after it is wrapped), and train inside of the with block"
        )
    session.precision.count(anatomy.parameters())
    provenance.config = {
        "model": {"dtype": session.precision.dtype},
        "capture": {
            "system": system or type(anatomy.root).__module__.partition(".")[0],
            **session.precision.to_json(),
        },
    }
    provenance.mesh = {"world_size": world.size, **world.sizes(anatomy.root)}
    recorder.close()


@contextmanager
def _hooks(session: Session) -> Iterator[None]:
    anatomy = session.anatomy
    with ExitStack() as stack:
        root, decoder = anatomy.root, anatomy.decoder
        handles: list[Any] = [
            root.register_forward_pre_hook(_eager(session.before_model), with_kwargs=True, prepend=True),
            root.register_forward_hook(_eager(session.after_model), with_kwargs=True, always_call=True),
            decoder.register_forward_hook(_eager(session.after_decoder), with_kwargs=True, prepend=True),
            register_optimizer_step_pre_hook(session.before_step),
            register_optimizer_step_post_hook(session.after_step),
        ]
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(listening(session))
        yield


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook out of compiled graphs; nothing is compiled where torch's compiler was never loaded."""
    compiler: Any = sys.modules.get("torch._dynamo")
    return hook if compiler is None else compiler.disable(hook)
