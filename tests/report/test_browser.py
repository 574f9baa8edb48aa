"""The page in a browser: that it draws, asks for nothing, and answers to a hand, a keyboard and a change of theme."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillway.planner.report.facts import Facts
from spillway.planner.report.page import to_page

CHROMIUM = os.environ.get("CHROMIUM") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(not Path(CHROMIUM).is_file(), reason=f"no Chromium at {CHROMIUM}; set CHROMIUM to one"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver on the path"),
    pytest.mark.skipif(importlib.util.find_spec("selenium") is None, reason="selenium is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("plotly") is None, reason="the page is drawn by plotly"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
FIGURES = ("memory", "streams", "curve")
Made = Callable[..., Facts]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(facts: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(to_page(facts(slow=True)), encoding="utf-8")
    return path


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The folder over HTTP, at an address of its own, and what was asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def show(browser: Any, address: str, *, width: int = 1600, scheme: str = "light") -> None:
    """Open a page, and wait until all of it is drawn."""
    browser.get_log("browser")
    browser.get_log("performance")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(address)
    until(
        browser,
        "return [...document.querySelectorAll('.figure')].every(each => each.layout && each.layout.font.color"
        " && each.querySelector('.main-svg'))",
    )


def until(browser: Any, script: str, *arguments: object) -> Any:
    """What a script gives when that is true."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(script, *arguments))


def run(browser: Any, script: str, *arguments: object) -> Any:
    return browser.execute_script(script, *arguments)


def requests(browser: Any) -> list[str]:
    """Addresses that the browser asked for since it was last looked."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_all_is_drawn_at_any_width_and_nothing_is_wider_than_the_page(
    browser: Any, page: Path, width: int, scheme: str
) -> None:
    show(browser, page.as_uri(), width=width, scheme=scheme)
    for figure in FIGURES:
        drawn = "return document.querySelectorAll(arguments[0]).length"
        assert run(browser, drawn, f"#{figure} .main-svg .cartesianlayer .trace path") >= (
            5 if figure == "curve" else 20
        )
        box = run(browser, "return document.getElementById(arguments[0]).getBoundingClientRect().toJSON()", figure)
        assert 0.8 * width < box["width"] <= width and box["height"] > 200
    assert run(browser, "return document.documentElement.scrollWidth") <= width
    assert complaints(browser) == []


def test_no_request_leaves_the_page_from_a_file_or_a_server(browser: Any, page: Path) -> None:
    show(browser, page.as_uri())
    touch(browser)
    assert {address for address in requests(browser) if not address.startswith(("data:", "blob:"))} == {page.as_uri()}
    assert complaints(browser) == []
    with served(page.parent) as (address, asked):
        show(browser, f"{address}/{page.name}")
        touch(browser)
        assert asked == [f"/{page.name}"]
        # Who tries is stopped by the page's own policy, and says so.
        tried = "fetch(arguments[0]).then(() => arguments[1]('went'), () => arguments[1]('stopped'))"
        assert browser.execute_async_script(tried, f"{address}/secret") == "stopped"
        assert asked == [f"/{page.name}"]
        assert any("Content Security Policy" in complaint for complaint in complaints(browser))


def touch(browser: Any) -> None:
    """Use what there is to use."""
    for control in ("theme", "closer", "theme"):
        run(browser, "document.getElementById(arguments[0]).click()", control)
    run(browser, "document.querySelectorAll('#blocks button').forEach(each => each.click())")
    # Plotly's own buttons, but for the one that saves a file.
    touched = run(
        browser,
        """
        const buttons = [...document.querySelectorAll('.modebar-btn')];
        buttons.slice(1).filter(each => !each.ariaLabel.includes('PNG')).forEach(each => each.click());
        return buttons.map(each => each.ariaLabel);
        """,
    )
    assert len(touched) > 6 and not [name for name in touched if "share" in name.lower() or "cloud" in name.lower()]


def point_at(browser: Any, selector: str) -> None:
    """Move the mouse to the middle of something."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    run(browser, "document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    element = browser.find_element(By.CSS_SELECTOR, selector)
    ActionChains(browser).move_to_element_with_offset(element, 3, 3).move_to_element(element).perform()


def test_a_label_comes_where_the_mouse_is(browser: Any, page: Path) -> None:
    show(browser, page.as_uri())
    point_at(browser, "#memory .nsewdrag")
    label = until(browser, "return document.querySelector('#memory .hoverlayer').textContent")
    assert "kept" in label and "weights" in label and "GiB" in label
    # The longest wait, whose bar is the easiest to meet.
    longest = run(
        browser,
        """
        const plot = document.getElementById('streams');
        let best = [0, 0, 0];
        plot.data.forEach((trace, curve) => trace.x.forEach((length, point) => {
          if (trace.name.startsWith('stalls for') && length > best[0]) best = [length, curve, point];
        }));
        Plotly.Fx.hover(plot, [{curveNumber: best[1], pointNumber: best[2]}]);
        return plot.data[best[1]].hovertext[best[2]];
        """,
    )
    label = until(browser, "return document.querySelector('#streams .hoverlayer').textContent")
    assert "compute stalls" in label and label.replace(" ", "") == longest.replace("<br>", "").replace(" ", "")


