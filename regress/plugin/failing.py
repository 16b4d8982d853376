"""What a failing check says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from regress.compare.verdict import Verdict

if TYPE_CHECKING:
    import pytest

    from regress.golden.checks import StoredCheck


def explain_check(
    failed: Sequence[Verdict], test: str, golden: StoredCheck | None, config: pytest.Config
) -> tuple[str, str]:
    """The first line and the details of a failing check; without a golden those of two values compared."""
    lines = [line for verdict in failed for line in (_headline(verdict), *_figures(verdict))]
    if golden is not None:
        lines += [f"environment: {line}" for line in _environment(golden, config)]
        lines += [f"golden: {golden.path}"]
        lines += [
            f"reproduce: pytest {shlex.quote(test)}",
            f"update: pytest --update-golden {shlex.quote(test)}",
        ]
    return _headline(failed[0]), "\n".join(lines)


def _environment(golden: StoredCheck, config: pytest.Config) -> list[str]:
    from regress.golden.provenance import differences
    from regress.plugin.settings import SETTINGS
    from regress.plugin.updating import provenance

    return differences(golden.provenance, provenance(config.rootpath, config.stash[SETTINGS].golden_dir))


def _headline(verdict: Verdict) -> str:
    if verdict.detail or verdict.worst is None:
        return f"{verdict.status}: {verdict.quantity}: {verdict.name}: {verdict.detail}"
    worst = verdict.worst
    return f"{verdict.status}: {verdict.quantity}: {worst.where}: golden {worst.golden:.9g}, actual {worst.actual:.9g}"


def _figures(verdict: Verdict) -> list[str]:
    if verdict.worst is None:
        return []
    return [
        f"  {verdict.over} of {verdict.count} elements beyond the tolerance of {verdict.tolerance:.3g} "
        f"({verdict.reason}); largest error {verdict.max_error:.3g}, {verdict.multiple:.3g} times the tolerance"
    ]
