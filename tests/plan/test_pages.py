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
from commands import ROOT
from made_plans import awkward, made, slower
from parsed import Parsed, said_by

import jaxbench
from jaxbench.base.hardware import PLANNED
from jaxbench.base.versions import versions
from jaxbench.pages.charts import empty_chart, ends, three_digits
from jaxbench.plan import command, difference
from jaxbench.plan.plan import read
from jaxbench.plan.row_page import plan_page
from jaxbench.plan.text import trust
from jaxbench.recipe import published
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.flops import days_per_1t_tokens
from jaxbench.recipe.names import model_name


def bars(text, caption):
    """(class, name, start, width in percent, figure) of each line of a table of bars, except of
    stacked bars."""
    line = re.compile(
        r'<tr class="([^"]*)"><th scope="row">([^<]*)</th>(?:(?!</tr>).)*?class="fill" x="(.*?)%"'
        r' width="(.*?)%".*?<td class=.n[^>]*>(.*?)</td>',
        re.DOTALL,
    )
    return [
        (css, name, float(start), float(width), figure)
        for css, name, start, width, figure in line.findall(table(text, caption))
    ]


def table(text, caption):
    """The table with a caption."""
    return text.partition(f"<caption>{caption}")[2].partition("</table>")[0]


def pieces(text, caption):
    """(class, start, width in percent) of the pieces of a stacked bar."""
    piece = re.compile(r'<rect class="piece (.*?)" x="(.*?)%" width="(.*?)%"')
    found = piece.findall(table(text, caption))
    return [(css, float(start), float(width)) for css, start, width in found]


STEPS = "Seconds of a step"


def test_a_plan_is_a_page(tmp_path):
    plan = slower(made(), 6.0)
    text = plan_page(plan)
    said, within = said_by(text), plan.forecast.interval
    assert "Llama 3.1 8B in bf16 on 64 H100s: 6.00 s per step" in said
    assert "forecast, not measured" in said
    assert re.search(r"It fits\. 0 % of the step is matmuls and attention; 100 % is waiting", said)
    low, high = three_digits(within.low_s), three_digits(within.high_s)
    assert f"per step; 90 % interval {low} to {high} s" in said
    assert re.search(r"tokens/s per GPU; [\d.]+ % MFU", said)
    assert f"✓ {plan.bytes_per_device.limit / 2**30 - 62:.1f} GiB free fits: 62.0 of" in said
    assert trust(plan.forecast) in said
    # Bound, forecast and published step are on one scale, which ends at the longest of them.
    bound, published = bars(text, STEPS)[0], bars(text, STEPS)[-1]
    assert bound[3] == pytest.approx(100 * plan.bound_step_s / 12.33, abs=0.01)
    assert published[1:] == ("published on H100: another program", 0, 100, "12.3 s")
    # The parts of the forecast lie one after the other and end where the step does.
    parts = pieces(text, STEPS)
    for (_, start, width), following in pairwise(parts):
        assert following[1] == pytest.approx(start + width, abs=0.02)
    assert parts[-1][0] == "other"  # waiting
    assert parts[-1][1] + parts[-1][2] == pytest.approx(100 * 6.0 / 12.33, abs=0.1)
    low, high = 100 * within.low_s / 12.33, 100 * within.high_s / 12.33
    assert f'x="{low:.1f}%" y="50%" width="{high - low:.2f}%"' in text
    (link,) = Parsed(text).all("a", download="llama31_8b_bf16-64-h100.json.gz")
    packed = link["href"].removeprefix("data:application/gzip;base64,")
    (tmp_path / "plan.json").write_bytes(gzip.decompress(base64.b64decode(packed)))
    assert read(tmp_path / "plan.json").forecast == plan.forecast


def test_memory_is_one_bar_with_names_that_people_use():
    plan = made()
    text = plan_page(plan)

    def legend(text):
        return re.findall(r"</span>(.*?)</li>", table(text, "Memory of one GPU"))

    state = ["parameters 4.0", "optimizer 8.0", "gradients 2.0"]
    assert legend(text) == [*state, "activations and other temporaries 48.0"]
    start, width = pieces(text, "Memory of one GPU")[-1][1:]
    assert start + width == pytest.approx(100 * 62 * 2**30 / plan.bytes_per_device.limit, abs=0.02)
    assert "forward &lt;div&gt;, 4 times" in text
    # Most of what is left are stacks of the forward pass.
    saved = replace(plan.largest_buffers[0], bytes=40 * 2**30)
    path = "state.optimizer[1][0].nu.stacks[0].layers[1].mixer.<x>.value"
    text = plan_page(replace(plan, largest_buffers=[saved, replace(saved, name=path)]))
    assert legend(text) == [*state, "saved activations 40.0", "other temporaries 8.0"]
    assert "optimizer, second moment: mixer.&lt;x&gt;" in text


