"""The fixture `regress`: comparison of any code's values with goldens."""

from __future__ import annotations

import functools
import shlex
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regress.errors import CheckError, RegressError
from regress.plugin.check_provenance import provenance_of
from regress.plugin.session_settings import SETTINGS
from regress.plugin.session_state import SESSION, owner
from regress.plugin.worker_rows import ASKED, send_calls, send_properties, send_update_row

if TYPE_CHECKING:
    from regress.compare.verdicts.verdict import Verdict
    from regress.dump.dump_reader import DumpReader
    from regress.golden.stored_checks import StoredCheck
    from regress.plugin.check_call import Call
    from regress.plugin.golden_update import StagedValues


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


@pytest.fixture
def regress(request: pytest.FixtureRequest) -> Regress:
    """Compare values with the goldens of this test (`regress.check`), or with one another (`regress.assert_close`)."""
    if getattr(getattr(request.node, "obj", None), "is_hypothesis_test", False):
        raise CheckError(f"""{request.node.name} asks for the fixture 'regress' inside @given, but a golden belongs to
        one value and not to every example: check a fixed example in a test of its own""")
    return Regress(request)


def _staged_of(node: pytest.Item) -> StagedValues | None:
    """Return the folder for values that are to become golden; None unless goldens are updated."""
    if node.config.stash[SETTINGS].update is None:
        return None
    return node.config.stash[SESSION].staged_values(node)


@pytest.fixture
def regress_check(regress: Regress) -> Regress:
    """Give the fixture `regress` under a name that leaves ``import regress`` visible in the test."""
    return regress


