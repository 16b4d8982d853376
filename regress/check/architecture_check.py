"""Check an architecture under the layouts of a trainer, in float64: each sample as if it were alone.

The model is cut to a few layers, one of each kind. Its weights are random, and nothing is downloaded but a
configuration; or they are those of its first layers.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regress.check.check_report import SCHEMA_VERSION
from regress.check.model_layouts import LAYOUTS, LENGTHS, Measured, alone, measure
from regress.engine.model_hub import local_folder
from regress.engine.numeric_types import true_float64
from regress.engine.pretrained_checkpoint import checkpoint_config, quiet, without_dropout
from regress.errors import ConfigError, reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
LAYERS = 2
"""Fewest layers that a model is cut to."""
_EXACT = 1e-9
"""Largest relative difference of two layouts of one computation in float64."""
TOKENS = 512
"""Most tokens of the vocabulary."""


@dataclass(frozen=True)
class LayoutRow:
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
    rows: tuple[LayoutRow, ...] = ()
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


class Architecture:
    """A model cut to a few layers, its samples, and what each of these gives alone.

    Args:
        name: ``hf:OWNER/NAME``, a folder with a config.json, or that file.
        real_weights: take those of the first layers from the checkpoint.

    Raises:
        ConfigError: if there is no such configuration, or transformers cannot build a causal language model of it.
    """

    def __init__(self, name: str, *, seed: int = 0, real_weights: bool = False) -> None:
        folder, config = _configuration(name, weights=real_weights)
        torch.manual_seed(seed)
        with _exact():
            self.model = _loaded(name, folder, config) if real_weights else _built(name, config)
            text = self.model.config.get_text_config()
            drawn = torch.Generator().manual_seed(seed)
            self.samples = [torch.randint(3, text.vocab_size, (n,), generator=drawn) for n in LENGTHS]
            self._truth = measure(self.model, self.samples, alone)
        kinds = getattr(text, "layer_types", None)
        size = f"{type(self.model).__name__}, {text.num_hidden_layers} layers"
        self.text = size + (f" ({', '.join(kinds)})" if kinds else "")

    def row(self, layout: str) -> LayoutRow:
        """Judge a layout of `regress.check.model_layouts.LAYOUTS`."""
        with _exact():
            return _row(layout, self.model, self.samples, self._truth)


def check_model(name: str, *, seed: int = 0, real_weights: bool = False) -> ModelCheck:
    """Check a model under padding, packing, microbatches, checkpointing, a compiler, generation, saving, two ranks.

    Args and errors are those of `Architecture`.
    """
    found = Architecture(name, seed=seed, real_weights=real_weights)
    return ModelCheck(name, found.text, tuple(found.row(layout) for layout in LAYOUTS))


@contextmanager
def _exact() -> Iterator[None]:
    """Compute in float64, in silence."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with true_float64(), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _configuration(name: str, *, weights: bool) -> tuple[Path, PretrainedConfig]:
    path = Path(name)
    if path.is_file():
        path = path.parent
    elif not path.is_dir():
        path = local_folder(name.removeprefix("hf:"), "MODEL", weights=weights)
    return path, checkpoint_config(path, "MODEL")


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
            alone(model, [torch.tensor([3, 4, 5])])
        except Exception as error:
            if not narrow:
                raise ConfigError(f"""{name} is not a causal language model that transformers builds and runs here
                ({reason(error)}): check its architecture, and what it needs installed""") from error
        else:
            return model
    raise AssertionError


def _loaded(name: str, folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Return the first layers of a checkpoint, as many as hold one of each kind, with all tokens and experts.

    Raises:
        ConfigError: if transformers cannot load it, or finds no weight for a parameter.
    """
    from transformers import AutoModelForCausalLM

    small = without_dropout(copy.deepcopy(config))
    text = small.get_text_config()
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    count = max(min(LAYERS, len(kinds)), *(kinds.index(kind) + 1 for kind in kinds))
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    small._experts_implementation = "eager"
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = load(
            folder, config=small, dtype=torch.float64, local_files_only=True, output_loading_info=True
        )
        found: PreTrainedModel = model.double().train()
        alone(found, [torch.tensor([3, 4, 5])])
    except Exception as error:
        raise ConfigError(f"""{name}: its weights cannot be loaded ({reason(error)}): give a checkpoint with weights, or
        leave --real-weights out""") from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{name} has no weight for {missing[0]}: give a complete checkpoint, or leave --real-weights out"
        )
    return found


def _row(layout: str, model: PreTrainedModel, samples: Sequence[Tensor], truth: Measured) -> LayoutRow:
    try:
        found = LAYOUTS[layout](model, samples)
    except Exception as error:
        return LayoutRow(layout, REFUSED, reason(error)[:200])
    for number, (mine, golden) in enumerate(zip(found.log_probs, truth.log_probs, strict=True)):
        off = (mine - golden).abs()
        if not bool(off.max() <= _EXACT * golden.abs().max()):
            at = int(off.nan_to_num(nan=torch.inf).argmax())
            text = f"log-prob of sample {number}, token {at + 1}: {float(mine[at]):.6g}, alone {float(golden[at]):.6g}"
            return LayoutRow(layout, WRONG, text)
    largest = max(float(one.abs().max()) for one in truth.gradients.values())
    for name, golden in truth.gradients.items():
        own = found.gradients.get(name)
        gap = float((golden if own is None else own - golden).abs().max())
        if not gap <= 10 * _EXACT * largest:
            return LayoutRow(
                layout, WRONG, f"log-probs are right, the gradient of {name} is off by {gap / largest:.2g}"
            )
    return LayoutRow(layout, RIGHT)
