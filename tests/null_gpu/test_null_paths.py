"""Every path through `train` on null GPUs: recipes, mesh axes, and what is done around training."""

import json
import re
import signal
import subprocess
import sys

import null_gpus
import pytest
import yaml
from cases import tiered
from commands import ROOT

from jaxbench.base.hardware import NULL
from jaxbench.jax_internals import KEEPS_AUTOTUNING, READS_HOST, profile_events
from jaxbench.plan import command as plan
from jaxbench.results import profiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
]

ROWS: dict[str, dict] = {
    "llama2_70b_bf16": {"pipeline": 2, "virtual_stages": 2, "fsdp": 2, "layers": 4},
    "llama31_8b_fp8": {"fsdp": 2, "layers": 2, "microbatch": 2},
    "llama31_70b_bf16": {"tensor": 2, "layers": 3, "remat": "attention", "offload": "up,input"},
    "llama31_405b_fp8": {"context": 2, "tensor": 2, "layers": 2},
    "grok1_314b_fp8": {"fsdp": 2, "expert": 2, "layers": 2},
    "qwen3_30b_a3b_bf16": {"pipeline": 2, "expert": 2, "layers": 2},
    "qwen3_235b_a22b_fp8": {"data": 2, "expert": 2, "layers": 2},
    "nemotron3_nano_30b_a3b_bf16": {"expert": 2, "tensor": 2, "layers": 3, "pattern": "M*E"},
    "nemotron3_super_120b_a12b_fp8": {"expert": 2, "layers": 3, "pattern": "M*E"},
    "deepseek_v3_bf16": {"pipeline": 2, "expert": 2},
    "gpt_oss_120b_fp8": {"fsdp": 2, "expert": 2, "layers": 2, "slots": "own"},
    "nemotron4_340b_bf16": {"pipeline": 2, "tensor": 2, "layers": 2},
    "nemotronh_56b_fp8": {"tensor": 2, "layers": 4},
}
"""Each model in one dtype: mesh and other settings of a row for GPUs whose sizes are the smoke
row's; fewer layers where those of the smoke row compile for minutes."""

LANDING = ("llama31_8b_fp8", "llama31_70b_bf16", "qwen3_30b_a3b_bf16")

AXES = ("data", "pipeline", "fsdp", "expert", "context", "tensor")


def small_row(recipe, folder):
    """(file of a recipe whose row for GPUs has the smoke row's sizes, number of GPUs)."""
    contents = yaml.safe_load((ROOT / "configs" / f"{recipe}.yaml").read_text())
    gpus = 1
    for axis in AXES:
        gpus *= ROWS[recipe].get(axis, 1)
    row = contents["rows"]["smoke"] | ROWS[recipe]
    row.pop("data", None)  # the GPUs that the other axes leave
    if pattern := row.pop("pattern", None):
        row["model"] |= {"pattern": pattern}
    if slots := row.pop("slots", None):
        row["model"]["experts"] |= {"slots": slots}
    path = folder / f"{recipe}.yaml"
    path.write_text(yaml.safe_dump(contents | {"rows": {gpus: row}}))
    return path, gpus


@pytest.mark.parametrize("recipe", tiered([], ROWS, slow=LANDING))
def test_a_recipe_trains(recipe, tmp_path):
    path, gpus = small_row(recipe, tmp_path)
    command = null_gpus.start(
        "--config", path, "--gpus", gpus, "--steps", 3, folder=tmp_path / "run",
        **null_gpus.environment(gpus),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    record = command.record
    assert (record["status"], len(command.steps)) == ("completed", 3)
    assert record["hardware"]["devices"] == gpus
    assert {record["label"], *(step["label"] for step in command.steps)} == {"null"}
    assert record["kernels"]["attention"] == "cudnn"
    assert "null GPUs: nothing here is a measurement" in record["not_comparable_because"]
    assert "null GPUs: nothing here is a measurement" in command.out


@pytest.mark.nightly
def test_another_model_is_compiled_for(tmp_path):
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16", steps=2), folder=tmp_path,
        **null_gpus.environment(model="gb300"),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    assert command.record["hardware"]["device"] == "NVIDIA GB300 (null)"


OPTIONS = {
    "profile": ("--profile", "jax", "--profile-steps", "5-8"),
    "trace": ("--nccl-trace",),
    "repeatable": ("--check-repeatable",),
    "pgle": ("--pgle",),
    "guided": ("--set", "execution.xla_flags=guided"),
}


@pytest.mark.parametrize("option", tiered([], OPTIONS, slow=["pgle", "profile"]))
def test_options_around_training(option, tmp_path):
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16"), *OPTIONS[option], folder=tmp_path,
        **null_gpus.environment(),
    ).wait()  # fmt: skip
    if option == "trace":  # the null library writes no trace, and that is said
        assert command.status == 1
        assert "NCCL" in command.record["reason"]
        return
    assert command.status == 0, command.text
    if option == "pgle":
        assert command.record["pgle"]["coverage"] == 1
    if option == "guided":
        assert command.record["kernels"]["schedule"] == "guided by the forecast"
    if option == "repeatable":
        assert command.record["repeatable"] == {"steps": 4, "arrays": 30}
    if option == "profile":
        assert "MemcpyD2H" in {event.name for event in profile_events(tmp_path)}
        assert plan.main(["--profile", str(tmp_path / "profile" / "rank-0")]) == 0
        (compared,) = profiled.read(tmp_path)
        assert (compared.steps, compared.gpu, compared.remark) == (3, "h100", NULL)
        assert compared.found > 0.95  # each kernel but copies, by the names in the profile
        assert "all-gather over fsdp" in {part.name for part in compared.links}


