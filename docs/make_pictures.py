"""Takes the pictures of README in light and in dark colours: a difference of two plans, and a
report of an invented slow run. Needs '.[dev,plan]', Chromium, and about two minutes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright import sync_api

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import made_runs  # noqa: E402

WIDTH, SCALE = 560, 2
"""The width of a page in pixels of CSS, and the pixels of the picture for each of them. README
shows two pictures next to each other, and their words must be legible."""

PAGES = {"slow": "gap-h", "flag": "time-h"}
"""Page -> the heading of its section on the picture, below its head."""

ROW = "llama31_8b_bf16:8"


def jaxbench(*words: str) -> None:
    """One command. Its status may be 1: a run is slow."""
    command = [sys.executable, "-m", "jaxbench", *words]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode <= 1


def pages(folder: Path) -> None:
    """Writes both pages into a folder."""
    written = ["--format", "html", "--output"]
    made_runs.write_slowed(folder / "runs", "invented", clock=0.9, slow=1.1, links_s=0.3)
    jaxbench("report", str(folder / "runs"), *written, str(folder / "slow.html"))
    changed = f"{ROW} execution.remat=full"
    jaxbench("plan", "--diff", ROW, changed, *written, str(folder / "flag.html"))


def take(folder: Path) -> None:
    """Takes every page in both colours."""
    with sync_api.sync_playwright() as playwright:
        found = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=found, chromium_sandbox=False)
        for name, section in PAGES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": WIDTH, "height": 600},
                    device_scale_factor=SCALE,
                    color_scheme=scheme,
                )
                page.goto((folder / f"{name}.html").as_uri())
                shown = f"section[aria-labelledby={section}]"
                hidden = f"section:not({shown}), footer, nav, details, main ul, main h2 + p"
                page.add_style_tag(content=f"{hidden} {{display: none}}")
                page.screenshot(path=ROOT / f"docs/{name}_{scheme}.png", full_page=True)
                page.close()
        browser.close()


def main() -> None:
    """Writes docs/slow_light.png and the other three, from new pages or from those that are in
    FOLDER already."""
    with TemporaryDirectory() as new:
        folder = Path(sys.argv[1]) if sys.argv[1:] else Path(new)
        if not sys.argv[1:]:
            pages(folder)
        take(folder.absolute())


if __name__ == "__main__":
    main()
