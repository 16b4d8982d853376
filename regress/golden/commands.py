"""`regress golden`: look at golden cases, check them, decide on pending updates. Works without a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regress.errors import GoldenError, meant
from regress.golden.location import open_store
from regress.golden.options import directory_option
from regress.printed import echo, hint_at

if TYPE_CHECKING:
    from regress.golden.difference import Difference, Side
    from regress.golden.store import GoldenStore


@click.group()
def golden() -> None:
    """Record, show, verify and update golden cases.

    Exit codes: 0 nothing to report, 1 a difference, damage or a pending update, 2 a case that cannot be used.
    """


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def _print_json(value: Any) -> None:
    from regress.dump.jsontext import tag_floats

    echo(json.dumps(tag_floats(value), indent=1, sort_keys=True, allow_nan=False))


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
    from regress.golden.checks import stored_checks
    from regress.golden.tables import case_rows, echo_table

    store = open_store(golden_dir)
    rows = case_rows(store)
    if as_json:
        _print_json(rows)
    else:
        echo_table([{key: row[key] for key in row if key not in ("quantities", "tensors")} for row in rows])
        checks = (
            f" and {_counted(len(stored), 'stored check')}" if (stored := stored_checks(store.root)) else ""
        )
        if checks or not rows:
            echo(f"{store.root} holds {_counted(len(rows), 'case') if rows else 'no cases'}{checks}")
    ctx.exit(1 if any(row["state"] == "damaged" for row in rows) else 0)


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
    from regress.golden.names import CHECKS
    from regress.golden.tables import check_rows, echo_table, quantity_rows, tensor_rows, tolerance_rows

    if case == CHECKS:
        rows = check_rows(open_store(golden_dir), quantity)
        if not rows:
            names = {row[key] for row in check_rows(open_store(golden_dir), None) for key in ("test", "name")}
            near = meant(quantity or "", sorted(names))
            raise GoldenError(
                f"{near}no stored check{f' matches {quantity!r}' if quantity else ''}: give a test or a name"
            )
        _print_json(rows) if as_json else echo_table(rows)
        return
    found = open_store(golden_dir).case(case, allow_changed_inputs=True)
    if quantity is not None:
        rows = tensor_rows(found, quantity)
        if not rows:
            known = sorted({row["quantity"] for row in quantity_rows(found)})
            told = ", ".join(known) or "nothing"
            raise GoldenError(
                f"{meant(quantity, known)}{found.folder} has no {quantity!r}: recorded is {told}"
            )
        _print_json(rows) if as_json else echo_table(rows)
        return
    about = {"reason": found.reason, "claims": found.claims, "config": found.config, "recipe": found.recipe}
    provenance = {} if found.manifest is None else dict(found.manifest.provenance)
    if as_json:
        quantities, tolerances = quantity_rows(found), tolerance_rows(found)
        _print_json(about | {"provenance": provenance, "quantities": quantities, "tolerances": tolerances})
        return
    echo(f"{found.name}: {' '.join(found.reason.split())}")
    echo(f"claims: {', '.join(found.claims) or 'none'}")
    for key, value in _flat({"config": found.config, "provenance": provenance}, ""):
        echo(f"{key}: {value}")
    echo("" if found.manifest is not None else f"not recorded yet: run regress golden record {case}")
    echo_table(quantity_rows(found))
    echo_table(tolerance_rows(found))


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [leaf for key in sorted(value) for leaf in _flat(value[key], f"{prefix}.{key}" if prefix else key)]


@golden.command()
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@directory_option
@json_option
@click.pass_context
def verify(ctx: click.Context, cases: tuple[str, ...], golden_dir: Path | None, as_json: bool) -> None:
    """Verify every byte.

    Verifies inputs, golden values, manifests, pending updates and stored checks.

    \b
    regress golden verify
    regress golden verify dense

    Exit codes: 0 all intact (leftover and pending files are listed), 1 damage.
    """
    from regress.golden.checks import stored_checks
    from regress.golden.verify import verify as check

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


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@golden.command(hidden=True)
@click.argument("first")
@click.argument("second", required=False)
@directory_option
@json_option
@click.pass_context
def diff(ctx: click.Context, first: str, second: str | None, golden_dir: Path | None, as_json: bool) -> None:
    """Compare golden directories, or cases.

    Two directories, two cases, or a case with its pending update.

    \b
    regress golden diff dense                  with its pending update
    regress golden diff dense ../old/golden/dense
    regress golden diff golden ../old/golden   all cases

    Exit codes: 0 the same, 1 a difference, 2 something that cannot be read.
    """
    from regress.golden.tables import echo_difference

    hint_at("golden diff", "regress golden review CASE", "regress compare golden:CASE OTHER")
    found = _differences(first, second, golden_dir)
    if as_json:
        _print_json({name: difference.to_json() for name, difference in found.items()})
    else:
        for name, difference in found.items():
            echo(f"{name}: {'different' if difference else 'the same'}")
            echo_difference(difference)
    ctx.exit(1 if any(found.values()) else 0)


def _differences(first: str, second: str | None, golden_dir: Path | None) -> dict[str, Difference]:
    from regress.golden.difference import compare
    from regress.golden.pending import pending_of
    from regress.golden.store import GoldenStore

    if second is None:
        store = open_store(golden_dir)
        store.case(first, allow_changed_inputs=True)
        return {first: pending_of(store, first).difference()}
    stores = [GoldenStore(path) for path in (first, second)]
    if not all(store.names() for store in stores):
        return {first: compare(_side(first, golden_dir), _side(second, golden_dir))}
    names = sorted({name for store in stores for name in store.names()})
    return {name: compare(*(_side_of(store, name) for store in stores)) for name in names}


def _side(text: str, golden_dir: Path | None) -> Side:
    """Return a case by its folder or by its name."""
    from regress.golden.store import GoldenStore

    path = Path(text)
    if path.is_dir():
        return _side_of(GoldenStore(path.absolute().parent), path.absolute().name)
    store = open_store(golden_dir)
    store.case(text, allow_changed_inputs=True)
    return _side_of(store, text)


def _side_of(store: GoldenStore, name: str) -> Side:
    from regress.golden.difference import Side

    if name not in store.names():
        return Side(None, [])
    case = store.case(name, allow_changed_inputs=True)
    return Side(case.manifest, [case.folder])


@golden.command()
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@directory_option
@json_option
@click.pass_context
def review(ctx: click.Context, cases: tuple[str, ...], golden_dir: Path | None, as_json: bool) -> None:
    """Show pending updates.

    Shows the changes, and the commands to accept or reject them.

    \b
    pytest --update-golden=review
    regress golden review

    Exit codes: 0 nothing is pending, 1 an update is pending.
    """
    from dataclasses import asdict

    from regress.golden.review import reviews

    found = reviews(open_store(golden_dir), cases)
    if as_json:
        _print_json([asdict(item) for item in found])
    else:
        for item in found:
            item.echo()
        if not found:
            echo("nothing is pending")
    ctx.exit(1 if found else 0)


@golden.command()
@click.argument("case")
@click.argument("patterns", nargs=-1, metavar="[QUANTITY]...")
@directory_option
def accept(case: str, patterns: tuple[str, ...], golden_dir: Path | None) -> None:
    """Accept a pending update.

    Accepts all of it, or only some quantities or stored checks; the rest stays pending.

    \b
    regress golden accept dense
    regress golden accept dense log_probs gradient
    regress golden accept dense 'step_000001/*'
    regress golden accept checks               stored checks, all of them
    regress golden accept checks tests/test_loss.py::test_loss
    """
    from regress.golden.names import CHECKS
    from regress.golden.pending import accept as accept_case
    from regress.golden.pending_checks import accept_checks

    store = open_store(golden_dir, writes=True)
    for path in accept_checks(store, patterns) if case == CHECKS else accept_case(store, case, patterns):
        echo(f"written: {path}")


@golden.command()
@click.argument("case")
@click.argument("patterns", nargs=-1, metavar="[QUANTITY]...")
@directory_option
def reject(case: str, patterns: tuple[str, ...], golden_dir: Path | None) -> None:
    """Reject a pending update.

    Drops all of it, or only some quantities or stored checks.

    \b
    regress golden reject dense
    regress golden reject dense log_probs
    """
    from regress.golden.names import CHECKS
    from regress.golden.pending import reject as reject_case
    from regress.golden.pending_checks import reject_checks

    store = open_store(golden_dir, writes=True)
    if case == CHECKS:
        reject_checks(store, patterns)
    else:
        reject_case(store, case, patterns)
    echo(f"rejected: {', '.join(patterns) or 'all'} of {case}")


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
    from regress.golden import prune as pruning

    store = open_store(golden_dir, writes=True)
    paths = pruning.prunable(store, orphans) if dry_run else pruning.prune(store, orphans)
    for path in paths:
        echo(f"{'would be removed' if dry_run else 'removed'}: {path}")
    if not paths:
        echo("nothing to remove")
