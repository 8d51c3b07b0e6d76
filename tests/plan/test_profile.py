"""A profile next to the forecast: a made one of exactly the expected step, and a slower one."""

import json
from dataclasses import replace

import jax
import pytest
from made_plans import LOOPS
from mistakes import assert_mistake

from jaxbench.base.hardware import H100
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.tables import load
from jaxbench.plan import command, compare_profile
from jaxbench.recipe.settings import AXES
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Span

SPACE = """
planes {{
  name: "/device:GPU:0" {lines} {names} stat_metadata {{ key: 1 value {{ name: "hlo_op" }} }}
}}
planes {{ name: "/device:GPU:1" }}
"""
EVENT = """events {{ metadata_id: 1 offset_ps: {start} duration_ps: {length}
stats {{ metadata_id: 1 str_value: "{name}" }} }}"""


def unrolled(spans, start_s=0.0):
    """Every span of every iteration, with times from the start of the step."""
    for entry in spans:
        if isinstance(entry, Span):
            yield replace(entry, start_s=start_s + entry.start_s)
        else:
            for n in range(entry.times):
                yield from unrolled(entry.spans, start_s + entry.start_s + n * entry.seconds)


def made(folder, steps=2, slower=None, gap_s=0.0):
    """Writes a profile in which a step is as forecast; a kernel may take longer, and before each
    step there may be nothing. Returns the forecast step."""
    walk = Walk(Program.parse(LOOPS))
    schedule = walk.under(Measured(H100, load("h100")))
    lines: dict[str, list[str]] = {}
    longer, (slow, extra) = 0.0, slower or ("", 0.0)
    for step in range(steps):
        longer += gap_s
        for each in unrolled(schedule.spans):
            seconds = each.seconds + (extra if each.name == slow else 0.0)
            start = step * schedule.step_s + longer + each.start_s
            events = lines.setdefault(each.stream, [])
            events.append(EVENT.format(
                start=round(1e12 * start), length=round(1e12 * seconds), name=each.name,
            ))  # fmt: skip
            longer += seconds - each.seconds
    text = " ".join(
        f'lines {{ id: {n} name: "Stream #{n}" {" ".join(events)} }}'
        for n, events in enumerate(lines.values())
    )
    space = SPACE.format(lines=text, names='event_metadata { key: 1 value { name: "kernel" } }')
    (folder / "made.xplane.pb").write_bytes(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(space)
    )
    (folder / "program.txt").write_text(LOOPS)
    return schedule


def compared(folder):
    text = (folder / "program.txt").read_text()
    axes = "{0.group} GPUs".format
    walk = Walk(Program.parse(text))
    return compare_profile.compare(
        compare_profile.read_profile(folder), walk, H100, load("h100"), axes
    )


def test_a_step_as_forecast_differs_nowhere(tmp_path):
    schedule = made(tmp_path)
    found = compared(tmp_path)
    assert (found.steps, found.found) == (2, pytest.approx(1))
    assert found.measured_s == pytest.approx(schedule.step_s, abs=2e-9)
    for part in (*found.kernels, *found.links, *found.largest):
        assert part.measured_s == pytest.approx(part.forecast_s, abs=2e-8), part
    assert sum(part.forecast_s for part in found.kernels) == pytest.approx(schedule.step_s)
    assert {part.name for part in found.links} == {
        "all-gather over 8 GPUs",
        "all-gather over 64 GPUs",
    }


def test_what_takes_longer_is_named(tmp_path):
    """One matmul of three in a loop, and nothing runs for a while before each step."""
    schedule = made(tmp_path, slower=("inner", 1e-3), gap_s=2e-3)
    found = compared(tmp_path)
    (waited_s,) = (t.exposed_s for t in schedule.transfers if len(t.collective.devices) == 64)
    parts = {part.name: part.measured_s - part.forecast_s for part in found.kernels}
    assert parts["matmuls"] == pytest.approx(3e-3, abs=1e-6)
    # Not before the first step; but also where the kernels had waited for the network's collective,
    # which ends before the slower kernels do.
    assert parts[compare_profile.GAPS] == pytest.approx(1e-3 + min(waited_s, 3e-3), abs=1e-6)
    first = found.largest[0]
    assert (first.name, first.runs, first.sizes) == ("inner", 3, "matmul bf16 1x8192x8192x8192")
    assert first.measured_s - first.forecast_s == pytest.approx(3e-3, abs=1e-6)


def test_a_comparison_is_printed_and_kept(tmp_path, capsys):
    made(tmp_path, slower=("inner", 1e-3))
    assert command.main(["--profile", str(tmp_path), "--gpu", "h100"]) == 0
    assert "inner" in capsys.readouterr().out
    kept = json.loads((tmp_path / compare_profile.COMPARED).read_text())
    assert kept["largest"][0]["name"] == "inner"


def cut(path):
    """Leaves the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "made.xplane.pb").unlink(), "has no profile of a GPU"),
        (lambda folder: (folder / "program.txt").unlink(), "cannot read the program"),
        (
            lambda folder: (folder / "program.txt").write_text(LOOPS.replace("%", "%other_")),
            "has no instruction of this program",
        ),
        (lambda folder: cut(folder / "made.xplane.pb"), "xplane.pb: cut off, or no profile of JAX"),
        (lambda folder: cut(folder / "program.txt"), "program.txt"),
        (lambda folder: (folder / "made.xplane.pb").write_text("{}"), "no profile of JAX"),
    ],
)
def test_what_is_no_profile_is_one_line(spoil, message, tmp_path, capsys):
    made(tmp_path)
    spoil(tmp_path)
    assert_mistake(command.main, ["--profile", tmp_path, "--gpu", "h100"], message, capsys)


def test_a_profile_takes_kernels_of_its_own_gpu(tmp_path, capsys):
    """The GPU is the record's, not the default of `--gpu`."""
    folder = tmp_path / "profile" / "rank-0"
    folder.mkdir(parents=True)
    made(folder)
    mesh = dict.fromkeys(AXES, 1) | {"fsdp": 64}
    record = {"hardware": {"device": "NVIDIA GB200"}, "recipe": {"parallelism": mesh}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    own = tmp_path / "own.csv"
    own.write_text("# gpu: gb200\nkind,name,sizes,microseconds\nmemory,any,1000,0.5\n")
    assert command.main(["--profile", str(folder), "--kernels", str(own)]) == 0
    other = tmp_path / "other.csv"
    other.write_text(own.read_text().replace("gb200", "h100"))
    capsys.readouterr()
    arguments = ["--profile", folder, "--kernels", other]
    assert_mistake(command.main, arguments, "kernels of h100, but the plan is for gb200", capsys)


def test_a_profile_of_an_unknown_gpu_needs_its_name(tmp_path, capsys):
    made(tmp_path)
    assert_mistake(command.main, ["--profile", tmp_path], "name one with --gpu", capsys)


@pytest.mark.parametrize("record", ["[1]", "{", '{"hardware": "x"}', '{"recipe": {}}', ""])
def test_a_record_that_is_none_leaves_the_gpu_to_be_named(record, tmp_path, capsys):
    folder = tmp_path / "profile" / "rank-0"
    folder.mkdir(parents=True)
    made(folder)
    (tmp_path / "run.json").write_text(record)
    assert_mistake(command.main, ["--profile", folder], "name one with --gpu", capsys)
    assert command.main(["--profile", str(folder), "--gpu", "h100"]) == 0
