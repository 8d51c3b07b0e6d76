"""Documents name only what exists."""

import re
from pathlib import Path

import pytest
import yaml
from commands import ROOT

import jaxbench
from jaxbench.__main__ import main
from jaxbench.recipe import planned

PACKAGE = Path(jaxbench.__file__).parent
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
LOG = ROOT / "docs" / "log"
DOCUMENTS = [
    *OUTSIDE,
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent != LOG),
]
"""All but the log, whose names are of their day."""
SOURCES = [
    path
    for folder in ("jaxbench", "launch", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sh", ".sbatch") and path.name != Path(__file__).name
]
PATHS = (
    r"[\w./-]+\.(?:py|md|sh|sbatch|csv|html|toml)"
    r"|(?:jaxbench|launch|tests|benchmarks|docs|configs)/[\w./-]*"
)
"""Files and folders of the tree, as documents write them."""


def prose(path: Path) -> str:
    """A document without its blocks of code, and without the generated table below its mark."""
    text = path.read_text().partition("<!-- table -->")[0]
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """The anchors of a document."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)}


def exists(path: Path) -> bool:
    """Whether a file or folder is in the tree, or will be."""
    return path.exists()


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request):
    """Each document in turn."""
    return request.param


def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        name, _, fragment = link.partition("#")
        target = document.parent / name if name else document
        assert re.match(r"https?:", link) or exists(target), link
        assert not fragment or fragment in anchors(target), link


def test_paths_exist(document):
    for name in re.findall(rf"`({PATHS})`", prose(document)):
        folders = (ROOT, PACKAGE, document.parent)  # prose leaves out `jaxbench/`
        assert any(exists(folder / name) for folder in folders), name


def test_names_in_modules_exist(document):
    """As in `train.program_checks.check_program`: what begins with a package of jaxbench."""
    if document.name == "record.md":
        return  # its dotted names are fields
    for name in re.findall(r"`([a-z]\w*(?:\.\w+)+)[`(]", prose(document)):
        path, parts = PACKAGE, name.split(".")
        while parts and not path.suffix:
            inner = path / parts[0]
            if not (inner.is_dir() or inner.with_suffix(".py").exists()):
                break
            path = inner if inner.is_dir() else inner.with_suffix(".py")
            parts = parts[1:]
        if parts and path != PACKAGE and parts[0] not in ("json", "jsonl", "py"):
            text = (path if path.suffix else path / "__init__.py").read_text()
            assert re.search(rf"\b{parts[0]}\b", text), name


def test_the_log_has_the_headings_that_documents_cite():
    log = "\n".join(path.read_text() for path in LOG.glob("*.md"))
    headings = re.findall(r"^#+ (.*)$", log, re.MULTILINE)
    text = " ".join(" ".join(map(prose, DOCUMENTS)).split())
    cited = {
        heading
        for citation in re.findall(r"\blog(?:\]\([^)]*\))?[,:]? ((?:\*[^*]+\*(?:, )?)+)", text)
        for heading in re.findall(r"\*([^*]+)\*", citation)
    }
    assert len(cited) > 10
    assert not {c for c in cited if not any(heading.startswith(c) for heading in headings)}


def test_code_names_documents_that_exist():
    for path in SOURCES:
        for name in re.findall(r"\bdocs/[\w/]+\.\w+", path.read_text()):
            assert exists(ROOT / name), f"{path}: {name}"


def test_messages_name_sections_of_the_readme():
    texts = [path.read_text() for path in SOURCES]
    named = {name for text in texts for name in re.findall(r"\(README: (\w[\w ]*)\)", text)}
    assert named
    assert {anchor(name) for name in named} <= anchors(ROOT / "README.md")


def test_the_guide_to_slurm_has_the_sample_that_a_script_replaces(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from sample_log import COMMANDS, GUIDE

    assert GUIDE.read_text().count(f"```text\n{COMMANDS}") == 1


def test_the_hosted_workflow_runs_the_readme():
    """Its job `readme` has the two commands below "Install and run"."""
    section = (ROOT / "README.md").read_text().partition("## Install and run\n")[2]
    blocks = re.findall(r"^```shell\n(.*?)^```$", section.partition("\n## ")[0], re.M | re.S)
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    steps = [step["run"].strip() for step in jobs["readme"]["steps"] if "run" in step]
    assert steps == [block.strip() for block in blocks]
    assert len(steps) == 2


SAMPLE = re.compile(
    r"^(?P<recipe>\w+), row (?P<row>\d+): (?P<mesh>[^,]+), NVIDIA (?P<device>\w+).*\n"
    r" +fits +(?P<peak>[\d.]+) of (?P<limit>[\d.]+) GiB per GPU\n"
    r" +step +(?P<step>[\d.]+) s \(90 % interval (?P<low>[\d.]+) to (?P<high>[\d.]+)\)",
    re.MULTILINE,
)
"""The first lines of a plan, as documents show them."""


def test_samples_of_plans_have_the_figures_of_the_table(document):
    lines = {(line["recipe"], line["GPU"], line["GPUs"]): line for line in planned.read()[1]}
    for found in SAMPLE.finditer(document.read_text()):
        line = lines[found["recipe"], found["device"].lower(), found["row"]]
        assert found["mesh"] == line["mesh"]
        for name, column in (("peak", "peak GiB"), ("limit", "limit GiB"), ("step", "forecast s")):
            assert found[name] == line[column], (found[0], name)
        for name, column in (("low", "low s"), ("high", "high s")):
            # Both are rounded, the sample to three digits.
            assert float(found[name]) == pytest.approx(float(line[column]), rel=0.005), found[0]


LISTED = re.compile(r"^\$ jaxbench list (.*)\n((?:.+\n)+?)```$", re.MULTILINE)
"""A call of `jaxbench list` and some of its lines, as documents show them."""


def test_samples_of_lists_are_lines_of_the_command(document, capsys):
    for words, sample in LISTED.findall(document.read_text()):
        assert main(["list", *words.split()]) == 0
        said = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
        assert {line for line in sample.splitlines() if line != "..."} <= said


def test_documents_have_samples_of_plans():
    texts = [path.read_text() for path in DOCUMENTS]
    assert sum(len(SAMPLE.findall(text)) for text in texts) >= 3
    assert sum(len(LISTED.findall(text)) for text in texts) >= 2
