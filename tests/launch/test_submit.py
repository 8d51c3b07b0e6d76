"""What launch/submit.sh, submit.py and setup.sh check where they run, and what they say."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from launching import SBATCH, STAGE, job, refused, slurm, submit
from variables import KNOWN

from jaxbench.report.command import report


@pytest.fixture
def here(tmp_path):
    """Variables of a place where jobs can start."""
    stage = tmp_path / "the stage"
    return {"PATH": slurm(tmp_path), "STAGE_PATH": str(stage), "JAXBENCH_VENV": sys.prefix}


def submitted(options, variables, monkeypatch, capsys):
    """(lines on stdout, on stderr) of a submission."""
    monkeypatch.setattr(submit.os, "environ", variables)
    status = submit.main(list(options))
    out, err = capsys.readouterr()
    assert status == 0, err
    return out.splitlines(), err.splitlines()


@pytest.mark.parametrize("options", [(), ("--cpu",)])
def test_a_submission_says_how_to_watch_it(options, here, monkeypatch, capsys):
    """The file of `log` in launch/slurm.sbatch; its folder is there, for tail -F."""
    options = ("llama31_8b_bf16", "--gpus", "8", *options)
    (first, second), err = submitted(options, here, monkeypatch, capsys)
    assert err == []
    folder = Path(first.removeprefix("job 77: "))
    assert folder.parent.parent.parent.parent.parent == Path(here["STAGE_PATH"], "results")
    assert folder.is_dir()
    command = shlex.split(second.removeprefix("watch it: "))
    assert command == ["tail", "-F", f"{folder}/sbatch_jaxbench_llama31_8b_bf16_8_77.out"]
    body = (ROOT / "launch" / "slurm.sbatch").read_text()
    assert "log=$folder/sbatch_jaxbench_${JAXBENCH_NAME}_$job.out" in body
    assert "folder=$JAXBENCH_RESULTS/$job" in body


def test_a_limit_without_time_to_save_is_a_warning(here, monkeypatch, capsys):
    options = ("llama31_8b_bf16", "--gpus", "8", "--time", "2", "--", "--checkpoint")
    out, (line,) = submitted(options, here, monkeypatch, capsys)
    assert out[0].startswith("job 77: ")
    assert line.startswith("warning: a time limit of 2 leaves no time to save")


def test_jobs_of_several_nodes_begin_with_a_check(monkeypatch, capsys):
    def check(*options):
        settings = job("llama31_8b_bf16", *options, **STAGE).settings
        return settings["JAXBENCH_CHECK"], settings["JAXBENCH_CHECK_OPTIONS"]

    assert check("--gpus", "16") == ("on", "--local-devices 1")
    assert check("--gpus", "8", "--processes-per-node", "1") == ("off", "--local-devices 8")
    assert check("--gpus", "16", "--cpu") == ("off", "--cpu-devices 1")
    assert check("--gpus", "16", "--check", "warn")[0] == "warn"
    for options in (("--gpus", "16", "--check", "off"), ("--gpus", "8")):
        words = "llama31_8b_bf16", *options, "--exclude-slow"
        refused(words, STAGE, "--exclude-slow", monkeypatch, capsys)


def test_what_nothing_is_published_for_says_so():
    assert job("llama31_8b_bf16", "--gpus", "8", **STAGE).remarks() == []
    assert job("nemotronh_56b_bf16", "--gpus", "4", "--cpu", **STAGE).remarks() == []
    (line,) = job("nemotronh_56b_bf16", "--gpus", "128", **STAGE).remarks()
    assert line.startswith("nothing is published for nemotronh_56b_bf16 on 128 H100s: ")
    (line,) = job("llama31_8b_bf16", "--gpus", "1", **STAGE).remarks()
    assert line.startswith("nothing is published for llama31_8b_bf16 on 1 H100: ")
    changed = job("llama31_8b_bf16", "--gpus", "8", "--set", "batch.global_batch=64", **STAGE)
    (line,) = changed.remarks()
    assert "llama31_8b_bf16 on 8 H100s with these settings: " in line


def test_what_may_not_be_meant_is_a_warning(here, tmp_path, monkeypatch, capsys):
    """A variable that nothing reads, and nodes that Slurm does not have; it may have them later."""
    answer = """#!/bin/sh