ORDER = (
    "return [...document.querySelectorAll('#blocks > tbody.member')].map(each => each.rows[0].cells[0].dataset.value)"
)
OPEN = "document.querySelectorAll('#blocks button[data-opens]').forEach(each => each.click())"


def test_a_heading_sorts_up_and_down_by_number_and_by_name(browser: Any, page: Path, facts: Made) -> None:
    show(browser, page.as_uri())
    rows = facts(slow=True).rows
    names = [row.name for row in rows]
    assert run(browser, ORDER) == names
    click = "document.querySelectorAll('#blocks thead button')[arguments[0]].click()"
    states = "return [...document.querySelectorAll('#blocks thead th')].map(each => each.getAttribute('aria-sort'))"
    run(browser, click, 3)
    # Sorting keeps the order of equal ones.
    assert run(browser, ORDER) == [row.name for row in sorted(rows, key=lambda row: row.sent_bytes)]
    assert run(browser, states) == [None, None, None, "ascending", None, None, None]
    run(browser, click, 3)
    assert run(browser, ORDER) == [row.name for row in sorted(rows, key=lambda row: row.sent_bytes, reverse=True)]
    assert run(browser, states)[3] == "descending"
    run(browser, click, 0)
    assert run(browser, ORDER) == names
    run(browser, click, 0)
    assert run(browser, ORDER) == names[::-1]


