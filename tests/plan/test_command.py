"""The command's options, and rows that are not in a recipe's file."""

import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from subprocess import CompletedProcess

import made_plans
import pytest
from mistakes import assert_mistake

from jaxbench.base.files import as_json, owned
from jaxbench.base.hardware import H100, PLANNED, identify
from jaxbench.plan import absent, candidates, command, processes, sweep
from jaxbench.plan.systems import Target, find, system, with_settings
from jaxbench.recipe import derived_rows, planned, published, recipes

ROW = ["--config", "llama31_8b_bf16", "--gpus", "16"]


def test_a_candidate_of_a_derived_row_is_the_same_to_its_process():
    """What `--set` gives it leaves nothing to be derived otherwise."""
    recipe = recipes.load("grok1_314b_bf16")
    row = recipes.resolve(derived_rows.extend(recipe, 48, H100), 48)
    assert row.label == "derived"
    near = sorted(candidates.layouts(row), key=lambda run: candidates.distance(run, row))[:12]
    for run in near:
        texts = candidates.changes(run, row)
        overrides = recipes.parse_overrides(texts)
        there = recipes.resolve(
            derived_rows.extend(recipe, 48, H100, overrides), 48, overrides=overrides
        )
        assert there.mesh_shape == run.mesh_shape
        assert (there.microbatch, there.batch.global_batch) == (
            run.microbatch,
            row.batch.global_batch,
        )


@pytest.mark.parametrize(
    "option", [["--format json"], ["--set", "model.layers=2"], ["--gpus", "8"]]
)
def test_what_would_be_ignored_is_refused(option, capsys):
    assert command.main(["--all", *option[0].split(), *option[1:]]) == 2
    assert capsys.readouterr().err == f"error: --all does not take {option[0]}\n"


GPU_FILE = """
like: h200
bf16: 1200  # TFLOP/s
memory: 200
bandwidth: 6000
leaf: 32
oversubscription: 2
"""


def test_a_file_describes_a_gpu_that_we_do_not_know(tmp_path):
    path = tmp_path / "next.yaml"
    path.write_text(GPU_FILE)
    target = find(str(path)).changed(["nic=100"])
    gpu = target.gpu
    assert target.name == "next"
    assert target.options() == ["--gpu", str(path), "--system", "nic=100"]
    assert (gpu.tflops["bf16"], gpu.tflops["fp8"]) == (1200, 1979)
    assert (gpu.memory, gpu.bandwidth, gpu.nic) == (200 * 2**30, 6000, 100)
    assert gpu.device == "NVIDIA H200 (next)"


@pytest.mark.parametrize("like", PLANNED)
def test_a_file_is_compiled_like_the_gpu_that_it_names(like, tmp_path):
    """Whatever the name of the file."""
    path = tmp_path / "B300.yaml"
    path.write_text(f"like: {like}\nbf16: 3000\n")
    known = identify(find(str(path)).gpu.device)
    assert known is not None
    assert known.name.lower() == like


def test_host_memory_is_a_property_of_a_plan():
    """Else a plan for another host would be read from the cache."""
    assert system(H100) != system(replace(H100, host_memory=2**36))


@pytest.mark.parametrize(
    ("variable", "another"),
    [
        ("--xla_gpu_enable_triton_gemm=true", True),
        ("--xla_allow_excess_precision=false", True),
        ("--xla_force_host_platform_device_count=8", False),
    ],
)
def test_flags_of_the_variable_make_another_plan(variable, another, monkeypatch):
    run, _ = command.resolve(ROW[1], 8, [], H100)
    target = find("h100")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    before = processes.folder(run, target)
    monkeypatch.setenv("XLA_FLAGS", variable)
    assert (processes.folder(run, target) != before) == another


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16: 1200", "expected a line such as like: h100, and changes to it"),
        ("like: h999", "like: 'h999' is not one of h100"),
        ("like: h100\nnvfp4: 1", "nvfp4=1: H100 does not multiply in nvfp4"),
        ("like: h100\nflops: 1", "flops=1: expected one of nvlink=N"),
        ("like: [", "line 2: "),
    ],
)
def test_a_file_that_describes_no_gpu_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "next.yaml"
    path.write_text(text)
    assert_mistake(command.main, [*ROW, "--gpu", path], message, capsys)


def test_a_system_has_the_units_that_its_help_says():
    settings = ["host=64", "bandwidth=4000", "memory=96", "host_memory=512.5", "power=600"]
    gpu = with_settings(H100, [*settings, "domain=72"])
    assert (gpu.host, gpu.bandwidth, gpu.power, gpu.domain) == (64.0, 4000.0, 600.0, 72)
    assert (gpu.memory, gpu.host_memory) == (96 * 2**30, int(512.5 * 2**30))
    assert gpu.memory_limit > H100.memory_limit
    assert "memory_bandwidth: 4000000000000 " in gpu.description


