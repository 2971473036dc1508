"""The page of `fa3gen report`: one file that needs nothing else, looked at in a real browser.

Without Chromium the browser's test is skipped, which the summary of the run says; with FA3GEN_REQUIRE_BROWSER set, as
in continuous integration, it fails.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import browser
import pytest
import rendering

from fa3gen import cli
from fa3gen.inspect.report import fragments
from fa3gen.inspect.report.pictures import PAIR, ROW
from fa3gen.records import evidence

STEM = "k4_2_d64"
VOID = {"meta", "link", "br", "hr", "img", "input"}
INSTALLATION_S = 600.0
WIDTHS = (390, 1280)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("dark", "light")
SECTIONS = (
    *("decisions", "warps", "bounds", "memory", "swizzle", "fragments", "tiles", "simulation", "trace", "compiled"),
    *("source", "numerics", "speed"),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one module, made by the first worker of a run that needs it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "report"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / f"{STEM}.html"
        if not file.is_file():
            started = time.perf_counter()
            assert cli.main(["report", STEM, "-o", str(folder)]) == 0
            assert time.perf_counter() - started < 60
    return file


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects ids, links and what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.elements: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif tag == "a" and name == "href":
                self.links.append(value or "")
            elif name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.loads.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> at {self.getpos()} closes {self.open[-3:]}"
        self.open.pop()


def test_one_file_that_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 3e6
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids)) and set(SECTIONS) <= set(reader.ids)
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    assert all(load.startswith(("#", "data:")) for load in reader.loads), reader.loads
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    assert str(rendering.ROOT) not in text  # nothing of the machine that made it


def test_what_the_page_says_is_what_is_known(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    state, record = evidence.status(rendering.CHECKOUT, STEM)
    assert record is not None
    [long] = [case for case in record.cases if case.name == "long"]
    assert long.o_error is not None and long.o_error.relative is not None
    on_gpu, on_cpu = text.index("<h3>On a GPU</h3>"), text.index("<h3>On the CPU model</h3>")
    origin, shown = f"{record.gpu}, {record.date}, DSL", f"{long.o_error.relative:.2e}"
    assert text.index("not a GPU; PyTorch", on_gpu) > on_cpu > text.index(origin, on_gpu)
    if state is evidence.Status.VERIFIED:
        assert f"verified on {record.gpu}, {record.date}" in text and shown in text[on_gpu:on_cpu]
    else:  # the record is of another file, and its figures stay out
        assert state.value in text and shown not in text[on_gpu:on_cpu]
    assert f"{rendering.plans()[STEM].smem.total_bytes:,} of 232,448 bytes" in text
    rows = re.findall(r"<code>(.*?)</code></div>", text)
    assert len(rows) == len(rendering.source(STEM).splitlines())


def test_a_file_that_was_edited_by_hand_has_a_badge(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    badge = '<span class="badge bad">not what its spec renders to</span>'
    assert badge not in page.read_text(encoding="utf-8")
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine", "--from", "k4_2"]) == 0
    assert cli.main(["render", "mine_d64"]) == 0
    with (tmp_path / "generated" / "mine_d64.py").open("a") as file:
        file.write("# edited\n")
    assert cli.main(["report", "mine_d64", "-o", str(tmp_path)]) == 0
    text = (tmp_path / "mine_d64.html").read_text(encoding="utf-8")
    assert badge in text and "<code>fa3gen render --check mine_d64</code> shows the difference" in text


def test_a_module_that_is_not_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine", "--from", "k4_2"]) == 0
    assert cli.main(["report", "mine"]) == 2
    assert "write them with: fa3gen render specs/mine.yaml" in capsys.readouterr().err


def wait_for_installation() -> None:
    """In continuous integration another process installs the browser while pip installs packages."""
    process, end = os.environ.get("FA3GEN_BROWSER_PROCESS"), time.monotonic() + INSTALLATION_S
    while process and Path("/proc", process).exists() and time.monotonic() < end:
        time.sleep(0.2)


def test_in_a_browser(page: Path) -> None:
    """No error, all pictures there, nothing wider than the window, both colour schemes; mouse and keyboard work."""
    wait_for_installation()
    path = browser.executable()
    if path is None:
        if os.environ.get("FA3GEN_REQUIRE_BROWSER"):
            pytest.fail("FA3GEN_REQUIRE_BROWSER is set, and there is no Chromium")
        pytest.skip(browser.NO_BROWSER)
    with browser.browser(path) as window:
        grounds = {}
        for width in WIDTHS:
            for scheme in SCHEMES:
                window.show(page, width, scheme)
                assert window.problems == []
                assert window.evaluate("document.documentElement.scrollWidth") == width
                _pictures(window)
                if width == WIDTHS[-1]:  # colours do not depend on it
                    grounds[scheme] = window.evaluate("getComputedStyle(document.body).backgroundColor")
                    contrasts = window.evaluate(CONTRASTS)
                    assert len(contrasts) > 20 and min(contrasts) >= 4.5, (scheme, contrasts)
        assert grounds["light"] != grounds["dark"]
        _fragments(window)
        _listing(window)
        _folding(window)
        assert window.problems == []


# Contrast (WCAG 2.1, 1.4.3) of all text outside pictures with the ground it stands on.
CONTRASTS = """
(() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((x) => x / 255).map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) { return colour; }
    }
    return [255, 255, 255, 255];
  };
  const seen = new Map();
  const texts = "h1,h2,h3,p,li,td,th,dt,dd,a,code,figcaption,summary,button,.row.has *";
  for (const element of document.querySelectorAll(texts)) {
    const key = element.tagName + element.className + getComputedStyle(element).color;
    if (element.textContent.trim() && !seen.has(key)) { seen.set(key, element); }
  }
  return [...seen.values()].map((element) => {
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
})()
"""


def _pictures(window: browser.Browser) -> None:
    boxes = window.evaluate(
        "[...document.querySelectorAll('svg')].map(e => { const r = e.getBoundingClientRect();"
        " return [r.width, r.height, e.getAttribute('aria-label')]; })"
    )
    assert len(boxes) >= 11 and all(width > 50 and height > 20 and label for width, height, label in boxes), boxes
    simulated = "document.querySelector('.simulation').shadowRoot.querySelector('svg').getBoundingClientRect().height"
    assert window.evaluate(simulated) > 100
    # A cell that is repeated has the colour of the original: not black, and not that of its neighbour.
    colours = window.evaluate(
        "[...document.querySelectorAll('svg[data-fragment] defs rect')].slice(0, 4).map(e => getComputedStyle(e).fill)"
    )
    assert len(set(colours)) == 4 and "rgb(0, 0, 0)" not in colours


def _fragments(window: browser.Browser) -> None:
    """What the page says of elements under the pointer, and under the cursor that keys move, is what the data says."""
    said = "document.querySelector('output[for=fragment-accumulator]').textContent"
    window.evaluate("document.querySelector('#fragment-accumulator').scrollIntoView({block: 'center'})")
    box = window.evaluate(
        "(() => { const r = document.querySelector('#fragment-accumulator svg').getBoundingClientRect();"
        " return [r.x, r.y]; })()"
    )
    row, column = 13, 11
    window.move(box[0] + 34 + (column + 0.5) * PAIR / 2, box[1] + 18 + (row + 0.5) * ROW)
    place = fragments.accumulator(row, column)
    expected = f"Row {row}, column {column}: thread {place.thread} (warp {place.warp}, lane {place.lane})"
    assert window.evaluate(said).startswith(f"{expected}, register {place.register}.")
    window.evaluate("document.querySelector('#fragment-accumulator svg').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        window.press(key)
    place = fragments.accumulator(row + 3, column + 1)
    assert f"Row {row + 3}, column {column + 1}: thread {place.thread} " in window.evaluate(said)
    hits = window.evaluate("document.querySelectorAll('#fragment-accumulator .hits rect').length")
    assert hits == 2 * 64 // 8  # two rows, and two columns in each block of eight


def _listing(window: browser.Browser) -> None:
    """A line with a product opens to its HGMMA, by key, and the next line is one key away."""
    line = "document.querySelector('.row.tensor')"
    window.evaluate(f"{line}.focus()")
    window.press("Enter")
    assert window.evaluate(f"{line}.getAttribute('aria-expanded')") == "true"
    shown = window.evaluate(f"{line}.nextElementSibling.textContent")
    assert shown.count("HGMMA") == 4 and "wgmma.mma_async" in shown
    window.press("ArrowDown")
    assert window.evaluate("document.activeElement.id") != window.evaluate(f"{line}.id")
    window.evaluate(f"{line}.click()")
    assert window.evaluate("document.querySelectorAll('.made-of').length") == 0


def _folding(window: browser.Browser) -> None:
    is_open = "[...document.querySelectorAll('details.section')].filter(e => e.open).length"
    assert window.evaluate(is_open) == len(SECTIONS)
    window.evaluate("document.querySelector('[data-fold=close]').click()")
    assert window.evaluate(is_open) == 0
    window.evaluate("location.hash = '#tiles'; new Promise(done => setTimeout(done, 100))")
    assert window.evaluate("document.getElementById('tiles').open") is True
