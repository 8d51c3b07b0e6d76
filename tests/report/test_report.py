"""Reports: runs as they are found, whole and broken, and the verdict on each."""

import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT
from made_runs import EXPERIMENT, PUBLISHED_S, bar, log, maxtext, nemo, write_record
from mistakes import assert_mistake
from rich.console import Console

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError
from jaxbench.recipe import published
from jaxbench.report import command, logs
from jaxbench.report.compare import compare, values_of
from jaxbench.report.named import named
from jaxbench.report.runs import Steps
from jaxbench.results.verdict import judge


def reported(*arguments):
    """(exit status, lines) of a report in JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxbench", "report", *map(str, arguments), "--format", "json"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def verdict_of(folder, *more):
    results = command.report([folder], more[1] if more else None)
    assert len(results) == 1
    return results[0]


def test_nemo_log_that_passes(tmp_path):
    log(tmp_path, "".join(nemo(n, 20.0 if n < 11 else 12.9) for n in range(50)))
    status, (line,) = reported(tmp_path)
    assert status == 0
    assert line["verdict"] == "pass"
    assert (line["recipe"], line["gpus"], line["dtype"]) == ("llama3.1 405b", 512, "fp8")
    assert line["window"] == "11:44"
    assert line["step_time_s"] == pytest.approx(12.9)
    assert line["ratio"] == pytest.approx(PUBLISHED_S / 12.9)
    assert line["tokens_per_s_per_gpu"] == pytest.approx(256 * 8192 / 12.9 / 512)
    row = next(r for r in published.rows() if r.step_time_s == PUBLISHED_S)
    # The printed MFU, at the printed step time, but for its erratum.
    assert row.errata == ("GQA16",)
    assert line["mfu_pct"] * 12.9 / PUBLISHED_S == pytest.approx(row.mfu_pct, rel=0.012)


def test_slow_is_the_gate(tmp_path):
    log(tmp_path, "".join(nemo(n, 13.1) for n in range(50)))
    status, (line,) = reported(tmp_path)
    assert (status, line["verdict"]) == (1, "slow")
    assert line["reason"] == "94.4 % of the published throughput"


def test_window_by_name(tmp_path):
    log(tmp_path, "".join(nemo(n, 14.0 if n < 35 else 12.0) for n in range(50)))
    assert verdict_of(tmp_path).verdict.name == "slow"
    newer = verdict_of(tmp_path, "--window", "newer")
    assert (newer.window, newer.mean_s, newer.verdict.name) == ((35, 44), 12.0, "pass")
    assert verdict_of(tmp_path, "--window", "0:0").mean_s == 14.0


def test_maxtext_log_with_a_line_from_each_process(tmp_path):
    name = "log-maxtext_llama2_70b_64_1407993.out"
    declared = "GSW: MODEL=llama2 MODEL_SIZE=70b DTYPE=bf16 JOB_NUM_NODES=8 GPUS_PER_NODE=8\n"
    log(tmp_path, declared + "".join(2 * maxtext(n) for n in range(50)), name)
    found = verdict_of(tmp_path)
    assert (found.run.gpus, found.run.dtype) == (64, "bf16")
    assert found.run.published["workload"] == "llama2"
    assert found.verdict.name in ("pass", "slow")


def test_progress_bar_written_in_one_line(tmp_path):
    name = "log-nemo_nemotron4_340b_128_55.out"
    declared = "GSW: MODEL=nemotron4 MODEL_SIZE=340b DTYPE=bf16\n"
    log(tmp_path, declared + "".join(2 * bar(n) for n in range(50)), name)
    found = verdict_of(tmp_path)
    assert found.mean_s == pytest.approx(4.61)
    assert found.verdict.name == "pass"
    assert len(found.run.steps.seconds) == 50


BROKEN = {
    "truncated": ([*range(30)], {}, "incomplete", "it ends after iteration 29 of 49"),
    "a hole": ([*range(20), *range(23, 50)], {}, "incomplete", "missing iterations 20, 21, 22"),
    "two runs": ([*range(50), *range(50)], {}, "incomplete", "iteration 0 occurs again: two runs"),
    "begun again": ([*range(30), *range(20, 50)], {}, "incomplete", "iteration 20 occurs again"),
    "NaN": ([*range(50)], {17: {"loss": "nan"}}, "failed", "the loss is nan at iteration 17"),
    "no time": ([*range(50)], {3: {"seconds": "inf"}}, "failed", "the step time is inf"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_never_passes(name, tmp_path):
    iterations, changes, verdict, reason = BROKEN[name]
    log(tmp_path, "".join(nemo(n, **changes.get(n, {})) for n in iterations))
    found = verdict_of(tmp_path).verdict
    assert (found.name, found.bad) == (verdict, True)
    assert reason in found.reason


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_other_encodings_are_read(encoding, tmp_path):
    log(tmp_path, "".join(nemo(n) for n in range(50)), encoding=encoding)
    assert verdict_of(tmp_path).verdict.name == "pass"


def test_bytes_that_are_no_text_and_a_cut_line(tmp_path):
    path = log(tmp_path, "".join(nemo(n) for n in range(50)))
    path.write_bytes(
        b"\xff\xfe\xfa\x00 no text \x80\n"[2:] + path.read_bytes() + nemo(49)[:40].encode()
    )
    assert verdict_of(tmp_path).verdict.name == "pass"


def test_another_work_is_not_comparable(tmp_path):
    text = "".join(nemo(n) for n in range(50)).replace(
        "global_batch_size: 256", "global_batch_size: 8"
    )
    log(tmp_path, text)
    found = verdict_of(tmp_path).verdict
    assert (found.name, found.bad) == ("not comparable", False)
    assert "its step has 65536 tokens, the published one 2097152" in found.reason


def test_a_log_that_says_nothing_of_its_work(tmp_path):
    path = tmp_path / "a.out"
    path.write_text("".join(nemo(n) for n in range(50)))
    found = logs.read(path)
    assert found.not_comparable == ["the log does not say its model, size, dtype, gpus"]
    (tmp_path / "b.out").write_text("hello\n")
    assert logs.read(tmp_path / "b.out") is None
    assert command.main([str(tmp_path / "b.out")]) == 2


@pytest.mark.nightly
def test_a_log_of_100_mb_takes_no_memory(tmp_path):
    path = log(tmp_path, "".join(nemo(n) for n in range(50)))
    noise = b"NCCL INFO AllReduce: opCount 3f sendbuff 0x7f recvbuff 0x7e count 16777216\n" * 1000
    with path.open("ab") as file:
        for _ in range(700):
            file.write(noise)
        for _ in range(700):  # one line of a progress bar that never ends
            file.write(noise.replace(b"\n", b" "))
    assert path.stat().st_size > 100e6
    code = (
        "import re, sys; from pathlib import Path; from jaxbench.report import logs; "
        "found = logs.read(Path(sys.argv[1])); status = Path('/proc/self/status').read_text(); "
        "print(len(found.steps.seconds), re.search(r'VmHWM:\\s+(\\d+)', status)[1])"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    steps, peak_kib = map(int, done.stdout.split())
    assert steps == 50
    assert peak_kib < 64 * 1024


@pytest.fixture
def record(tmp_path):
    """Writes a record of ours into a folder: `record(name, status=.., steps=..)`."""
    return partial(write_record, tmp_path)


def test_our_folders(record, tmp_path):
    record("good")
    record("smoke", label="smoke", not_comparable_because=["smoke row on a CPU"])
    record("lost", status="failed", reason="rank 3 is lost", steps=20)
    record("killed", status="running", steps=20)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"status": ')
    status, lines = reported(tmp_path)
    assert status == 1
    by_name = {line["path"].rsplit("/")[-1]: line for line in lines}
    assert {name: line["verdict"] for name, line in by_name.items()} == {
        "good": "pass", "smoke": "not comparable", "lost": "failed", "killed": "incomplete",
        "torn": "failed",
    }  # fmt: skip
    assert by_name["lost"]["reason"] == "rank 3 is lost"
    assert by_name["killed"]["reason"].startswith("it still runs, or was killed")
    assert by_name["torn"]["reason"].startswith("its record cannot be read")
    assert by_name["smoke"]["label"] == "smoke"


def test_other_formats(record, tmp_path, capsys):
    record("good")
    assert command.main([str(tmp_path), "--format", "csv"]) == 0
    (line,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (line["verdict"], float(line["step_time_s"])) == ("pass", 4.7)
    assert command.main([str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.count("| pass | llama2_70b_bf16:64 | 64 |") == 1
    assert command.main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "✓ pass   llama2_70b_bf16:64" in out
    assert err == "1 run: 1 without fault, 0 failed, interrupted, incomplete or slow\n"
    output = tmp_path / "report.txt"
    assert command.main([str(tmp_path), "--output", str(output)]) == 0
    assert "llama2_70b_bf16:64" in output.read_text()


def in_terminal(folder, width, monkeypatch, *, colours=False):
    """What a terminal of a width shows of a report."""
    text = io.StringIO()
    monkeypatch.setattr(command, "console", lambda: Console(
        file=text, width=width, force_terminal=colours, color_system="standard" if colours else None
    ))  # fmt: skip
    command.main([str(folder)])
    return text.getvalue()


def test_a_terminal_of_any_width_shows_all(record, tmp_path, monkeypatch):
    """A block for each run in 80 columns, a table in 200; each reason once, and what is wrong
    first."""
    for name in ("good", "better"):
        record(name, seconds=7.0)
    record("slow", seconds=7.9)
    record("lost", status="failed", reason="rank 3 is lost", steps=20)
    record("other", device="NVIDIA H200")
    reason = "the hardware is NVIDIA H200, the published one is H100"
    for width in (80, 200):
        text = in_terminal(tmp_path, width, monkeypatch)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        plain = " ".join(text.split())
        for said in ("rank 3 is lost", reason, "12.9 % slower than published (+0.901 s)"):
            assert plain.count(said) == 1, (width, said)
        assert text.count("11:44") == 1
        assert "99.9 % of the published" not in plain
        assert text.index("✕ failed") < text.index("✓ pass")
        for name in ("good", "better", "slow", "lost", "other"):
            assert f"llama2_70b_bf16:64 · {name}" in text
    coloured = in_terminal(tmp_path, 200, monkeypatch, colours=True)
    for verdict, colour in {"✓ pass": 32, "▼ slow": 33, "✕ failed": 31}.items():
        assert f"\x1b[{colour}m{verdict}" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in in_terminal(tmp_path, 200, monkeypatch, colours=True)


def test_a_smoke_run_says_so_once(record, tmp_path, capsys):
    record("smoke", row="smoke", recipe="llama31_8b_bf16")
    command.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "llama31_8b_bf16:smoke " in out
    assert "(smoke)" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "/nowhere: no such file or folder"),
        (["{empty}"], "found no run in "),
        (["{log}", "--window", "late"], "--window late: expected published, newer, or first:last"),
        (["{log}", "--window", "9:3"], "--window 9:3: expected"),
        (["--history", "{log}", "{log}"], "--history takes a threshold between 0 and 100"),
        (
            ["--history", "{log}", "--format", "csv"],
            "--history has no --format csv; expected one of table",
        ),
        (["--history", "{empty}"], "found no run in "),
        (["--compare", "{log}", "{log}", "--format", "html"], "--compare has no --format html"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", "log": log(tmp_path, nemo(0))}
    words = [text.format(**places) for text in arguments]
    assert_mistake(command.main, words, message, capsys)


def noisy(mean, seed):
    """Step times with a spread of 1 %."""
    return mean * np.random.default_rng(seed).normal(1, 0.01, 50)


@pytest.fixture
def repeats(record, tmp_path):
    """Folders of repeats: `repeats(name, mean, ..)` with a run for each mean."""

    def write(name, *means, **changes):
        for n, mean in enumerate(means):
            folder = record(f"{name}-{n}", **changes)
            lines = [
                json.dumps({"step": step, "step_time_s": s, "loss": 10.4})
                for step, s in enumerate(noisy(mean, len(name) + n))
            ]
            (folder / "steps.jsonl").write_text("\n".join(lines))
            (tmp_path / name).mkdir(exist_ok=True)
            folder.rename(tmp_path / name / str(n))
        return str(tmp_path / name)

    return write


def test_a_comparison_decides_what_the_spread_allows(repeats, capsys):
    a = repeats("a", 4.70, 4.72, 4.68)
    flags = {"flags": {"compiler_options": {"xla_some": True}}}
    cases = {
        "slower": repeats("slower", 4.95, 4.93, **flags), "faster": repeats("faster", 4.5, 4.51),
        "same": repeats("same", 4.71, 4.70), "undecided": repeats("undecided", 4.70, 4.95),
    }  # fmt: skip
    for verdict, b in cases.items():
        assert command.main(["--compare", a, b]) == (verdict == "slower"), verdict
        out, err = capsys.readouterr()
        assert out.startswith(f"{verdict}: the step time of B differs from A's by ")
        assert err == ""
        differs = "  flags.compiler_options.xla_some: None -> True" in out
        assert differs == (verdict == "slower")
    assert command.main(["--compare", a, cases["slower"], "--threshold", "10"]) == 0


def test_a_comparison_reads_the_records_of_all_runs():
    """The second run of B had another driver."""
    drivers = [{"versions": {"driver": driver}} for driver in ("580", "590")]
    assert values_of(drivers[:1]) == {"versions.driver": "580"}
    assert values_of(drivers) == {"versions.driver": "580, 590"}


def test_a_comparison_leaves_out_the_shell(record, capsys):
    sides = [record(name) for name in "ab"]
    for side in sides:
        variables = {"PATH": f"/{side.name}/bin", "NCCL_ALGO": side.name}
        (side / "environment.json").write_text(json.dumps(variables))
    assert command.main(["--compare", *map(str, sides)]) == 0
    out = capsys.readouterr().out
    assert "environment.NCCL_ALGO: a -> b" in out
    assert "PATH" not in out


def test_an_interval_covers_the_truth_as_often_as_it_says(repeats):
    """Of 200 pairs of runs of the same speed 10 should lie outside. Fewer than 4 or more than 20 do
    in one of a hundred such tests."""
    path = repeats("a", 4.7)
    (like,) = command.report([Path(path)], None)
    outside = 0
    for seed in range(200):
        pair = []
        for half in range(2):
            steps = Steps(dict(enumerate(noisy(4.7, 1000 + 2 * seed + half))))
            pair.append(replace(like, run=replace(like.run, steps=steps)))
        found = compare(pair[:1], pair[1:], 0.02)
        outside += not found.low <= 1 <= found.high
    assert 4 <= outside <= 20


@pytest.mark.parametrize("count", [2, 3])
def test_few_runs_that_differ_from_job_to_job(count, repeats):
    """Of 100 pairs of sides of the same speed 5 should lie outside, if jobs differ by 1 %."""
    (like,) = command.report([Path(repeats("a", 4.7))], None)
    generator = np.random.default_rng(7)

    def side():
        for _ in range(count):
            steps = 4.7 * generator.normal(1, 0.01) * generator.normal(1, 0.004, 50)
            run = replace(like.run, steps=Steps(dict(enumerate(steps.tolist()))))
            yield replace(like, run=run)

    found = [compare([*side()], [*side()], 0.02) for _ in range(100)]
    assert sum(not comparison.low <= 1 <= comparison.high for comparison in found) <= 12


def test_a_single_step_is_not_compared(repeats):
    (like,) = command.report([Path(repeats("a", 4.7))], None)
    one = replace(like, run=replace(like.run, steps=Steps({20: 4.7})))
    with pytest.raises(RecipeError, match="B needs at least two steps"):
        compare([like], [one], 0.02)
    assert compare([like], [one, one], 0.02).verdict == "same"


def test_the_ratio_lies_in_its_interval(repeats):
    """One run against two of unequal length and speed."""
    (like,) = command.report([Path(repeats("a", 4.7))], None)

    def of(seconds, count):
        return replace(
            like, run=replace(like.run, steps=Steps(dict.fromkeys(range(count), seconds)))
        )

    found = compare([of(4.7, 40)], [of(4.7, 400), of(5.17, 10)], 0.02)
    assert found.low <= found.ratio <= found.high < 1.01


def test_equal_runs_of_two_speeds_differ(repeats):
    """Each side has the same run twice, and one side is 10 % slower."""
    a, b = (command.report([Path(repeats(name, s))], None) for name, s in (("a", 4.7), ("b", 5.17)))
    assert compare(a * 2, b * 2, 0.02).verdict == "slower"


@pytest.mark.parametrize("count", [2, 8])
def test_repeats_narrow_an_interval(count, repeats):
    """By the root of their number, if they do not differ from each other."""
    (one,) = command.report([Path(repeats("a", 4.7))], None)
    alone, many = (compare([one] * n, [one] * n, 0.02) for n in (1, count))
    expected = (alone.high - alone.low) / count**0.5
    assert many.high - many.low == pytest.approx(expected, rel=0.05)


def changed_model(folder, into):
    """A record of the same row with half of the layers, so half of the FLOPs."""
    content = json.loads((folder / "run.json").read_text())
    rates = content["summary"]["tflops_per_gpu"]
    content["summary"]["tflops_per_gpu"] = {name: rate / 2 for name, rate in rates.items()}
    (into / "run.json").write_text(json.dumps(content))
    return into


def test_a_run_that_is_not_complete_has_no_step_time_in_a_history(record, tmp_path, capsys):
    record("good")
    record("failed", status="failed", reason="rank 3 is lost")
    assert command.main(["--history", str(tmp_path), "--format", "json"]) == 0
    (series,) = json.loads(capsys.readouterr().out)
    times = {run["verdict"]: run["step_time_s"] for run in series["runs"]}
    assert times == {"pass": 4.7, "failed": None}


def test_a_record_of_a_later_version_is_not_read(record, tmp_path):
    record("later", schema=2)
    status, (line,) = reported(tmp_path)
    assert (status, line["verdict"]) == (1, "failed")
    assert "it has schema 2, and this version of jaxbench reads 1" in line["reason"]


def test_logs_below_a_run_of_ours_belong_to_it(record, tmp_path):
    """As NCCL's traces do, in a folder with a name of a published script's."""
    traces = record(f"{EXPERIMENT}/1726") / "nccl-trace"
    traces.mkdir()
    (traces / "node.1.log").write_text("node:1:1 [0] NCCL INFO cudaDriverVersion 13000\n")
    status, (line,) = reported(tmp_path)
    assert (status, line["verdict"]) == (0, "pass")


def test_names_tell_runs_apart(record):
    for side in ("before", "after"):
        for number in (1, 2):
            record(f"{side}/{number}")
    folder = record("alone", label="log").parent
    found = sorted(run.name for run in named(command.report([folder], None), "published"))
    row = "llama2_70b_bf16:64"
    same = [f"{row} · {side}/{number}" for side in ("after", "before") for number in (1, 2)]
    assert found == sorted([*same, f"{row} · alone"])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"step_time_s": 1e308}, "the step time is 1e+308 at iteration 20"),
        ({"step_time_s": 1e-310}, "the step time is 1e-310 at iteration 20"),
        ({"step": 10**400}, "missing iterations 20"),
    ],
)
def test_impossible_steps_are_told(changed, reason, record, tmp_path):
    path = record("run") / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[20] = json.dumps(json.loads(lines[20]) | changed)
    path.write_text("\n".join(lines))
    _, (line,) = reported(tmp_path)
    assert line["reason"] == reason
    for options in ([str(tmp_path), "--format", "html"], ["--history", str(tmp_path)]):
        command.main([*options, "--output", str(tmp_path / "page")])


def test_texts_of_others_have_one_printable_line(record, tmp_path, capsys):
    record("good", reason="it failed\n✓ pass   llama2_70b_bf16:64", status="failed")
    (tmp_path / "evil\x1b[31m.out").symlink_to("/proc/self/mem")
    assert command.main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\n✓ pass" not in text
    broken = tmp_path / "evil\x1b[31m" / "run"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    assert command.main(["--compare", str(broken.parent), str(broken.parent)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_pipe_is_written_to(record, tmp_path):
    """And not replaced by a file."""
    record("good")
    pipe = tmp_path.parent / f"{tmp_path.name}-pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert command.main([str(tmp_path), "--format", "csv", "--output", str(pipe)]) == 0
    assert os.read(reader, 10_000).decode().startswith("verdict,")
    assert pipe.is_fifo()
    os.close(reader)


def test_another_model_has_a_history_of_its_own(record, capsys):
    good = record("good")
    folder = changed_model(good, record("half")).parent
    failed = record("failed", status="failed", reason="it has no step", summary=None)
    (failed / "steps.jsonl").unlink()
    assert command.main(["--history", str(folder), "--format", "json"]) == 0
    history = json.loads(capsys.readouterr().out)
    names = [series["row"] for series in history]
    assert sorted(len(series["runs"]) for series in history) == [1, 2]
    assert all(" TFLOP per GPU" in name for name in names)


def test_a_record_whose_starts_do_not_agree_is_one_bad_run(record, capsys):
    good = record("good")
    starts = [{"changed": {}}, {"changed": {"recipe.seed": [1, 2]}}]
    record("edited", starts=starts)
    assert command.main([str(good.parent), "--format", "csv"]) == 1
    lines = capsys.readouterr().out.splitlines()
    reason = "its record cannot be read: resumed_at has 0 steps, and starts has more"
    assert len(lines) == 3  # a heading and both runs
    assert sum(reason in line for line in lines) == 1


FOREIGN = {
    "an escape": lambda path: path.write_text(
        path.read_text().replace('"llama2_70b_bf16"', r'"\u001b[2Jllama\ud800"')
    ),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "environment.json", "plan.json"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_neither_stops_a_report_nor_writes_to_the_terminal(
    kind, name, record, capsys
):
    good, other = record("good"), record("other")
    (other / name).touch()
    FOREIGN[kind](other / name)
    for form in ("table", "markdown", "csv", "json"):
        command.main([str(good.parent), "--format", form])
        out = capsys.readouterr().out
        out.encode()
        assert "\x1b" not in out
        assert "pass" in out


def test_only_whole_runs_of_one_work_are_compared(record, capsys):
    good, other = record("good"), record("other")
    cut = record("cut", steps=20)
    content = json.loads((other / "run.json").read_text())
    content["recipe"]["gpus"] = 128
    (other / "run.json").write_text(json.dumps(content))
    for b, message in (
        (cut, "B needs complete runs, but this one is incomplete"),
        (other, "A and B are of different work"),
        (changed_model(good, record("half")), " TFLOP per GPU"),
    ):
        assert_mistake(command.main, ["--compare", good, b], message, capsys)
    assert command.main(["--compare", str(good), str(good)]) == 0
    assert "only one run of A" in capsys.readouterr().out


def test_verdicts():
    assert judge(10.0, 9.5).name == "pass"
    assert judge(10.0, 9.49).name == "slow"
    assert judge(10.0, 9.5, not_comparable=["another GPU"]).ratio is None
    assert judge(10.0, None).reason == "nothing is published for this work"
    assert judge(None, 9.5).name == "incomplete"
    assert judge(10.0, 9.5, failed="NaN", incomplete=["short"]).name == "failed"


@pytest.mark.parametrize(
    ("repeats", "order", "whole"),
    [
        ("never", (0, 1, 2), True), ("never", (0, 1, 1, 2), False), ("never", (0, 1, 2, 1), False),
        ("redrawn", (0, 1, 1, 2), True), ("redrawn", (0, 1, 0, 1, 2), False),
        ("processes", (0, 0, 1, 1, 2, 2), True), ("processes", (0, 1, 0, 1, 2, 2), True),
        ("processes", (0, 1, 2, 1, 2), False), ("processes", (0, 1, 2, 0, 1, 2), False),
    ],
)  # fmt: skip
def test_when_an_iteration_may_come_again(repeats, order, whole):
    steps = Steps(expected=3, repeats=repeats)
    for place, n in enumerate(order):
        steps.add(n, 1.0 + place, 5.0)
    assert (steps.problems() == []) == whole
    if whole and repeats == "redrawn":
        assert steps.seconds[1] == 3.0


def test_a_run_too_short_for_the_published_window_never_passes(tmp_path):
    log(tmp_path, "".join(nemo(n, last=39) for n in range(40)))
    found = verdict_of(tmp_path).verdict
    assert found.name == "not comparable"
    assert found.reason == "40 iterations: the published means are of iterations 11 to 44"


@pytest.mark.parametrize("where", ["name", "folder", "lines"])
def test_profiled_and_traced_logs_never_pass(where, tmp_path):
    text = "".join(nemo(n) for n in range(50))
    trace = "host:1 NCCL INFO AllGather: opCount 3f sendbuff 0x7f\n" if where == "lines" else ""
    name = f"log-{EXPERIMENT}_nccltrace.out" if where == "name" else f"log-{EXPERIMENT}.out"
    path = log(tmp_path, trace + text, name)
    if where == "folder":
        (path.parent / "nsys_profile").mkdir()
    found = verdict_of(tmp_path).verdict
    assert (found.name, found.reason) == ("not comparable", "it was profiled, or traced by NCCL")


def test_a_log_that_made_no_iteration_is_a_failed_run(tmp_path):
    log(tmp_path, "Traceback (most recent call last):\n")
    found = verdict_of(tmp_path).verdict
    known = "maxtext log, nemo log, nemo progress bar"
    assert (found.name, found.reason) == (
        "failed", f"it has no iteration in a known format ({known})",
    )  # fmt: skip


CUT = {
    "loss: --": ("reduced_train_loss: 11.9", "reduced_train_loss: --"),
    "cut off in a number": ("train_step_timing in s: 12.37 |", "train_step_timing in s: 1.2e-"),
    "a long number": ("iteration 7/", f"iteration {'7' * 5000}/"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_line_that_is_none_is_a_missing_iteration(name, tmp_path):
    lines = [nemo(n) for n in range(50)]
    lines[7] = lines[7].replace(*CUT[name])
    log(tmp_path, "".join(lines))
    found = verdict_of(tmp_path).verdict
    assert (found.name, found.reason) == ("incomplete", "missing iterations 7")


@pytest.mark.parametrize("seconds", [0.0, -300.0])
def test_a_time_that_is_none_fails(seconds, tmp_path):
    log(tmp_path, "".join(nemo(n, seconds if n == 20 else 12.0) for n in range(50)))
    found = verdict_of(tmp_path).verdict
    assert (found.name, found.reason) == ("failed", f"the step time is {seconds} at iteration 20")


ODD = {
    "no reasons": {"not_comparable_because": None}, "no device": {"hardware": {"device": None}},
    "a list": {"summary": [1]}, "a word": {"published": "x"},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_record_that_is_none_is_a_failed_run(name, record, tmp_path):
    record("odd", **ODD[name])
    found = verdict_of(tmp_path).verdict
    assert found.name == "failed"
    assert found.reason.startswith("its record cannot be read: ")


def test_steps_of_a_restored_run_count_from_its_checkpoint(record, tmp_path):
    folder = record("restored", first_step=20)
    lines = (folder / "steps.jsonl").read_text().splitlines()
    (folder / "steps.jsonl").write_text("\n".join(lines[20:]))
    found = verdict_of(tmp_path)
    assert found.window == (35, 49)  # not the published one, of which it has not all steps
    assert found.verdict.name == "not comparable"
    assert "iterations 20 to 49: the published means are of" in found.verdict.reason
    (folder / "steps.jsonl").write_text("\n".join(lines[22:]))
    assert verdict_of(tmp_path).verdict.reason == "missing iterations 20, 21"


PROGRAM = {"recipe.batch.microbatch": [4, 1]}


@pytest.mark.parametrize(
    ("changed", "seconds", "reason"),
    [
        ({}, [4.7] * 20 + [5.0] * 30, None),
        (PROGRAM, [4.7] * 20 + [5.0] * 30, None),
        (
            PROGRAM,
            [4.7] * 46 + [5.0] * 4,
            "iterations 11 to 44 belong to another program: it changed",
        ),
        ({}, [4.7] * 46 + [5.0] * 4, None),
    ],
)
def test_a_mean_is_of_one_start(changed, seconds, reason, record, tmp_path):
    """The run's own window, or a given one."""
    resumed = seconds.index(5.0)
    begun = [{"step": 0, "changed": {}}, {"step": resumed, "changed": changed}]
    folder = record("resumed", seconds=seconds, resumed_at=[resumed], starts=begun)
    found = json.loads((folder / "run.json").read_text())
    found["summary"]["window"] = [35, 49] if resumed == 20 else [11, 44]
    (folder / "run.json").write_text(json.dumps(found))
    result = verdict_of(tmp_path)
    assert result.mean_s == (None if reason else pytest.approx(5.0 if resumed == 20 else 4.7))
    if reason:
        assert result.verdict.reason.startswith(reason)


