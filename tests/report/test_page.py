"""The page and the history: what they say of runs of all kinds, and that they need nothing."""

import base64
import gzip
import json
import re
import shutil

import pytest
from cases import tiered
from made_runs import EXPERIMENT, PUBLISHED_S, day, log, nemo, times, write_record, write_slowed
from parsed import Parsed

from jaxbench.report import command, history, sections
from jaxbench.report.named import named
from jaxbench.results import plans


def page(*arguments):
    """(exit status, text of the page)."""
    output = arguments[0].parent / f"{arguments[0].name}.html"
    status = command.main([*map(str, arguments), "--format", "html", "--output", str(output)])
    return status, output.read_text()


def downloads(parsed):
    """The JSON of each run."""
    links = [a for a in parsed.all("a") if "download" in a]
    packed = [a["href"].removeprefix("data:application/gzip;base64,") for a in links]
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in packed]


@pytest.fixture
def runs(tmp_path):
    """A run for each verdict, logs, a plan and a smoke run."""
    folder = tmp_path / "runs"
    write_record(folder, "good", times(7.0), ranks=16)
    write_record(folder, "good128", times(7.1), row=128, ranks=2)
    write_record(folder, "slow", times(7.9))
    write_record(folder, "lost", status="failed", reason="rank 3 is lost", steps=20)
    write_record(folder, "killed", status="running", steps=20)
    write_record(folder, "stopped", status="interrupted", reason="cancelled", steps=20)
    write_record(folder, "other", times(6.5), device="NVIDIA H200")
    write_record(folder, "tiny", times(0.3), label="smoke", not_comparable_because=["smoke row"])
    log(folder, "".join(nemo(n, s) for n, s in enumerate(times(PUBLISHED_S))))
    return folder


def test_a_page_says_what_the_table_says(runs):
    status, text = page(runs)
    assert status == 1
    parsed = Parsed(text)
    assert "3 of 4 comparable runs reach 95\xa0% of the published throughput." in text
    for verdict, count in {
        "pass": 3, "slow": 1, "failed": 1, "interrupted": 1, "incomplete": 1, "not comparable": 2,
    }.items():  # fmt: skip
        css = f"verdict v-{verdict.replace(' ', '-')}"
        # In the header, with what is wrong, in the table and next to the record, always with its
        # word.
        places = 1 + (2 if verdict in ("pass", "not comparable") else 3) * count
        assert len(parsed.all("span", **{"class": css})) == places
        assert len(re.findall(rf'{css}"><span aria-hidden="true">.</span> {verdict}<', text)) == (
            places
        )
    for said in ("rank 3 is lost", "it still runs, or was killed", "7.00", "iterations 11:44"):
        assert said in text
    assert {d["report"]["verdict"] for d in downloads(parsed)} == {
        "pass", "slow", "failed", "interrupted", "incomplete", "not comparable",
    }  # fmt: skip
    for section in ("scaling", "traces", "gpus", "memory", "details"):
        assert parsed.all("section", id=section)
    assert not parsed.all("section", id="time")  # no plan


def test_what_is_wrong_comes_first(runs):
    """The bad runs with their reasons are above the table, and figures of a run that does not count
    are nowhere."""
    text = page(runs)[1]
    (bad,) = re.findall(r'<ul class="plain" aria-label="bad runs">(.*?)</ul>', text, re.DOTALL)
    assert len(re.findall("<li>", bad)) == 4
    assert re.search(r"slow</span> .*llama2_70b_bf16:64 · slow</a>: 12\.\d % slower than pub", bad)
    assert "lost</a>: rank 3 is lost" in bad
    assert text.index(bad) < text.index('id="runs"')
    order = ("runs", "gpus", "traces", "scaling", "memory", "details")
    places = [text.index(f'<section id="{name}"') for name in order]
    assert places == sorted(places)
    for record in downloads(Parsed(text)):
        line, verdict = record["report"], record["report"]["verdict"]
        counts = verdict in ("pass", "slow", "not comparable")
        for key in ("step_time_s", "tokens_per_s_per_gpu", "mfu_pct", "tflops_per_gpu"):
            assert (line[key] is not None) == counts, (verdict, key)