if [ "$1" = --test-only ]; then echo "allocation failure: too many nodes" >&2; exit 1; fi
echo 77
"""
    path = slurm(tmp_path, answer=answer)
    variables = here | {"PATH": path, "ENABLE_CHECKPOIN": "true", "SLURM_TIME_LIMIT": "1"}
    (first, *_), err = submitted(RUN, variables, monkeypatch, capsys)
    assert first.startswith("job 77: ")
    assert err == [
        "warning: ENABLE_CHECKPOIN is not read; is ENABLE_CHECKPOINT meant?",
        "warning: with the nodes as they are, Slurm will never start this job (allocation failure: "
        "too many nodes); scancel ends it",
    ]


SHELL = {
    "SBATCH_TIMELIMIT": "1", "SBATCH_ARRAY_INX": "0-3", "SBATCH_EXPORT": "NONE", "SBATCH_QOS": "a",
    "SBATCH_REQUEUE": "0", "SLURM_DISTRIBUTION": "cyclic", "SLURM_LABELIO": "1",
    "SLURM_NTASKS": "9", "SLURM_CONF": "/etc/slurm.conf", "NCCL_DEBUG": "INFO",
}  # fmt: skip
"""Variables of a shell in an allocation, of which a job's options are none."""


def test_a_shell_s_variables_do_not_change_a_job(here, tmp_path, monkeypatch, capsys):
    answer = SBATCH.replace("cat >", 'env > "{folder}/environment"; cat >')
    variables = here | SHELL | {"PATH": slurm(tmp_path, answer=answer)}
    _, err = submitted(RUN, variables, monkeypatch, capsys)
    ignored = ("ARRAY_INX", "EXPORT", "REQUEUE", "TIMELIMIT")
    expected = "is not read: a job has the options of launch/submit.sh, such as --sbatch"
    assert err == [f"warning: SBATCH_{name} {expected}" for name in ignored]
    lines = (tmp_path / "environment").read_text().splitlines()
    given = {line.partition("=")[0] for line in lines} & SHELL.keys()
    assert given == {"SLURM_CONF", "NCCL_DEBUG"}
    script = (tmp_path / "script-77").read_text()
    assert "#SBATCH --qos=a" in script.splitlines()
    assert "srun --export=ALL --distribution=block " in script
    clearing = script.index('unset "${!JAXBENCH_@}" "${!RUN_CONF_@}"')
    assert clearing < script.index("export JAXBENCH_ROOT=")


def test_a_job_describes_itself_before_it_runs(tmp_path):
    """`jaxbench report` reads it as it reads a run."""
    made = job("llama31_8b_bf16", "--gpus", "8", GPU_TYPE="b200", **STAGE)
    ended = {"status": "failed", "cause": "gpu", "reason": "check: n1 gpu 0: MIG is on"}
    (tmp_path / "job.json").write_text(json.dumps(made.record("1-1") | ended))
    (found,) = report([tmp_path], None)
    assert (found.run.recipe, found.run.gpus, found.run.dtype) == ("llama31_8b_bf16:8", 8, "bf16")
    assert (found.verdict.name, found.verdict.reason) == ("failed", ended["reason"])


def test_the_launcher_reads_the_variables_that_it_knows_and_no_others():
    text = "".join(path.read_text() for path in (ROOT / "launch").glob("*.py"))
    calls = re.findall(r"variables\.(?:text|flag|number)\(([^)]*)\)", text)
    read = {name for call in calls for name in re.findall(r'"([A-Z_]+)"', call)}
    assert {name for name in read if name[:6] != "SLURM_"} <= set(KNOWN)


def test_a_submission_says_that_nothing_is_published(here, monkeypatch, capsys):
    options = ("nemotronh_56b_bf16", "--gpus", "128")
    out, _ = submitted(options, here, monkeypatch, capsys)
    assert out[2].startswith("nothing is published for nemotronh_56b_bf16 on 128 H100s")
    out, _ = submitted((*options, "--dry-run"), here, monkeypatch, capsys)
    assert out[-1].startswith("# nothing is published for nemotronh_56b_bf16 on 128 H100s")


RUN = ("llama31_8b_bf16", "--gpus", "8")


def test_without_slurm_it_says_so(here, tmp_path, monkeypatch, capsys):
    message = "there is no sbatch here; on one host use launch/run.sh"
    refused(RUN, here | {"PATH": str(tmp_path)}, message, monkeypatch, capsys)
    assert not Path(here["STAGE_PATH"]).exists()


