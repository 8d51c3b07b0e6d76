"""Pages in a real browser: each asks for nothing, complains of nothing, fits, and can be read by
everybody (axe-core). So do some of the site of the documents.

Chromium is the system's (`CHROMIUM` names another one) or Playwright's own.
"""

import functools
import gzip
import http.server
import importlib.util
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from commands import ROOT
from made_plans import PROGRAM, awkward, made
from made_runs import (
    EXPERIMENT,
    PUBLISHED_S,
    day,
    log,
    nemo,
    times,
    write_profile,
    write_record,
    write_slowed,
)  # fmt: skip

from jaxbench.base.hardware import H100
from jaxbench.base.versions import installed
from jaxbench.plan import difference, hlo_file
from jaxbench.plan.row_page import plan_page
from jaxbench.plan.systems import Target
from jaxbench.report import command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed("playwright"),
        reason="needs Playwright: pip install -c constraints.txt -e '.[dev]'",
    ),
]
SITE = ROOT / "build/site"
SYSTEM = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    from playwright import sync_api

    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, SYSTEM)), None)
    with sync_api.sync_playwright() as playwright:
        path = found or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        try:  # as root, as CI may run, it has no sandbox
            browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=False)
        except sync_api.Error as error:
            pytest.skip(f"needs a Chromium that starts: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report and a history of runs of all kinds, and plans, as files."""
    folder = tmp_path_factory.mktemp("pages") / "runs"
    for n, row in enumerate((64, 128, 256)):
        write_record(folder, f"llama2-{row}", times(7.0 + n / 5), row=row, ranks=row // 8,
                     started=day(n))  # fmt: skip
    write_record(folder, "a-name-that-is-long-" * 6, times(7.9), started=day(9), ranks=300)
    write_record(folder, "lost", status="failed", reason="rank 3 is lost " * 9, steps=20)
    write_record(folder, "smoke", times(0.3), row="smoke", ranks=2)
    write_profile(write_slowed(folder, "slowed", clock=0.9, slow=1.1, started=day(10)), 0.3)
    log(folder, "".join(nemo(n, s) for n, s in enumerate(times(PUBLISHED_S))), f"{EXPERIMENT}.out")
    settings = json.loads((folder / "llama2-64" / "run.json").read_text())["recipe"]
    plan = {"gpus": 64, "target": "h100", "settings": settings,
            "forecast": {"step_s": 5.0, "parts_s": {"products": 4.0, "norms": 1.0}}}  # fmt: skip
    (folder / "llama2-64" / "plan.json").write_text(json.dumps(plan))
    files = {}
    for name, arguments in {
        "report": [str(folder)], "history": ["--history", str(folder)],
    }.items():  # fmt: skip
        files[name] = folder.parent / f"{name}.html"
        command.main([*arguments, "--format", "html", "--output", str(files[name])])
    texts = {"plan": plan_page(made()), "offloaded": plan_page(awkward(), "fits " * 99)}
    texts["difference"] = difference.page(made(), awkward())
    program = folder.parent / "program.txt"
    program.write_text(PROGRAM.replace("=true", "=true, num_partitions=64", 1))
    texts["program"] = hlo_file.page(hlo_file.read(program, Target(H100, "h100")))
    for name, text in texts.items():
        files[name] = folder.parent / f"{name}.html"
        files[name].write_text(text)
    return files


@pytest.mark.parametrize(
    "name",
    [
        "report",
        "history",
        "plan",
        "offloaded",
        "difference",
        "program",
    ],
)
@pytest.mark.parametrize(
    ("width", "scheme", "media"),
    [(1280, "light", "screen"), (360, "dark", "screen"), (794, "dark", "print")],
)
def test_a_page_loads_alone_and_fits(name, width, scheme, media, browser, pages):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.emulate_media(media=media, color_scheme=scheme)
    page.goto(pages[name].as_uri())
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    dark = scheme == "dark" and media == "screen"
    assert page.evaluate(BRIGHTNESS) < 64 if dark else page.evaluate(BRIGHTNESS) > 192
    page.close()


def violations(page):
    """What axe-core has against a page: rule, and how often."""
    if not installed("axe_playwright_python"):
        pytest.skip("needs axe-core: pip install -c constraints.txt -e '.[dev]'")
    package = importlib.util.find_spec("axe_playwright_python").submodule_search_locations[0]
    page.evaluate(Path(package, "axe.min.js").read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [(rule["id"], len(rule["nodes"])) for rule in found]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files, without a log."""

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    """The address of the documents' site, on this machine."""
    if not SITE.is_dir():
        pytest.skip("needs the site: pip install -e '.[docs]' && python docs/make_site.py")
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["index", "plan", "guide/how_long", "reference/commands"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_site_asks_for_nothing_elsewhere(name, width, scheme, browser, site):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site}{name}.html")
    page.wait_for_load_state("networkidle")  # alone, it comes before a slow machine has loaded all
    assert said == []
    assert [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []
    page.close()


def test_the_table_of_all_rows_is_searched_and_sorted(browser, site):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{site}plan.html")
    table = page.locator("table[data-columns]")
    row = "tbody tr:not([hidden])"
    assert table.locator("th:visible").count() == 6
    page.fill(".tools input[type=search]", "llama31_70b GB200")
    assert 0 < table.locator(row).count() < 10
    for heading in ("forecast / published", "forecast / published"):
        table.get_by_role("button", name=heading).click()
    ratios = table.locator(f"{row} td:nth-child(5)").all_inner_texts()
    assert ratios == sorted(ratios, reverse=True)
    page.check(".tools input[type=checkbox]")
    assert table.locator("th:visible").count() > 20
    page.close()


OUTSIDE = """
[...document.querySelectorAll('svg[role=img] text')].filter(text => {
  const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
  return inner.left < outer.left - 2 || inner.right > outer.right + 2;
}).map(text => text.textContent)
"""
"""What is written over the edge of its chart."""

BRIGHTNESS = """
Math.max(...getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3))
"""
"""Of the paper, 0 to 255."""


def test_keyboard_and_download(browser, pages):
    """The first stop leads past the navigation; a record opens with a key; its JSON is whole."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(pages["report"].as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.locator("#run-1 summary").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    with page.expect_download() as download:
        page.click("#run-1 a[download]")
    content = json.loads(gzip.decompress(Path(download.value.path()).read_bytes()))
    assert content["record"]["command"].startswith("python -m jaxbench.train")
    page.close()
