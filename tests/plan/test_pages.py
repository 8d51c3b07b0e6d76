"""Pages of plans: what they say, and that they need nothing."""

import base64
import gzip
import json
import re
import shlex
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise

import pytest
from made_plans import awkward, made, scaled, searched, slower
from parsed import Parsed

import jaxbench
from jaxbench.base.hardware import PLANNED
from jaxbench.base.versions import versions
from jaxbench.plan import command
from jaxbench.plan.many_pages import _search_chart
from jaxbench.plan.plan import read
from jaxbench.plan.row_page import difference_page, plan_page
from jaxbench.plan.text import trust


def bars(text, caption):
    """(class, name, start, width in percent, figure) of each line of a table of bars."""
    table = text.partition(f"<caption>{caption}")[2].partition("</table>")[0]
    line = re.compile(
        r'<tr class="(.*?)"><th scope="row">(.*?)</th>.*?class="fill" x="(.*?)%" width="(.*?)%"'
        r".*?<td class=.n[^>]*>(.*?)</td>",
        re.DOTALL,
    )
    return [
        (css, name, float(start), float(width), figure)
        for css, name, start, width, figure in line.findall(table)
    ]


def test_a_plan_is_a_page(tmp_path):
    plan = slower(made(), 0.05)
    text = plan_page(plan)
    page = Parsed(text)
    page.names()
    said = " ".join(page.texts)
    ratio = plan.forecast_step_s / 12.33
    assert "llama31_8b_bf16 on 64 H100 GPUs fits. A step is forecast to take" in said
    assert f" s, {ratio:.2f} times the published step." in said.replace("\xa0", " ")
    assert "not measured" in said
    assert f"How far to trust the forecast: {trust(plan.forecast)}." in said
    *_, (_, shown, _, _, ends) = bars(text, "Forecast, seconds")
    within = plan.forecast.interval
    assert (shown, ends) == ("90 % interval", f"{within.low_s:.3f} to {within.high_s:.3f}")
    assert "forward &lt;div&gt;, 4 times" in text
    name = replace(plan.largest_buffers[0], name="state.model.<x>")
    assert "state.<wbr>model.&lt;x&gt;" in plan_page(replace(plan, largest_buffers=[name]))
    # Parts lie one after the other, and end where the step does.
    *parts, whole, published, _ = bars(text, "Forecast, seconds")
    for (_, _, start, width, _), following in pairwise(parts):
        assert following[2] == pytest.approx(start + width, abs=0.02)
    assert parts[-1][2] + parts[-1][3] == pytest.approx(whole[3], abs=0.02)
    assert (whole[1], whole[4]) == ("forecast", f"{plan.forecast_step_s:.3f}")
    assert published[1:] == ("published, H100", 0, pytest.approx(100, abs=0.1), "12.33")
    assert [css for css, name, *_ in parts if name.startswith(("waiting", "slowed"))] == ["other"]
    held = bars(text, "Contents, GiB")
    assert [(name, figure) for _, name, _, _, figure in held] == [
        ("parameters", "4.0"), ("optimizer", "8.0"), ("gradients", "2.0"),
        ("other temporaries", "48.0"), ("peak", "62.0"),
    ]  # fmt: skip
    (link,) = page.all("a", download="llama31_8b_bf16-64-h100.json.gz")
    packed = link["href"].removeprefix("data:application/gzip;base64,")
    (tmp_path / "plan.json").write_bytes(gzip.decompress(base64.b64decode(packed)))
    assert read(tmp_path / "plan.json").forecast == plan.forecast