def test_a_refusal_of_slurm_is_one_line(here, tmp_path, monkeypatch, capsys):
    answer = "#!/bin/sh\nprintf 'sbatch: error: no\\nsbatch: such account\\n' >&2; exit 1\n"
    monkeypatch.setattr(submit.os, "environ", here | {"PATH": slurm(tmp_path, answer=answer)})
    assert submit.main(list(RUN)) == 2
    assert capsys.readouterr().err == "error: sbatch: sbatch: error: no sbatch: such account\n"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STAGE_PATH": "/proc/none"}, "cannot write to /proc/none/results/"),
        ({"STAGE_PATH": "/dev/null"}, "Not a directory; set STAGE_PATH (or LLMB_INSTALL) to a fol"),
        ({"RUN_CONF_IMAGE": "/none.sqsh"}, "RUN_CONF_IMAGE: there is no file /none.sqsh; launch/"),
        ({"RUN_CONF_IMAGE": "ubuntu"}, f"RUN_CONF_IMAGE: there is no file {Path.cwd()}/ubuntu;"),
        (
            {"RUN_CONF_IMAGE": "docker://python:3.12", "STAGE_PATH": "/tmp/a,b"},
            "/tmp/a,b: a container cannot mount a path with : or ,",
        ),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_line(variables, message, here, monkeypatch, capsys):
    refused(RUN, here | variables, message, monkeypatch, capsys)


def test_a_folder_of_somebody_else_is_one_line(here, monkeypatch, capsys):
    """Root may write everywhere, so this only asks what is made of the answer."""
    monkeypatch.setattr(submit.sbatch.os, "access", lambda path, mode: mode == os.X_OK)
    message = ": Permission denied; set STAGE_PATH"
    refused(RUN, here, message, monkeypatch, capsys)


def test_an_image_needs_pyxis(here, tmp_path, monkeypatch, capsys):
    image = {"RUN_CONF_IMAGE": "docker://python:3.12"}
    (first, _), _ = submitted(RUN, here | image, monkeypatch, capsys)
    assert first.startswith("job ")
    path = slurm(tmp_path, pyxis=False)
    message = "RUN_CONF_IMAGE needs pyxis: srun has no option --container-image here"
    refused(RUN, here | image | {"PATH": path}, message, monkeypatch, capsys)


def test_an_image_that_is_a_file_goes_by_its_whole_path(here, tmp_path, monkeypatch, capsys):
    """Pyxis takes a name without a folder for an image of a registry."""
    monkeypatch.chdir(tmp_path)
    Path("my image.sqsh").touch()
    submitted(RUN, here | {"RUN_CONF_IMAGE": "my image.sqsh"}, monkeypatch, capsys)
    script = (tmp_path / "script-77").read_text()
    assert f"export RUN_CONF_IMAGE='{tmp_path}/my image.sqsh'" in script.splitlines()
    made = job(*RUN, **STAGE, RUN_CONF_IMAGE="nvcr.io#nvidia/jax:25.01")
    assert made.settings["RUN_CONF_IMAGE"] == "nvcr.io#nvidia/jax:25.01"


def test_a_container_mounts_what_its_processes_read(tmp_path):
    """Source, stage, recipe, checkpoint and virtual environment, unless one is inside another, or
    the environment is one of the image."""
    image = {"RUN_CONF_IMAGE": "docker://python:3.12", "STAGE_PATH": "/stage"}
    recipe, saved, venv = tmp_path / "own.yaml", tmp_path / "saved", tmp_path / "venv"
    recipe.write_text((ROOT / "configs" / "llama31_8b_bf16.yaml").read_text())
    for folder in (saved, venv):
        folder.mkdir()
    options = str(recipe), *RUN[1:], "--", "--restore", str(saved)

    def mounts(*options, **settings):
        return set(job(*options, **settings, **image).settings["JAXBENCH_MOUNTS"].split(","))

    always = {f"{path}:{path}" for path in ("/stage", ROOT)}
    assert mounts(*RUN) == always
    named = {f"{path}:{path}" for path in (recipe, saved, venv)}
    assert mounts(*options, JAXBENCH_VENV=str(venv)) == always | named
    inside = job(*RUN, JAXBENCH_VENV="/none", **image).settings
    assert inside["JAXBENCH_VENV"] == "/none"
    assert "/none" not in inside["JAXBENCH_MOUNTS"]


def test_a_dry_run_needs_nothing_of_that(monkeypatch, capsys):
    variables = {"PATH": "", "RUN_CONF_IMAGE": "/none", "STAGE_PATH": "/proc/none"}
    out, err = submitted((*RUN, "--dry-run"), variables, monkeypatch, capsys)
    assert out[0] == "#!/usr/bin/env bash"
    assert err == []


