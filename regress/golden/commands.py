"""`regress golden`: look at golden cases, check every byte of them, remove what nothing needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regress.errors import ConfigError, GoldenError, meant
from regress.golden.golden_directory import open_store
from regress.golden.golden_options import directory_option
from regress.printable_text import echo

if TYPE_CHECKING:
    from regress.golden.golden_case import GoldenCase
    from regress.golden.golden_directory import GoldenStore

Row = dict[str, Any]

_LONG = (
    "tensor",
    "reason",
    "test",
    "name",
    "value",
    "text",
    "why",
)  # columns that a narrow terminal may break
_WIDE = 1000  # where there is no terminal nothing is cut or wrapped, so that lines can be searched
_STATISTICS = ("dtype", "shape", "min", "max", "mean")


@click.group()
def golden() -> None:
    """Record, show, verify and update golden cases.

    pytest --update-golden changes them; git diff shows the numbers, and git restore takes them back.

    Exit codes: 0 nothing to report, 1 damage, 2 a case that cannot be used.
    """


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@golden.command("list")
@directory_option
@json_option
@click.pass_context
def list_(ctx: click.Context, golden_dir: Path | None, as_json: bool) -> None:
    """List the cases.

    \b
    regress golden list

    Exit codes: 0, or 1 when a case is damaged.
    """
    from regress.golden.stored_checks import stored_checks

    store = open_store(golden_dir)
    rows = [_case_row(store, name) for name in store.names()]
    if as_json:
        _print_json(rows)
    else:
        _echo_table([{key: row[key] for key in row if key not in ("quantities", "tensors")} for row in rows])
        stored = stored_checks(store.root)
        if stored or not rows:
            checks = f" and {_counted(len(stored), 'stored check')}" if stored else ""
            echo(f"{store.root} holds {_counted(len(rows), 'case') if rows else 'no cases'}{checks}")
    ctx.exit(1 if any(row["state"] == "damaged" for row in rows) else 0)


def _case_row(store: GoldenStore, name: str) -> Row:
    """Return the row of a case; for a damaged one, with its problem."""
    try:
        case = store.case(name, allow_changed_inputs=True)
    except GoldenError as error:
        nothing = dict.fromkeys(("updates", "quantities", "tensors", "bytes"))
        return {"case": name, **nothing, "state": "damaged", "reason": str(error)}
    truth = {} if case.manifest is None else case.manifest.truth
    entries = [entry for row in truth.values() for entry in row.values()]
    inputs = [] if case.manifest is None else case.manifest.inputs.values()
    return {
        "case": name,
        "updates": len(truth),
        "quantities": len({quantity for row in truth.values() for quantity in row}),
        "tensors": sum(len(entry.tensors) for entry in entries),
        "bytes": sum(entry.stamp.size for entry in entries) + sum(stamp.size for stamp in inputs),
        "state": "recorded" if truth else "not recorded",
        "reason": " ".join(case.reason.split()),
    }


@golden.command()
@click.argument("case")
@click.argument("quantity", required=False)
@directory_option
@json_option
def show(case: str, quantity: str | None, golden_dir: Path | None, as_json: bool) -> None:
    """Show a case, or one quantity of it.

    Shows its reason, its recorded quantities and their tolerances; or all tensors of the quantity.

    \b
    regress golden show dense
    regress golden show dense gradient
    regress golden show checks                 values that tests have stored
    regress golden show checks tests/test_loss.py::test_loss
    """
    from regress.golden.golden_files import CHECKS

    store = open_store(golden_dir)
    if case == CHECKS:
        rows = list(_check_rows(store, quantity))
        if not rows:
            names = {row[key] for row in _check_rows(store, None) for key in ("test", "name")}
            near = meant(quantity or "", sorted(names))
            raise GoldenError(
                f"{near}no stored check{f' matches {quantity!r}' if quantity else ''}: give a test or a name"
            )
        _print_json(rows) if as_json else _echo_table(rows)
        return
    found = store.case(case, allow_changed_inputs=True)
    quantities = _quantity_rows(found)
    if quantity is not None:
        rows = _tensor_rows(found, quantity)
        if not rows:
            known = sorted({row["quantity"] for row in quantities})
            listed = ", ".join(known) or "nothing"
            raise GoldenError(
                f"{meant(quantity, known)}{found.folder} has no {quantity!r}: recorded is {listed}"
            )
        _print_json(rows) if as_json else _echo_table(rows)
        return
    about = {"reason": found.reason, "claims": found.claims, "config": found.config, "recipe": found.recipe}
    provenance = {} if found.manifest is None else dict(found.manifest.provenance)
    tolerances = _tolerance_rows(found)
    if as_json:
        _print_json(about | {"provenance": provenance, "quantities": quantities, "tolerances": tolerances})
        return
    echo(f"{found.name}: {' '.join(found.reason.split())}")
    echo(f"claims: {', '.join(found.claims) or 'none'}")
    for key, value in _flat({"config": found.config, "provenance": provenance}, ""):
        echo(f"{key}: {value}")
    echo("" if found.manifest is not None else f"not recorded yet: run regress golden record {case}")
    _echo_table(quantities)
    _echo_table(tolerances)


def _quantity_rows(case: GoldenCase) -> list[Row]:
    truth = {} if case.manifest is None else case.manifest.truth
    return [
        {
            "update": where,
            "quantity": quantity,
            "tensors": len(entry.tensors),
            "dtypes": "+".join(sorted({tensor.dtype for tensor in entry.tensors.values()})),
            "bytes": entry.stamp.size,
            "absmax": max((tensor.absmax or 0.0 for tensor in entry.tensors.values()), default=0.0),
        }
        for where in case.wheres()
        for quantity, entry in sorted(truth[where].items())
    ]


def _tensor_rows(case: GoldenCase, quantity: str) -> list[Row]:
    truth = {} if case.manifest is None else case.manifest.truth
    return [
        {"update": where, "tensor": name} | {key: v for key, v in vars(tensor).items() if key != "sha256"}
        for where in case.wheres()
        if quantity in truth[where]
        for name, tensor in sorted(truth[where][quantity].tensors.items())
    ]


def _tolerance_rows(case: GoldenCase) -> list[Row]:
    """Return one row for each tolerance; those of single tensors follow that of their quantity."""
    names = ("relative", "absolute", "reason")
    return [
        {
            "quantity": quantity,
            "tensor": pattern,
            "precision": precision,
            **{n: getattr(own, n) for n in names},
        }
        for quantity, row in sorted(({} if case.manifest is None else case.manifest.tolerances).items())
        for precision, entry in sorted(row.items())
        for pattern, own in ((None, entry), *entry.tensors.items())
    ]


def _check_rows(store: GoldenStore, pattern: str | None) -> Iterator[Row]:
    """Yield a row for each leaf of the stored checks; `pattern` equals or matches tests, names or files."""
    from regress.golden.case_manifest import TensorEntry
    from regress.golden.stored_checks import read_check, stored_checks
    from regress.golden.value_tree import CONTAINERS, describe

    for path in stored_checks(store.root):
        check = read_check(store.root, path)
        if check is None or not (
            pattern is None
            or any(text == pattern or fnmatchcase(text, pattern) for text in (path, check.test, check.name))
        ):
            continue
        for leaf, node in check.value.nodes.items():
            if node[0] in CONTAINERS:
                continue
            array = check.value.tensors.get(leaf)
            entry: Mapping[str, Any] = {} if array is None else vars(TensorEntry.of(array))
            yield {
                "test": check.test,
                "name": check.name,
                "value": leaf,
                **{key: entry.get(key) for key in _STATISTICS},
                "text": describe(node) if array is None else None,
                "rtol": check.rtol or None,
                "atol": check.atol or None,
                "why": check.why or None,
            }


@golden.command()
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@directory_option
@json_option
@click.pass_context
def verify(ctx: click.Context, cases: tuple[str, ...], golden_dir: Path | None, as_json: bool) -> None:
    """Verify every byte.

    Verifies inputs, golden values, manifests and stored checks.

    \b
    regress golden verify
    regress golden verify dense

    Exit codes: 0 all intact (leftover files are listed), 1 damage.
    """
    from regress.golden.golden_verification import verify as check
    from regress.golden.stored_checks import stored_checks

    store = open_store(golden_dir)
    for name in cases:
        if name not in store.names():
            store.case(name)
    findings = check(store, cases)
    damaged = [finding for finding in findings if finding.damage]
    if as_json:
        _print_json([vars(finding) for finding in findings])
    else:
        for finding in findings:
            echo(f"{'damaged' if finding.damage else 'note'}: {finding.case}: {finding.text}")
        verdict = _counted(len(damaged), "damaged file") if damaged else "intact"
        stored = [] if cases else stored_checks(store.root)
        checks = f", {_counted(len(stored), 'stored check')}" if stored else ""
        echo(f"{_counted(len(cases or store.names()), 'case')}{checks}: {verdict}")
    ctx.exit(1 if damaged else 0)


@golden.command()
@directory_option
def migrate(golden_dir: Path | None) -> None:
    """Bring cases of earlier releases to the schema of this one.

    Truth files get names that stay; values stay bit for bit. All cases change, or none.

    \b
    regress golden migrate
    git add -A golden

    Exit codes: 0 done, 2 a case is damaged.
    """
    from regress.golden.schema_migration import migrate as change

    names = change(open_store(golden_dir, writes=True))
    echo(f"migrated: {', '.join(names)}" if names else "nothing to migrate")


_GIT = {
    "diff": "git diff golden, or regress compare golden:CASE@HEAD golden:CASE",
    "review": "git diff golden, or regress compare golden:CASE@HEAD golden:CASE",
    "accept": "git add golden",
    "reject": "git restore golden",
}
"""Commands of earlier releases, and git's for the same."""


