"""The HTML report of a real group, opened in a real browser."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from tests.tracing.browser import BROWSER, Page, page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        BROWSER is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


class Shown(px.Worker):
    @px.register(px.Dispatch.ONE_TO_ALL)
    def rest(self, seconds: float) -> int:
        with px.span("resting"):
            time.sleep(seconds * (1 + self.rank))
        return self.rank

    @px.register(px.Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("as told")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The page of a traced run on Ray."""
    path = tmp_path_factory.mktemp("page") / "run.html"
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Shown, name="shown") as group:
        group.rest(0.0)
        with px.trace() as trace:
            time.sleep(0.5)  # start-up, to the left of the first view
            for _ in range(3):
                group.rest(0.05)
            with contextlib.suppress(ValueError):
                group.fail()
    trace.save(path, title="A run", charts={"reward": [0.1, 0.4, 0.5]})
    return path


@pytest.fixture(scope="module")
def tab(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page(tmp_path_factory.mktemp("browser")) as opened:
        opened.open(report.as_uri())
        yield opened
        assert opened.complaints == []


def painted(tab: Page) -> int:
    """Points of the timeline in one of the methods' colours: the first of the palette."""
    return tab.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {"
        "const c = document.querySelector('.view canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) if (d[i] === 0x4c && d[i + 1] === 0x78 && d[i + 2] === 0xd0) n += 1;"
        "done(n); })))"
    )


def test_the_page_loads_nothing_but_itself_and_has_all_tracks_failures_and_curves(
    tab: Page, report: Path
) -> None:
    text = tab.evaluate("document.body.innerText")

    assert tab.evaluate("document.documentElement.dataset.ready") == "yes"
    assert [url for url in tab.asked if not url.startswith("data:")] == [report.as_uri()]
    tracks = "[...document.querySelectorAll('.labels .track')].map((one) => one.dataset.track)"
    assert tab.evaluate(tracks) == ["shown", "rank 0", "rank 1"]
    assert "ValueError: as told" in text
    assert "A run" in text
    assert tab.evaluate("document.querySelectorAll('.chart polyline').length") == 2


def test_hovering_tells_what_a_slice_is_and_a_click_lists_its_ranks(tab: Page) -> None:
    tab.evaluate("document.querySelector('.view').scrollIntoView()")
    left, top, width = tab.evaluate(
        "(() => { const b = document.querySelector('.view').getBoundingClientRect(); "
        "return [b.left, b.top, b.width]; })()"
    )
    row = tab.evaluate("parseFloat([...document.querySelectorAll('.labels .track')][2].style.top)")
    # rank 1 rests most of the time: its first call lies at the beginning
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        tab.mouse(kind, left + 190 + (width - 190) * 0.1, top + row + 8)

    assert "rest" in tab.evaluate("document.querySelector('.tip').textContent")
    assert tab.evaluate("getComputedStyle(document.querySelector('.tip')).display") == "block"
    rows = "[...document.querySelectorAll('.chosen tbody tr')].map((r) => r.cells[0].textContent)"
    assert tab.evaluate(rows) == ["rank 0", "rank 1"]


def test_calls_are_painted_wider_when_zoomed_and_a_method_can_be_faded(tab: Page) -> None:
    before = painted(tab)
    tab.evaluate("document.querySelector('.legend button').click()")
    faded = painted(tab)
    tab.evaluate("document.querySelector('.legend button').click()")

    assert before > 1000
    assert faded < before / 10
    assert painted(tab) == before

    for _ in range(6):
        tab.evaluate("document.getElementById('in').click()")
    zoomed = painted(tab)
    tab.evaluate("document.getElementById('all').click()")

    assert zoomed != before
    assert painted(tab) < before  # with the time before the first call


def test_light_and_dark_can_be_chosen_and_a_phone_shows_the_page_without_scrolling_sideways(
    tab: Page,
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = tab.evaluate(ground)
    tab.evaluate("document.getElementById('theme').click()")
    after = tab.evaluate(ground)
    tab.evaluate("document.getElementById('theme').click()")

    assert before != after
    assert tab.evaluate(ground) == before

    tab.send("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=2, mobile=True)
    fits: Any = tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.send("Emulation.clearDeviceMetricsOverride")

    assert fits
