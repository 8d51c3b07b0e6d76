"""Logs as terminals, launchers and other programs write them."""

import re

import made_runs
import pytest
from made_runs import EXPERIMENT, bar, log, maxtext, nemo

from jaxbench.report import command, logs
from jaxbench.report.runs import evaluate
from jaxbench.results.window import WINDOWS

NAMES = {
    nemo: f"log-{EXPERIMENT}.out",
    maxtext: "log-maxtext_llama2_70b_64_1407993.out",
    bar: "log-nemo_nemotron4_340b_128_55.out",
}
WORKLOADS = {
    maxtext: "GSW: MODEL=llama2 MODEL_SIZE=70b DTYPE=bf16 JOB_NUM_NODES=8 GPUS_PER_NODE=8\n",
    bar: "GSW: MODEL=nemotron4 MODEL_SIZE=340b DTYPE=bf16\n",
    nemo: "",
}


def found(folder, text, of=nemo):
    """The result of one log."""
    log(folder, WORKLOADS[of] + text, NAMES[of])
    (run,) = command.find(folder)
    return evaluate(run, WINDOWS["published"])


@pytest.mark.parametrize("of", NAMES, ids=lambda of: of.__name__)
@pytest.mark.parametrize("lost", [20, 49])
def test_a_lost_newline_costs_no_iteration(of, lost, tmp_path):
    lines = [of(n) for n in range(50)]
    lines[lost - 1] = lines[lost - 1].rstrip()
    result = found(tmp_path, "".join(lines), of)
    assert len(result.run.steps.seconds) == 50
    assert result.verdict.name in ("pass", "slow")


def test_a_newline_lost_behind_the_time_gives_each_iteration_its_own(tmp_path):
    lines = [nemo(n, seconds=10.0 + n).partition(" | consumed")[0] for n in range(50)]
    result = found(tmp_path, "".join(lines))
    assert result.run.steps.seconds == {n: 10.0 + n for n in range(50)}


@pytest.mark.parametrize("of", NAMES, ids=lambda of: of.__name__)
@pytest.mark.parametrize("code", ["\x1b[32m", "\x1b[1;38;5;12m", "\x1b[0K", "\x1b]0;title\x07"])
def test_colours_are_removed(of, code, tmp_path):
    text = "".join(of(n) for n in range(50))
    text = re.sub(r"(\d[\d.]*)", rf"{code}\1" "\x1b[0m", text)
    result = found(tmp_path, text, of)
    assert len(result.run.steps.seconds) == 50
    assert result.verdict.name in ("pass", "slow")


def growing(of, before, after):
    """A log whose batch grows at iteration 30."""
    lines = [of(n) for n in range(50)]
    return "".join([*lines[:30], *(line.replace(before, after) for line in lines[30:])])


@pytest.mark.parametrize(
    ("of", "text", "reason"),
    [
        (nemo, growing(nemo, "size: 256", "size: 512"), "from 256 to 512 sequences"),
        (maxtext, growing(maxtext, "weights: 524288", "weights: 262144"), "524288 to 262144 tok"),
        (
            bar,
            "".join(
                bar(n).replace(f"={32 * (n + 1)}.0", f"={32 * (n + 1) + 32 * max(0, n - 29)}.0")
                for n in range(50)
            ),
            "from 32 to 64 sequences",
        ),
    ],
)
def test_a_batch_that_changes_is_not_comparable(of, text, reason, tmp_path):
    verdict = found(tmp_path, text, of).verdict
    assert verdict.name == "not comparable"
    assert verdict.reason.startswith("a step changes from ")
    assert reason in verdict.reason
    assert verdict.reason.endswith(" at iteration 30"), verdict.reason


TORCHTITAN = (
    "[rank0]:[titan] - root - INFO - step: 10  loss:  7.1  memory: 40GiB(50%)  tps: 7,123\n"
)
MEGATRON = (
    " [2026-01-01 00:00:00] iteration       10/      50 | consumed samples:   2560 | "
    "elapsed time per iteration (ms): 12370.1 | lm loss: 1.1E+01 |\n"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TORCHTITAN, "torchtitan"),
        (f"\x1b[31m{TORCHTITAN}", "torchtitan"),
        (MEGATRON, "Megatron-LM or Megatron-Bridge"),
    ],
)
def test_a_log_of_another_program_is_a_row_that_says_so(text, name, tmp_path):
    (tmp_path / "other.log").write_text(text * 50)
    log(tmp_path, "".join(nemo(n) for n in range(50)))
    other, ours = (evaluate(run, WINDOWS["published"]) for run in command.find(tmp_path))
    if ours.verdict.name == "failed":
        other, ours = ours, other
    assert ours.verdict.name == "pass"
    known = ", ".join(logs.FORMATS)
    assert other.verdict.reason == (
        f"a log of {name}: it has no iteration in a known format ({known})"
    )


def test_what_cannot_be_read_is_a_row_next_to_the_others(tmp_path, monkeypatch):
    made_runs.write_record(tmp_path, "a")
    made_runs.write_record(tmp_path, "b")
    made_runs.write_record(tmp_path, "c")
    whole = logs.opened

    def refuse(path):
        if path.parent.name == "b" and path.name == "steps.jsonl":
            raise PermissionError(13, "Permission denied")
        return whole(path)

    is_run = command.folders.is_run

    def refuse_folder(path):
        if path.name == "c":
            raise PermissionError(13, "Permission denied")
        return is_run(path)

    monkeypatch.setattr(logs, "opened", refuse)
    monkeypatch.setattr(command.folders, "is_run", refuse_folder)
    runs = {run.path.name: run.failed for run in command.find(tmp_path)}
    assert runs == {
        "a": None,
        "b": "steps.jsonl cannot be read: Permission denied",
        "c": "it cannot be read: Permission denied",
    }