class Regress:
    """Compares values of one test with its goldens or with one another.

    Values are tensors (torch, numpy), numbers, texts, None, pandas DataFrames and Series, and dicts and lists of these.
    Both sides must agree in structure, keys, dtype and shape; NaN and infinities must match by position; integers,
    booleans and texts are compared exactly, whatever the tolerance. Floats may differ by
    `atol + rtol * max |golden|`, where the maximum is over the tensor that holds them, and must be equal by default.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node: pytest.Item = request.node
        self._config = request.config
        self._settings = request.config.stash[SETTINGS]
        self._staged = _staged_of(request.node)
        self._names: set[str] = set()

    def __repr__(self) -> str:
        """Return a short text, because pytest prints it with every failure."""
        return f"<regress of {owner(self._node)}>"

    def check(
        self,
        name: str,
        value: Any,
        *,
        rtol: float = 0.0,
        atol: float = 0.0,
        why: str = "",
        nonfinite: bool = False,
    ) -> None:
        """Compare `value` with the golden of this test and name; `pytest --update-golden` writes it.

        Args:
            name: name of the value, unique within a test.
            value: the value, or a function without arguments that computes it. Before it becomes golden, a function is
                run twice, and refused when the two results differ beyond the tolerance.
            rtol: tolerance as a fraction of the largest absolute value of each golden tensor.
            atol: absolute tolerance, added to that.
            why: source of the tolerance; required if there is one.
            nonfinite: allow NaN and infinities to become golden.

        Raises:
            AssertionError: the value is not the golden one, or there is none; the first line is the verdict.
            CheckError: the arguments are not valid together.
            GoldenError: the golden is damaged, or the new value is refused.
        """
        __tracebackhide__ = True
        again = value if isinstance(value, _FUNCTIONS) else None
        value = value if again is None else again()
        try:
            self._claim(name)
            call = self._call(name, value, rtol, atol, why, again, nonfinite)
            provenance = functools.partial(provenance_of, self._config)
            outcome = call.conclude(self._settings, provenance, self._staged)
        except RegressError as error:
            raise error.with_traceback(None) from None
        if outcome.row is not None:
            send_update_row(self._node, outcome.row)
        elif outcome.golden is None:
            from regress.plugin.value_display import show

            self._node.add_report_section("call", f"regress: {name}", show(call.new.value))
            raise AssertionError(
                f"no golden yet for {name!r} of {call.new.test}: look at the value, then run pytest --update-golden"
            )
        else:
            self._judge(outcome.verdicts, name, outcome.golden)

    def assert_close(
        self, actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0, why: str = ""
    ) -> None:
        """Compare two values by the rules of `check`; raises `AssertionError` whose first line is the verdict."""
        __tracebackhide__ = True
        from regress.plugin.value_comparison import verdicts_on

        try:
            verdicts = verdicts_on(actual, expected, rtol, atol, why, self._settings.tolerance_scale)
        except RegressError as error:
            raise error.with_traceback(None) from None
        self._judge(verdicts, "assert_close", None)

    def replay(self, case: str, variant: str, precision: str = "float64") -> DumpReader:
        """Return the dump of a golden case under a variant; each replay runs once per session.

        Args:
            precision: ``"float64"``, ``"float32"``, ``"bfloat16"`` or, under FSDP, ``"mixed"``.

        Raises:
            RegressError: if there is no such case, variant or precision, or the replay fails.
        """
        try:
            return self._config.stash[SESSION].suite().dump(case, variant, precision)
        except RegressError as error:
            raise error.with_traceback(None) from None

    def _claim(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise CheckError(f"{name!r} is not a name of a value: give a text that is not empty")
        if name in self._names:
            raise CheckError(f"""{name!r} was checked in this test already, and two values cannot share a golden: give
            each a name of its own""")
        self._names.add(name)

    def _call(
        self,
        name: str,
        value: Any,
        rtol: float,
        atol: float,
        why: str,
        again: Callable[[], Any] | None,
        nonfinite: bool,
    ) -> Call:
        from regress.golden.stored_checks import StoredCheck
        from regress.golden.value_tree import Tree
        from regress.plugin.check_call import Call
        from regress.plugin.golden_comparison import tolerance_of

        tolerance = tolerance_of(rtol, atol, why, self._settings.tolerance_scale)
        new = StoredCheck(owner(self._node), name, Tree.of(value), float(rtol), float(atol), why, {})
        self._node.user_properties.append((ASKED, new.path))
        return Call(new, tolerance, again, nonfinite)

    def _judge(self, verdicts: list[Verdict], name: str, golden: StoredCheck | None) -> None:
        """Raise `AssertionError` if a verdict is bad; pass all of them to the report of the session."""
        __tracebackhide__ = True
        from regress.report.verdict_entries import Call

        test = owner(self._node)
        calls = [Call(test, "", verdict, test=test) for verdict in verdicts]
        for call in calls[:1]:  # the gravest
            send_properties(self._node, call)
        if self._settings.report is not None:
            send_calls(self._node, calls)
        failed = [verdict for verdict in verdicts if not verdict.ok]
        if failed:
            from regress.golden.golden_provenance import differences

            environment = (
                [] if golden is None else differences(golden.provenance, provenance_of(self._config))
            )
            first_line, details = explain_check(
                failed, test, environment, of_golden=golden is not None, report=self._settings.report
            )
            self._node.add_report_section("call", f"regress: {name}", details)
            raise AssertionError(first_line)


def explain_check(
    failed: Sequence[Verdict],
    test: str,
    environment: Sequence[str],
    *,
    of_golden: bool,
    report: Path | None = None,
) -> tuple[str, str]:
    """Return the first line and the details of a failing comparison: `of_golden`, or of two values of the test.

    Args:
        report: folder of the report of the session.
    """
    from regress.report.verdict_entries import link
    from regress.report.verdict_text import explain, headline

    quoted = shlex.quote(test)
    commands = {"reproduce": f"pytest {quoted}"}
    if of_golden:
        commands["update"] = f"pytest --update-golden {quoted}"
    if report is not None:
        commands["report"] = link(report, test, failed[0])
    return headline(failed[0], test), explain(failed, where=test, environment=environment, commands=commands)
