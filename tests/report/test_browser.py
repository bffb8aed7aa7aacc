"""A report in a real browser: light and dark, on a desk and on a phone, without a network.

`make test-browser` runs them where a Chromium is installed.
"""

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.report.__main__ import write_report
from tests.browser import browser, found_browser
from tests.report.test_report import LOGS, leave, timeline

pytestmark = pytest.mark.browser

SCREENS = {"desk": (1280, 900), "phone": (390, 844)}

# Each text that is seen and its contrast with what lies behind it (WCAG 2.2, 1.4.3), if too low.
FAINT = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const solid = (colour) => { const [, , , a = 1] = parts(colour); return a > 0.5; };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (solid(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement, words = text.textContent.trim();
    if (!words || ["SCRIPT", "STYLE", "TITLE", "title"].includes(node.tagName)) continue;
    if (!node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const ink = node instanceof SVGElement ? style.fill : style.color;
    const [high, low] = [light(ink), light(behind(node))].sort((a, b) => b - a);
    seen += 1;
    if ((high + 0.05) / (low + 0.05) < 4.5) found.push([words.slice(0, 40), ink, behind(node)]);
  }
  return { seen, found };
})()
"""

# What reaches over the right edge and cannot be scrolled within something.
WIDE = """
(() => {
  const edge = document.documentElement.clientWidth, found = [];
  for (const node of document.body.querySelectorAll("*")) {
    const box = node.getBoundingClientRect();
    if (!box.width || box.right <= edge + 1) continue;
    let within = node.parentElement;
    while (within && getComputedStyle(within).overflowX === "visible") {
      within = within.parentElement;
    }
    if (!within || within === document.documentElement || within === document.body) {
      found.push(`${node.tagName}.${node.className} ends at ${box.right} of ${edge}`);
    }
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports of one run and of two, with every section opened."""
    folder = tmp_path_factory.mktemp("runs")
    one = leave(folder / "one", timeline(send=0.003), logs=LOGS, stalls=[(4, 0.02)])
    two = leave(folder / "two", timeline())
    both = f"report.runs=[{one},{two}]"
    return {
        "run": write_report(compose_config([f"run.dir={one}"])),
        "runs": write_report(compose_config([both, f"report.out={folder}/both.html"])),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    assert found_browser(), "make test-browser: no Chromium found (Debian: chromium)"
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["run", "runs"])
def test_a_report_reads_well_on_every_screen(page, pages, name, screen, dark, tmp_path):
    width, height = SCREENS[screen]
    page.open(pages[name], width=width, height=height, dark=dark)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.faults() == []
    assert [url for url in page.asked_for() if not url.startswith(("file:", "about:"))] == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(WIDE) == []
    told = page.run(FAINT)
    assert told["seen"] > 100 and told["found"] == []
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(23, 23, 27)") is dark
    (tmp_path / "page.png").write_bytes(page.picture())
    timelines = page.frames()[1:]
    assert len(timelines) == (2 if name == "runs" else 1)
    for each in timelines:
        assert page.run(FAINT, each)["found"] == []
        assert page.run("getComputedStyle(document.body).backgroundColor", each) == ground


def test_a_timeline_within_a_report_zooms_and_tells_of_a_box(page, pages):
    page.open(pages["run"], width=1280, height=900, dark=False)
    page.run("document.querySelector('iframe').scrollIntoView()")  # nothing is drawn out of sight
    (_, within) = page.frames()
    said = "document.getElementById('range').textContent"
    whole = page.run(said, within)
    inked = """
      (() => {
        const { width, height } = canvas;
        const seen = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        return new Set(new Uint32Array(seen.buffer)).size;
      })()
    """
    assert page.run(inked, within) > 5, "nothing is painted"
    page.run("document.getElementById('in').click()", within)
    page.run("new Promise((done) => setTimeout(done, 100))", within)
    assert page.run(said, within) != whole
    page.run("document.getElementById('all').click()", within)
    page.run("new Promise((done) => setTimeout(done, 100))", within)
    assert page.run(said, within) == whole
    shown = """
      new Promise((done) => {
        const box = canvas.getBoundingClientRect(), row = scene.sections[0].rows[0];
        const x = box.left + xOf(row.start[0] + row.took[0] / 2), y = box.top + row.y + row.h / 2;
        for (const kind of ["pointermove", "mousemove"]) {
          const at = { clientX: x, clientY: y, bubbles: true };
          canvas.dispatchEvent(new (kind[0] === "p" ? PointerEvent : MouseEvent)(kind, at));
        }
        setTimeout(() => done(tip.innerText), 100);
      })
    """
    assert "F0" in page.run(shown, within).replace(" ", "")


def test_the_page_of_a_browser_hears_of_faults(page, tmp_path):
    """What the other tests rely on: scripts that fail and requests that go out are noticed."""
    (tmp_path / "bad.html").write_text(
        "<p style='color:#999;width:2000px'>pale and wide</p><img src='http://127.0.0.1:9/no.png'>"
        "<script>setTimeout(() => nothing.of.this, 0)</script>"
    )
    page.open(tmp_path / "bad.html", width=390, height=844, dark=False)
    assert any("nothing is not defined" in str(each) for each in page.faults())
    assert "http://127.0.0.1:9/no.png" in page.asked_for()
    assert page.run(FAINT)["found"][0][0] == "pale and wide"
    assert page.run(WIDE)
