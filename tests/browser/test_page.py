"""The HTML page as a reader has it: opened from a disk in Chromium, searched, filtered, pointed at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regress.compare.verdicts.affected_elements import Affected, Count
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.report.report_files import in_order, write_report
from regress.report.report_model import Report
from regress.report.verdict_entries import Call
from tests.browser.large_report import BROKEN_RANK, CALLS, FAILED, QUANTITIES, RECORDS, ROWS, TOKENS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    report = Report(
        "</title><script>alert(1)</script>", CALLS, {"dense/tp3": "12 heads & 5 ranks"}, tokens=[TOKENS]
    )
    path = next(path for path in write_report(folder, report) if path.name == "index.html")
    return path.as_uri()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, which may say nothing on its console, and ask for nothing but itself."""
    opened = browser.new_page(viewport={"width": 1300, "height": 900}, reduced_motion="reduce")
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(url)
    opened.wait_for_selector("#histogram svg")
    yield opened
    opened.wait_for_timeout(200)  # charts are drawn a moment after the table
    opened.close()
    assert said == []
    assert {one.partition("#")[0] for one in asked} == {url}


def rows(page: Page) -> list[dict[str, Any]]:
    """The rows in the document: index among all that are shown, and text."""
    script = "all => all.map(r => ({index: Number(r.getAttribute('aria-rowindex')), text: r.innerText}))"
    found: list[dict[str, Any]] = page.eval_on_selector_all("#table .body .row", script)
    assert len(found) <= ROWS
    return found


def shown(page: Page) -> str:
    return (
        page.input_value("#shown") if False else str(page.evaluate("document.getElementById('shown').value"))
    )


def test_it_opens_without_a_word_and_without_a_jump(page: Page) -> None:
    assert page.title().startswith("</title><script>")
    assert shown(page) == f"10,000 of 10,000, {FAILED} failed"
    for chart in ("heat", "layers", "histogram", "positions"):
        assert page.query_selector(f"#{chart} svg") is not None
    script = """() => new Promise(done => {
        const total = list => done(list.getEntries().reduce((all, entry) => all + entry.value, 0));
        new PerformanceObserver(total).observe({type: "layout-shift", buffered: true});
        setTimeout(() => done(0), 300);
    })"""
    assert page.evaluate(script) < 0.05
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_ten_thousand_records_are_a_few_rows_of_the_document(page: Page) -> None:
    assert "drift" in rows(page)[0]["text"]
    page.focus("#table")
    page.keyboard.press("End")
    page.wait_for_selector(f"#table .chosen[aria-rowindex='{RECORDS + 1}']")
    assert rows(page)[-1]["index"] == RECORDS + 1
    page.keyboard.press("Home")
    page.wait_for_selector("#table .chosen[aria-rowindex='2']")
    assert page.evaluate("document.querySelectorAll('*').length") < 10_000


def test_the_first_that_failed_stands_first_and_a_click_changes_the_order(page: Page) -> None:
    first = next(call.verdict for call in in_order(CALLS) if not call.verdict.ok)
    assert str(first.place) in rows(page)[0]["text"]
    assert first.quantity in rows(page)[0]["text"]
    steps = max(call.verdict.place.step or 0 for call in CALLS)
    page.click("#table .head >> text=tolerance")
    assert f"step{steps}/rank{BROKEN_RANK}" in rows(page)[0]["text"]
    page.click("#table .head >> text=tolerance")
    assert "✓" in rows(page)[0]["text"]
    page.click("#table .head >> text=place")
    assert "step0/rank0" in rows(page)[0]["text"]


