"""The gap of runs that are slow for planted reasons: its parts, and the pictures of their GPUs."""

import json
import re

import pytest
from made_runs import CLOCKED_S, OTHER_S, day, write_profile, write_slowed
from parsed import Parsed

from jaxbench.report import command
from jaxbench.report.gap import REMAINS, explain
from jaxbench.report.gpus import ecc_errors, gpus, heat_maps

FORECAST = CLOCKED_S + OTHER_S
LATE = [(13, 9.0), (20, 14.0), (31, 11.0)]
PLANTED = {
    "clocks": ({"clock": 0.85}, {"clocks": CLOCKED_S * (1 / 0.85 - 1)}),
    "one GPU": ({"slow": 1.18}, {"slow ranks": CLOCKED_S * 0.18}),
    "one host": ({"busy_s": 0.7}, {"slow ranks": 0.7}),
    "records": ({"written_s": LATE}, {"file system": 34 / 34}),
    "compilations": ({"compiled_s": LATE}, {"recompilation": 34 / 34}),
    "all": (
        {"clock": 0.9, "slow": 1.1, "written_s": LATE[:1], "compiled_s": LATE[1:]},
        {"clocks": CLOCKED_S * (1 / 0.9 - 1), "slow ranks": CLOCKED_S * 0.1 / 0.9,
         "file system": 9 / 34, "recompilation": 25 / 34},
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", PLANTED)
def test_planted_parts_are_found_within_two_points(cause, tmp_path):
    options, planted = PLANTED[cause]
    # Not comparable, so that the gap is to the forecast of the same program.
    write_slowed(tmp_path, "run", **options, not_comparable_because=["made"])
    (result,) = command.report([tmp_path], None)
    gap = explain(result)
    assert (gap.kind, gap.reference_s) == ("forecast", FORECAST)
    parts = {part.name: part.seconds for part in gap.parts}
    assert list(parts) == ["clocks", "slow ranks", "file system", "recompilation", REMAINS]
    assert sum(parts.values()) == pytest.approx(gap.seconds)
    for name, seconds in parts.items():
        assert abs(seconds - planted.get(name, 0.0)) < 0.02 * gap.seconds, (name, parts)


def test_exposed_communication_is_the_additional_wait_of_the_rank_that_waits_least(tmp_path):
    path = write_slowed(tmp_path, "run", clock=0.9, links_s=0.4, not_comparable_because=["made"])
    write_profile(path, 0.7, rank=0)
    write_profile(path, 0.4, rank=11)
    (path / "profile" / "rank-2").mkdir()
    (path / "profile" / "rank-2" / "compared.json").write_text('{"kernels": [7]}')
    (result,) = command.report([tmp_path], None)
    gap = explain(result)
    parts = {part.name: (part.seconds, part.why) for part in gap.parts}
    seconds, why = parts["exposed communication"]
    assert seconds == pytest.approx(0.4)
    assert "0.600 s" in why
    assert "0.200 s" in why
    assert why.startswith("rank 11 ")
    assert abs(parts[REMAINS][0]) < 0.02 * gap.seconds
    text = page(tmp_path)
    parsed = Parsed(text)
    assert parsed.all("section", id="profile")
    assert text.index("rank 0, 5 steps") < text.index("rank 11, 5 steps")
    for said in ("all-gather over fsdp", "matmul bf16 1x8192x28672x64", "+0.7000"):
        assert said in text


def test_parts_whose_data_are_absent_are_absent(tmp_path):
    path = write_slowed(tmp_path, "run", clock=0.85, ranks=[])
    lines = (path / "steps.jsonl").read_text().replace("host_s", "other_s")
    (path / "steps.jsonl").write_text(lines)
    (result,) = command.report([tmp_path], None)
    (part,) = explain(result).parts
    assert part[:2] == (REMAINS, pytest.approx(explain(result).seconds))
    assert "Why it is slow" not in page(tmp_path)


def test_a_gap_by_which_runs_differ_is_not_explained(tmp_path):
    for slow, explained in ((1.0, False), (1.1, True)):
        write_slowed(tmp_path / f"{slow}", "run", slow=slow, not_comparable_because=["made"])
        (result,) = command.report([tmp_path / f"{slow}"], None)
        gap = explain(result)
        assert len(gap.parts) > 1
        assert (gap.seconds > 0.01 * gap.reference_s) == explained
        assert ("Why it is slow" in page(tmp_path / f"{slow}")) == explained


@pytest.mark.parametrize(("clock", "lost"), [(0.8, 0.0), (0.5, 3.0)])
def test_the_clocks_that_a_forecast_expects_are_no_part_of_a_gap(clock, lost, tmp_path):
    """Here the power limit makes matmuls take 1.25 times as long as at the peak."""
    path = write_slowed(tmp_path, "run", clock=clock, not_comparable_because=["made"])
    plan = json.loads((path / "plan.json").read_text())
    plan["bound_parts_s"]["compute"] = CLOCKED_S * 0.8
    (path / "plan.json").write_text(json.dumps(plan))
    (result,) = command.report([tmp_path], None)
    part = explain(result).parts[0]
    assert part[:2] == ("clocks", pytest.approx(lost, abs=0.05))


def test_without_a_plan_clocks_are_of_the_flops_at_the_peak(tmp_path):
    path = write_slowed(tmp_path, "run", clock=0.8)
    (path / "plan.json").unlink()
    (result,) = command.report([tmp_path], None)
    gap = explain(result)
    assert (gap.kind, gap.reference_s) == ("published", result.run.published["step_time_s"])
    at_peak = min(result.run.flops.values()) / 989.4e12
    assert gap.parts[0][:2] == ("clocks", pytest.approx(at_peak * (1 / 0.8 - 1), rel=0.01))


def page(folder):
    output = folder / "page.html"
    command.main([str(folder), "--format", "html", "--output", str(output)])
    return output.read_text()


def test_the_page_and_the_table_say_why(tmp_path, capsys):
    write_slowed(tmp_path, "run", clock=0.85, slow=1.1)
    text = page(tmp_path)
    assert "rank 11 on n1, GPU 3: 1.10" in text
    pictures = [a["aria-labelledby"] for a in Parsed(text).all("svg") if "aria-labelledby" in a]
    assert [p for p in pictures if p.startswith("heat-")] == ["heat-1-1-t heat-1-1-d"]
    assert command.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert " % slower than published (+" in out
    assert "clocks at 85.0 % (+0." in out
    assert "GPU 3 of n1 (+0." in out
    assert "J/token" not in out + text


def test_only_an_outlier_is_coloured_and_labelled(tmp_path):
    """A quantity without an outlier is a sentence."""
    write_slowed(tmp_path, "run", slow=1.1)
    text = page(tmp_path)
    (outlier,) = re.findall(r'class="heat outlier" d="(.*?)"', text)
    (normal,) = re.findall(r'class="heat normal" d="(.*?)"', text)
    assert (outlier.count("M"), normal.count("M")) == (1, 15)
    assert re.search(r'<text class="outlier" [^>]*>GPU 3: 9[01]\.\d</text>', text)
    assert "power under load: 600.0 W everywhere" in text


def test_a_late_process_is_named_where_the_others_have_no_steps():
    late = {"rank": 0, "host": "n0", "wait_s": 0.1, "step_time_s": {"mean": 1.0}}
    ranks = [late | {"products_s": [1.0, 1.0]}]
    ranks += [{"rank": n, "host": "n1", "wait_s": 0.9} for n in range(1, 6)]
    ((picture,), _) = heat_maps(gpus({"ranks": ranks}))
    assert picture["says"] == "rank 0 on n0, GPU 0: 10.0; rank 0 on n0, GPU 1: 10.0"


def test_ecc_errors_are_named():
    """Those of GPUs that have some, the most first."""
    counts = [{"ecc_corrected": n, "ecc_uncorrected": int(n == 2)} for n in range(3)]
    told = [{"gpu": n, **count} for n, count in enumerate(counts)]
    sentences = ecc_errors(gpus({"ranks": [{"rank": 0, "host": "n0", "gpus": told}]}))
    assert sentences == [
        "uncorrected ECC errors: rank 0 on n0, GPU 2: 1",
        "corrected ECC errors: rank 0 on n0, GPU 2: 2; rank 0 on n0, GPU 1: 1",
    ]


def test_the_page_has_ecc_errors(tmp_path):
    path = write_slowed(tmp_path, "run") / "run.json"
    assert "ECC errors" not in page(tmp_path)
    record = json.loads(path.read_text())
    record["ranks"][1]["gpus"][0]["ecc_uncorrected"] = 3
    path.write_text(json.dumps(record))
    assert "uncorrected ECC errors: rank 1 on n" in page(tmp_path)


def test_a_remainder_below_zero_is_no_bar(tmp_path):
    path = write_slowed(tmp_path, "run", clock=0.9)
    write_profile(path, 0.5)
    text = page(tmp_path)
    (table,) = re.findall(r'<table class="bars">\n<caption>[^<]*above.*?</table>', text, re.DOTALL)
    assert REMAINS not in table
    assert "s longer than the difference: they overlap" in text


def test_joules_per_token_stand_where_they_were_told(tmp_path, capsys):
    path = write_slowed(tmp_path, "run") / "run.json"
    path.write_text(path.read_text().replace('"window"', '"joules_per_token": 0.1234, "window"'))
    text = page(tmp_path)
    assert command.main([str(tmp_path)]) == 0
    assert " 0.123\n" in capsys.readouterr().out
    for cell in ('data-label="J/token">0.123<', 'data-label="Tokens/kWh">29173420<'):
        assert cell in text


def test_a_history_names_slow_nodes_of_the_last_weeks(tmp_path, capsys):
    write_slowed(tmp_path, "old", busy_s=0.7, started=day(0))
    for number in range(3):
        changes = {"slow": 1.1} if number < 2 else {}
        write_slowed(tmp_path, f"{number}", **changes, started=day(40 + number))
    assert command.main(["--history", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("node")]
    assert lines == ["node n1 was slow in 2 of 3 runs of 4 weeks, last on 2026-04-11: "
                     "rank 11 on n1, GPU 3: 1.100 times the typical GPU's time"]  # fmt: skip
    output = tmp_path / "page.html"
    command.main(["--history", str(tmp_path), "--format", "html", "--output", str(output)])
    assert "<td>2026-04-11: rank 11 on n1" in output.read_text()
    command.main(["--history", str(tmp_path), "--format", "json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert [list(run["slow_nodes"]) for run in row["runs"]] == [["n0"], ["n1"], ["n1"], []]