@pytest.fixture(scope="module")
def two_kinds(facts: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with four blocks of one kind, and two of another."""
    found = facts(slow=True)
    rows = tuple(replace(row, kind=place // 4) for place, row in enumerate(found.rows))
    path = tmp_path_factory.mktemp("kinds") / "plan.html"
    path.write_text(to_page(replace(found, rows=rows)), encoding="utf-8")
    return path


def test_blocks_of_a_kind_are_one_row_until_it_is_opened(browser: Any, two_kinds: Path, facts: Made) -> None:
    show(browser, two_kinds.as_uri())
    names = [row.name for row in facts(slow=True).rows]
    shown = (
        "return [...document.querySelectorAll('#blocks > tbody')].filter(each => each.checkVisibility())"
        ".map(each => each.rows[0].cells[0].textContent)"
    )
    first, second = "layers.0 to 3 x 4", "layers.4, 5 x 2"
    click = "document.querySelectorAll('#blocks button[data-opens]')[arguments[0]].click()"
    assert run(browser, shown) == [first, second]
    run(browser, click, 1)
    assert run(browser, shown) == [first, second, *names[4:]]
    # Blocks stay below their kind, whatever is sorted.
    sort = "document.querySelectorAll('#blocks thead button')[arguments[0]].click()"
    run(browser, sort, 0)
    run(browser, sort, 0)
    assert run(browser, shown) == [second, *names[:3:-1], first]
    run(browser, click, 1)
    assert run(browser, shown) == [second, *names[:3:-1], first, *names[3::-1]]
    run(browser, click, 0)
    assert run(browser, shown) == [second, first, *names[3::-1]]
    assert complaints(browser) == []


def test_a_name_opens_the_operators_of_its_block_and_shuts_them(browser: Any, page: Path, facts: Made) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    show(browser, page.as_uri())
    row = facts(slow=True).rows[1]
    run(browser, OPEN)
    button = browser.find_elements(By.CSS_SELECTOR, "#blocks tbody.member button")[1]
    # By keyboard.
    button.send_keys(Keys.ENTER)
    told = until(browser, "return document.querySelector('.operators')?.textContent")
    assert all(each.operator in told and each.reason in told for each in row.operators)
    assert run(browser, "return document.querySelector('.operators .module code').textContent") == row.name
    assert button.get_attribute("aria-expanded") == "true"
    assert browser.find_element(By.ID, button.get_attribute("aria-controls")).is_displayed()
    # What is opened goes where its block goes.
    run(browser, "document.querySelector('#blocks thead button').click(); ")
    run(browser, "document.querySelector('#blocks thead button').click(); ")
    before = run(browser, "return document.querySelector('.operators').previousElementSibling.cells[0].dataset.value")
    assert before == row.name
    button.send_keys(Keys.SPACE)
    assert until(browser, "return !document.querySelector('.operators')")
    assert button.get_attribute("aria-expanded") == "false"


@pytest.mark.parametrize("width", [400, 1600])
def test_why_a_block_is_treated_so_stands_where_there_is_room(
    browser: Any, page: Path, facts: Made, width: int
) -> None:
    show(browser, page.as_uri(), width=width)
    run(browser, OPEN)
    run(browser, "document.querySelector('#blocks tbody.member button').click()")
    displays = "return [...document.querySelectorAll('.member td.reason, .why')].map(e => e.checkVisibility())"
    in_row, among_operators, *_ = run(browser, displays)
    assert (in_row, among_operators) == (width == 1600, width == 400)
    why = run(browser, "return document.querySelector('.why').textContent")
    assert why == facts(slow=True).rows[0].reason


def colours(browser: Any) -> tuple[str, str, str]:
    """Of the ground, the text, and the text of a picture."""
    return (
        run(browser, "return getComputedStyle(document.body).backgroundColor"),
        run(browser, "return getComputedStyle(document.body).color"),
        run(browser, "return getComputedStyle(document.querySelector('#streams .xtitle')).fill"),
    )


def test_dark_and_light_follow_the_system_and_the_switch(browser: Any, page: Path) -> None:
    show(browser, page.as_uri())
    light = colours(browser)
    show(browser, page.as_uri(), scheme="dark")
    dark = colours(browser)
    assert not set(light) & set(dark)
    assert light[1] == light[2] and dark[1] == dark[2]
    switch = "document.getElementById('theme').click()"
    fill = "return getComputedStyle(document.querySelector('#streams .xtitle')).fill === arguments[0]"
    run(browser, switch)
    until(browser, fill, light[2])
    assert colours(browser) == light
    assert run(browser, "return document.getElementById('theme').textContent") == "Dark"
    run(browser, switch)
    until(browser, fill, dark[2])
    assert colours(browser) == dark


def test_what_is_always_there_is_left_out_of_the_picture_and_can_be_shown(
    browser: Any, page: Path, facts: Made
) -> None:
    show(browser, page.as_uri())
    found = facts(slow=True)
    looks = (
        "const { layout, data } = document.getElementById('memory');"
        "const named = data.filter(each => each.showlegend !== false).map(each => each.name);"
        "return [layout.yaxis.range[0], layout.yaxis.range[1], layout.yaxis.title.text, named]"
    )
    low, high, title, named = run(browser, looks)
    assert low == found.constant_bytes / (1 << 30) and "axis from" in title and "weights" not in named
    press = "document.getElementById('closer').click();"
    run(browser, press)
    assert until(browser, looks.replace("return [", "return data[0].showlegend !== false && ["))[::2] == [
        0,
        "memory, GiB",
    ]
    assert "weights" in run(browser, looks)[3]
    run(browser, press)
    until(browser, looks.replace("return [", "return data[0].showlegend === false && ["))
    assert run(browser, looks) == [low, high, title, named]


@pytest.mark.parametrize("width", [400, 1600])
def test_memory_and_streams_stand_and_are_zoomed_on_one_time_axis(browser: Any, page: Path, width: int) -> None:
    show(browser, page.as_uri(), width=width)
    ends = (
        "return ['memory', 'streams'].map(id => {"
        " const box = document.querySelector(`#${id} .nsewdrag`).getBoundingClientRect();"
        " return [box.left, box.right]; })"
    )
    memory, streams = run(browser, ends)
    assert memory == pytest.approx(streams, abs=0.5) and streams[1] - streams[0] > 0.6 * width
    for zoomed, other in (("memory", "streams"), ("streams", "memory")):
        part = [1, 2] if zoomed == "memory" else [3, 4]
        run(browser, "Plotly.relayout(arguments[0], {'xaxis.range': arguments[1]})", zoomed, part)
        until(
            browser,
            "const [from, to] = document.getElementById(arguments[0]).layout.xaxis.range;"
            "return from === arguments[1][0] && to === arguments[1][1]",
            other,
            part,
        )
    assert run(browser, ends) == [pytest.approx(memory, abs=0.5)] * 2


def test_whoever_has_only_a_keyboard_reaches_all_that_can_be_used(browser: Any, page: Path, facts: Made) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(browser, page.as_uri())
    reached = []
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if run(browser, "return 'opens' in document.activeElement.dataset"):
            ActionChains(browser).send_keys(Keys.ENTER).perform()
        reached.append(
            run(browser, "const e = document.activeElement; return e.id || e.className || e.textContent.trim()")
        )
    assert reached[0] == "skip" and {row.name for row in facts(slow=True).rows} <= set(reached)
    expected = ["theme", "closer", "scroll", "Block", "Decision", "Kept"]
    assert [each for each in dict.fromkeys(reached) if each in expected] == expected