def test_a_slow_run_is_not_part_of_the_scaling(tmp_path):
    """The line goes through the latest run that passes; the others are hollow marks."""
    folder = tmp_path / "runs"
    write_record(folder, "old", times(7.2), started=day(0))
    write_record(folder, "new", times(7.0), started=day(1))
    write_record(folder, "slow", times(7.9), started=day(2))
    write_record(folder, "good128", times(7.1), row=128, started=day(0))
    (found,) = sections.scaling(named(command.report([folder], None), "published"))
    rates = {gpus: cells[found["names"].index("this report")][0] for gpus, cells in found["rows"]}
    assert rates[64] == pytest.approx(128 * 4096 / 7.0 / 64, rel=0.003)
    assert dict(found["chart"].paths)["dot repeat"].count("M") == 2
    assert re.fullmatch(
        r"64 → 128 GPUs: published 99\.0\xa0%, this report 98\.\d\xa0%", found["says"]
    )
    assert found["chart"].y.low == 0


def test_a_step_below_the_bound_is_impossible(tmp_path):
    folder = write_record(tmp_path / "runs", "run", times(3.6))
    settings = json.loads((folder / "run.json").read_text())["recipe"]
    (folder / "plan.json").write_text(
        json.dumps(PLAN | {"settings": settings, "bound_step_s": 4.1})
    )
    status, text = page(tmp_path / "runs")
    assert status == 1
    assert "s is impossible: the bound of its plan is 4.100 s" in text
    assert 'id="time"' not in text


