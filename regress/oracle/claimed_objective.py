"""Objective that a trainer is judged by: the one it claims, or the one that its own token gradients prove."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from regress.dump.coordinates import Place
from regress.errors import CompareError, ConfigError, OracleError
from regress.explain.explanation import explain_update
from regress.explain.loss_statements import NEGLIGIBLE
from regress.explain.statement import Statement, UpdateExplanation
from regress.explain.update_tokens import Floats, read_update
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import preset_values
from regress.oracle.exported_truth import ADVANTAGES, advantage_in
from regress.oracle.observed_updates import OLD, Observed, Recorded

OldOf: TypeAlias = Callable[[Observed], Floats | None]
"""Returns log-probs over the frame of an update; None where nothing tells the weights."""
SECTIONS = (
    "algorithm.",
    "optimizer.max_grad_norm",
    "rollout_worker.temperature",
    "reference.",
    "model.router_",
)
_CORE: Mapping[str, Callable[[Objective], bool]] = {
    "loss": lambda objective: True,
    "clip_low": lambda objective: "clip" in objective.loss,
    "clip_high": lambda objective: "clip" in objective.loss,
    "advantage": lambda objective: True,
    "scale": lambda objective: True,
    "aggregation": lambda objective: True,
    "denominator_scope": lambda objective: True,
    "kl_coef": lambda objective: True,
    "kl_estimator": lambda objective: bool(objective.kl_coef),
    "old_log_probs": lambda objective: True,
}
"""Fields that are always told, and where they mean something."""
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


def resolved(objective: Objective) -> str:
    """Return the fields of an objective that matter to it: what it is made of, and what differs from the defaults."""
    shown = [name for name, applies in _CORE.items() if applies(objective)]
    known = {spec.name: spec.default for spec in fields(Objective)}
    shown += [
        name for name, value in known.items() if name not in _CORE and getattr(objective, name) != value
    ]
    return ", ".join(f"{name}={getattr(objective, name)}" for name in shown)


def claim_of(
    recorded: Recorded, path: str, preset: str | None, settings: Mapping[str, Any], old: OldOf
) -> Claim:
    """Return the objective that the caller names, else the one that the dump proves.

    Args:
        old: returns log-probs before the first update on a rollout, where they were not recorded.

    Raises:
        OracleError: if neither tells it. ConfigError: for a setting that is none of an objective.
    """
    chosen = {key: value for key, value in settings.items() if key != ADVANTAGES}
    for key in chosen:
        if not key.startswith(SECTIONS):
            raise ConfigError(f"""--set {key} is not a setting of an objective; give keys that begin with
            {", ".join(SECTIONS)}, or {ADVANTAGES}""")
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
        words, values, notes = _proven(recorded, path, old)
    shown = [f"{key}={value}" for key, value in settings.items()]
    words = f"{words} ({', '.join(shown)})" if shown else words
    return Claim(words, {**values, **chosen}, advantage, limit, notes)


def _proven(recorded: Recorded, path: str, old: OldOf) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the objective that explains the token gradients of every update that tells one."""
    shown, silent = _shown(recorded, path, old)
    if not shown:
        raise OracleError(f"""no update of {path} proves which objective its trainer has (see regress
        explain{f": {silent[0]}" if silent else ""}); give --preset, such as trl:dapo, with --set algorithm.KEY=VALUE
        where the trainer has other values""")
    name, values, differ = _common(shown)
    for other in dict.fromkeys(one.names[0] for one in shown if one.changed and differ):
        again, _ = _shown(recorded, path, old, other)
        name, values, found = _common(again) if len(again) == len(shown) else (name, values, differ)
        if not found:
            differ = ""
            break
    if differ:
        raise OracleError(f"""the updates of {path} do not follow one objective: {differ}, so nothing says which is
        meant; give --preset""")
    notes = [
        f"the objective, {name}, is the one that explains the recorded token gradients: a trainer that should have "
        "another one is not found out; give --preset to say what it should be"
    ]
    settings = {f"algorithm.{key}": value for key, value in {"kl_coef": 0.0, **values}.items()}
    return f"{name}, as its gradients prove", {"algorithm.preset": name, **settings}, (*notes, *silent)


@dataclass(frozen=True)
class _Shown:
    """Hold what one update shows of the objective: presets that it may be, and values.

    First updates have no ratio but 1, and no KL where they start at the reference.

    Attributes:
        changed: the preset has other values than its own.
    """

    at: Place
    names: list[str]
    values: Mapping[str, Any]
    changed: bool