@pytest.mark.skipif(not READS_HOST, reason="offloads: Python 3.12, whose jaxlib does")
def test_a_job_with_too_little_memory_ends_before_it_compiles(tmp_path):
    # A layer that does not repeat would keep its activations on the GPU.
    offload = "execution.remat=attention", "execution.offload=gate,up", "model.layers=3"
    command = null_gpus.start(
        *null_gpus.tiny("llama31_70b_bf16", *offload), folder=tmp_path, **null_gpus.environment(),
        SLURM_MEM_PER_NODE="1",
    ).wait()  # fmt: skip
    assert (command.status, command.err.count("\n")) == (4, 1), command.text
    assert "but Slurm gave the job only 0.0 GiB (SLURM_MEM_PER_NODE; sbatch --mem=0" in command.err
    assert "compiling" not in command.out


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_job_takes_only_its_gpus_of_a_larger_node(gpus, tmp_path):
    """One process, which sees all eight, under launch/run.sh."""
    words = null_gpus.tiny("llama31_8b_bf16", "parallelism.fsdp=1", gpus=gpus, steps=3)
    job = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAXBENCH_VENV": sys.prefix,
        "SLURM_NTASKS_PER_NODE": "1", "JAXBENCH_LOCAL_DEVICES": str(gpus),
    }  # fmt: skip
    folder = "--output", tmp_path / "run"
    done = subprocess.run(
        ["bash", "launch/run.sh", *map(str, (*words, "--local-devices", gpus, *folder))],
        cwd=ROOT, env=job | null_gpus.environment(8), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["hardware"]["devices"]) == ("completed", gpus)


@pytest.mark.skipif(not READS_HOST, reason="offloads: Python 3.12, whose jaxlib does")
def test_two_processes_offload(tmp_path):
    """Both find out twice whether their hosts have the memory, before and after they compile."""
    offload = "execution.remat=attention", "execution.offload=gate,up", "model.layers=3"
    commands = null_gpus.start_two(
        *null_gpus.tiny("llama31_70b_bf16", *offload, steps=3), folder=tmp_path,
        **null_gpus.environment(1),
    )  # fmt: skip
    for command in commands:
        assert command.wait().status == 0, command.text
    assert (commands[0].record["status"], len(commands[0].steps)) == ("completed", 3)


@pytest.mark.nightly
def test_a_killed_run_resumes(tmp_path):
    cache = ("--compilation-cache", tmp_path / "cache")
    saving = (*null_gpus.tiny("llama31_8b_bf16", steps=60), *cache, "--checkpoint-every", 10)
    variables = null_gpus.environment(kernel_us=50)
    command = null_gpus.start(*saving, "--resume", folder=tmp_path, **variables)
    command.wait_for_steps(25)
    command.process.send_signal(signal.SIGKILL)
    assert command.wait().status == -signal.SIGKILL
    command = null_gpus.start(*saving, "--resume", folder=tmp_path, **variables).wait()
    assert command.status == 0, command.text
    (resumed,) = command.record["resumed_at"]
    assert resumed in (10, 20)
    assert [step["step"] for step in command.steps] == list(range(60))


@pytest.mark.nightly
def test_two_processes(tmp_path):
    """Whose collectives move data between them: the checkpoint restored is the one saved. Both
    compile with one profile, the forecast's."""
    changes = "parallelism.fsdp=4", "execution.xla_flags=guided"
    arguments = null_gpus.tiny("llama31_8b_bf16", *changes, gpus=4, steps=6)
    for part in (("--checkpoint",), ("--restore", tmp_path / "first")):
        folder = tmp_path / ("first" if "--checkpoint" in part else "second")
        steps = () if "--checkpoint" in part else ("--steps", 8)
        commands = null_gpus.start_two(
            *arguments, *steps, *part, folder=folder, **null_gpus.environment(2)
        )
        for command in commands:
            assert command.wait().status == 0, command.text
    record = json.loads((tmp_path / "second" / "run.json").read_text())
    assert (record["hardware"]["processes"], record["hardware"]["devices"]) == (2, 4)
    assert record["restored"]["step"] == 6


@pytest.mark.nightly
def test_another_program_is_not_autotuned_anew(tmp_path):
    """Both processes keep what they found: XLA gives each a share of the kernels."""
    kept, counted = [], []
    for remat in ("full", "attention"):
        arguments = null_gpus.tiny("llama31_8b_bf16", f"execution.remat={remat}", steps=3)
        folder = tmp_path / remat
        counts = tmp_path / f"counts-{remat}"
        counts.mkdir()
        commands = null_gpus.start_two(
            *arguments, "--compilation-cache", tmp_path / "cache", folder=folder,
            **null_gpus.environment(1, counts=counts), JAX_ENABLE_COMPILATION_CACHE="true",
        )  # fmt: skip
        for command in commands:
            assert command.wait().status == 0, command.text
        kept.append(commands[0].record["autotuned_before"])
        texts = [path.read_text() for path in counts.glob("*.txt")]
        counted.append([int(n) for text in texts for n in re.findall(r"(\d+) kernels of", text)])
    if not KEEPS_AUTOTUNING:
        assert kept == [None, None]
        return
    first, second = kept
    assert first == 0
    assert second > 80  # of about 120, half of which each process has timed
    assert max(counted[1]) < min(counted[0])
