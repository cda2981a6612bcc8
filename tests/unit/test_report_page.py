"""The page in a real browser: drawn, readable at 1280 and at 400 px, light and dark, no error."""

import html
import json
import os
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

from megatron_hbp.report.page import page_html
from megatron_hbp.report.pareto import GOALS
from tests.unit.report_pages import Seen, cost_for, rich_plan, small_plan

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed"
)

# Opens pages in frames, since a browser without a screen is never narrower than 500 px, and tells
# what it sees there.
TOUR = """
const seen = {};
const shown = (element) => {
  const box = element.getBoundingClientRect();
  return box.width > 0 && box.height > 0;
};
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement, view = frame.contentWindow;
    const marks = [...page.querySelectorAll(".mark")];
    const outside = marks.filter((mark) => {
      const box = mark.getBoundingClientRect();
      const area = mark.closest("svg").getBoundingClientRect();
      return box.left < area.left - 9 || box.right > area.right + 9
        || box.top < area.top - 9 || box.bottom > area.bottom + 9;
    });
    const words = [...page.querySelectorAll("p, td, th, dd, h1, h2, h3, figure text")];
    const report = seen[frame.id] = {
      width: view.innerWidth,
      overflow: root.scrollWidth - root.clientWidth,
      told: { ...root.dataset },
      marks: marks.length,
      drawn: marks.filter(shown).length,
      outside: outside.map((mark) => mark.outerHTML),
      plots: page.querySelectorAll(".plot").length,
      smallest: Math.min(...words.map((w) => parseFloat(view.getComputedStyle(w).fontSize))),
      escaped: [...page.querySelectorAll("main *")].filter((e) =>
        !e.closest(".scroll, svg, details")
        && e.getBoundingClientRect().right > root.clientWidth + 1).map((e) => e.outerHTML),
      ticks: [...page.querySelectorAll(".ticks-x")].map((group) => [...group.children].filter(shown)
        .map((text) => text.getBoundingClientRect()).map((box) => [box.left, box.right])),
      ground: view.getComputedStyle(page.body).backgroundColor,
      loaded: view.performance.getEntriesByType("resource").map((entry) => entry.name),
      text: page.body.innerText,
    };
    if (frame.sandbox.length) continue;  // no script: nothing to press
    const plot = page.querySelector(".plot"), tip = page.getElementById("tip");
    const press = (key) => {
      plot.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
      return tip.hidden ? null : tip.textContent;
    };
    report.focusable = plot.tabIndex;
    report.tips = ["ArrowRight", "ArrowRight", "ArrowLeft", "Escape"].map(press);
    page.getElementById("theme").click();
    report.other_ground = view.getComputedStyle(page.body).backgroundColor;
    report.axes = {};
    const front = page.querySelector("#front figure");
    for (const goal of page.getElementById("axis-x").options) {
      for (const axis of ["x", "y"]) {
        const select = page.getElementById("axis-" + axis);
        select.value = goal.value;
        select.dispatchEvent(new view.Event("change"));
      }
      report.axes[goal.value] = [
        front.querySelector(".axis.x").textContent,
        front.querySelector(".axis.y").textContent,
        ...[...front.querySelectorAll("circle")].map((dot) =>
          [parseFloat(dot.getAttribute("cx")), 100 - parseFloat(dot.getAttribute("cy"))]),
      ];
    }
  }
  document.querySelector("pre").textContent = JSON.stringify(seen);
});
"""


