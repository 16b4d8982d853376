"""`case.yaml`: what it may hold, and what is refused before anybody walks through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.errors import GoldenError
from regress.golden.golden_case import CaseFile, parse_case

PATH = Path("golden/x/case.yaml")


def parse(text: str) -> CaseFile:
    return parse_case(text.encode(), PATH)


def test_only_the_reason_is_needed() -> None:
    assert parse("reason: why\n") == CaseFile("why", [], {}, {})
    assert parse("reason: why\nclaims:\nconfig:\nrecipe: {}\n") == CaseFile("why", [], {}, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.5e+2", 150.0),
        (".5e1", 5.0),
        ("1.0", 1.0),
        ("12", 12),
        ("1e", "1e"),
        ("e3", "e3"),
    ],
)
def test_numbers_are_what_they_look_like(text: str, value: object) -> None:
    """PyYAML follows YAML 1.1, in which 1e-3 is a text; the engine's own files read it as a number."""
    found = parse(f"reason: r\nconfig: {{a: {text}}}").config["a"]
    assert found == value
    assert type(found) is type(value)


BOMB = "reason: r\nconfig:\n  a0: &a0 [x, x]\n" + "".join(
    f"  a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "golden/x/case.yaml:4 is not valid YAML (an alias, which no case needs): correct it"),
        ("reason: &r [*r]", "golden/x/case.yaml:1 is not valid YAML (an alias, which no case needs): correct it"),
        ("reason: !!python/object/apply:os.system ['touch x']", "case.yaml:1 is not valid YAML (could not determine a"),
        ("reason: !!python/name:os.system", "could not determine a constructor"),
        ("!!python/object:regress.errors.GoldenError {}", "could not determine a constructor"),
        ("reason: r\nreason: s", "golden/x/case.yaml:2 is not valid YAML (the key 'reason' twice): correct it"),
        ("reason: r\nconfig: {a: 1, a: 2}", "(the key 'a' twice)"),
        ("reason: [", "golden/x/case.yaml:1 is not valid YAML"),
        ("reason: r\n\tx: 1", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("[" * 10_000, "is nested too deeply: it is not a description of a case"),
        ("reason: r\nconfig: {a: 2026-01-01}", "(DumpError: the case['config']['a'] is a date"),
        ("reason: r\nconfig: {1: 2}", "has the key 1"),
        ("reason: r\nconfig: {[a]: 2}", "holds what no case can hold"),
        (f"reason: r\nconfig: {{a: {'9' * 30}}}", "needs more than 64 bits"),
        ("", "must hold a mapping with the key reason: write lines of KEY: VALUE"),
        ("- reason", "must hold a mapping"),
        ("config: {}", "golden/x/case.yaml has no reason: write one sentence on what this case is for"),
        ("reason: '  '", "has no reason"),
        ("reason: 3", "has no reason"),
        ("reason: r\nconfiguration: {}", "the unknown key 'configuration': a case has reason, claims,"),
        ("reason: r\nclaims: kl", "has claims 'kl': write a list of words"),
        ("reason: r\nclaims: [1]", "has claims [1]: write a list of words"),
        ("reason: r\nconfig: [1]", "has config [1]: write a mapping"),
        ("reason: r\nrecipe: x", "has recipe 'x': write a mapping"),
        ("reason: r\n---\nreason: s", "is not valid YAML"),
        (f"reason: {'r' * 2**20}", "bytes, but a case is described in at most 1048576: shorten it"),
    ],
)  # fmt: skip
def test_refused(text: str, says: str) -> None:
    with pytest.raises(GoldenError) as caught:
        parse(text)
    assert "golden/x/case.yaml" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"reason: \xff", b"reason: \x00"])
def test_binary(data: bytes) -> None:
    with pytest.raises(GoldenError, match=r"case\.yaml holds what no case can hold"):
        parse_case(data, PATH)
