"""The forecast of a program."""

import json
import re
from dataclasses import replace

import pytest
from compiled import needs_compiler
from made_plans import DOT, PROGRAM

from jaxbench.base.hardware import H100, PLANNED
from jaxbench.forecast import tables
from jaxbench.forecast.forecast import forecast
from jaxbench.plan import command, text
from jaxbench.xla import hlo
from jaxbench.xla.custom_calls import RULES
from jaxbench.xla.schedule import Walk

START = """\
  %start = ((bf16[4096,8192]{1,0}), bf16[32768,8192]{1,0}) all-gather-start(%shard), \
replica_groups=[1,8]<=[8], dimensions={0}
"""
PAIR = """\
HloModule pair, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[8192,8192], shard: bf16[4096,8192]) -> bf16[32768,8192] {{
  %x = bf16[8192,8192]{{1,0}} parameter(0)
  %shard = bf16[4096,8192]{{1,0}} parameter(1)
{}{}\
  ROOT %done = bf16[32768,8192]{{1,0}} all-gather-done(%start)
}}
"""


@pytest.mark.parametrize(
    ("first", "second", "measured_ms"),
    [(DOT, START, 2.96), (START, DOT, 2.02)],
    ids=["one after the other", "both at once"],
)
def test_a_matmul_next_to_a_gather_takes_what_eight_h100s_took(first, second, measured_ms):
    """pytorch/pytorch pull request 172714: a matmul of 8192 in 16 bits, and an all-gather of 64 MiB
    from each of 8 H100s. Published to three digits; both tables are of other clusters."""
    walk = Walk(hlo.Program.parse(PAIR.format(first, second)))
    found = forecast(walk, H100, tables.load("h100"), lambda c: "fsdp")
    assert 1e3 * found.step_s == pytest.approx(measured_ms, rel=0.03)


def test_parts_add_up_and_what_lies_outside_the_tables_is_said():
    program = hlo.Program.parse(PROGRAM)
    found = forecast(Walk(program), H100, tables.load("h100"), lambda c: "fsdp")
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    times = tables.load("h100").values
    square, wide = (2 * 8192 * n * 8192 / 717e12 for n in (8192, 131072))
    gather = times["collective", "all-gather"][8, 2**27] * 1e-6
    assert found.parts_s["products"] == pytest.approx(square + wide)
    assert found.parts_s["exposed: fsdp"] == pytest.approx(gather)
    assert found.parts_s["slowed"] == pytest.approx(gather * (1 - 1 / 1.5))
    assert found.beyond == ["matmul bf16 1 x 8192 x 131072 x 8192"]
    moved = found.parts_s["other kernels"] + found.parts_s["launches"]
    assert found.outside == pytest.approx(wide / (square + wide + moved))
    links = gather * (2 - 1 / 1.5)
    assert found.rests_on == {
        "measured shapes": pytest.approx(square), "in proportion": pytest.approx(wide),
        "links": pytest.approx(links), "bytes": pytest.approx(moved),
    }  # fmt: skip
    last = text.forecast(found)[-1]
    shares = [round(100 * s / found.step_s) for s in (wide, square, links, moved)]
    names = f"in proportion {shares[0]} % ({found.beyond[0]})", f"measured shapes {shares[1]} %"
    assert last.startswith("  rests on: ")
    assert all(name in last for name in names)


def test_what_is_assumed_has_its_share_of_the_step():
    """Of the tables that the program needs. A name may be that of all tables of a kind."""
    stated = {"product": "by peaks", "product bf16": "the H200's", "product fp8": "", "scan": ""}
    loaded = replace(tables.load("h100"), assumed=stated)
    found = forecast(Walk(hlo.Program.parse(PROGRAM)), H100, loaded, lambda c: "fsdp")
    share = f"{100 * found.parts_s['products'] / found.step_s:.1f} % of the step"
    assert found.assumed == [
        f"matmul: by peaks ({share})",
        f"matmul bf16: the H200's ({share})",
    ]
    assert found.interval.assumed == pytest.approx(found.parts_s["products"] / found.step_s)
    assert found.interval.assumed_rates == ["matmuls", "matmuls in bf16"]


