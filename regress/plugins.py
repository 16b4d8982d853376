"""Parts that stand on the core and register what they bring: this project's own by a table, others by entry points.

The core imports none of them, and asks for a group when it needs something of it. Another package registers in its
``pyproject.toml``::

    [project.entry-points."regress.sources"]
    mysystem = "mypackage.regress_reader:READER"
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from regress.errors import ConfigError, reason

COMMANDS = "regress.commands"
"""Command -> `click.Command`, below ``regress``."""
TRAINERS = "regress.trainers"
"""Value of ``trainer.type`` -> function like `regress.parallel.parallel_run.train`."""
RESUME_CHECKS = "regress.resume_checks"
"""Any name -> function of a configuration, a console and the keys whose change is accepted. It is called before a run
goes on, and raises for a checkpoint that it cannot go on from."""
REPLAYERS = "regress.replayers"
"""Value of ``trainer.type`` -> function of a `regress.replay.replayer_registry.Machine` that returns a `Replayer`."""
VARIANTS = "regress.variants"
"""Any name -> mapping of names to `regress.replay.variant.Variant`."""
MODES = "regress.modes"
"""System -> function of directories and options that returns `regress.report.mode_comparison.Modes`."""
SOURCES = "regress.sources"
"""System -> `regress.dump.source_readers.Reader` of its dumps."""

SYSTEMS = "regress.systems"
"""Released trainer -> class of its `regress.systems.protocol.SystemUnderTest`."""

OWN: Mapping[str, Mapping[str, str]] = {
    COMMANDS: {
        "check": "regress.check.commands:check",
        "compare": "regress.report.compare_commands:compare",
        "doctor": "regress.doctor.commands:doctor",
        "explain": "regress.explain.commands:explain",
        "golden": "regress.replay.commands:golden",
        "history": "regress.report.history_commands:history",
        "objective": "regress.grpo.commands:objective",
        "oracle": "regress.oracle.commands:oracle",
        "replay": "regress.replay.replay_commands:replay",
        "report": "regress.report.run_commands:report",
        "serve": "regress.service.commands:serve",
        "systems": "regress.systems.commands:systems",
        "track": "regress.engine.tracking.commands:track",
        "variants": "regress.replay.replay_commands:variants",
    },
    TRAINERS: {
        "local": "regress.parallel.parallel_run:train",
        "remote": "regress.service.client.remote_run:train",
    },
    RESUME_CHECKS: {"doctor": "regress.doctor.examination:before_resume"},
    REPLAYERS: {
        "local": "regress.replay.engine_replayer:EngineReplayer",
        "remote": "regress.service.replay.remote_replayer:RemoteReplayer",
    },
    VARIANTS: {"remote": "regress.service.replay.remote_variants:REMOTE"},
    MODES: {"nexrl": "regress.interop.modes.three_modes:ThreeModes"},
    SOURCES: {
        "nexrl": "regress.interop.nexrl_dumps:READER",
        "service": "regress.interop.service_dumps:READER",
        "files": "regress.dump.bare_files:READER",
    },
    SYSTEMS: {
        "deepspeed": "regress.systems.adapters.deepspeed:DeepSpeed",
        "megatron": "regress.systems.adapters.megatron:Megatron",
        "trainer": "regress.systems.adapters.transformers_trainer:Trainer",
        "trl": "regress.systems.adapters.trl:TRL",
        "verl": "regress.systems.adapters.verl:Verl",
        "verl-pins": "regress.systems.adapters.verl:VerlOnItsPins",
    },
}
"""Parts of this package by group and name, each of which may be left out."""

HELP: Mapping[str, str] = {
    "check": "Check a loss function, an architecture, or that a script resumes: no recording.",
    "compare": "Compare two sources; the first judges the second.",
    "doctor": "Examine a checkpoint and its run before it is resumed, and repair what can be repaired.",
    "explain": "Say what a recorded trainer really does.",
    "golden": "Record, show, verify and update golden cases.",
    "history": "Keep how much of its tolerance each quantity used, and tell what rose.",
    "objective": "Say what a preset reproduces, and what the fields of an objective mean.",
    "oracle": "Judge a recorded trainer without a baseline.",
    "replay": "Replay golden cases under other computations.",
    "report": "Show the course of a run: reward, pass rate, curriculum, lengths, KL, clip fraction, gradient norm, "
    "samples.",
    "serve": "Serve the engine as a remote training API, for the SDKs of Weaver and Tinker.",
    "systems": "Judge released trainers by the float64 truth of a recorded batch.",
    "track": "Send the metrics of a run to trackers.",
    "variants": "List the variants and the faults they could reveal.",
}
"""Line of each command of this package in ``regress --help``, which loads none of them."""

REPAIR = "repair or uninstall the package that registers it"


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return what is registered in a group, by name: parts of this package that are there, then those of others.

    Raises:
        ConfigError: if a name is registered twice.
    """
    own = {name: EntryPoint(name, value, group) for name, value in OWN.get(group, {}).items()}
    found = {name: point for name, point in own.items() if _is_there(point)}
    others = {point.value: point for point in entry_points(group=group) if not is_own(point)}
    for point in sorted(others.values(), key=lambda point: point.name):
        known = found.setdefault(point.name, point)
        if known is not point:
            raise ConfigError(
                f"{point.name!r} of {group} is registered by {known.value} and by {point.value}: uninstall one of them"
            )
    return found


def named(group: str, name: str) -> EntryPoint:
    """Return what is registered under a name.

    Raises:
        ConfigError: if nothing is.
    """
    known = registered(group)
    if name not in known:
        raise ConfigError(f"""nothing that is installed provides {name!r} of {group} (there is
        {", ".join(known) or "none"}): install the package that registers it""")
    return known[name]


def load(point: EntryPoint) -> Any:
    """Return the object that is registered.

    Raises:
        ConfigError: if another package registers something that cannot be imported.
    """
    try:
        return point.load()
    except Exception as error:
        if is_own(point):
            raise
        raise ConfigError(
            f"{point.name!r} of {point.group} is {point.value}, which cannot be loaded ({reason(error)}): {REPAIR}"
        ) from error


def is_own(point: EntryPoint) -> bool:
    """Return True for a part of this package, which the table lists, whatever metadata of an installation says."""
    return point.value.startswith("regress.")


def _is_there(point: EntryPoint) -> bool:
    """Return True if the room of a part of this package is there: found, not imported."""
    try:
        spec = find_spec(".".join(point.value.split(".")[:2]))
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None  # a folder of nothing but caches has none