def test_search_and_filters(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("RANK3/micro2 log")
    wanted = [c for c in CALLS if "rank3/micro2" in str(c.verdict.place) and "log" in c.verdict.quantity]
    assert shown(page) == f"{len(wanted)} of 10,000, {len(wanted)} failed"
    assert all("rank3/micro2" in row["text"] for row in rows(page))
    page.keyboard.press("Escape")
    page.select_option("#status", "failed")
    assert shown(page) == f"{FAILED} of 10,000, {FAILED} failed"
    page.select_option("#quantity", "ratio")
    assert shown(page) == "0 of 10,000"
    assert "No record passes the filters" in page.inner_text("#table")
    page.wait_for_selector("#heat :text('No record passes')")
    page.click("#clear")
    assert shown(page).startswith("10,000 of")


def test_a_cell_of_the_heat_map_filters_the_records(page: Page) -> None:
    page.evaluate("document.getElementById('heat').scrollIntoView()")
    titles = page.eval_on_selector_all("#heat figcaption", "all => all.map(one => one.textContent)")
    assert titles == [f"{name} ✗" if name == "log_probs" else name for name in QUANTITIES]
    cell = page.locator("#heat .cell").first
    cell.hover()
    assert page.inner_text("#heat .tip >> nth=0").startswith("batch_inputs\nrank 0, microbatch 0\n")
    cell.click()
    page.wait_for_selector("#chips :text('microbatch 0')")
    wanted = [
        c
        for c in CALLS
        if (c.verdict.quantity, c.verdict.place.rank, c.verdict.place.micro) == ("batch_inputs", 0, 0)
    ]
    assert shown(page) == f"{len(wanted)} of 10,000"


def test_a_link_opens_its_record(browser: Browser, url: str) -> None:
    page = browser.new_page()
    page.goto(f"{url}#dense/dp8/step7/rank3/micro2/log_probs")
    text = page.inner_text("#details")
    for words in (
        "✗ drift",
        "dense/dp8/step7/rank3/micro2",
        "sample g7/0, position 2",
        "</script>",
        "-1.25",
        "four times the floor",
    ):
        assert words in text
    for words in ("undefined", "[object"):
        assert words not in text
    assert page.evaluate("scrollY") > 0
    page.keyboard.press("Escape")
    assert not page.is_visible("#details")
    page.evaluate("location.hash = '#dense/dp8/step7/rank0/gradient'")
    page.wait_for_selector("#details[open]")
    assert "✓ ok" in page.inner_text("#details")
    page.close()


def test_a_token_tells_golden_and_actual(page: Page) -> None:
    tokens = page.query_selector_all("#token-text .token")
    assert [token.inner_text() for token in tokens] == ["<b>", " what", " is", "<", " it"]
    assert ["beyond" in (token.get_attribute("class") or "") for token in tokens] == [
        False,
        False,
        True,
        False,
        True,
    ]
    tokens[2].hover()
    detail = page.inner_text("#token-detail")
    for words in ("sample g/0, position 2", "token 7", "-2", "-1.75", "✗ 250000"):
        assert words in detail
    tokens[4].hover()
    assert "NaN" in page.inner_text("#token-detail")

    page.focus("#token-text")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert "sample g/0, position 1" in page.inner_text("#token-detail")

    def colours() -> list[str]:
        script = "all => all.map(one => one.style.backgroundColor)"
        found: list[str] = page.eval_on_selector_all("#token-text .token", script)
        return found

    by_error = colours()
    assert [bool(colour) for colour in by_error] == [False, False, True, False, True]
    page.select_option("#token-colour", "loss mask")
    assert [bool(colour) for colour in colours()] == [False, True, True, False, True]
    page.select_option("#token-colour", "value: advantages")
    _, up, same, _, down = colours()
    assert up == same != down
    page.select_option("#token-sample", "1")
    assert page.inner_text("#token-text").split() == ["<", "it"]


def test_a_chart_tells_its_values_to_a_pointer_and_to_keys(page: Page) -> None:
    """A reader without a mouse gets the same words; what has them is a live region, so that they are spoken."""
    page.locator("#layers .read").scroll_into_view_if_needed()
    box = page.locator("#layers circle").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 8, box["y"] + 8)  # near it
    near = page.inner_text("#layers .tip")
    assert near.startswith("activations, layer 1: 0.333")
    page.mouse.move(5, 5)
    assert page.inner_text("#layers .tip") == ""
    page.focus("#layers .read svg")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.inner_text("#layers .tip") == near
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#layers .tip").startswith("activations, layer 0: ")
    page.keyboard.press("Escape")
    assert page.inner_text("#layers .tip") == ""
    plots = "all => all.map(one => [one.tabIndex, one.getAttribute('aria-label'), one.nextSibling.role])"
    for index, label, role in page.eval_on_selector_all(".read > svg", plots):
        assert (index, role) == (0, "status")
        assert "Arrow keys" in label


def test_enter_on_a_cell_filters_the_records(page: Page) -> None:
    page.focus("#heat svg >> nth=2")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("#chips :text('rank 3')")
    wanted = [
        c
        for c in CALLS
        if (c.verdict.quantity, c.verdict.place.rank, c.verdict.place.micro) == ("log_probs", 3, 1)
    ]
    assert shown(page) == f"{len(wanted)} of 10,000, {len(wanted)} failed"


def test_a_line_can_be_left_out(page: Page) -> None:
    assert page.locator("#positions .line").count() == 2 + 2  # with those of the legend
    page.click("#positions .legend >> text=advantages")
    assert page.locator("#positions .line").count() == 1 + 2
    assert page.get_attribute("#positions .legend button >> nth=1", "aria-pressed") == "false"
    page.keyboard.press("Enter")  # it keeps the focus
    assert page.locator("#positions .line").count() == 2 + 2


