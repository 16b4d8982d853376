"""Traits of golden cases, by which variants choose theirs: what the model is, and what the objective asks for.

They follow from the configuration and the recorded weights, never from a name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from regress.engine.config.training_config import AlgorithmConfig
from regress.golden.golden_case import GoldenCase
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_presets import preset_values
from regress.replay.replay_plan import depends_on_microbatches, section_values


@dataclass(frozen=True)
class Facts:
    """Facts of a case that decide its layouts.

    Attributes:
        config: its configuration, as overrides of the defaults.
        model: configuration of its model, as transformers writes it.
        weights: names of the model's weights.
        adapters: True if low-rank adapters are trained.
        sampled: True if replays sample the rollouts.
    """

    config: Mapping[str, Any]
    model: Mapping[str, Any]
    weights: frozenset[str] = frozenset()
    adapters: bool = False
    sampled: bool = False

    @property
    def kind(self) -> str:
        """Family of the model, its ``model_type``."""
        return str(self.model.get("model_type", "unknown"))

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self._size("num_attention_heads", "n_head")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self._size("num_key_value_heads") or self.heads

    @property
    def blocks(self) -> int:
        """Blocks of the model."""
        return self._size("num_hidden_layers", "n_layer")

    @property
    def experts(self) -> int | None:
        """Experts of a layer; None without."""
        return self._size("num_experts", "num_local_experts") or None

    @property
    def attention(self) -> dict[str, int]:
        """Numbers of heads, by their keys in the model's configuration."""
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.key_heads}

    @property
    def recurrent(self) -> bool:
        """True if layers of linear attention hand a state from token to token."""
        return "linear_attention" in (self.model.get("layer_types") or ())

    @property
    def columns(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by their keys in the model's configuration."""
        found = self.attention
        if not self.experts:
            wide = self._size("intermediate_size", "n_inner") or 4 * self._size("n_embd")
            found["n_inner" if "n_embd" in self.model else "intermediate_size"] = wide
        return found

    @property
    def absolute(self) -> bool:
        """True for a table of positions; False for rotary ones."""
        return "n_positions" in self.model and "rotary_dim" not in self.model

    @property
    def tied(self) -> bool:
        """True if embedding and output projection share their weights."""
        return bool(self.model.get("tie_word_embeddings", False))

    @cached_property
    def algorithm(self) -> dict[str, Any]:
        """Every key of the section ``algorithm``."""
        return {**_DEFAULTS, **section_values(self.config, {}, "algorithm")}

    @cached_property
    def objective(self) -> ObjectiveFields:
        """The objective."""
        known = ObjectiveFields.__dataclass_fields__
        return ObjectiveFields(**{key: value for key, value in self.algorithm.items() if key in known})

    def setting(self, section: str, key: str, default: Any) -> Any:
        """Return a value of the configuration."""
        return (self.config.get(section) or {}).get(key, default)

    def _size(self, *keys: str) -> int:
        found = (self.model.get(key) for key in keys)
        return next((int(value) for value in found if isinstance(value, int)), 0)


def _grpo(f: Facts) -> bool:
    """Return True for the objective of GRPO, in all but numbers."""
    plain: dict[str, Any] = {**_DEFAULTS, **preset_values("grpo")}
    named = {key: value for key, value in plain.items() if isinstance(value, str | bool) or value is None}
    return all(f.algorithm[key] == value for key, value in named.items() if key not in _FREE)


def _plain(f: Facts) -> bool:
    """Return True for one update by each rollout, of one turn, with a KL term in the loss."""
    once = f.setting("trainer", "epochs", 1) == 1 and f.setting("trainer", "mini_batch_size", None) is None
    return once and f.objective.kl_coef > 0 and not f.sampled and f.setting("task", "max_turns", 1) == 1


_DEFAULTS = vars(AlgorithmConfig())
_FREE = ("preset", "old_log_probs")


def _many_parts(f: Facts) -> bool:
    """Return True for the model in which most can go wrong by a split: norms of heads, and queries that share keys."""
    normed = any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in f.weights)
    special = f.tied or f.experts or f.adapters or f.absolute or f.recurrent
    return normed and f.key_heads < f.heads and not special


def _adaptive(f: Facts) -> bool:
    """Return True if a coefficient of the loss follows what the steps before measured."""
    return "adaptive" in (f.objective.kl_controller, f.objective.entropy_controller)


