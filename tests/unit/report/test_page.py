"""Content of the HTML page; its behaviour is tested in tests/browser."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import zlib
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.verdicts.verdict import Status, Verdict, Worst, WorstRow
from regress.dump.coordinates import Place
from regress.printable_text import printable
from regress.report.html_report import LISTED, page_data, to_html
from regress.report.report_model import Report
from regress.report.token_values import TokenTable, TokenValues
from regress.report.verdict_entries import Call

TEXTS = st.text(max_size=9) | st.sampled_from(["</script>", "<!--", "&amp;", "'\"", "\u2028"])
FIGURES = st.floats(0) | st.just(math.inf) | st.just(math.nan)
VERDICTS = st.builds(
    Verdict,
    st.sampled_from(Status),
    st.sampled_from(["log_probs", "kl"]),
    TEXTS,
    st.builds(Place, st.integers(0, 3), st.none(), st.none() | st.integers(0, 3), st.none()),
    TEXTS,
    st.none() | st.builds(Worst, st.just((1,)), TEXTS, FIGURES, FIGURES, FIGURES, st.none()),
    FIGURES,
)
CALLS = st.builds(Call, TEXTS, TEXTS, VERDICTS, st.just({"0": math.inf}), TEXTS)


class _Page(HTMLParser):
    """Tags, addresses and texts outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for key, value in attrs if key in ("src", "href", "action")]
        self.policy += "".join(
            str(value) for key, value in attrs if key == "content" and "default-src" in str(value)
        )


def figure(column: list[object] | None, row: int) -> float | None:
    """Return a cell of a column of figures as JavaScript reads it."""
    cell = None if column is None else column[row]
    return None if cell is None else float(str(cell).replace("Infinity", "inf"))


@settings(deadline=None)
@given(st.lists(CALLS, max_size=4))
def test_the_data_restores_every_record_and_cannot_leave_its_script(calls: list[Call]) -> None:
    text = page_data(Report("x", calls))
    assert "<" not in text
    tree = json.loads(text)
    columns = tree["columns"]
    assert tree["count"] == len(calls)
    for row, call in enumerate(calls):

        def at(name: str, row: int = row) -> str:
            column = columns.get(name)
            return "" if column is None else column["values"][column["codes"][row]]

        assert (at("where"), at("name"), at("detail"), at("anchor")) == (
            *map(printable, (call.where, call.verdict.name, call.verdict.detail)),
            printable(call.anchor),
        )
        assert at("status") == call.verdict.status
        found = figure(columns["multiple"], row)
        assert found is not None
        assert math.isclose(found, call.verdict.multiple, rel_tol=1e-5) or math.isnan(call.verdict.multiple)
        assert figure(columns.get("rank"), row) == call.verdict.place.rank


def test_layers_are_those_that_were_told_or_that_the_name_tells() -> None:
    def call(name: str, multiple: float, layers: dict[str, float]) -> Call:
        return Call("w", "", Verdict(Status.OK, "param", name, Place(0), multiple=multiple), layers)

    several = [
        call("h.0.x", 0.25, {}),
        call("h.1.x", 0.5, {"1": 0.5, "head": math.inf}),
        call("h.0.y", 0.125, {}),
    ]
    (row,) = json.loads(page_data(Report("x", several)))["layers"]
    assert row == {
        "where": "w",
        "quantity": "param",
        "layers": [["0", 0.25], ["1", 0.5], ["head", "Infinity"]],
    }


def test_tokens_keep_every_digit() -> None:
    golden = [None, -1.2345678901234567, math.nan]
    values = [
        TokenValues("log_probs", golden, golden, 1e-6),
        TokenValues("kl", golden, [None, 0.1, math.inf], 0.0),
    ]
    table = TokenTable("w", Place(0), ("g/0",), (3,), (1, 2, 3), (False, True, True), values)
    (found,) = json.loads(page_data(Report("x", tokens=[table])))["tokens"]
    assert found["values"][0]["golden"][:2] == [None, -1.2345678901234567]
    assert found["values"][0]["actual"] is None
    assert found["values"][1]["actual"] == [None, 0.1, "Infinity"]


def test_the_page_needs_no_other_file_and_escapes_what_it_shows() -> None:
    verdict = Verdict(Status.DRIFT, "kl", "kl", Place(0), "<b>not</b> alike", multiple=2.0)
    calls = [Call(f"dense/<i>{n}", "", verdict) for n in range(LISTED + 5)]
    report = Report("<u>", calls, {"a": "<s>"}, notes=["<em>"], environment={"k": "<q>"})
    text = to_html(report)
    page = _Page(text)
    assert not {"b", "i", "u", "s", "em", "q", "link", "img", "iframe"} & set(page.tags)
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert re.search("default-src 'none'", page.policy)
    assert "connect-src" not in page.policy
    assert "and 5 more, in the table below" in text
    assert "&lt;b&gt;not&lt;/b&gt; alike" in text


def test_a_comparison_of_a_thousand_tensors_is_a_small_page_with_all_of_its_data() -> None:
    """Every record has what a comparison tells of it: worst element and row, quantiles, figures of seventeen digits."""
    chance = random.Random(0)

    def call(number: int) -> Call:
        golden, error, layer = chance.gauss(0, 1), chance.random() * 1e-15, number % 32
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        where = f"element [{number}, {layer}] of {name}"
        verdict = Verdict(
            *(Status.OK, "gradient", name, Place(number // 400, None, number % 4, number % 3)),
            worst=Worst((number, layer), where, golden, golden + error, error, 1.0),
            worst_row=WorstRow((number,), where, error, chance.random()),
            quantiles={name: chance.random() * 1e-15 for name in ("p50", "p90", "p99", "p999")},
            **{
                name: chance.random()
                for name in ("multiple", "max_error", "relative", "relative_l2", "scale", "alpha")
            },
            reason="four times the noise floor of this case",
        )
        return Call("compare", "float64", verdict)

    report = Report("regress compare", [call(number) for number in range(1200)])
    text = to_html(report)
    assert len(text.encode()) < 300_000
    packed = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert packed is not None
    assert zlib.decompress(base64.b64decode(json.loads(packed[1]))).decode() == page_data(report)


def test_findings_are_shown_by_replay() -> None:
    class Told(str):
        def to_json(self) -> dict[str, str]:
            return {"rule": "x"}

    report = Report(
        "x",
        divergences={"dense/tp2": Told("log_probs of rank 1 first")},
        diagnoses={"dense/tp2": [Told("a reduction is missing")], "dense/cp2": [Told("a shift")]},
    )
    text = to_html(report)
    for words in ("log_probs of rank 1 first", "a reduction is missing", "<h2>dense/cp2</h2>", "a shift"):
        assert words in text
    assert report.to_json()["diagnoses"]["dense/cp2"] == [{"text": "a shift", "rule": "x"}]
