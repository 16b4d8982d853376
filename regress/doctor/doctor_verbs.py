"""The verbs of ``regress doctor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from regress.doctor import checkpoint_repair
from regress.doctor.check_context import CheckContext, gathered
from regress.doctor.checks.tracker_check import check_variables
from regress.doctor.doctor_report import Report, show
from regress.doctor.examination import cleanup, examine
from regress.dump.dump_location import is_remote
from regress.engine.checkpoint.checkpoint_names import CURRICULUM_STATE
from regress.errors import DoctorError

CHANGES = ("auto_fix", "clean_only", "create_fresh", "backup", "restore")
"""Verbs that write into the run."""


class Found(Protocol):
    """Findings and actions of a verb."""

    @property
    def exit_code(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...

    def show(self, console: Console) -> None: ...


@dataclass(frozen=True)
class Examined:
    """A report, and how much of it is shown."""

    report: Report
    plan: bool = True
    detail: bool = False

    @property
    def exit_code(self) -> int:
        return self.report.exit_code

    def to_json(self) -> dict[str, Any]:
        return self.report.to_json()

    def show(self, console: Console) -> None:
        show(self.report, console, plan=self.plan, detail=self.detail)


@dataclass(frozen=True)
class Done:
    """A change that needs no examination."""

    verb: str
    lines: tuple[str, ...]
    paths: tuple[str, ...] = ()
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"verb": self.verb, "result": list(self.lines), "paths": list(self.paths)}

    def show(self, console: Console) -> None:
        for line in self.lines:
            console.print(Text(line), soft_wrap=True)


def run(verb: str, options: Mapping[str, Any]) -> Found:
    """Carry out a verb.

    Raises:
        DoctorError: if there is nothing to examine, or a change cannot be made.
    """
    if verb in CHANGES:
        _require_local(verb, options)
    context = gathered(
        options["arguments"],
        checkpoint=options["checkpoint"],
        project_root=options["project_root"],
        config_path=options["config_path"],
        config_name=options["config_name"],
        flags=options["flags"],
        allowed=options["allow_change"],
        deep=not options["fast"],
    )
    if verb in CHANGES and not options["dry_run"]:
        context = checkpoint_repair.finished(context)
    if verb == "restore":
        return _restore(context, options["restore"], options["dry_run"])
    if options["dry_run"] and verb in _PREVIEWS:
        return _PREVIEWS[verb](context)
    return _VERBS[verb](context)


def _require_local(verb: str, options: Mapping[str, Any]) -> None:
    for path in (options["checkpoint"], *options["arguments"]):
        if path is not None and is_remote(path.partition("=")[0]):
            raise DoctorError(f"""--{verb.replace("_", "-")} changes files, and {path} lies in a store, where the doctor
            changes nothing; copy the run to this machine, name the copy, and upload it again""")


def _examine(context: CheckContext) -> Found:
    return Examined(Report(context, examine(context)))


def _report_only(context: CheckContext) -> Found:
    return Examined(Report(context, examine(context)), plan=False)


def _diagnose(context: CheckContext) -> Found:
    return Examined(Report(context, examine(context)), detail=True)


def _backup(context: CheckContext) -> Found:
    folder, paths = checkpoint_repair.back_up(context)
    return Done("backup", (f"copied {len(paths)} files to {folder}",), tuple(paths))


def _preview_backup(context: CheckContext) -> Found:
    paths = checkpoint_repair.contents(context)
    return Done("backup", (f"--backup would copy {len(paths)} files",), tuple(paths))


def _restore(context: CheckContext, name: str, dry_run: bool) -> Found:
    folder, paths = checkpoint_repair.restore(context, name, dry_run=dry_run)
    verb = "would put back" if dry_run else "put back"
    return Done("restore", (f"{verb} {len(paths)} files from {folder}",), tuple(paths))


def _preview_fresh(context: CheckContext) -> Found:
    _, stage = checkpoint_repair.fresh(context)
    path = str(context.target.root / CURRICULUM_STATE)
    return Done("create-fresh", (f"--create-fresh would write {path} at {stage}",), (path,))


def _shell(context: CheckContext) -> Found:
    lines = tuple(issue.command for issue in check_variables(context) if issue.command is not None)
    return Done("shell", lines)


_VERBS: Mapping[str, Callable[[CheckContext], Found]] = {
    "examine": _examine,
    "report_only": _report_only,
    "diagnose": _diagnose,
    "auto_fix": lambda context: Examined(checkpoint_repair.repair(context)),
    "clean_only": lambda context: Examined(checkpoint_repair.clean_up(context)),
    "create_fresh": lambda context: Examined(checkpoint_repair.create_fresh(context)),
    "backup": _backup,
    "shell": _shell,
}
_PREVIEWS: Mapping[str, Callable[[CheckContext], Found]] = {
    "auto_fix": _examine,
    "clean_only": lambda context: Examined(Report(context, cleanup(context))),
    "create_fresh": _preview_fresh,
    "backup": _preview_backup,
}
