"""Curriculum of a configuration: its stages, and the variables that set their thresholds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from regress.engine.config.leaves import KeyPath
from regress.engine.config.origins import COMMAND_LINE, ENVIRONMENT, Origin
from regress.engine.config.schema import Config
from regress.engine.config.store import Entry, Store
from regress.errors import ConfigError, TaskError
from regress.tasks.curriculum import Rules
from regress.tasks.stages import Stage, read_stages

VARIABLE = "CURRICULUM_PERFORMANCE_THRESHOLD_"
_NUMBERED = re.compile(re.escape(VARIABLE) + r"([0-9]+)")


def stages_of(config: Config) -> tuple[Stage, ...]:
    """Return the stages of section ``curriculum``.

    Raises:
        ConfigError: naming the stage and field that cannot be.
    """
    chosen = config.curriculum
    try:
        return read_stages(
            chosen.stages,
            chosen.thresholds,
            min_evaluations=chosen.min_evaluations,
            full_pass=chosen.full_pass,
        )
    except TaskError as error:
        raise ConfigError(str(error)) from error


def rules_of(config: Config) -> Rules:
    """Return what all stages have in common."""
    chosen = config.curriculum
    return Rules(chosen.max_rounds, chosen.threshold_increment, chosen.threshold_limit, chosen.window)


def apply_thresholds(environ: Mapping[str, str], store: Store, build: Callable[[], Config]) -> None:
    """Let ``CURRICULUM_PERFORMANCE_THRESHOLD_<n>`` set the threshold of the n-th stage, from 1.

    They beat a file, as every variable does. An entry for the stage in ``curriculum.thresholds``, or a threshold of the
    stage itself in ``curriculum.stages``, wins where the command line or a ``REGRESS_*`` variable gives it. Without a
    curriculum the variables mean nothing.

    Args:
        build: returns the configuration of the other layers.

    Raises:
        ConfigError: for a variable that belongs to no stage, or is no number.
    """
    given = {name: environ[name] for name in sorted(environ) if name.startswith(VARIABLE)}
    if not given:
        return
    config = build()
    if not config.curriculum.enable:
        return
    stages = stages_of(config)
    entries = config.curriculum.stages
    for variable, text in given.items():
        number = _number(variable, len(stages))
        stage = stages[number - 1]
        path = ("curriculum", "thresholds", stage.name)
        own = entries is not None and "threshold" in entries[number - 1]
        if own and _wins(store, ("curriculum", "stages")):
            continue
        if stage.name in config.curriculum.thresholds and _wins(store, path):
            continue
        store.put(Entry(path, _rate(variable, text), Origin(ENVIRONMENT, variable)))


def _wins(store: Store, path: KeyPath) -> bool:
    return store.origin(path).layer in (COMMAND_LINE, ENVIRONMENT)


def _number(variable: str, count: int) -> int:
    found = _NUMBERED.fullmatch(variable)
    number = int(found[1]) if found else 0
    if not 1 <= number <= count:
        raise ConfigError(
            f"The environment variable {variable} belongs to no stage of the curriculum; they are numbered from 1 to "
            f"{count}, so correct its name or unset it."
        )
    return number


def _rate(variable: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise ConfigError(
            f"The environment variable {variable}={text} must be a pass rate greater than 0 and at most 1."
        )
    return rate
