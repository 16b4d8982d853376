"""Objective that a trainer is judged by: the one it claims, or the one that its own token gradients prove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regress.errors import CompareError, ConfigError, OracleError
from regress.explain.explain import explain_dump
from regress.explain.statement import Statement
from regress.grpo.presets import preset_values
from regress.oracle.exported import ADVANTAGES, advantage_in
from regress.oracle.observed import Recorded, named

SECTIONS = (
    "algorithm.",
    "optimizer.max_grad_norm",
    "rollout_worker.temperature",
    "reference.",
    "model.router_",
)
ROUNDED = 1e-3
"""Relative difference up to which a coefficient that was solved for is the round number beside it."""


@dataclass(frozen=True)
class Claim:
    """Objective of a trainer.

    Attributes:
        words: the objective, and who says so.
        values: dotted key -> value of the configuration.
        advantage: one advantage for every loss token; None: from rewards.
        max_grad_norm: norm that gradients are clipped to, where the caller says it.
        notes: what follows for the judgement.
    """

    words: str
    values: Mapping[str, Any]
    advantage: float | None = None
    max_grad_norm: float | None = None
    notes: tuple[str, ...] = ()


def claim_of(recorded: Recorded, path: str, preset: str | None, settings: Mapping[str, Any]) -> Claim:
    """Return the objective that the caller names, else the one that the dump proves.

    Raises:
        OracleError: if neither tells it. ConfigError: for a setting that is none of an objective.
    """
    chosen = {key: value for key, value in settings.items() if key != ADVANTAGES}
    for key in chosen:
        if not key.startswith(SECTIONS):
            raise ConfigError(
                f"--set {key} is no setting of an objective; give keys that begin with {', '.join(SECTIONS)}, or "
                f"{ADVANTAGES}"
            )
    limit = chosen.pop("optimizer.max_grad_norm", None)
    advantage = advantage_in(settings)
    words: str
    values: dict[str, Any]
    notes: tuple[str, ...]
    own = any(key.startswith("algorithm.") for key in chosen)
    if preset is not None:
        preset_values(preset)
        words, values, notes = f"{preset}, as claimed", {"algorithm.preset": preset}, ()
    elif own or advantage is not None:
        words, values, notes = "as the settings say", {}, ()
    else:
        words, values, notes = _proven(recorded, path)
    shown = [f"{key}={value}" for key, value in settings.items()]
    words = f"{words} ({', '.join(shown)})" if shown else words
    return Claim(words, {**values, **chosen}, advantage, limit, notes)


def _proven(recorded: Recorded, path: str) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the objective that explains the token gradients of every update that tells one."""
    names: list[str] | None = None
    values: dict[str, Any] = {}
    for at in recorded.places:
        found = _statement(path, at)
        if found is None:
            continue
        name, changes = (found.values[0], {}) if not _changed(found) else found.values
        same = [str(one) for one in found.values] if not _changed(found) else [str(name)]
        known = names is not None
        names = same if names is None else [one for one in names if one in same]
        own = {**changes, **_coefficients(found)}
        if not names or (known and values != own):
            raise OracleError(
                f"the updates of {path} do not follow one objective (see regress explain, for one {named(at)}), so "
                "nothing says which is meant; give --preset"
            )
        values = own
    if names is None:
        raise OracleError(
            f"no update of {path} proves which objective its trainer has (see regress explain); give --preset, such as "
            "trl:dapo, with --set algorithm.KEY=VALUE where the trainer has other values"
        )
    note = (
        f"the objective, {names[0]}, is the one that explains the recorded token gradients: a trainer that should have "
        "another one is not found out; give --preset to say what it should be"
    )
    told = {f"algorithm.{key}": value for key, value in values.items()}
    return f"{names[0]}, as its gradients prove", {"algorithm.preset": names[0], **told}, (note,)


def _statement(path: str, at: tuple[int, int | None]) -> Statement | None:
    try:
        found = explain_dump(path, step=at[0], update=at[1])
    except CompareError:
        return None
    bonus = next(
        (one for one in found.statements if one.subject == "entropy" and one.values != ("none",)), None
    )
    if bonus is not None:
        raise OracleError(
            f"the loss of {named(at)} of {path} has an entropy term ({bonus.text}), which no preset names; give "
            "--preset and --set algorithm.entropy_coef=VALUE"
        )
    return next((one for one in found.statements if one.subject == "preset" and one.values), None)


def _changed(found: Statement) -> bool:
    """Return True if a statement names one preset with changed fields."""
    return len(found.values) == 2 and isinstance(found.values[1], dict)


def _coefficients(found: Statement) -> dict[str, Any]:
    """Return coefficients that were solved for, as the round numbers that they are.

    Raises:
        OracleError: if one is none.
    """
    values: dict[str, Any] = {
        "kl_coef": 0.0
    }  # whatever the preset has, the gradients have none but what follows
    if "norm_length" in found.evidence:
        values["norm_length"] = int(found.evidence["norm_length"])
    if "kl_coef" in found.evidence:
        solved = float(found.evidence["kl_coef"])
        values["kl_coef"] = float(f"{solved:.2g}")
        if abs(values["kl_coef"] / solved - 1) > ROUNDED:
            raise OracleError(
                f"the KL term has the coefficient {solved:.6g} by the token gradients, which is no round number; give "
                "--preset and --set algorithm.kl_coef=VALUE"
            )
    return values
