"""Check an architecture under the layouts of a trainer, in float64: each sample as if it were alone.

The model is cut to a few layers, one of each kind, and has random weights; nothing is downloaded but a configuration.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regress.check.report import SCHEMA_VERSION
from regress.engine.hub import local_folder
from regress.engine.precision import true_float64
from regress.engine.pretrained import checkpoint_config, quiet, without_dropout
from regress.errors import ConfigError, reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
LAYERS = 2
"""Fewest layers that a model is cut to."""
_LENGTHS = (5, 9, 3, 7)
_EXACT = 1e-9
"""Largest relative difference of two layouts of one computation in float64."""
TOKENS = 512
"""Most tokens of the vocabulary."""


@dataclass(frozen=True)
class Row:
    """One layout.

    Attributes:
        layout: its name.
        verdict: `RIGHT`, `WRONG` or `REFUSED` (the model raises an error).
        text: the token or parameter that is furthest off, or the error.
    """

    layout: str
    verdict: str
    text: str = ""


@dataclass(frozen=True)
class ModelCheck:
    """A model under all layouts.

    Attributes:
        model: as it was asked for.
        architecture: class and size, in words.
        rows: layouts.
        error: why nothing could be checked, as `RegressError.to_json` tells it.
    """

    model: str
    architecture: str = ""
    rows: tuple[Row, ...] = ()
    error: Mapping[str, str] | None = None

    @property
    def exit_code(self) -> int:
        """0 none is wrong, 1 some are, 2 it could not be checked."""
        return 2 if self.error is not None else int(any(row.verdict == WRONG for row in self.rows))

    def to_text(self) -> str:
        """Return the check as a terminal shows it."""
        width = max((len(row.layout) for row in self.rows), default=0)
        lines = [f"  {row.layout:<{width}}  {row.verdict:<7}  {row.text}".rstrip() for row in self.rows]
        return "\n".join([f"{self.model}: {self.architecture}", *lines])

    def dumps(self) -> str:
        """Return the check as JSON."""
        rows = [vars(row) for row in self.rows]
        tree = {"schema_version": SCHEMA_VERSION, **vars(self), "rows": rows, "exit_code": self.exit_code}
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True)
class _Found:
    """Log-probs of each sample's tokens but the first, and gradients of their weighted sum by parameter."""

    log_probs: list[Tensor]
    gradients: Mapping[str, Tensor]


Log = list[Tensor]
Layout = Callable[["PreTrainedModel", Sequence[Tensor]], Log]


def check_model(name: str, *, seed: int = 0) -> ModelCheck:
    """Check a model under padding, packing, microbatches, checkpointing, a compiler, generation before, and saving.

    Args:
        name: ``hf:OWNER/NAME``, a folder with a config.json, or that file.

    Raises:
        ConfigError: if there is no such configuration, or transformers cannot build a causal language model of it.
    """
    config = _configuration(name)
    torch.manual_seed(seed)
    with true_float64(), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _built(name, config)
        text = model.config.get_text_config()
        drawn = torch.Generator().manual_seed(seed)
        samples = [torch.randint(3, text.vocab_size, (n,), generator=drawn) for n in _LENGTHS]
        truth = _measured(model, samples, _alone)
        rows = [_row(layout, model, samples, run, truth) for layout, run in _LAYOUTS.items()]
    size = f"{type(model).__name__}, {text.num_hidden_layers} layers"
    kinds = getattr(text, "layer_types", None)
    return ModelCheck(name, size + (f" ({', '.join(kinds)})" if kinds else ""), tuple(rows))


def _configuration(name: str) -> PretrainedConfig:
    path = Path(name)
    if path.is_file():
        return checkpoint_config(path.parent, "MODEL")
    plain = name.removeprefix("hf:")
    return checkpoint_config(path if path.is_dir() else local_folder(plain, "MODEL", weights=False), "MODEL")


def cut(config: PretrainedConfig, *, narrow: bool) -> PretrainedConfig:
    """Return a configuration of few layers, one of each kind, with few tokens and experts, and no dropout.

    Args:
        narrow: with few and small heads, too, their shares and the width of a head as they were.
    """
    small = without_dropout(copy.deepcopy(config))
    text = small.get_text_config()
    kinds = getattr(text, "layer_types", None)
    chosen = list(range(min(LAYERS, text.num_hidden_layers)))
    if kinds:
        first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        others = [n for n in range(len(kinds)) if n not in first]
        chosen = sorted([*first, *others[: max(0, LAYERS - len(first))]])
        with suppress(AttributeError):  # told by other fields
            text.layer_types = [kinds[n] for n in chosen]
    changes: dict[str, int] = {"num_hidden_layers": len(chosen), "vocab_size": min(TOKENS, text.vocab_size)}
    changes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"):
        if isinstance(count := getattr(text, name, None), int):
            changes[name] = min(count, 2 if name.endswith("tok") else 4)
    if narrow:
        heads = getattr(text, "num_attention_heads", None) or 1
        shared = heads // (getattr(text, "num_key_value_heads", None) or heads)
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        changes |= {"num_attention_heads": 2 * shared, "num_key_value_heads": 2, "head_dim": width}
        changes |= {"hidden_size": 2 * shared * width, "intermediate_size": 64, "moe_intermediate_size": 32}
    for name, value in changes.items():
        if hasattr(text, name):
            setattr(text, name, value)
    return small


