"""Takes the pictures of README: a report of two runs of this machine's CPU, and a plan of 8 H100s,
in light and in dark colours. Needs '.[dev,plan]', Chromium, and about three minutes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright import sync_api

ROOT = Path(__file__).parents[1]
WIDTH = 1180
PAGES = {"report": ("#runs", "#traces"), "plan": ("#time", "#network")}
"""Page -> its sections on the picture, below its head."""

RUNS = (
    ["--config", "llama2_70b_bf16", "--steps", "40"],
    ["--config", "llama31_8b_bf16", "--steps", "40", "--cpu-devices", "4",
     "--set", "parallelism.fsdp=2", "--set", "parallelism.tensor=2"],
)  # fmt: skip


def jaxbench(*words: str) -> None:
    """One command."""
    subprocess.run([sys.executable, "-m", "jaxbench", *words], check=True, cwd=ROOT)


def pages(folder: Path) -> None:
    """Writes both pages into a folder."""
    for number, options in enumerate(RUNS):
        jaxbench("train", *options, "--output", str(folder / f"runs/{number}"))
    written = ["--format", "html", "--output"]
    jaxbench("report", str(folder / "runs"), *written, str(folder / "report.html"))
    jaxbench("plan", "--config", "llama31_8b_bf16", "--gpus", "8", *written,
             str(folder / "plan.html"))  # fmt: skip


def take(folder: Path) -> None:
    """Takes every page in both colours."""
    with sync_api.sync_playwright() as playwright:
        found = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=found, chromium_sandbox=False)
        for name, sections in PAGES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": WIDTH, "height": 600}, color_scheme=scheme
                )
                page.goto((folder / f"{name}.html").as_uri())
                shown = ", ".join(sections)
                page.add_style_tag(content=f"section:not({shown}), footer, nav {{display: none}}")
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