def _refused(name: str) -> click.Command:
    def refuse(_: tuple[str, ...]) -> None:
        raise ConfigError(f"""an update is in force once it is written, and nothing waits beside it: say {_GIT[name]} in
        place of regress golden {name}""")

    anything = click.Argument(["_"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(
        name,
        callback=refuse,
        params=[anything],
        hidden=True,
        context_settings={"ignore_unknown_options": True},
    )


for _name in _GIT:
    golden.add_command(_refused(_name))


@golden.command()
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@click.option(
    "--orphans",
    type=click.Path(path_type=Path),
    default=".pytest_cache/v/regress/orphans",
    show_default=True,
    help="List of stored checks without a test, written by the last full run of pytest.",
)
@directory_option
def prune(dry_run: bool, orphans: Path, golden_dir: Path | None) -> None:
    """Remove unused files.

    Removes leftovers of interrupted updates, and stored checks that no test asks for.

    \b
    regress golden prune --dry-run
    regress golden prune
    """
    from regress.golden.golden_verification import prunable
    from regress.golden.golden_verification import prune as remove

    store = open_store(golden_dir, writes=True)
    paths = prunable(store, orphans) if dry_run else remove(store, orphans)
    for path in paths:
        echo(f"{'would be removed' if dry_run else 'removed'}: {path}")
    if not paths:
        echo("nothing to remove")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [leaf for key in sorted(value) for leaf in _flat(value[key], f"{prefix}.{key}" if prefix else key)]


def _print_json(value: Any) -> None:
    from regress.dump.canonical_json import tag_floats

    echo(json.dumps(tag_floats(value), indent=1, sort_keys=True, allow_nan=False))


def _echo_table(rows: Sequence[Row]) -> None:
    """Print rows under the keys of the first; columns without any value are left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    for key in keys:
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        table.add_column(
            key, justify="right" if numeric else "left", no_wrap=key not in _LONG, overflow="fold"
        )
    for row in rows:
        cells = (
            "-" if (v := row[key]) is None else f"{v:.3g}" if isinstance(v, float) else str(v) for key in keys
        )
        table.add_row(*map(Text, cells))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    console = Console(highlight=False, width=_WIDE)
    with console.capture() as capture:
        console.print(table)
    echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