def _built(name: str, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model that is as narrow as its architecture allows.

    Raises:
        ConfigError: if transformers builds no causal language model of it.
    """
    from transformers import AutoModelForCausalLM

    for narrow in (True, False):
        try:
            small = cut(config, narrow=narrow)
            small._experts_implementation = "eager"  # products of groups know no float64
            model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float64)
            model = model.double().train()
            _alone(model, [torch.tensor([3, 4, 5])])
        except Exception as error:
            if not narrow:
                raise ConfigError(
                    f"{name} is no causal language model that transformers builds and runs here ({reason(error)}): "
                    "check its architecture, and what it needs installed"
                ) from error
        else:
            return model
    raise AssertionError


def _row(layout: str, model: PreTrainedModel, samples: Sequence[Tensor], run: Layout, truth: _Found) -> Row:
    try:
        found = _measured(model, samples, run)
    except Exception as error:
        return Row(layout, REFUSED, reason(error)[:200])
    for number, (mine, golden) in enumerate(zip(found.log_probs, truth.log_probs, strict=True)):
        off = (mine - golden).abs()
        if not bool(off.max() <= _EXACT * golden.abs().max()):
            at = int(off.nan_to_num(nan=torch.inf).argmax())
            text = f"log-prob of sample {number}, token {at + 1}: {float(mine[at]):.6g}, alone {float(golden[at]):.6g}"
            return Row(layout, WRONG, text)
    largest = max(float(one.abs().max()) for one in truth.gradients.values())
    for name, golden in truth.gradients.items():
        gap = float((found.gradients[name] - golden).abs().max())
        if not gap <= 10 * _EXACT * largest:
            return Row(
                layout, WRONG, f"log-probs are right, the gradient of {name} is off by {gap / largest:.2g}"
            )
    return Row(layout, RIGHT)


def _measured(model: PreTrainedModel, samples: Sequence[Tensor], run: Layout) -> _Found:
    model.zero_grad(set_to_none=True)
    log_probs = run(model, samples)
    weights = torch.linspace(-1.0, 1.5, sum(len(one) for one in log_probs))
    if torch.cat(log_probs).requires_grad:
        (torch.cat(log_probs) * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return _Found([one.detach() for one in log_probs], gradients)


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of each token but the first of a sample, from the logits of its row."""
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def _alone(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    return [_log_probs(model(input_ids=ids[None], use_cache=False).logits[0], ids) for ids in samples]


def _padded(model: PreTrainedModel, samples: Sequence[Tensor], *, left: bool, positions: bool = False) -> Log:
    width = max(len(ids) for ids in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    places = [slice(width - len(one), width) if left else slice(0, len(one)) for one in samples]
    for row, (place, one) in enumerate(zip(places, samples, strict=True)):
        ids[row, place], mask[row, place] = one, 1
    more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    pairs = zip(places, samples, strict=True)
    return [_log_probs(logits[row, place], one) for row, (place, one) in enumerate(pairs)]


def _packed(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
    logits = model(input_ids=torch.cat([*samples])[None], position_ids=positions, use_cache=False).logits[0]
    stops = torch.tensor([len(ids) for ids in samples]).cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return [_log_probs(logits[a:b], ids) for a, b, ids in zip(starts, stops, samples, strict=True)]


def _microbatches(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    return [one for part in (samples[:1], samples[1:]) for one in _padded(model, part, left=False)]


def _after_generation(model: Any, samples: Sequence[Tensor]) -> Log:
    mask = torch.ones_like(samples[0][None])
    model.eval()
    try:
        model.generate(
            samples[0][None], attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    finally:
        model.train()
    return _padded(model, samples, left=False)


def _checkpointed(model: Any, samples: Sequence[Tensor]) -> Log:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        return _padded(model, samples, left=False)
    finally:
        model.gradient_checkpointing_disable()


def _compiled(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    torch.compiler.reset()
    call: Any = torch.compile(model, backend="aot_eager")
    return _padded(call, samples, left=False)


def _saved(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = (
                type(model)
                .from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
                .train()
            )
    finally:
        logging.enable_progress_bar()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
            if not torch.equal(mine, theirs):
                raise ValueError("a weight is another one after saving and loading")
    found = _alone(again, samples)
    own = _alone(model, samples)
    return [mine + (theirs - mine).detach() for mine, theirs in zip(own, found, strict=True)]


_LAYOUTS: Mapping[str, Layout] = {
    "padded right": partial(_padded, left=False),
    "padded left": partial(_padded, left=True),
    "padded left, position ids": partial(_padded, left=True, positions=True),
    "packed by position ids": _packed,
    "microbatches": _microbatches,
    "generate, then score": _after_generation,
    "checkpointed": _checkpointed,
    "compiled": _compiled,
    "saved and loaded": _saved,
}