def shell(script, *arguments, **environment):
    """(status, stdout, stderr) of a script of launch/."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/root"} | environment
    done = subprocess.run(
        [ROOT / "launch" / script, *arguments], capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout, done.stderr


def test_submit_names_setup_where_nothing_is_installed(tmp_path):
    status, out, err = shell("submit.sh", *RUN, JAXBENCH_VENV=str(tmp_path), **STAGE)
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"error: there is no virtual environment in .*: run launch/setup\.sh.*\n", err
    )
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/none/python3")
    for script in ("submit.sh", "sweep.sh"):
        status, out, err = shell(script, *RUN, JAXBENCH_VENV=str(tmp_path), **STAGE)
        expected = (
            f"error: {python} (/none/python3) cannot be executed: No such file or directory\n"
        )
        assert (status, out, err) == (2, "", expected)


def test_submit_with_an_image_needs_only_a_python(tmp_path):
    """And no JAX."""
    (tmp_path / "python3").symlink_to(sys.executable)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = {"JAXBENCH_VENV": "/none", "RUN_CONF_IMAGE": "docker://a", "PATH": path, **STAGE}
    code = "import sys; sys.modules['jax'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    python = tmp_path / "python3"
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    status, _, err = shell("submit.sh", *RUN, "--dry-run", PYTHONPATH=str(tmp_path), **variables)
    assert (status, err) == (0, "")
    python.write_text("#!/bin/sh\nexit 1\n")
    status, out, err = shell("submit.sh", *RUN, "--dry-run", **variables)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "needs a python3 of 3.11 or newer with PyYAML" in err


def test_setup_names_its_variables():
    status, out, err = shell("setup.sh", "--help")
    assert (status, err) == (0, "")
    text = (ROOT / "launch" / "setup.sh").read_text()
    read = set(re.findall(r"\$\{([A-Z_]+):[-+]", text))
    assert read == {"EXTRAS", "PYTHON", "JAXBENCH_VENV", "RUN_CONF_IMAGE", "IMAGE"}
    for name in read:
        assert re.search(rf"^  {name}  +\w", out, re.MULTILINE), name
    status, out, err = shell("setup.sh", "everything")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: launch/setup.sh: unknown argument everything; --help")
    status, out, err = shell("setup.sh", EXTRAS="gpu,gpx")
    assert (status, out) == (2, "")
    assert err.startswith("error: EXTRAS=gpu,gpx: expected gpu, plan, te, dev or docs")


def test_setup_says_what_it_does(tmp_path):
    """With a Python whose virtual environments only say what they are told."""
    python = tmp_path / "python"
    tell = 'echo "told: $*"'
    python.write_text(f"""#!/bin/sh
[ "$1" != -m ] || {{ mkdir -p "$3/bin" && for name in python pip; do
  echo '#!/bin/sh\n{tell}' > "$3/bin/$name" && chmod +x "$3/bin/$name"
done; }}
[ "$1" != --version ] || echo Python 3.12.0
""")
    python.chmod(0o755)
    status, out, err = shell(
        "setup.sh", PYTHON=str(python), JAXBENCH_VENV=str(tmp_path / "venv"), EXTRAS="gpu,dev"
    )
    assert (status, err) == (0, "")
    first, second, pip, third, last = out.splitlines()
    assert first == f"1/3 making a virtual environment in {tmp_path}/venv with Python 3.12.0"
    assert re.search(r"^2/3 installing .*\(gpu,dev\): JAX with CUDA, about 2\.5 GB", second)
    assert "--quiet" not in pip
    assert third == "3/3 trying it"
    assert last == f"jaxbench is installed in {tmp_path}/venv"


def test_the_readme_submits_what_there_is(monkeypatch):
    """Every submission of its section on Slurm makes a job, and its stage is not in git."""
    text = (ROOT / "README.md").read_text().partition("## On a Slurm cluster")[2]
    section = text.partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("launch/submit.sh")]
    assert len(lines) >= 2
    for line in lines:
        job(*shlex.split(line, comments=True)[1:], **STAGE)
    for word in ("SBATCH_GPUS_PER_NODE", "--time", "watch it: tail -F "):
        assert word in section
    assert "STAGE_PATH=$PWD/stage" in section
    assert "stage/" in (ROOT / ".gitignore").read_text().splitlines()
