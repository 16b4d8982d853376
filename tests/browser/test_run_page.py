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
    page.wait_for_selector(".plot .main-svg")


def test_every_chart_has_its_lines_and_resumes(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [written(tmp_path / "base", rows()), written(tmp_path / "resumed", resumed())])
    drawn = page.eval_on_selector_all(
        "[id^=chart-]", "plots => plots.map(p => [p.data.length, p.layout.shapes.length, p.data[0].y.length])"
    )
    assert len(drawn) >= 7
    assert {(traces % 2, shapes) for traces, shapes, _ in drawn} == {
        (0, 1)
    }  # each metric of both runs, one resume
    reward = page.evaluate("document.getElementById('chart-0').data.map(t => [t.name, Array.from(t.y)])")
    assert ["returns_mean · resumed", [0, 0.25, 1, 1.25]] in reward
    assert page.locator("#segments tbody tr").count() == 3


def test_stages_have_their_names_and_a_constant_zero_is_no_range_below_it(page: Page, tmp_path: Path) -> None:
    made = rows()
    for row in made:
        row["rollouts/truncated_ratio"] = 0.0
        if "curriculum/current_stage" in row:
            row["curriculum/stage_name"] = ["short", "long"][row["curriculum/current_stage"]]
            row["curriculum/round"] = 1.0
    show(page, tmp_path, [written(tmp_path / "base", made)])
    plots = "Array.from(document.querySelectorAll('[id^=chart-]')).filter(p => p.data[0].name === "
    stage = page.evaluate(f"{plots} 'current_stage')[0].layout.yaxis.ticktext")
    assert stage == ["short 0", "long 1"]
    told = page.evaluate(f"{plots} 'current_stage')[0].data[0].text[0]")
    assert told == "step 0, short, round 1"
    assert page.evaluate(f"{plots} 'truncated_ratio')[0].layout.yaxis.range[0]") > -0.1


def test_any_metric_can_be_chosen_and_the_page_may_be_dark(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [written(tmp_path / "base", rows())])
    page.select_option("#metric", "training_step/grad_norm")
    assert page.evaluate("Array.from(document.getElementById('any').data[0].y)") == [1 + n for n in range(8)]
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_nothing_of_a_hostile_run_is_executed(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [hostile(tmp_path / "run")])
    names = page.eval_on_selector_all("#metric option", "options => options.map(o => o.value)")
    for name in names:
        page.select_option("#metric", name)
    assert any("<img" in name for name in names)
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    assert page.locator("#samples td", has_text="<img src=x").count() >= 1