def test_kernels_that_move_bytes_are_assumed_on_blackwell():
    found = forecast(
        Walk(hlo.Program.parse(PROGRAM)), PLANNED["gb200"], tables.load("gb200"), lambda c: "fsdp"
    )
    (assumed,) = found.assumed
    assert assumed.startswith("memory: two parts of the time of the H100's and the H200's kernels")
    assert found.interval.assumed == pytest.approx(found.rests_on["bytes"] / found.step_s)
    assert found.interval.assumed_rates == ["kernels that move bytes"]


def test_a_forecast_says_how_far_to_trust_it():
    """In one line, below the forecast: interval, errors, and what is assumed."""
    loaded = replace(tables.load("gb200"), assumed={})
    assumed = replace(loaded, assumed={"product bf16": "the B200's"})
    steps = [forecast(Walk(hlo.Program.parse(PROGRAM)), PLANNED["gb200"], t, lambda c: "fsdp")
             for t in (loaded, assumed)]  # fmt: skip
    for found, rest in zip(steps, ("no part", r"\d\d %"), strict=True):
        rates = r" \(matmuls in bf16\)" if rest != "no part" else ""
        assert re.fullmatch(
            r"  trust: 90 % interval [\d.]+ to [\d.]+ s, from the errors on \d+ programs of \d+ "
            r"families \(1 with experts\) that others timed; [\d.]+ s if calibrated by their mean "
            rf"error; {rest} of this step rests on assumed rates{rates}",
            text.forecast(found)[1],
        )
    one, other = (found.interval for found in steps)
    assert one.low_s > other.low_s
    assert one.high_s < other.high_s


def test_a_forecast_of_grouped_matmuls_says_what_it_rests_on():
    """A kernel's cost is in its call. Its rate is of other kernels."""
    metadata = {
        "kind": "grouped_weights", "flops": str(2 * 16 * 1024 * 1536 * 4096), "moved": "1024",
        "sizes": "[16, 1024, 1536, 4096]", "dtype": "bf16", "blocks": "",
    }  # fmt: skip
    quoted = json.dumps(metadata).replace('"', r"\22")
    program = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (p: bf16[8,8]) -> bf16[8,8] {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  ROOT %y = bf16[8,8]{{1,0}} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={{serialized_metadata = "{quoted}"}}
}}
"""
    found = forecast(
        Walk(hlo.Program.parse(program, RULES)), PLANNED["b200"], tables.load("b200"), lambda c: ""
    )
    (assumed,) = found.assumed
    assert assumed.startswith("grouped_weights: 0.73 of the rate")
    assert found.beyond == ["grouped_weights bf16 16 x 1024 x 1536 x 4096"]
    share = f"{100 * found.interval.assumed:.0f} % of this step rests on assumed rates"
    assert found.interval.assumed > 0.9
    assert text.forecast(found)[1].endswith(f"; {share} (gradients of grouped weights)")


@pytest.mark.nightly
@needs_compiler
def test_plan_prints_a_forecast_by_a_users_own_kernels(tmp_path, capsys):
    """Products that take ten times as long in a file make a plan's products take as long; files
    have a sustained rate too, here one that limits no product."""
    row = ["--config", "llama31_8b_bf16", "--gpus", "1", "--set", "model.layers=2", "--json"]
    assert command.main(row) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forecast_step_s"] == pytest.approx(sum(found["forecast"]["parts_s"].values()))
    assert found["bound_step_s"] < found["forecast_step_s"]
    times = tables.load("h100").values["product", "bf16"]
    forecasts = {}
    for name, factor in (("same.csv", 1), ("slow.csv", 10)):
        rows = [f"product,bf16,{m}x{n}x{k},{factor * t}" for (m, n, k), t in times.items()]
        lines = ["# gpu: h100", "kind,name,sizes,microseconds", *rows, "sustained,bf16,200,100000"]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        assert command.main([*row, "--kernels", str(tmp_path / name)]) == 0
        forecasts[name] = json.loads(capsys.readouterr().out)["forecast"]
    products = {name: forecast["parts_s"]["products"] for name, forecast in forecasts.items()}
    assert products["slow.csv"] == pytest.approx(10 * products["same.csv"], rel=0.02)
    assert products["same.csv"] < found["forecast"]["parts_s"]["products"]
    assert forecasts["slow.csv"]["sources"]["product bf16"] == "slow.csv"
