"""Builds the documentation as a site in build/site; a link or an anchor that leads nowhere is an
error. Needs `pip install -c constraints.txt -e '.[docs]'`, and no network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build/pages"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE")
"""Documents that are not in docs/; on the site they are next to those that are."""

PICTURE = r'<picture><source .* srcset="(.*?)"><img (.*?)src="(.*?)"(.*?)></picture>'
"""A picture in README, which the browser shows in its own colours. On the site a reader can choose
others (`ONLY`)."""

ONLY = r'<img \2src="\3#only-light"\4> <img \2src="\1#only-dark"\4>'


def gather() -> None:
    """Writes all documents into one folder. Their links are changed to be right from there."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in sorted(PAGES.rglob("*.md")):
        up = "../" * (len(path.relative_to(PAGES).parts) - 1)
        text = re.sub(rf"\]\({up}\.\./({'|'.join(OUTSIDE)})", rf"]({up}\1", path.read_text())
        path.write_text(text)
    for name in OUTSIDE:
        text = re.sub(r'(\]\(|src(?:set)?=")docs/', r"\1", (ROOT / name).read_text())
        text = re.sub(PICTURE, ONLY, text)
        # unlike GitHub, the builder takes no list right below a paragraph
        (PAGES / name).write_text(re.sub(r"(?m)^(\w.*:)\n(?=- )", r"\1\n\n", text))


def main() -> int:
    """Returns the exit status of the builder."""
    gather()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