def _shown(
    recorded: Recorded, path: str, old: OldOf, preset: str | None = None
) -> tuple[list[_Shown], list[str]]:
    """Return what each update shows, and sentences on those that show no preset."""
    shown, silent = [], []
    for update in recorded.updates():
        found = _explained(recorded, path, update, old, preset)
        statement = None if found is None else _preset(found)
        if found is not None and statement is not None:
            shown.append(_read(update.at, found, statement))
        elif found is not None:
            silent.append(_untold(update.at, found))
    return shown, silent


def _common(shown: list[_Shown]) -> tuple[str, dict[str, Any], str]:
    """Return the preset of all updates, its values, and where they contradict each other; empty if they do not."""
    names, values = shown[0].names, dict[str, Any]()
    for one in shown:
        names = [name for name in names if name in one.names]
        place = f"(see regress explain --step {one.at.step})"
        for key in one.values:
            if values.setdefault(key, one.values[key]) != one.values[key]:
                return (
                    "",
                    {},
                    f"{key} is {one.values[key]} in {one.at.words} and {values[key]} before {place}",
                )
        if not names:
            return (
                "",
                {},
                f"no preset that has the gradients of those before has those of {one.at.words} {place}",
            )
    return names[0], values, ""


def _explained(
    recorded: Recorded, path: str, update: Observed, old: OldOf, preset: str | None
) -> UpdateExplanation | None:
    """Return the explanation of an update with the rollout that it trains on; None without token gradients."""
    rollout = () if update.rollout is None else update.rollout.samples
    try:
        tokens = read_update(recorded.dump, update.at.step, update.at.update, rollouts=rollout)
    except CompareError:
        return None
    if tokens.get(*OLD) is None and tokens.frame == update.tokens.frame:
        log_probs = old(update) if update.old is None else update.old
        tokens.values |= {} if log_probs is None else {OLD[-1]: log_probs}
    (found,) = explain_update(path, tokens, preset).updates
    bonus = next(
        (one for one in found.statements if one.subject == "entropy" and one.values != ("none",)), None
    )
    if bonus is not None:
        raise OracleError(f"""the loss of {update.at.words} of {path} has an entropy term ({bonus.text}), which no
        preset names; give --preset and --set algorithm.entropy_coef=VALUE""")
    return found


def _preset(found: UpdateExplanation) -> Statement | None:
    """Return the statement that names presets which have the gradients, as they are or with changed fields."""
    presets = (one for one in found.statements if one.subject == "preset" and one.values)
    return next((one for one in presets if _changed(one) or not one.departure), None)


def _untold(at: Place, found: UpdateExplanation) -> str:
    """Return what an update without a preset shows, in a sentence."""
    said = "; ".join(
        [
            f"{one.subject}: {one.text}"
            for one in found.statements
            if one.subject in ("advantages", "kl", "ratio")
        ]
        + [f"{subject}: {why}" for subject, why in found.undetermined.items() if subject != "entropy"]
    )
    place = at.words
    return f"{place} is that of no preset, and was judged by what other updates prove ({said})"


def _read(at: Place, found: UpdateExplanation, statement: Statement) -> _Shown:
    changed = _changed(statement)
    if changed:
        name, changes = statement.values
        values, names = dict(changes), [str(name)]
    else:
        values, names = {}, [str(one) for one in statement.values]
    kl = next((one for one in found.statements if one.subject == "kl" and not one.departure), None)
    bounds = {} if kl is None or kl.values != ("none",) else kl.evidence.get("coefficient at most", {})
    shown = {"kl_coef": 0.0} if bounds and max(bounds.values()) <= NEGLIGIBLE else {}
    return _Shown(at, names, {**values, **shown, **_coefficients(statement)}, changed)


def _changed(found: Statement) -> bool:
    """Return True if a statement names one preset with changed fields."""
    return len(found.values) == 2 and isinstance(found.values[1], dict)


def _coefficients(found: Statement) -> dict[str, Any]:
    """Return coefficients that were solved for, as the round numbers that they are.

    Raises:
        OracleError: if one is none.
    """
    values: dict[str, Any] = {}
    if "norm_length" in found.evidence:
        values["norm_length"] = int(found.evidence["norm_length"])
    if "kl_coef" in found.evidence:
        solved = float(found.evidence["kl_coef"])
        values["kl_coef"] = float(f"{solved:.2g}")
        if abs(values["kl_coef"] / solved - 1) > ROUNDED:
            raise OracleError(f"""the KL term has the coefficient {solved:.6g} by the token gradients, which is not a
            round number; give --preset and --set algorithm.kl_coef=VALUE""")
    return values