def test_days_are_those_that_the_source_prints():
    """Llama 2 70B on 64 H100s: 6.999 s for 128 sequences of 4096 tokens are 154.51 days."""
    plan = slower(made("llama2_70b_bf16"), 6.999)
    by_hand = 1e12 / (128 * 4096) * 6.999 / (24 * 3600)
    rate = plan.rates["forecast"].tokens_per_s_per_gpu * plan.gpus
    assert days_per_1t_tokens(rate) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(plan.published.days_per_1t_tokens, abs=0.01)
    said = said_by(plan_page(plan))
    assert "155 days for 1 trillion tokens on 64 H100s; 237,000 GPU hours" in said
    # Of a model that was shortened or changed they would say nothing.
    short = plan.settings | {"label": "derived", "model": plan.settings["model"] | {"layers": 2}}
    changed = plan.settings | {"label": "derived", "overrides": ["model.mlp.ffn=1"]}
    for settings in (plan.settings | {"label": "proxy"}, short, changed):
        assert "trillion" not in said_by(plan_page(replace(plan, settings=settings)))


def test_a_page_says_why_it_differs_and_how_far_to_trust_it():
    plan = slower(made("llama2_70b_bf16"), 5.6)
    within = replace(plan.forecast.interval, low_s=5.0, high_s=7.3)
    inside = replace(plan, forecast=replace(plan.forecast, interval=within))
    said = said_by(plan_page(inside))
    assert "Why 20 % below the published step?" in said
    assert "programs of each model differ. The published step lies in the interval, so" in said
    assert "How near is it to the published step?" in said_by(plan_page(slower(plan, 7.0)))
    narrow = replace(plan.forecast, interval=replace(within, high_s=6.0))
    assert "The published step lies outside of the interval." in said_by(
        plan_page(replace(plan, forecast=narrow))
    )
    changed = plan.settings | {"overrides": ["execution.remat=full"]}
    said = said_by(plan_page(replace(plan, settings=changed)))
    assert "on 64 H100s, execution.remat=full: 5.60 s per step" in said
    assert "Nothing is published for this work." in said_by(
        plan_page(replace(plan, published=None))
    )
    assert "do not know what these calls compute: their_kernel." in said_by(plan_page(awkward()))


def test_the_document_says_how_the_programs_of_each_model_differ():
    text = (ROOT / "docs/forecast.md").read_text()
    lines = text.partition("| model | what differs")[2].partition("\n\n")[0].splitlines()
    names = [name for line in lines[2:] for name in line.split("|")[1].strip().split(", ")]
    for row in published.rows():
        model = model_name(row.workload, row.size)
        assert any(model.startswith(name) for name in names), model


def test_models_have_their_names():
    names = [model_name(model.family, model.size) for model in MODELS.values()]
    expected = "DeepSeek-V3 GPT-OSS 120B Grok-1 314B Llama 2 70B Llama 3.1 405B Nemotron-4 340B " \
        "Nemotron-H 56B Nemotron 3 Nano 30B-A3B Qwen3 235B-A22B"  # fmt: skip
    assert all(name in " ".join(names) for name in re.split(r" (?=[A-Z]\w+[- ]\w)", expected))
    assert "Llama 3.1 8B" in names
    assert "Nemotron 3 Super 120B-A12B" in names


def test_axes_begin_at_zero_or_at_a_tick():
    assert ends([98.0, 100.0], from_zero=True) == (0.0, 100.0)
    low, high = ends([6.9, 7.1], from_zero=False)
    assert 6.0 < low < 6.9 < 7.1 < high < 8.0
    assert ends([1.0, 9.0], from_zero=False)[0] == 0.0  # nothing to gain
    for values in ([6.9, 7.1], [3.0, 3.0], [0.0, 0.0], [0.028, 0.045]):
        chart = empty_chart("", "", [1, 2], values, unit="s", x_title="GPUs", labels=[])
        ticks = [value for value, _ in chart.y_ticks]
        assert (ticks[0], ticks[-1]) == pytest.approx((chart.y.low, chart.y.high))


def two(**changes):
    """Two plans of one row, of which B has `execution.remat=full` and waits longer."""
    a = made()
    settings = a.settings | {"overrides": ["execution.remat=full"]}
    settings["execution"] = a.settings["execution"] | {"remat": "full"}
    b = slower(a, 1.246 * a.forecast_step_s, settings=settings, flags=a.flags | {"xla_x": True})
    return a, replace(b, **changes)


