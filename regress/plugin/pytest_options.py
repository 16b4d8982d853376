"""Options of the plugin and its ini keys, read and checked at once when pytest is configured.

| option | ini key | what it decides |
|---|---|---|
| `--update-golden[=MODES]` | | write goldens |
| `--golden-dir=DIR` | `regress_golden_dir` | where goldens lie |
| `--regress-tier=TIER` | `regress_tier` | which replays are run |
| `--regress-matrix=EXTENT` | `regress_matrix` | on which cases |
| `--regress-tolerance-scale=X` | `regress_tolerance_scale` | factor on every tolerance |
| `--regress-report[=DIR]` | `regress_report` | where reports are written |
| `--regress-keep-dumps[=DIR]` | `regress_keep_dumps` | where dumps of replays stay |
| `--regress-set=KEY=VALUE` | `regress_set` | configuration laid over every variant |
| `--regress-model=MODEL` | | architectures that are tested |
| `--regress-allow-code` | | import any module that a case or configuration names |
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping

import pytest

from regress.credential_redaction import redacted

EXTENTS = ("reduced", "default", "full")
TIERS = ("semantics", "precision", "bitwise", "all")
DEFAULTS: Mapping[str, str] = {
    "--update-golden": "drifted",
    "--regress-report": "regress-report",
    "--regress-keep-dumps": "regress-dumps",
}
"""Value of an option that is given without one."""


def add_options(parser: pytest.Parser) -> None:
    """Declare options and ini keys."""
    add = parser.getgroup("regress", "numerical regression (regress)").addoption
    _optional(
        parser,
        "--update-golden",
        "MODES",
        "Write goldens. Modes, separated by commas: drifted (default: what is beyond its tolerance), all (whatever "
        "differs), force (even where CI is set).",
    )
    add("--golden-dir", metavar="DIR", help="Where goldens lie (ini: regress_golden_dir; default: golden).")
    add("--regress-tier", metavar="TIER", help=f"Replays to run: {', '.join(TIERS)} (ini: regress_tier).")
    add(
        "--regress-matrix",
        metavar="EXTENT",
        help="Cases on which a variant is replayed: reduced (one of each kind), default (those it could break), full "
        "(all possible ones), auto (reduced; default where -k or an id chooses tests; ini: regress_matrix).",
    )
    add(
        "--regress-tolerance-scale",
        metavar="X",
        help="Factor on every tolerance (ini: regress_tolerance_scale).",
    )
    _optional(
        parser,
        "--regress-report",
        "DIR",
        "Write reports of how close every comparison was (default: regress-report; ini: regress_report).",
    )
    _optional(
        parser,
        "--regress-keep-dumps",
        "DIR",
        "Keep the dumps of replays (default: regress-dumps; ini: regress_keep_dumps).",
    )
    add(
        "--regress-set",
        metavar="KEY=VALUE",
        action="append",
        help="Configuration laid over every variant, such as model.patch=my_kernels:apply; repeatable (ini: "
        "regress_set).",
    )
    add(
        "--regress-model",
        metavar="MODEL",
        action="append",
        help="Test the layouts of an architecture, as `regress check model MODEL` does; repeatable.",
    )
    add(
        "--regress-allow-code",
        action="store_true",
        help="Import any module that a case or configuration names, not only those of [tool.regress] allow_code.",
    )
    parser.addini("regress_set", "configuration laid over every variant, KEY=VALUE a line", type="linelist")
    parser.addini("regress_golden_dir", "where goldens lie, relative to this file", default="golden")
    parser.addini("regress_tier", f"replays to run: {', '.join(TIERS)}", default="all")
    parser.addini("regress_matrix", f"cases of a variant: auto, {', '.join(EXTENTS)}", default="auto")
    parser.addini("regress_tolerance_scale", "factor on every tolerance", default="1")
    parser.addini("regress_report", "folder for reports, relative to this file", default="")
    parser.addini("regress_keep_dumps", "where dumps of replays stay, relative to this file", default="")


def _optional(parser: pytest.Parser, option: str, metavar: str, text: str) -> None:
    group = parser.getgroup("regress")
    group.addoption(option, nargs="?", const=DEFAULTS[option], metavar=metavar, help=text)


def said(config: pytest.Config) -> list[str]:
    """Return the options of this session that are needed to repeat one of its tests."""
    names = ("--golden-dir", "--regress-tier", "--regress-matrix", "--regress-tolerance-scale")
    values = {name: config.getoption(name) for name in names}
    found = [f"{name}={value}" for name, value in values.items() if value is not None]
    found += [f"--regress-set={text}" for text in config.getoption("--regress-set") or ()]
    return [*found, *(["--regress-allow-code"] if config.getoption("--regress-allow-code") else [])]


def reproduce(config: pytest.Config, test: str, selector: str) -> str:
    """Return the command that judges one quantity of a test again; see `regress.plugin.quantity_selection.selector`."""
    run = redacted(shlex.join(["pytest", *said(config)]))
    return f"{run} {shlex.quote(test)} -k {shlex.quote(selector)}"


def spell_out(config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Give options without a value their default, in place.

    Otherwise `pytest --update-golden tests/test_loss.py` would take the path for a mode.
    """
    end = args.index("--") if "--" in args else len(args)
    found = [f"{arg}={DEFAULTS[arg]}" if arg in DEFAULTS else arg for arg in args[:end]]
    if found != args[:end]:
        args[:end] = found
        top = config.known_args_namespace.confcutdir  # which pytest has found since it parsed the arguments
        config.known_args_namespace = parser.parse_known_args(args, namespace=copy.copy(config.option))
        config.known_args_namespace.confcutdir = top