def _crosses(f: Facts) -> bool:
    """Return True if an objective other than GRPO has denominators or statistics of the whole batch."""
    o, adaptive = f.objective, _adaptive(f)
    batch = o.scale == "batch" or o.normalize_advantages or "reinforce_plus_plus" in o.advantage
    crosses = o.aggregation != "token-sum" or o.compares_tokens or batch or adaptive or o.correction_normalize
    return crosses and not depends_on_microbatches(f.algorithm) and not _grpo(f)


def _sums(f: Facts) -> bool:
    o = f.objective
    constant = o.aggregation == "seq-mean-token-sum-norm" and o.norm_rule == "maximum"
    return constant and not o.compares_tokens and not depends_on_microbatches(f.algorithm)


TRAITS: Mapping[str, Callable[[Facts], bool]] = {
    "@grpo": lambda f: _many_parts(f) and _grpo(f) and _plain(f),
    "@absolute": lambda f: f.absolute,
    "@tied": lambda f: f.tied and not f.absolute,
    "@experts": lambda f: f.experts is not None,
    "@recurrent": lambda f: f.recurrent,
    "@adapters": lambda f: f.adapters,
    "@turns": lambda f: f.setting("task", "max_turns", 1) > 1 and not f.sampled,
    "@sampled": lambda f: f.sampled,
    "@reused": lambda f: f.setting("trainer", "epochs", 1) > 1 and f.objective.aggregation == "token-mean",
    "@cispo": lambda f: f.objective.loss == "cispo" and f.objective.sampler_correction != "none",
    "@sums": _sums,
    "@sequences": lambda f: f.objective.importance_level == "sequence" and f.objective.loss == "ppo_clip",
    "@covariance": lambda f: f.objective.loss.endswith("_cov") and f.objective.statistics_scope == "global",
    "@current": lambda f: f.algorithm["old_log_probs"] == "current",
    "@adaptive": _adaptive,
    "@corrected": lambda f: f.objective.corrects_over_rollout and f.objective.correction_normalize,
    "@batch": _crosses,
    "@microbatches": lambda f: depends_on_microbatches(f.algorithm),
}
"""Traits, and whether a case has them:

``@grpo`` GRPO on a model with norms of heads and keys that heads share, in which nearly every fault of a layout
shows; ``@absolute`` a table of positions; ``@tied`` one weight for embedding and output projection, of rotary
positions; ``@experts``; ``@recurrent`` layers of linear attention; ``@adapters``; ``@turns`` answers of an
environment between completions; ``@sampled`` rollouts that are sampled; ``@reused`` several epochs under a mean over
all tokens; ``@cispo`` with corrections for the sampler; ``@sums`` divided by a constant; ``@sequences`` ratios of
whole sequences; ``@covariance`` tokens compared over the batch; ``@current`` old log-probs of the pass itself;
``@adaptive`` coefficients that follow what was measured; ``@corrected`` weights for the sampler that are divided by
their mean over the rollout; ``@batch`` denominators or statistics of the whole batch, of an objective other than GRPO;
``@microbatches`` those of each microbatch.
"""

_KNOWN: WeakKeyDictionary[GoldenCase, tuple[Facts, frozenset[str]]] = WeakKeyDictionary()


def facts_of(case: GoldenCase) -> Facts:
    """Return the facts of a case, read once."""
    return _known(case)[0]


def traits_of(case: GoldenCase) -> frozenset[str]:
    """Return the traits of a case."""
    return _known(case)[1]


def _known(case: GoldenCase) -> tuple[Facts, frozenset[str]]:
    if case not in _KNOWN:
        facts = _read(case)
        _KNOWN[case] = facts, frozenset(name for name, test in TRAITS.items() if test(facts))
    return _KNOWN[case]


def _read(case: GoldenCase) -> Facts:
    folder = case.folder / "model"
    adapters = (folder / "adapter_config.json").is_file()
    whole = folder / "base" if adapters else folder
    path = whole / "config.json"
    model = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    weights = (name for file in sorted(whole.glob("*.safetensors")) for name in _tensor_names(file))
    return Facts(case.config, model.get("text_config", model), frozenset(weights), adapters, case.sampled)


def _tensor_names(path: Path) -> list[str]:
    """Return the names in the header of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return list(json.loads(file.read(min(size, path.stat().st_size))))