def test_a_difference_begins_with_its_conclusion():
    a, b = two()
    longer = b.forecast_step_s - a.forecast_step_s
    first, changed, why, memory, *_ = difference.report(a, b).splitlines()
    assert re.fullmatch(r"B is 24\.6 % slower: [\d.]+ s instead of [\d.]+ s\.", first)
    assert re.fullmatch(r"changed: execution\.remat \S+ -> full \(1 more follows\)", changed)
    assert why.startswith(f"why: +{longer:.5f} s")
    assert why.endswith(" s waiting for data")
    assert memory == "memory: 62.0 GiB instead of 62.0 GiB per GPU; both fit"
    assert difference.slower(b, a).startswith("B takes 19.7 % less time: ")
    assert difference.slower(a, a).startswith("B is as fast as A: ")
    assert difference.slower(a, awkward()) == "There is no forecast of B."
    # Steps of other work: rates are compared.
    more = a.settings | {"batch": a.settings["batch"] | {"global_batch": 1}}
    assert difference.slower(a, slower(a, a.forecast_step_s / 2, settings=more)) == (
        f"B trains 100.0 % more tokens/s per GPU: "
        f"{2 * a.rates['forecast'].tokens_per_s_per_gpu:,.0f} instead of "
        f"{a.rates['forecast'].tokens_per_s_per_gpu:,.0f}."
    )
    assert difference.report(a, a) == "the plans are the same"


def test_a_difference_is_a_page(tmp_path):
    """What somebody changed, apart from what followed and from what moved; signed bars."""
    a, b = two(uncovered_wire_bytes=2**31)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for plan, file in zip((a, b), files, strict=True):
        file.write_text(json.dumps(asdict(plan)))
    output = tmp_path / "page.html"
    words = ["--diff", *map(str, files), "--format", "html", "--output", str(output)]
    assert command.main(words) == 0
    text = output.read_text()
    said = said_by(text)
    # How it was made.
    assert shlex.join(["jaxbench", "plan", *words]) in said
    version, commit = jaxbench.__version__, (versions()["commit"] or "")[:7]
    today, jax = datetime.now(UTC).date(), metadata.version("jax")
    of = rf"{today} · jaxbench {version} \({commit}\+?\) · jax {jax}"
    assert re.search(rf"jaxbench plan · two forecasts, not measured · {of}", said)
    assert "B: Llama 3.1 8B in bf16 on 64 H100s, execution.remat=full" in said
    changed, _, moved = said.partition("What is different as a result")
    assert re.search(r"What somebody set .* execution\.remat \S+ full", changed)
    assert re.search(r"What follows from it .* flags\.xla_x - yes", changed)
    assert re.search(r"sent without matmuls or attention next to it, GiB [\d.]+ 2\.000 \+", moved)
    (longer, step) = bars(text, "Seconds of B minus seconds of A")
    assert longer[:4] == ("other", "waiting for data", 0, 100)
    assert longer[4] == step[4] == f"{b.forecast_step_s - a.forecast_step_s:+.3f}"
    shorter = bars(difference.page(b, a), "Seconds of B minus seconds of A")[0]
    assert shorter[:4] == ("good", "waiting for data", 0, 100)
    assert shorter[4].startswith("-")


def test_values_of_a_difference_have_their_own_units():
    """A time of the host is no size of it, a number of stages no time; nothing is Python's."""
    said = said_by(difference.page(made(), awkward()))
    assert "exposed copies to and from the host, s 0.000 0.250" in said
    assert re.search(r"copied to the host, GiB 0\.000 64\.000", said)
    assert "settings.parallelism.virtual_stages 1 6" in said
    assert "calls without a rule - their_kernel" in said
    assert "fits yes no" in said
    assert re.search(r"parameters, billions 8\.030 341\.029", said)
    assert not re.search(
        r"\bNone\b|\bTrue\b|\bFalse\b|\[\]", said.partition("What is different")[2]
    )


def test_what_does_not_fit_is_said_first():
    plan = made("llama31_8b_bf16", gpus=8, gpu=PLANNED["gb200"])
    said = said_by(plan_page(plan))
    assert "Why does it differ from the published step? The published step, 12.3 s, is" in said
    big = replace(plan.bytes_per_device, peak=200 * 2**30, host=2**40)
    text = plan_page(replace(plan, bytes_per_device=big, fits=False))
    said = said_by(text)
    assert "Llama 3.1 8B in bf16 on 8 GB200s: does not fit" in said
    assert "✕ does not fit 200.0 of 167.6 GiB per GPU, 32.4 GiB too much" in said
    assert '<tr class="over"><th scope="row">peak' in table(text, "Memory of one GPU")
    host = replace(big, peak=2**30)
    said = said_by(plan_page(replace(plan, bytes_per_device=host, fits=False)))
    assert "✕ does not fit 1024.0 of" in said


def test_a_page_says_how_to_make_it_fit(monkeypatch, capsys):
    """The last line of the search for settings, which is printed too."""
    tried = [
        "  still too big, 70.9 GiB: --set a=1",
        "  fits with 66.1 GiB: jaxbench plan --set a=2",
    ]
    monkeypatch.setattr(command, "make_plan", lambda *_: replace(made(gpus=8), fits=False))
    monkeypatch.setattr(command, "find_remedy", lambda *_: iter(tried))
    words = ["--config", "llama31_8b_bf16", "--gpus", "8", "--format", "html"]
    assert command.main(words) == 1
    out, err = capsys.readouterr()
    assert "How to make it fit: fits with 66.1 GiB: jaxbench plan --set a=2 Why" in said_by(out)
    assert "70.9" not in said_by(out)
    assert err.splitlines() == tried