def test_a_difference_is_a_page(tmp_path):
    """What somebody changed, apart from what moved, in units; both steps on one scale."""
    a, files = made(), [tmp_path / "a.json", tmp_path / "b.json"]
    b = slower(a, 2 * a.forecast_step_s, uncovered_wire_bytes=2**31)
    b = replace(b, settings=b.settings | {"seed": 7})
    for plan, file in zip((a, b), files, strict=True):
        file.write_text(json.dumps(asdict(plan)))
    output = tmp_path / "page.html"
    words = ["--diff", *map(str, files), "--format", "html", "--output", str(output)]
    assert command.main(words) == 0
    page = Parsed(output.read_text())
    page.names()
    said = " ".join(page.texts).replace("\xa0", " ")
    assert f"forecast to take {b.forecast_step_s:.3f} s, 2.000 times A's" in said
    # How it was made.
    assert shlex.join(["jaxbench", "plan", *words]) in page.texts
    version, commit = jaxbench.__version__, (versions()["commit"] or "")[:7]
    today, jax = datetime.now(UTC).date(), metadata.version("jax")
    of = rf"{today} · jaxbench {version} \({commit}\+?\) · jax {jax}"
    assert re.search(rf"jaxbench plan · two forecasts, not measured · {of}", said)
    changed, _, moved = said.partition("What is different as a result")
    assert "settings.seed 0 7" in changed
    assert "forecast_step_s, s" in moved
    assert re.search(r"uncovered_wire_bytes, GiB [\d.]+ 2\.000 x", moved)
    sides = [bars(output.read_text(), f"{side}: llama31_8b_bf16 on 64 H100") for side in "AB"]
    widths = [next(bar[3] for bar in side if bar[1] == "forecast") for side in sides]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.02)


def test_values_of_a_difference_have_their_own_units():
    """A time of the host is no size of it, a number of stages no time; nothing is Python's."""
    said = " ".join(Parsed(difference_page(made(), awkward())).texts)
    assert "host.exposed_s, s 0.000 0.250" in said
    assert re.search(r"host\.to_host, GiB 0\.000 64\.000", said)
    assert "stages.virtual_stages - 6" in said
    assert "fits yes no" in said
    assert re.search(r"parameters, billions 8\.030 341\.029", said)
    assert not re.search(
        r"\bNone\b|\bTrue\b|\bFalse\b|\[\]", said.partition("What is different")[2]
    )


@pytest.mark.parametrize(
    ("other_s", "labels"), [(2.0, ["the row: best"]), (0.5, ["the row", "best"])]
)
def test_a_search_marks_the_best_and_no_other(other_s, labels):
    row = {"fits": True, "set": [], "peak": 2**35, "step_s": 1.0}
    other = row | {"set": ["parallelism.fsdp=4"], "step_s": other_s}
    lines = [row, other] if other_s > 1 else [other, row]  # the fastest first
    said = [text for _, _, _, text, _ in _search_chart(lines, 2**36).texts]
    assert sorted(said, reverse=True) == [*labels[:1], "limit", *labels[1:]]


def test_what_does_not_fit_is_said_first():
    plan = made("llama31_8b_fp8", gpus=8, gpu=PLANNED["gb200"])
    assert "1.00 times the published step" not in plan_page(plan)  # which is on H100
    big = replace(plan.bytes_per_device, peak=200 * 2**30, host=2**40)
    text = plan_page(replace(plan, bytes_per_device=big, fits=False))
    assert "does not fit: 200.0\xa0GiB of 167.6\xa0GiB per GPU." in text
    assert [css for css, name, *_ in bars(text, "Contents, GiB") if name == "peak"] == ["over"]
    host = replace(big, peak=2**30)
    text = plan_page(replace(plan, bytes_per_device=host, fits=False))
    assert "memory: 1024.0\xa0GiB of" in text
    Parsed(text).names()


@pytest.mark.slow
def test_scaling_is_a_page(tmp_path, monkeypatch):
    text = scaled(tmp_path / "page.html", monkeypatch)
    page = Parsed(text)
    page.names()
    said = " ".join(page.texts).replace("\xa0", " ")
    share = f"{100 / 1.4:.1f} % of its rate per GPU on 8 GPUs."
    assert f"On 128 GPUs llama31_8b_bf16 has {share}" in said
    assert len(page.all("svg", role="img")) == 3
    assert "waiting for data: 0.000 on 8 GPUs" in text
    assert "1 GPU: not compared" in said


@pytest.mark.slow
def test_a_search_is_a_page(tmp_path, monkeypatch, capsys):
    text = searched(tmp_path / "page.html", monkeypatch)
    assert capsys.readouterr() == ("", "")  # no progress bar either
    page = Parsed(text)
    page.names()
    said = " ".join(page.texts)
    assert "llama31_8b_bf16 on 8 H100 GPUs: the best of 7 candidates takes" in said
    assert "jaxbench plan --config llama31_8b_bf16 --gpus 8 --gpu h100 --set " in said
    assert "does not fit: 2.0 GiB over the limit" in said
    assert "not compiled: killed by signal 9" in said
    (drawn,) = page.all("path", **{"class": "dot lost"})
    assert drawn["d"].count("M") == 2  # the row and the one after it
