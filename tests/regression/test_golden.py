"""Every golden case under every variant: one test for each rank and microbatch."""

from __future__ import annotations

from regress.plugin.replay_tests import RecordCheck


def test_golden(regress_record: RecordCheck) -> None:
    regress_record.check()