def _tour(folder, frames, *flags):
    """Opens {name: (page, width, sandbox attribute)}; what TOUR saw, and the console's lines."""
    body = "".join(
        f'<iframe id="{name}" {sandbox} style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for name, (page, width, sandbox) in frames.items()
    )
    tour = folder / "tour.html"
    tour.write_text(f"<!doctype html><meta charset=utf-8><pre></pre>{body}<script>{TOUR}</script>")
    command = [
        BROWSER, "--headless=new", "--disable-gpu", "--disable-dev-shm-usage",
        "--enable-logging=stderr", "--v=0", "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        *flags, "--dump-dom",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), tour.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    found = re.search(r"<pre>(\{.*?)</pre>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), re.findall(r".*CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def pages():
    return {
        name: page_html(plan, cost_for(plan))
        for name, plan in (("rich", rich_plan()), ("small", small_plan()))
    }


@pytest.fixture(scope="module")
def toured(pages, tmp_path_factory):
    frames = {
        f"{name} {width}": (page, width, "")
        for name, page in pages.items()
        for width in (1280, 400)
    }
    frames["no script"] = (pages["rich"], 400, 'sandbox="allow-same-origin"')
    return _tour(tmp_path_factory.mktemp("light"), frames)


SCRIPTED = ("rich 1280", "rich 400", "small 1280", "small 400")


def test_no_console_error(toured):
    # a frame whose scripts are forbidden says so
    assert [line for line in toured[1] if "sandboxed" not in line] == []


@pytest.mark.parametrize("frame", [*SCRIPTED, "no script"])
def test_plots_are_drawn_and_fit(toured, pages, frame):
    seen = toured[0][frame]
    page = Seen.of(pages["small" if "small" in frame else "rich"])
    assert seen["marks"] == len(page.tips) > 20
    assert seen["drawn"] == seen["marks"]
    assert seen["plots"] == page.tags.count("svg") >= 7
    assert seen["outside"] == []
    assert seen["overflow"] == 0
    assert seen["escaped"] == []
    assert seen["smallest"] >= 11
    assert seen["width"] == (1280 if "1280" in frame else 400)
    for boxes in seen["ticks"]:
        for (_, right), (left, _) in pairwise(boxes):
            assert left > right, "words of an axis do not touch"


@pytest.mark.parametrize("frame", SCRIPTED)
def test_the_page_tells_what_it_has_drawn(toured, frame):
    seen = toured[0][frame]
    told = {"marks": str(seen["marks"]), "width": str(seen["width"]), "overflow": "0"}
    assert seen["told"] == told


@pytest.mark.parametrize("frame", [*SCRIPTED, "no script"])
def test_nothing_is_loaded(toured, frame):
    assert toured[0][frame]["loaded"] == []


@pytest.mark.parametrize("frame", SCRIPTED)
def test_keys_walk_over_the_marks(toured, pages, frame):
    seen = toured[0][frame]
    tips = Seen.of(pages[frame.split()[0]]).tips
    assert seen["focusable"] == 0
    assert seen["tips"] == [tips[0], tips[1], tips[0], None]


@pytest.mark.parametrize("frame", SCRIPTED)
def test_any_metric_can_be_an_axis(toured, pages, frame):
    goals = json.loads(re.search(r'id="goals">(.*?)</script>', pages[frame.split()[0]], re.S)[1])
    axes = toured[0][frame]["axes"]
    assert list(axes) == [name for name, _, _ in GOALS]
    for name, (x_label, y_label, *dots) in axes.items():
        assert x_label == y_label == goals[name]["label"]
        assert [x for x, _ in dots] == goals[name]["at"]
        assert [y for _, y in dots] == pytest.approx(goals[name]["at"])


def test_words_and_tables_need_no_script(toured):
    scripted, plain = toured[0]["rich 400"]["text"], toured[0]["no script"]["text"]
    assert len(plain) > 5000
    # what only a script can do is not offered
    offered = re.sub(r"Theme\n|x axis [^\n]*\n", "", scripted)
    assert set(plain.split()) >= set(offered.split()) - {"x", "y", "axis"}


def test_light_and_dark(toured, pages, tmp_path):
    light = toured[0]["rich 1280"]
    assert light["ground"] == "rgb(255, 255, 255)"
    assert light["other_ground"] == "rgb(20, 23, 28)"
    frames = {"page": (pages["small"], 400, "")}
    dark, lines = _tour(tmp_path, frames, "--blink-settings=preferredColorScheme=0")
    assert dark["page"]["ground"] == "rgb(20, 23, 28)"
    assert dark["page"]["other_ground"] == "rgb(255, 255, 255)"
    assert lines == []


def test_errors_would_be_seen(pages, tmp_path):
    broken = pages["small"].replace('"use strict";', '"use strict"; console.error("seen"); gone();')
    frames = {"page": (broken, 400, 'sandbox="allow-same-origin allow-scripts"')}
    _, lines = _tour(tmp_path, frames)
    assert any("seen" in line for line in lines)
    assert any("gone is not defined" in line for line in lines)