def test_a_page_needs_nothing(runs):
    parsed = Parsed(page(runs)[1])
    assert not parsed.all("script")
    for _, attributes in parsed.elements:
        for name in ("href", "src", "action", "data", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attributes)
    style = re.search(r"<style>(.*?)</style>", page(runs)[1], re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    policy = parsed.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_a_page_can_be_read_without_seeing_it(runs):
    parsed = Parsed(page(runs)[1])
    parsed.names()
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    for link in parsed.all("a"):
        if link["href"].startswith("#"):
            assert link["href"][1:] in ids


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\x00\u202e{{ 7 * 7 }}'


def test_what_runs_say_is_escaped(tmp_path):
    """In every field that a page shows, and in names of files."""
    folder = tmp_path / "runs"
    write_record(
        folder, "<b>bold</b>", times(7.0), status="failed", reason=HOSTILE, label=HOSTILE,
        command=HOSTILE, flags={HOSTILE: HOSTILE}, versions={"driver": "\ud800"},
        ranks=2, kernels=[HOSTILE],
    )  # fmt: skip
    record = json.loads((folder / "<b>bold</b>" / "run.json").read_text())
    record["recipe"]["model"]["family"] = record["recipe"]["recipe"] = HOSTILE
    for rank in record["ranks"]:
        rank["host"] = HOSTILE
    (folder / "ok").mkdir()
    (folder / "ok" / "run.json").write_text(json.dumps(record | {"status": "completed"}))
    shutil.copy(folder / "<b>bold</b>" / "steps.jsonl", folder / "ok")
    said = f"GSW: MODEL={HOSTILE.replace(' ', '')} FW_VERSION=<i>x</i>\n"
    log(folder, said + "".join(nemo(n) for n in range(50)), f"log-{EXPERIMENT}<u>.out")
    for text in (page(folder)[1], history_page(folder)):
        parsed = Parsed(text)
        assert not parsed.all("script")
        assert not parsed.all("img")
        assert not {"u", "i", "b"} & {t for t, a in parsed.elements if a.get("onerror")}
        assert "<u>" not in text
        assert "<b>bold" not in text
        assert "\x00" not in text
        assert "\u202e" not in text
        assert "{{ 7 * 7 }}" in text


ODD = (None, [], [[1]], {"a": [1]}, -1, 1e308, float("nan"), 10**400)
FIELDS = (
    ("recipe", "gpus"), ("recipe", "batch", "global_batch"), ("published", "step_time_s"),
    ("published", "errata"), ("published", "layers"), ("ranks", 0, "rank"), ("ranks", 0, "wait_s"),
    ("ranks", 0, "gpus"),
    ("hardware", "device_memory_bytes"), ("summary", "step_time_s", "mean"), ("started",),
    ("summary", "tflops_per_gpu", "published"), ("recipe", "model", "family"), ("command",),
)  # fmt: skip


@pytest.mark.parametrize(
    "path", tiered(FIELDS[::7], FIELDS), ids=lambda path: ".".join(map(str, path))
)
def test_an_odd_record_is_a_run_on_the_page(path, tmp_path):
    folder = write_record(tmp_path / "runs", "run", times(7.0), ranks=2)
    record = (folder / "run.json").read_text()
    for value in ODD:
        changed = inner = json.loads(record)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        (folder / "run.json").write_text(json.dumps(changed))
        status, text = page(tmp_path / "runs")
        assert status in (0, 1)
        assert 'id="run-1"' in text
        assert 'id="row-1-h"' in history_page(tmp_path / "runs")
        assert command.main([str(folder), "--format", "json"]) in (0, 1)


def history_page(folder):
    output = folder.parent / "history.html"
    command.main(["--history", str(folder), "--format", "html", "--output", str(output)])
    return output.read_text()


def test_a_smoke_run_cannot_be_taken_for_a_result(tmp_path):
    folder = tmp_path / "runs"
    for n in range(2):
        write_record(folder, f"{n}", times(0.3, seed=n), row="smoke", ranks=2)
    text = page(folder)[1]
    parsed = Parsed(text)
    assert "Smoke runs only. Nothing here is a benchmark result." in text
    # Every chart of step times says so itself; maps of GPUs have no room for it.
    charts = [a for a in parsed.all("svg") if a.get("aria-labelledby", "").startswith("trace-")]
    assert len(parsed.all("text", **{"class": "watermark"})) == len(charts) == 2
    assert not parsed.all("section", id="scaling")
    for row in re.findall(r"<tr role=\"row\"><td.*?</tr>", text, re.DOTALL):
        assert "no benchmark result" in row
    assert "no benchmark result" in history_page(folder)


def test_a_log_of_a_smoke_run_is_one_wherever_it_lies(tmp_path):
    said = "SMOKE RUN: tiny dims on this machine's CPU.\n"
    log(tmp_path, said + "".join(nemo(n) for n in range(50)))
    (found,) = command.report([tmp_path], None)
    assert (found.run.label, found.verdict.name) == ("smoke", "not comparable")


def test_size(tmp_path):
    """50 runs of 50 steps, each with ranks, flags and the environment of a Slurm job."""
    folder = tmp_path / "runs"
    environment = {f"SLURM_VARIABLE_{n}": f"a value of some length {n}" for n in range(60)}
    for n in range(50):
        where = write_record(
            folder, f"{n}", times(7.0, seed=n), row=(64, 128)[n % 2], ranks=64 if n % 2 else 128
        )
        (where / "environment.json").write_text(json.dumps(environment))
    text = page(folder)[1]
    assert len(text.encode()) < 1_000_000
    both = [d["record"]["ranks"] for d in downloads(Parsed(text))[:50:49]]
    assert both[0] == "128 ranks are in the run's own run.json"
    assert len(both[1]) == 64


def test_a_long_run_is_drawn_short(tmp_path):
    write_record(tmp_path / "runs", "long", times(7.0, steps=50_000), steps=50_000)
    text = page(tmp_path / "runs")[1]
    assert len(text) < 100_000
    assert downloads(Parsed(text))[0]["step_times_s"] is None


def test_outliers_are_marked(tmp_path):
    seconds = times(7.0)
    seconds[20] *= 1.05
    write_record(tmp_path / "runs", "run", seconds)
    assert f"outliers: 20 ({seconds[20]:.4g} s)" in page(tmp_path / "runs")[1]


def test_the_load_of_experts_is_shown_by_layer(tmp_path):
    """As it was in the first and in the last step. A line that is no list of figures is skipped."""
    path = write_record(tmp_path / "runs", "run", times(7.0))
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        line["layer_load_max"] = [1.5, 4.0, 2.0] if line["step"] < 20 else [1.5, 1.5, 1.2]
    lines[0]["layer_load_max"] = ["no", -1, 2]
    (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(tmp_path / "runs")[1]
    assert "step 1: 4.00 at most, 2.50 on average; step 49: 1.50 at most, 1.40 on" in text
    assert Parsed(text).all("section", id="experts")


def test_a_straggler_is_named(tmp_path):
    folder = write_record(tmp_path / "runs", "run", times(7.0), ranks=32)
    record = json.loads((folder / "run.json").read_text())
    record["ranks"][17] |= {"wait_s": 0.7, "host": "node-slow"}
    record["ranks"] += [{"rank": "x"}, None]
    (folder / "run.json").write_text(json.dumps(record))
    text = page(tmp_path / "runs")[1]
    share = 100 * 0.7 / record["ranks"][17]["step_time_s"]["mean"]
    assert "wait for the device" in text
    assert f"rank 17 on node-slow, GPU 0: {share:.1f}; the others: " in text


def test_a_gpu_that_is_slow_alone_is_named(tmp_path):
    """Without telemetry its own matmuls show it."""
    folder = write_record(tmp_path / "runs", "run", times(7.0), ranks=32)
    record = json.loads((folder / "run.json").read_text())
    for rank in record["ranks"]:
        rank["products_s"] = [0.0125 if rank["rank"] == 9 else 0.0100]
    (folder / "run.json").write_text(json.dumps(record))
    text = page(tmp_path / "runs")[1]
    host = record["ranks"][9]["host"]
    assert f"rank 9 on {host}, GPU 0: 80.0; the others: 100.0 to 100.0" in text


PARTS = {"products": 5.0, "cold_starts": 1.5, "odd": "x"}
PLAN = {"gpus": 64, "target": "h100", "forecast": {"step_s": 6.5, "parts_s": PARTS},
        "bytes_per_device": {"peak": 5e10}}  # fmt: skip


@pytest.mark.parametrize("place", ["run/plan.json", "run/plan/plan.json", "p/plan.json"])
def test_the_plan_of_the_same_program_is_shown(place, tmp_path):
    folder = write_record(tmp_path / "runs", "run", times(7.0))
    settings = json.loads((folder / "run.json").read_text())["recipe"]
    path = tmp_path / "runs" / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(PLAN | {"settings": settings}))
    status, text = page(tmp_path / "runs")
    assert status == 0
    for said in ("matmuls", "cold starts", "forecast of the plan", "1.08 times the fore"):
        assert said in text
    (line,) = [d["report"] for d in downloads(Parsed(text))]
    assert line["forecast_s"] == 6.5
    assert line["of_forecast"] == pytest.approx(6.5 / line["step_time_s"])


@pytest.mark.parametrize("change", ["target", "settings", "gpus", "numbers", "list"])
def test_another_plan_is_not(change, tmp_path):
    folder = write_record(tmp_path, "run", times(7.0))
    recipe = json.loads((folder / "run.json").read_text())["recipe"]
    changes = {
        "target": {"target": "h200"}, "gpus": {"gpus": 128},
        "list": {"forecast": {"step_s": 6.5, "parts_s": [1]}},
        "settings": {"settings": recipe | {"parallelism": {}}},
        "numbers": {"forecast": {"step_s": 10**400, "parts_s": PARTS}},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(PLAN | {"settings": recipe} | changes[change]))
    assert plans.find_plan(folder, recipe, "NVIDIA H100 80GB HBM3") is None
    (found,) = command.report([tmp_path], None)
    assert found.verdict.name == "pass"


@pytest.fixture
def dated(tmp_path):
    """Runs of many days: a driver makes them faster, a flag slower, and one is lost."""
    folder, level = tmp_path / "history", 7.0
    for number in range(12):
        level *= {4: 0.95, 9: 1.04}.get(number, 1.0)
        changes = {"driver": "580.65.06" if number < 4 else "590.12.01"}
        if number >= 9:
            changes["flags"] = {"compiler_options": {"xla_new": True}}
        status = "failed" if number == 6 else "completed"
        write_record(folder, f"run-{number:02}", times(level, seed=number), status=status,
                     started=day(number), **changes)  # fmt: skip
    return folder


def test_history_marks_what_changed(dated, capsys):
    rows = history.history(command.report([dated], None), 0.02)
    assert [row.name for row in rows] == ["llama2_70b_bf16:64 on 64 x NVIDIA H100 80GB HBM3"]
    first, second = rows[0].changes
    assert first.change == pytest.approx(-0.05, abs=0.004)
    assert first.why == ["versions.driver: 580.65.06 -> 590.12.01"]
    assert (first.started, second.started) == (day(4), day(9))
    assert second.change == pytest.approx(0.04, abs=0.004)
    assert "flags.compiler_options.xla_new: None -> True" in {
        f"{name}: {a} -> {b}" for name, a, b in second.differences
    }
    assert command.main(["--history", str(dated)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "  2026-03-05 09:30  " in out
    assert " % faster\n      versions.driver: 580.65.06 -> 590.12.01\n" in out
    assert "  2026-03-07 09:30            -  failed" in out
    assert command.main(["--history", str(dated), "--threshold", "6"]) == 0
    assert "versions.driver" not in capsys.readouterr().out
    assert command.main(["--history", str(dated), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [r["change"] is not None for r in row["runs"]].count(True) == 2
    text = history_page(dated)
    assert "llama2_70b_bf16 on 64 H100s: 4.1\xa0% slower since 10 March 2026." in text
    assert not re.search(r"\b1 runs\b", text)
    assert len(Parsed(text).all("path", **{"class": "rule change"})) == 2


def test_a_history_leads_with_what_changed(tmp_path, capsys):
    """Telemetry is part of what differs, and a single run has nothing to compare."""
    for number in range(4):
        slow = {"clock": 0.9, "slow": 1.1} if number == 3 else {}
        write_slowed(tmp_path / "h", f"{number}", **slow, started=day(number))
        write_record(tmp_path / "h", f"128-{number}", times(7.0, seed=number), row=128,
                     started=day(number))  # fmt: skip
    write_record(tmp_path / "h", "one", times(7.0), row=256)
    assert command.main(["--history", str(tmp_path / "h")]) == 0
    first, _, second, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"llama2_70b_bf16 on 64 H100s: 16\.\d % slower since 4 March 2026\.", first)
    assert second.startswith("llama2_70b_bf16:64 on 64 x NVIDIA H100 80GB HBM3: 16.")
    assert "      clock under load, % of the highest: 100.0 -> 90.0" in rest
    assert "      slow nodes: none -> n1" in rest
    names = [line for line in rest if line.startswith("llama2")]
    assert [line.partition("HBM3: ")[2] for line in names] == [
        "no change above 2 % in 4 runs", "one run, nothing to compare",
    ]  # fmt: skip
    text = history_page(tmp_path / "h")
    assert "clock under load, % of the highest: 100.0 → 90.0" in text
    assert text.index("bf16:64 on") < text.index("bf16:128 on")
    assert "One run, nothing to compare." in text


def test_a_slow_drift_is_a_change(tmp_path):
    for number in range(12):
        write_record(
            tmp_path, f"{number}", times(7.0 * 1.006**number, noise=0), started=day(number)
        )
    (row,) = history.history(command.report([tmp_path], None), 0.02)
    assert row.changes
    assert all(
        p.change > 0.02 and p.why == ["neither the records nor the telemetry differ"]
        for p in row.changes
    )


def test_rows_of_a_history(tmp_path):
    """Another work or other hardware is another row; an undated record has its file's time."""
    write_record(tmp_path, "a", times(7.0))
    write_record(tmp_path, "b", times(7.0), device="NVIDIA H200")
    write_record(tmp_path, "c", times(7.0), row=128)
    log(tmp_path, "".join(nemo(n) for n in range(50)))
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    del record["started"]
    (tmp_path / "a" / "run.json").write_text(json.dumps(record))
    rows = history.history(command.report([tmp_path], None), 0.02)
    assert len(rows) == 4
    dated = {row.name: row.points[0].result.run.dated for row in rows}
    assert dated == {
        "llama2_70b_bf16:128 on 128 x NVIDIA H100 80GB HBM3": "record",
        "llama2_70b_bf16:64 on 64 x NVIDIA H100 80GB HBM3": "file time",
        "llama2_70b_bf16:64 on 64 x NVIDIA H200": "record",
        "llama3.1 405b fp8 on 512 x unknown hardware": "file time",
    }