@pytest.mark.parametrize(
    ("options", "gpus"),
    [([], {"h100", "h200", "b200", "gb200", "b300", "gb300"}), (["--gpu", "gb200"], {"gb200"}),
     (["--system", "nic=25"], {"h100"})],
)  # fmt: skip
def test_all_plans_what_is_published_for_a_gpu(options, gpus, monkeypatch, tmp_path):
    """For every GPU, or the one that is asked for."""
    planned = Counter()

    def plan_all(runs, target):
        models = ((run.model.family, run.model.size, run.precision.dtype) for run in runs)
        planned.update((target.name, *m, run.gpus) for m, run in zip(models, runs, strict=True))
        return {}, {}

    monkeypatch.setattr(sweep, "plan_all", plan_all)
    assert command.main(["--all", *options, "--output", str(tmp_path)]) == 0
    assert {gpu for gpu, *_ in planned} <= gpus
    assert set(planned.values()) == {1}
    for row in published.rows():
        name = row.gpu_type, row.workload, row.size, row.dtype, row.gpus
        assert (name in planned) == (row.gpu_type in gpus), name


TABLE = """\
recipe,GPU,GPUs,mesh,peak GiB,fits,wire GiB,uncovered GiB,exposed s,bound s,forecast s,launches
llama,h100,8,fsdp 8,60.0,yes,10.0,0.0,0.01,1.000,1.200,1000
llama,h100,16,fsdp 16,60.0,yes,10.0,0.0,0.01,1.000,1.200,1000
llama,gb200,8,fsdp 8,60.0,yes,10.0,0.0,0.01,1.000,1.200,1000
"""


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ([("60.0", "61.0"), ("0.01", "0.03")], 0, "no row changed by more than 2 %\n"),
        ([("16,60.0,yes", "16,75.0,NO")], 1,
         "llama h100 16: fits yes -> NO\nllama h100 16: peak GiB 60.0 -> 75.0, x 1.250\n"),
        ([("8,60.0,yes,10.0,0.0,0.01,1.000,1.200", "8,60.0,yes,10.0,0.0,0.01,1.000,1.100")], 0,
         "llama h100 8: forecast s 1.200 -> 1.100, x 0.917\n"
         "llama gb200 8: forecast s 1.200 -> 1.100, x 0.917\n"),
        ([("h100,8,fsdp 8,60.0,yes,10.0,0.0,0.01,1.000,1.200",
           "h100,8,fsdp 8,60.0,yes,10.0,0.0,0.01,1.030,1.200")], 1,
         "llama h100 8: bound s 1.000 -> 1.030, x 1.030\n"),
        ([("gb200,8", "gb200,4")], 1,
         "llama gb200 8: only in {a}\nllama gb200 4: only in {b}\n"),
    ],
)  # fmt: skip
def test_tables_are_compared_row_by_row(changes, status, said, tmp_path, capsys):
    a, b, text = tmp_path / "a.csv", tmp_path / "b.csv", TABLE
    for old, new in changes:
        text = text.replace(old, new)
    a.write_text(TABLE)
    b.write_text(text)
    assert command.main(["--diff", str(a), str(b)]) == status
    assert capsys.readouterr().out == said.format(a=a, b=b)


