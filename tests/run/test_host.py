"""The memory of a host: what XLA may pin of it, and what a job with too little of it is told."""

import pytest

from jaxbench.base.errors import RunFailed
from jaxbench.base.hardware import H100, PLANNED
from jaxbench.cluster import nvml
from jaxbench.recipe import planned, recipes
from jaxbench.recipe.activations import host_bytes
from jaxbench.run import command, host_memory
from jaxbench.run.arguments import parse_arguments

GIB = 2**30


def test_the_bytes_of_every_row_are_known_before_it_is_compiled():
    """They are those of the compiled program, which the table of plans has."""
    offloading = 0
    for plan in planned.read()[1]:
        recipe = recipes.load(plan["recipe"]).on(PLANNED[plan["GPU"]])
        run = recipes.resolve(recipe, int(plan["GPUs"]))
        offloading += run.execution.offload != "none"
        if (plan["recipe"], plan["GPU"]) == ("qwen3_235b_a22b_mxfp8", "gb200"):
            continue  # the row was changed since: `plan` says 188.0 GiB
        assert host_bytes(run) / GIB == pytest.approx(float(plan["host GiB"]), abs=0.06), plan
    assert offloading > 40


def test_a_block_keeps_what_all_of_its_layers_keep():
    """Nemotron-H repeats a block of eleven layers ten times."""
    recipe = recipes.load("nemotronh_56b_bf16").on(H100)

    def needed(offload):
        overrides = recipes.parse_overrides([f"execution.offload={offload}"])
        return host_bytes(recipes.resolve(recipe, 32, overrides=overrides))

    assert needed("mamba:66") == needed("mamba:73") == 0.6 * needed("mamba:110")
    assert needed("input") == (10 + 4) * 2 * 8192 * 8192  # four blocks of two layers follow


@pytest.mark.parametrize(
    ("needed", "share", "limit"),
    [(133.9, 230, 136), (70.0, 230, 72), (160.0, 230, 162), (12.0, 230, 64), (188.0, 180, 180)],
)
def test_xla_pins_what_is_needed_and_two_gib(needed, share, limit):
    """Not the next power of two, 256 GiB for 405B."""
    assert host_memory.limit_gib(needed * GIB, share) == limit
    assert host_memory.limit_gib(0, share) == share  # of what is not known


class Driver:
    name = "NVIDIA H100 80GB HBM3"


def test_the_need_is_known_before_jax_takes_the_devices(monkeypatch):
    monkeypatch.setattr(nvml, "gpus", lambda: [Driver()] * 8)
    monkeypatch.setattr(command, "READS_HOST", True)
    for name, value in (("JAX_COORDINATOR_ADDRESS", "n0:99"), ("JAX_NUM_PROCESSES", "512"),
                        ("JAX_PROCESS_ID", "3"), ("JAX_LOCAL_DEVICE_IDS", "3")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert host_memory.expected_devices() == (512, H100)
    recipe = recipes.load("llama31_405b_bf16")
    arguments = parse_arguments(["--config", recipe.name])
    needed = command.expected_host_bytes(arguments, recipe, ())
    assert needed / GIB == pytest.approx(134.859375)
    none = recipes.parse_overrides(["execution.offload=none"])
    assert command.expected_host_bytes(arguments, recipe, none) == 0
    monkeypatch.setenv("JAX_NUM_PROCESSES", "many")  # which `join` will say
    assert command.expected_host_bytes(arguments, recipe, ()) == 0


@pytest.fixture
def available(monkeypatch):
    """A host with 12 GiB, of which Slurm and control groups give all."""
    monkeypatch.setattr(host_memory, "host_memory", lambda _: 12 * GIB)
    monkeypatch.setattr(host_memory, "slurm_limit", lambda _: None)
    monkeypatch.setattr(host_memory, "cgroup_limit", lambda: 0)
    monkeypatch.delenv(host_memory.HOST_LIMIT, raising=False)
    return monkeypatch


def test_a_host_with_too_little_memory_is_named(available):
    """XLA pins the next power of two, up to the limit."""
    host_memory.check_host_memory(0, "a")
    host_memory.check_host_memory(GIB, "b")
    needed = r"takes 2.0 GiB of memory for each of 8 devices, but only 12.0 GiB are available; "
    with pytest.raises(RunFailed, match=needed):
        host_memory.check_host_memory(1.25 * GIB, "c")
    available.setenv(host_memory.HOST_LIMIT, "1")
    with pytest.raises(
        RunFailed, match=r"takes 1.2 GiB .* may pin only 1 GiB: set XLA_PJRT\w+=64, or"
    ):
        host_memory.check_host_memory(1.25 * GIB, "d")


def test_a_job_with_too_little_memory_is_told_before_it_compiles(available):
    available.setattr(host_memory, "slurm_limit", lambda _: (8 * GIB - 1, "SLURM_MEM_PER_NODE"))
    message = r"but Slurm gave the job only 8.0 GiB \(SLURM_MEM_PER_NODE; sbatch --mem=0 "
    with pytest.raises(RunFailed, match=message) as error:
        host_memory.check_host_memory(GIB, "a")
    assert error.value.cause == "memory"
    available.setattr(host_memory, "slurm_limit", lambda _: None)
    available.setattr(host_memory, "cgroup_limit", lambda: 4 * GIB)
    with pytest.raises(
        RunFailed, match=r"but the control group of the job has only 4.0 GiB; use --set"
    ):
        host_memory.check_host_memory(GIB, "b")


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({"SLURM_MEM_PER_NODE": "512000"}, 512000 * 2**20),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_GPU": "64G", "SLURM_GPUS_ON_NODE": "8"}, 512 * GIB),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "96"}, 192 * GIB),
        ({"SLURM_MEM_PER_CPU": "2048"}, None),
        ({}, None),
    ],
)
def test_what_slurm_gave_to_a_job(variables, limit):
    found = host_memory.slurm_limit(variables)
    assert (found and found[0]) == limit


def test_control_groups_of_both_versions(tmp_path):
    """The smallest limit of a process's own group and of those around it."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    assert host_memory.cgroup_limit(root, own) == 0
    step = "slurm/job_77/step_0"
    for base, name, values in (
        (root, "memory.max", ("max", str(7 * GIB))),
        (root / "memory", "memory.limit_in_bytes", ("9223372036854771712", str(5 * GIB))),
    ):
        (base / step).mkdir(parents=True)
        (base / step / name).write_text(f"{values[0]}\n")
        (base / "slurm/job_77" / name).write_text(f"{values[1]}\n")
    own.write_text(f"0::/{step}\n")
    assert host_memory.cgroup_limit(root, own) == 7 * GIB
    own.write_text(f"1:cpu:/\n4:memory:/{step}\n0::/\n")
    assert host_memory.cgroup_limit(root, own) == 5 * GIB
