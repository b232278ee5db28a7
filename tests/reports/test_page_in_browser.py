"""The page in a real browser: everything is drawn, nothing fails or is fetched, and it fits a phone."""

from pathlib import Path

import pytest

from evenly.reports import read_recorded
from evenly.reports.page import write_page
from tests.reports.browser import Browser, find_chromium
from tests.reports.recorded import recorded, write_big, write_recorded
from tests.reports.runs import failed, started, steps, write

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Pages are tried in Chromium; apt-get install chromium.")
EMPTY = """[...document.querySelectorAll('.chart, .timeline')]
  .filter(chart => chart.clientWidth && ![...chart.querySelectorAll('svg path')].some(path => path.getAttribute('d')))
  .map(chart => chart.dataset.chart || 'timeline')"""
SHOWN = "[...document.querySelectorAll('.chart, .timeline')].filter(chart => chart.clientWidth).length"
TOO_WIDE = """[...document.querySelectorAll('body *')]
  .filter(one => !one.closest('.scroll table') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.tagName + '.' + one.className)"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser():
    with Browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    seeds = [recorded(folder / f"seed{seed}", seed=seed) for seed in range(3)]
    broken = write_recorded(folder / "a-run-with-a-very-long-name-that-has-no-place-to-break")
    (broken / "ranks" / "0.jsonl").write_text("nonsense\n" + "word" * 200)
    stopped = write(folder / "stopped", started(), steps(3), failed("ValueError: " + "x" * 300))
    runs = {"one": seeds[:1], "seeds": seeds, "broken": [read_recorded(broken)], "stopped": [read_recorded(stopped)]}
    for name, several in runs.items():
        write_page(several, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in runs}


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "seeds", "broken", "stopped"])
def test_all_is_drawn_nothing_fails_nothing_is_fetched_and_it_fits(browser, pages, name, theme, width):
    browser.open(pages[name], width=width, theme=theme)
    assert browser.messages == []
    assert browser.requests == [pages[name].as_uri()]
    assert browser.ask(EMPTY) == []
    assert browser.ask(SHOWN) >= (0 if name == "stopped" else 8)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(TOO_WIDE) == []


def test_the_theme_follows_the_system_and_the_button(browser, pages):
    browser.open(pages["one"], width=1200, theme="light")
    light = browser.ask(BACKGROUND)
    browser.ask("document.getElementById('theme').click()")
    dark = browser.ask(BACKGROUND)
    browser.open(pages["one"], width=1200, theme="dark")
    assert browser.ask(BACKGROUND) == dark != light
    browser.ask("document.getElementById('theme').click()")
    assert browser.ask(BACKGROUND) == light


def test_charts_are_shown_against_time_and_steps(browser, pages):
    browser.open(pages["one"], width=1200, theme="light")
    labels = "[...document.querySelectorAll('.chart svg text')].map(text => text.textContent).join()"
    assert "steps" not in browser.ask(labels)
    browser.ask("document.querySelector('input[value=step]').click()")
    assert "200 steps" in browser.ask(labels)
    assert browser.ask(EMPTY) == []


def test_the_timeline_zooms_to_single_steps_and_back(browser, pages):
    browser.open(pages["one"], width=1200, theme="light")
    shown = "document.querySelector('.timeline .tools span').textContent"
    whole = browser.ask(shown)
    browser.ask("for (let n = 0; n < 6; n++) document.querySelector('.timeline button[title=\"zoom in\"]').click()")
    assert " to " in browser.ask(shown)
    assert browser.ask("document.querySelectorAll('.timeline svg path').length") >= 3
    browser.ask("scrollTo(0, document.querySelector('.timeline').getBoundingClientRect().top + scrollY - 100)")
    left, top, width = browser.ask(
        "(r => [r.left, r.top, r.width])(document.querySelector('.timeline svg').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=top + 20)
    assert browser.ask("document.getElementById('tip').textContent").startswith("rank 0, node 0")
    before = browser.ask(shown)
    for kind, x in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
        browser.call("Input.dispatchMouseEvent", type=kind, x=left + x * width, y=top + 20, button="left", clickCount=1)
    assert browser.ask(shown) != before
    browser.ask("document.querySelector('.timeline button[title=\"show all\"]').click()")
    assert browser.ask(shown) == whole
    assert browser.messages == []


def test_every_run_of_several_can_be_chosen(browser, pages):
    browser.open(pages["seeds"], width=1200, theme="light")
    for run in range(3):
        browser.ask(f"document.querySelector('.tabs button[data-run=\"{run}\"]').click()")
        browser.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        visible = "[...document.querySelectorAll('article.run')].filter(one => !one.hidden).map(one => one.dataset.run)"
        assert browser.ask(visible) == [str(run)]
        assert browser.ask(EMPTY) == []
    assert browser.messages == []


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_of_100000_steps_on_8_ranks_opens_at_once(browser, tmp_path):
    write_big(tmp_path / "big")
    write_page([read_recorded(tmp_path / "big")], tmp_path / "big.html")
    assert (tmp_path / "big.html").stat().st_size < 5e6
    assert browser.open(tmp_path / "big.html", width=1200, theme="light") < 2.0
    assert browser.ask(EMPTY) == []
    assert browser.ask("document.querySelectorAll('.timeline .lane').length") == 8


def test_it_prints_on_white_whatever_the_theme(browser, pages):
    browser.open(pages["one"], width=800, theme="dark")
    browser.ask("document.documentElement.dataset.theme = 'dark'")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=features)
    try:
        assert browser.ask(BACKGROUND) == "rgb(255, 255, 255)"
        assert browser.ask("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.ask("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
        assert browser.ask("getComputedStyle(document.querySelector('.controls')).display") == "none"
    finally:
        browser.call("Emulation.setEmulatedMedia", media="", features=features)


def test_ticks_differ_from_each_other_however_far_it_is_zoomed(browser, pages):
    browser.open(pages["one"], width=1200, theme="light")
    for _ in range(8):
        browser.ask("document.querySelector('.timeline button[title=\"zoom in\"]').click()")
        ticks = browser.ask("[...document.querySelectorAll('.timeline text[text-anchor]')].map(one => one.textContent)")
        assert len(ticks) == len(set(ticks)) >= 2