def test_short_steps_are_compared_by_their_share(tmp_path, capsys):
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text(TABLE.replace("1.000,1.200", "0.100,0.124"))
    b.write_text(TABLE.replace("1.000,1.200", "0.100,0.170"))
    assert command.main(["--diff", str(a), str(b)]) == 1
    assert "llama h100 8: forecast s 0.124 -> 0.170, x 1.371\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", ROW[1]], f"--gpus is missing: {ROW[1]} has rows for "),
        (["--config", "/etc/passwd"], "/etc/passwd"),
        ([*ROW[:3], "9"], "they do not fill nodes of 8; the nearest counts that work: 8 and 16"),
        (
            [*ROW, "--system", "nic=fast"],
            "--system nic=fast: expected one of nvlink=N, nic=N, host=N, bandwidth=N, power=N",
        ),
        (
            [*ROW, "--set", "precision.dtype=nvfp4"],
            "nvfp4: H100 does not support it; b200, b300",
        ),
        (
            [*ROW, "--system", "oversubscription=2"],
            "oversubscription has to be at least 1, and needs",
        ),
        ([*ROW, "--system", "bandwidth=1e300"], "--system bandwidth=1e300: expected one of"),
        (["--diff", "llama31_8b_bf16:abc", "x.json"], "llama31_8b_bf16:abc: expected a number of"),
        ([*ROW, "--system", "node=7"], "a domain of 8 GPUs does not consist of nodes of 7"),
        (
            [*ROW, "--system", "node=7", "--system", "domain=7"],
            "the nearest that do: 14 and 21",
        ),
        (
            [*ROW, "--set", "model.attention.head_dim=100"],
            "cuDNN attention takes multiples of 8 up to 256",
        ),
        (["--diff", "nowhere.json", "nowhere.json"], "nowhere.json: cannot read a plan"),
        (["--search", "--all"], "--all and --search exclude each other"),
        (["--search"], "--config and --gpus are needed"),
        ([*ROW, "--search", "--format", "html"], "--search does not take --format html"),
        (["--search", "--limit", "0"], "--limit = 0 must be above 0"),
        (["--limit", "3"], "--limit needs --search"),
        ([*ROW, "--output", "x"], "--output needs --format json or html"),
        ([*ROW, "--format", "html", "--output", "no/x.html"], "--output no/x.html: no such folder"),
        (["--diff", "x.csv", "y.csv", "--format", "html"], "--diff does not take --format html"),
        (["--search", "--dump", "x"], "--dump is for a single plan"),
        (["--search", "--config", "llama2_70b_fp8", "--gpus", "9"], "do not fill nodes of 8"),
    ],
)
def test_mistakes_are_one_line(arguments, message, monkeypatch, capsys):
    """Without the compiler for GPUs too."""
    monkeypatch.setattr(absent, "installed", lambda module: False)
    assert_mistake(command.main, arguments, message, capsys)


@pytest.mark.parametrize("option", ["--dump", "--output"])
def test_what_another_plan_writes_is_refused_at_once(option, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "plan_one", lambda args, gpu: pytest.fail("it planned"))
    path = tmp_path / "plan"
    if option == "--dump":
        path.mkdir()
    words = [*ROW, "--format", "json", option, str(path)]
    with owned(path):
        assert_mistake(command.main, words, f"{path} is in use by process ", capsys)


def test_a_plan_is_made_by_one_process_at_a_time(tmp_path, monkeypatch):
    """As where two searches come to the same candidate."""
    running, most = [], []

    def run(words, **options):
        running.append(words)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return CompletedProcess(words, 2, "", "error: refused")

    monkeypatch.setattr(processes, "CACHE", tmp_path)
    monkeypatch.setattr(processes.subprocess, "run", run)
    row = recipes.resolve(recipes.load("llama31_8b_bf16"), 16)
    target = Target(H100, "h100")
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(processes.plan_run, row, target, row.recipe) for _ in range(3)]
    assert [future.result() for future in futures] == 3 * ["refused"]
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda plan: {"schema": 1, "status": "completed", "recipe": {}}, "unexpected field"),
        (lambda plan: [plan], "expected dict, got ["),
        (lambda plan: {}, "missing field '"),
        (lambda plan: plan | {"gpus": "8"}, "expected int, got '8'"),
        (lambda plan: plan | {"fits": 1}, "expected bool, got 1"),
        (lambda plan: plan | {"forecast": 1.0}, "expected dict, got 1.0"),
        (lambda plan: plan | {"collectives": {}}, "expected list, got {}"),
    ],
)
def test_a_file_that_is_no_plan_is_one_line(spoil, message, tmp_path, capsys):
    plan = made_plans.made()
    files = tmp_path / "a.json", tmp_path / "b.json"
    files[0].write_text(as_json(plan))
    files[1].write_text(json.dumps(spoil(json.loads(as_json(plan)))))
    assert_mistake(command.main, ["--diff", *files], message, capsys)
    files[1].write_text(as_json(plan)[:1000])
    assert_mistake(command.main, ["--diff", *files], "b.json: not a plan.json of `plan", capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace(",", ";"),
            "b.csv: not a table of plan --all (plan.csv): line ",
        ),
        # Behind the first cell of a line.
        (
            lambda text: text[: text.index(",", text.index("\n", len(text) // 2))],
            "b.csv: not a table",
        ),
        (
            lambda text: re.sub(r"(?m)^(\w+,h100,\d+,[^,]+,)[\d.]+", r"\1x", text, count=1),
            "could not convert string to float",
        ),
    ],
)
def test_a_table_that_is_none_is_one_line(change, message, tmp_path, capsys):
    text = planned.PATH.read_text()
    files = tmp_path / "a.csv", tmp_path / "b.csv"
    files[0].write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    files[1].write_text(text)
    assert command.main(["--diff", *map(str, files)]) == 0
    assert "no row changed" in capsys.readouterr().out
    files[1].write_text(change(text))
    assert_mistake(command.main, ["--diff", *files], message, capsys)
