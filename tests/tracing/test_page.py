"""The HTML report of a real group in a real browser, used by a script that records what the page shows."""

from __future__ import annotations

import contextlib
import html
import json
import re
import shutil
import subprocess
import time
from typing import Any

import pytest

import phalanx as px

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        BROWSER is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]
# Each resource that the page loads is an error on its console.
ALONE = '<meta http-equiv="Content-Security-Policy" content="default-src data: \'unsafe-inline\'">'
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
OPTIONS += ["--window-size=1200,900", "--enable-logging=stderr", "--dump-dom"]
USE = """
<script>
if (window === top) {
  const one = (css) => document.querySelector(css), all = (css) => [...document.querySelectorAll(css)];
  const page = document.documentElement.outerHTML, frames = [];
  window.requestAnimationFrame = (draw) => frames.push(draw);
  const painted = () => { // points of the timeline in one of the methods' colours: the first of the palette
    frames.splice(0).forEach((draw) => draw());
    const canvas = one(".view canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4)
      if (data[i] === 0x4c && data[i + 1] === 0x78 && data[i + 2] === 0xd0) count += 1;
    return count;
  };
  const click = (css, times = 1) => { while (times--) one(css).click(); };
  const told = {
    ready: document.documentElement.dataset.ready,
    text: document.body.innerText,
    tracks: all(".labels .track").map((track) => track.dataset.track),
    curves: all(".chart polyline").length,
  };

  one(".view").scrollIntoView();
  const box = one(".view").getBoundingClientRect(), row = parseFloat(all(".labels .track")[2].style.top);
  // rank 1 rests most of the time: its first call lies at the beginning
  const at = { clientX: box.left + 190 + (box.width - 190) * 0.1, clientY: box.top + row + 8, bubbles: true };
  const under = document.elementFromPoint(at.clientX, at.clientY);
  for (const kind of ["pointermove", "pointerdown", "pointerup"]) under.dispatchEvent(new PointerEvent(kind, at));
  told.tip = one(".tip").textContent;
  told.display = getComputedStyle(one(".tip")).display;
  told.ranks = all(".chosen tbody tr").map((line) => line.cells[0].textContent);

  dispatchEvent(new Event("resize"));
  told.painted = [painted()];
  for (const [css, times] of [[".legend button", 1], [".legend button", 1], ["#in", 6], ["#all", 1]]) {
    click(css, times);
    told.painted.push(painted());
  }

  const ground = () => getComputedStyle(document.body).backgroundColor;
  told.grounds = [ground(), click("#theme"), ground(), click("#theme"), ground()].filter(Boolean);

  const phone = Object.assign(document.createElement("iframe"), { width: 390 });
  phone.srcdoc = page;
  phone.onload = () => {
    const { clientWidth, scrollWidth } = phone.contentDocument.documentElement;
    told.phone = [clientWidth, scrollWidth];
    const box = Object.assign(document.createElement("pre"), { id: "told", textContent: JSON.stringify(told) });
    document.body.append(box);
  };
  document.body.append(phone);
}
</script>
"""


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
def told(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> dict[str, Any]:
    """The records of the script on the page of a traced run on Ray."""
    folder = tmp_path_factory.mktemp("page")
    path = folder / "run.html"
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Shown, name="shown") as group:
        group.rest(0.0)
        with px.trace() as trace:
            time.sleep(0.5)  # start-up, to the left of the first view
            for _ in range(3):
                group.rest(0.05)
            with contextlib.suppress(ValueError):
                group.fail()
    trace.save(path, title="A run", charts={"reward": [0.1, 0.4, 0.5], "still": [-1e17, -1e17]})
    text = path.read_text().replace("<head>", "<head>" + ALONE).replace("</body>", USE + "</body>")
    path.write_text(text)
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={folder / 'browser'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    complaints = [line for line in said if "willReadFrequently" not in line]
    found = re.search('<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return {**json.loads(html.unescape(found[1])), "complaints": complaints}


def test_the_page_loads_no_resources_and_has_all_tracks_failures_and_curves(told: dict[str, Any]) -> None:
    assert told["ready"] == "yes"
    assert told["complaints"] == []
    assert told["tracks"] == ["shown", "rank 0", "rank 1"]
    assert "ValueError: as told" in told["text"]
    assert "A run" in told["text"]
    assert told["curves"] == 4


def test_hovering_names_a_slice_and_a_click_lists_its_ranks(told: dict[str, Any]) -> None:
    assert "rest" in told["tip"]
    assert told["display"] == "block"
    assert told["ranks"] == ["rank 0", "rank 1"]


def test_zooming_repaints_calls_and_a_method_can_be_faded(told: dict[str, Any]) -> None:
    before, faded, again, zoomed, everything = told["painted"]

    assert before > 1000
    assert faded < before / 10
    assert again == before
    assert zoomed != before
    assert everything < before  # the view includes the time before the first call


def test_the_page_has_light_and_dark_themes_and_fits_the_width_of_a_phone(told: dict[str, Any]) -> None:
    light, dark, again = told["grounds"]
    shown, whole = told["phone"]

    assert light != dark
    assert again == light
    assert whole <= shown < 400
