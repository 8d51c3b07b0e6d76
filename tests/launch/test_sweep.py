"""launch/sweep.py: which runs of a list are submitted, and what is refused before the first."""

import json
import sys

import pytest
from launching import slurm, submit, sweep

from jaxbench.base.errors import RecipeError
from jaxbench.base.files import owned

LIST = "- {config: llama31_8b_bf16, gpus: [8, 16], repeats: 2}\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a list, in a place where jobs can start."""
    variables = {
        "PATH": slurm(tmp_path), "STAGE_PATH": str(tmp_path / "stage"), "JAXBENCH_VENV": sys.prefix,
    }  # fmt: skip
    monkeypatch.setattr(submit.os, "environ", variables)
    (tmp_path / "runs.yaml").write_text(LIST)
    return tmp_path


def jobs(here):
    """What the sweep knows."""
    return json.loads((here / "runs.jobs.json").read_text())


def scripts(here):
    """How many jobs were submitted."""
    return len(list(here.glob("script-*")))


def end(here, cause=None, **states):
    """Gives jobs a record."""
    for job in jobs(here).values():
        if (status := states.get(f"job{job['id']}")) is not None:
            record = sweep.Path(job["folder"]) / "run.json"
            record.write_text(json.dumps({"status": status, "cause": cause}))


def refused(here, capsys, message, *options):
    """The sweep ends with one line, and submits nothing."""
    before = scripts(here)
    assert sweep.main([str(here / "runs.yaml"), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:7]) == ("", 1, "error: ")
    assert message in err
    assert scripts(here) == before


def test_a_sweep_skips_what_is_done(here, capsys):
    path = str(here / "runs.yaml")
    (here / "refused").write_text("too many nodes\n")
    assert sweep.main([path, "--show"]) == 0
    assert scripts(here) == 0
    assert sweep.main([path]) == 0
    assert scripts(here) == 4
    assert capsys.readouterr().err.count("Slurm will never start this job (too many nodes)") == 4
    end(here, job77="completed", job78="failed", job79="completed", job80="running")
    (here / "queue").write_text("80\n")
    capsys.readouterr()
    assert sweep.main([path]) == 0
    assert scripts(here) == 5  # only the one that failed
    out = capsys.readouterr().out
    assert out.count("completed") == 2
    assert "llama31_8b_bf16          8 GPUs  run 1  failed, submitted           81\n" in out