def test_a_browser_that_cannot_unpack_the_records_says_so(browser: Browser, url: str) -> None:
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto(url)
    assert "a browser of 2023 or later" in page.inner_text("main .note")
    assert "batch_inputs" in page.inner_text("#headroom")  # what needs no program is there
    page.close()


def test_light_and_dark(page: Page) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


HOSTILE = "<img src=x onerror=window.pwned=1>"


def test_names_of_anybody_are_texts_in_charts_too(browser: Browser, tmp_path: Path) -> None:
    """Quantities, layers and replays of a dump become labels, legends, tips and names for a reader of the screen."""
    calls = [
        Call(
            f"{HOSTILE}{n}",
            "float64",
            Verdict(
                Status.DRIFT, f"{HOSTILE}'\"", f"h.{n}.{HOSTILE}", Place(0, None, n, n), HOSTILE, multiple=2.0
            ),
            {HOSTILE: 2.0, "</svg><script>window.pwned=1</script>": 3.0},
            HOSTILE,
        )
        for n in range(3)
    ]
    report = Report(
        HOSTILE, calls, {HOSTILE: HOSTILE}, tokens=[replace(TOKENS, where=HOSTILE, text=(HOSTILE,) * 5)]
    )
    path = next(path for path in write_report(tmp_path, report) if path.name == "index.html")
    page = browser.new_page(reduced_motion="reduce")
    page.goto(path.as_uri())
    for plot in ("heat", "layers", "histogram", "positions"):
        page.focus(f"#{plot} .read svg")
        for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
            told = page.inner_text(f"#{plot} .tip >> nth=0")
            assert (HOSTILE in told) == (plot in ("heat", "layers"))
            assert told
    assert HOSTILE in (page.get_attribute("#layers .read svg", "aria-label") or "")
    assert page.locator("#layers text", has_text="<img src").count() == 1
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, svg script, svg foreignObject").count() == 0
    page.close()


@pytest.fixture
def of_two(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """A page of two replays: of one rank, and of three, of which the last is wrong."""
    affected = Affected(
        "token", Count(3, 12, 1, 2), ("g/0",), (4, 6, 0, 5), held={"equals": {"what": "ref_log_probs"}}
    )
    calls = [
        Call(where, "float64", Verdict(
            Status.DRIFT if rank == 2 else Status.OK, "log_probs", "log_probs", Place(0, None, rank, 0),
            multiple=40.0 if rank == 2 else 0.25, tolerance=1e-6, count=12, affected=affected if rank == 2 else None,
        ))
        for where, ranks in (("dense/base", 1), ("dense/tp3", 3)) for rank in range(ranks)
    ]  # fmt: skip
    path = next(path for path in write_report(tmp_path, Report("two", calls)) if path.name == "index.html")
    opened = browser.new_page(reduced_motion="reduce")
    opened.goto(path.as_uri())
    opened.wait_for_selector("#heat svg")
    yield opened
    opened.close()


def told(page: Page, plot: str, count: int) -> list[str]:
    """Return the words of the last mark of each row of a plot, as arrow keys reach it."""
    found = []
    page.focus(plot)
    for _ in range(count):
        page.keyboard.press("ArrowDown")
        found.append(page.locator(f"{plot} + .tip").first.inner_text().rpartition(", ")[2])
    return found


def test_the_map_is_of_one_replay(of_two: Page) -> None:
    """Rank 0 of a replay on one rank is not rank 0 of one on three: their cells were one."""
    assert of_two.inner_text("#heat .hint") == "Of dense/tp3, the farthest of 2; choose another above."
    assert told(of_two, "#heat svg", 3) == ["0 of 1 failed", "0 of 1 failed", "1 of 1 failed"]
    of_two.select_option("#where", "dense/base")
    of_two.wait_for_timeout(400)  # the page allows no script to be made of a text, as waiting for one asks
    assert told(of_two, "#heat svg", 1) == ["0 of 1 failed"]
    assert of_two.inner_text("#heat .hint") == ""


def test_enter_opens_the_chosen_record_and_leaves_it_open(of_two: Page) -> None:
    of_two.focus("#table")
    of_two.keyboard.press("Enter")
    of_two.wait_for_timeout(200)
    assert of_two.is_visible("#details")
    text = of_two.inner_text("#details")
    for words in (
        "3 of 12 tokens, in 1 of 2 samples",
        "positions 4 to 6; those that hold 0 to 5",
        "equals: what ref",
    ):
        assert words in text
    assert "{" not in text
    assert "[" not in text
    of_two.keyboard.press("Enter")  # the button that closes it has the focus
    assert not of_two.is_visible("#details")


def test_a_red_page_tells_the_farthest_failure_and_no_headroom(of_two: Page) -> None:
    cards = of_two.inner_text("main")
    assert "40 x tolerance" in cards
    assert "least headroom" not in cards.lower()