def test_steps_that_are_none_are_missing(record, tmp_path):
    folder = record("odd")
    lines = (folder / "steps.jsonl").read_text().splitlines()
    lines[3] = '{"step": Infinity, "step_time_s": 1.0, "loss": 1.0}'
    lines[4] = "[" * 100000
    lines[5] = lines[5].replace("4.7", '"x"')
    (folder / "steps.jsonl").write_text("\n".join(lines))
    assert verdict_of(tmp_path).verdict.reason == "missing iterations 3, 4, 5"
    (folder / "run.json").unlink()
    assert verdict_of(tmp_path).verdict.name == "failed"


def test_each_run_once_whatever_lies_in_a_folder(record, tmp_path):
    record("good")
    log(tmp_path, "".join(nemo(n) for n in range(50)))
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.log").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "a.log")
    (tmp_path / "notes.txt").write_text("hello")
    assert len(command.report([tmp_path], None)) == 2


def test_the_nearest_name_says_what_a_log_is(tmp_path):
    path = tmp_path / "pretrain_llama3.1_405b_bf16_512" / f"log-{EXPERIMENT}.out"
    assert logs.workload_of(path) == ("llama3.1", "405b", "fp8", 512)
    assert logs.workload_of(tmp_path / "fp8" / "log-nemo_grok1_314b_64_1.out").dtype == "fp8"


def test_runs_of_null_gpus_stand_beside_nothing(tmp_path, capsys):
    """A record that says of its device that it computes nothing, and nothing else."""
    path = write_record(tmp_path, "run", device="NVIDIA H100 80GB HBM3 (null)",
                        not_comparable_because=[])  # fmt: skip
    verdict = verdict_of(path).verdict
    assert (verdict.name, verdict.reason, verdict.ratio) == ("not comparable", hardware.NULL, None)
    for arguments in (["--history", path], ["--compare", path, path]):
        assert command.main([*map(str, arguments)]) == 2
        assert capsys.readouterr() == ("", f"error: {path}: {hardware.NULL}; leave it out\n")
