"""The page of `regress report` as a reader has it: charts are drawn, and nothing of a hostile run is executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from made_runs import hostile, resumed, rows, written

from regress.cli import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page, which may say nothing on its console, and ask for nothing but itself."""
    opened = browser.new_page(viewport={"width": 1300, "height": 900}, reduced_motion="reduce")
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    opened.close()
    assert said == []
    assert len({url.partition("#")[0] for url in asked}) == 1


def show(page: Page, folder: Path, runs: Sequence[Path]) -> None:
    path = folder / "page.html"
    done = CliRunner().invoke(main, ["report", *map(str, runs), "--output", str(path)])
    assert done.exit_code == 0, done.output
    page.goto(path.as_uri())
    page.wait_for_selector(".plot svg")


def told(page: Page, plot: str) -> dict[str, list[str]]:
    """Values of a plot by line, as arrow keys read them."""
    page.focus(f"{plot} .read > svg")
    found: dict[str, list[str]] = {}
    count = page.locator(f"{plot} .legend button").count()
    page.keyboard.press("ArrowRight")
    for _ in range(count):
        before = ""
        while (text := page.inner_text(f"{plot} .tip")) != before:
            name, _, value = text.partition("\n")
            found.setdefault(name, []).append(value.rpartition(": ")[2])
            before = text
            page.keyboard.press("ArrowRight")
        while page.keyboard.press("ArrowLeft") or (text := page.inner_text(f"{plot} .tip")) != before:
            before = text
        page.keyboard.press("ArrowDown")
    return found


def test_every_chart_has_its_lines_and_resumes(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [written(tmp_path / "base", rows()), written(tmp_path / "resumed", resumed())])
    drawn = page.eval_on_selector_all(
        "[id^=chart-] .read > svg",
        "plots => plots.map(p => [p.querySelectorAll('.line').length, p.querySelectorAll('.rule[style]').length])",
    )
    assert len(drawn) >= 7
    assert {(lines % 2, limits) for lines, limits in drawn} == {
        (0, 1)
    }  # each metric of both runs, one resume
    assert told(page, "#chart-0")["returns_mean · resumed"] == ["0", "0.25", "1", "1.25"]
    assert page.locator("#segments tbody tr").count() == 3


def test_stages_have_their_names_and_a_constant_zero_is_no_range_below_it(page: Page, tmp_path: Path) -> None:
    made = rows()
    for row in made:
        row["rollouts/truncated_ratio"] = 0.0
        if "curriculum/current_stage" in row:
            row["curriculum/stage_name"] = ["short", "long"][row["curriculum/current_stage"]]
            row["curriculum/round"] = 1.0
    show(page, tmp_path, [written(tmp_path / "base", made)])
    stage = page.locator(".panel", has=page.locator("h2", has_text="Curriculum stage"))
    assert {"short 0", "long 1"} <= {*stage.locator(".read text").all_text_contents()}
    stage.locator(".read > svg").focus()
    page.keyboard.press("ArrowRight")
    assert stage.locator(".tip").inner_text() == "current_stage\nstep 0, short, round 1: 0"
    truncated = page.locator(".panel", has=page.locator("h2", has_text="Truncated")).locator(".read text")
    numbers = [float(text) for text in truncated.all_text_contents() if text[-1:].isdigit()]
    assert min(numbers) == 0.0


def test_any_metric_can_be_chosen_and_the_page_may_be_dark(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [written(tmp_path / "base", rows())])
    page.select_option("#metric", "training_step/grad_norm")
    assert told(page, "#any") == {"grad_norm": [str(1 + n) for n in range(8)]}
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_nothing_of_a_hostile_run_is_executed(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [hostile(tmp_path / "run")])
    names = page.eval_on_selector_all("#metric option", "options => options.map(o => o.value)")
    for name in names:
        page.select_option("#metric", name)
    told = set()
    for plot in page.locator(".read").all():
        plot.locator("svg").focus()
        page.keyboard.press("ArrowRight")
        told.add(plot.locator(".tip").inner_text())
    assert any("<img" in text for text in told)
    assert any("<img" in name for name in names)
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    assert page.locator("#samples td", has_text="<img src=x").count() >= 1
