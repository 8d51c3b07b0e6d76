"""Takes the pictures of README: a report of the published Llama runs, and a plan of 64 H100s, in
light and in dark colours. Needs '.[dev,plan]', Chromium, and about a minute."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright import sync_api

ROOT = Path(__file__).parents[1]
WIDTH, SCALE = 560, 2
"""Of a page on the picture, in pixels of CSS, and the pixels of the picture for each: README shows
two pictures next to each other, in which words must be legible."""

PAGES = {"report": "#scaling", "plan": "#time"}
"""Page -> its section on the picture, below its head."""

SHOWN = re.compile(r"workload,|llama2,|llama3\.1,405b,\w+,fp8,h100,")
"""Lines of the published table that the report reads: its heading, and some of Llama."""


def jaxbench(*words: str) -> None:
    """One command."""
    subprocess.run([sys.executable, "-m", "jaxbench", *words], check=True, cwd=ROOT)


def pages(folder: Path) -> None:
    """Writes both pages into a folder."""
    lines = (ROOT / "configs/published.csv").read_text().splitlines(keepends=True)
    (folder / "llama.csv").write_text("".join(filter(SHOWN.match, lines)))
    written = ["--format", "html", "--output"]
    jaxbench("report", str(folder / "llama.csv"), *written, str(folder / "report.html"))
    jaxbench("plan", "--config", "llama2_70b_fp8", "--gpus", "64", *written,
             str(folder / "plan.html"))  # fmt: skip


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
                hidden = f"section:not({section}), footer, nav, details {{display: none}}"
                page.add_style_tag(content=hidden)
                page.screenshot(path=ROOT / f"docs/{name}_{scheme}.png", full_page=True)
                page.close()
        browser.close()


def main() -> None:
    """Writes docs/report_light.png and the other three; of a FOLDER that has the pages already, or
    else of new ones."""
    with TemporaryDirectory() as new:
        folder = Path(sys.argv[1]) if sys.argv[1:] else Path(new)
        if not sys.argv[1:]:
            pages(folder)
        take(folder.absolute())


if __name__ == "__main__":
    main()
