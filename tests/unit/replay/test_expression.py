"""Choosing variants by patterns and by expressions."""

from __future__ import annotations

import pytest

from regress.errors import ConfigError
from regress.replay.variant_names import choose

NAMES = ["base", "packed", "tp2", "tp2-packed", "dp2-tp2", "fsdp2"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("*", NAMES),
        ("packed", ["packed"]),
        ("tp2*, base", ["base", "tp2", "tp2-packed"]),
        ("tp2 and packed", ["tp2-packed"]),
        ("tp2 and not packed", ["tp2", "dp2-tp2"]),
        ("dp2 or base", ["base", "dp2-tp2"]),
        ("not tp and dp2-tp2", ["dp2-tp2"]),
        ("not (tp2 or dp2)", ["base", "packed", "fsdp2"]),
        ("not not base", ["base"]),
        ("packed or base and nothing", ["packed", "tp2-packed"]),
        ("(packed or base) and not *-packed", ["base", "packed"]),
        ("not tp2*", ["base", "packed", "dp2-tp2", "fsdp2"]),
    ],
)
def test_what_is_found(text: str, found: list[str]) -> None:
    assert choose(NAMES, text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp2", "'cp2' matches none of base, packed, "),
        ("cp2 and tp2", "'cp2 and tp2' matches none of base, packed, "),
        (
            "tp2 and",
            "'tp2 and' is not an expression (at its end); write such as 'tp2 and not (packed or left)'",
        ),
        ("(tp2 or base", "is not an expression (at its end)"),
        ("tp2 or base)", "is not an expression (at ')')"),
        ("tp2 not base", "is not an expression (at 'not')"),
        ("and", "is not an expression (at 'and')"),
        ("()", "is not an expression (at ')')"),
    ],
)
def test_what_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(NAMES, text)
    assert message in str(caught.value)