def test_a_sweep_names_runs_of_other_options(here, capsys):
    path = str(here / "runs.yaml")
    assert sweep.main([path, "--", "--cpu", "--", "--steps", "9"]) == 0
    capsys.readouterr()
    assert sweep.main([path, "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.rstrip().endswith("new; submitted with --cpu -- --steps 9") for line in lines)


def test_a_sweep_shows_why_a_run_ended(here, capsys):
    path = str(here / "runs.yaml")
    assert sweep.main([path]) == 0
    end(here, job77="failed", job78="failed", cause="network")
    end(here, job79="interrupted", cause="time limit")
    capsys.readouterr()
    assert sweep.main([path, "--show"]) == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith("run 0  failed: network             77")
    assert second.endswith("run 1  failed: network             78")
    assert third.endswith("run 0  interrupted: time limit     79")
    assert fourth.endswith("run 1  lost                        80")


@pytest.mark.parametrize(("status", "cause"), [("failed", "lost"), ("interrupted", "preempted")])
def test_a_job_that_comes_back_is_not_submitted_again(status, cause, here, capsys):
    """Its record says how the start before ended, until the next one begins."""
    path = str(here / "runs.yaml")
    assert sweep.main([path]) == 0
    (here / "queue").write_text("77\n78\n79\n80\n")
    end(here, job78=status, cause=cause)
    capsys.readouterr()
    assert sweep.main([path]) == 0
    assert scripts(here) == 4
    assert capsys.readouterr().out.count("pending") == 4


def test_a_sweep_reports_what_has_run(here, capsys):
    argv = [str(here / "runs.yaml"), "--show", "--report"]
    assert sweep.main(argv) == 0  # nothing has
    assert sweep.main(argv[:1]) == 0
    first = next(iter(jobs(here).values()))
    folder = sweep.Path(first["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"status": "failed"}))
    capsys.readouterr()
    assert sweep.main(argv) == 1
    out, err = capsys.readouterr()
    assert f"✕ failed  {folder.name}: its record cannot be read: 'recipe'" in out
    assert "iterations" not in out
    assert f"page: {here / 'runs.html'}\n" in out
    assert folder.name in (here / "runs.html").read_text()
    assert err == "1 run: 0 without fault, 1 failed, interrupted, incomplete or slow\n"


def test_what_is_told_to_all_is_part_of_a_run(here):
    path = str(here / "runs.yaml")
    for _ in range(2):
        (here / "queue").write_text("\n".join(str(77 + n) for n in range(scripts(here))))
        assert sweep.main([path]) == 0
        assert sweep.main([path, "--", "--system", "hgx_h100"]) == 0
        assert sweep.main([path, "--", "--", "--set", "batch.microbatch=2"]) == 0
        (here / "queue").write_text("\n".join(str(77 + n) for n in range(scripts(here))))
    assert scripts(here) == 3 * 4
    assert "--set batch.microbatch=2" in (here / "script-88").read_text()
    assert "llama31_8b_bf16 8 0" in jobs(here)  # as before there were options


def test_settings_of_an_entry_are_part_of_a_run(here, capsys):
    (here / "runs.yaml").write_text(
        "- {config: llama31_8b_bf16, gpus: 8}\n"
        "- {config: llama31_8b_bf16, gpus: 8, set: batch.microbatch=2}\n"
        "- {config: configs/llama31_8b_bf16.yaml, gpus: 8, set: [batch.microbatch=4]}\n"
    )
    assert sweep.main([str(here / "runs.yaml")]) == 0
    assert scripts(here) == 3
    assert "--set batch.microbatch=4" in (here / "script-79").read_text()
    assert "run 0  batch.microbatch=4  new, submitted" in capsys.readouterr().out


def test_a_recipe_of_ones_own_is_another_one(here):
    text = (submit.ROOT / "configs" / "llama31_8b_bf16.yaml").read_text()
    (here / "llama31_8b_bf16.yaml").write_text(text)
    (here / "runs.yaml").write_text(
        "- {config: llama31_8b_bf16, gpus: 8}\n"
        f"- {{config: {here}/llama31_8b_bf16.yaml, gpus: 8}}\n"
    )
    assert sweep.main([str(here / "runs.yaml")]) == 0
    assert scripts(here) == 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{config: llama31_8b_bf16, gpus: 9}", "9 GPUs do not fill nodes of 8"),
        ("{config: nothing, gpus: 8}", "nothing.yaml: No such file"),
        ("{config: llama31_8b_bf16, gpus: eight}", "expected a number, or a list of numbers"),
        ("{config: llama31_8b_bf16, gpus: 8, set: a.b=1}", "unknown key 'a.b'"),
        ("{config: llama31_8b_bf16, gpus: 8, repeat: 2}", "expected config, gpus and, optionally"),
        ("{config: llama31_8b_bf16, gpus: 8, repeats: some}", "a number above 0 as repeats"),
        ("{config: 8, gpus: 8}", "expected a recipe as config"),
        ("{config: llama31_8b_bf16, gpus: 8}", "the same run as"),
        ("configs", "expected config, gpus and, optionally, repeats and set"),
    ],
)
def test_every_entry_is_checked_before_the_first_is_submitted(second, message, here, capsys):
    path = here / "runs.yaml"
    path.write_text(f"{LIST}- {second}\n")
    shown = json.dumps(submit.yaml.safe_load(second))
    refused(here, capsys, f"{path}, entry 2 ({shown}): ")
    refused(here, capsys, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shw",), "unrecognized arguments: --shw"),
        (("--", "--checkpoint"), "--checkpoint is an option of train"),
        (("--", "--gpus", "16"), "--gpus after -- contradicts the list"),
        (("--", "--dry-run"), "a sweep has no dry run; use --show"),
        (("--", "--", "--output", "x"), "only the launcher sets --output"),
    ],
)
def test_a_mistake_is_one_line(options, message, here, capsys):
    refused(here, capsys, message, *options)


def test_what_slurm_refuses_names_its_entry(here, capsys):
    slurm(here, answer="#!/bin/sh\necho 'no such account' >&2; exit 1\n")
    refused(here, capsys, 'repeats": 2}): sbatch: no such account')


def test_without_slurm_it_says_so(here, monkeypatch, capsys):
    monkeypatch.setitem(submit.os.environ, "PATH", str(here))
    message = "there is no squeue here; on one host use launch/run.sh"
    refused(here, capsys, message)
    refused(here, capsys, message, "--show")


def test_a_queue_that_cannot_be_read_loses_no_jobs(here, capsys):
    """Everything would look lost, and be submitted again."""
    squeue = here / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error' >&2; exit 1\n")
    refused(here, capsys, "squeue: slurm_load_jobs error")


def test_files_that_are_none_are_one_line(here, capsys):
    for text in ("{", "[1]", '{"a": 1}', '{"a": {"id": 1}}'):
        (here / "runs.jobs.json").write_text(text)
        refused(here, capsys, "runs.jobs.json: not what a sweep wrote")
    (here / "runs.jobs.json").unlink()
    twice = "- {config: a, gpus: 8, gpus: 16}"
    for text, message in (
        ("a: [", "not valid YAML"),
        (twice, "line 1: the key 'gpus' occurs"),
        ("", "expected a list of {config"),
    ):
        (here / "runs.yaml").write_text(text)
        refused(here, capsys, message)
        with pytest.raises(RecipeError, match=message.split(" {")[0]):
            sweep.entries(here / "runs.yaml")


def test_two_sweeps_of_a_list_at_once_submit_its_jobs_once(here, capsys):
    with owned(here / "runs.jobs.json"):
        refused(here, capsys, "runs.jobs.json is in use by process ")
        assert sweep.main([str(here / "runs.yaml"), "--show"]) == 0
