"""`jaxbench check`: its judgement of made measurements, and the command on CPU devices."""

import errno
import json
import random
import re
import time
from dataclasses import replace

import commands
import pytest
from mistakes import assert_mistake

from jaxbench.base import hardware
from jaxbench.base.files import owned
from jaxbench.check import command, host_facts, judge
from jaxbench.check.judge import Rate
from jaxbench.check.measure import bus_factor, distances, expected_seconds, pairs
from jaxbench.cluster import nvml
from jaxbench.forecast import tables

SINGLE = {"bf16 matmuls": 700.0, "fp8 matmuls": 1300.0, "memory": 2660.0, "host to GPU": 50.0}
FACTS = {
    "nvlinks": 18, "nvlinks_up": 18, "unreached": [], "power_limit_w": 700.0, "reasons": [],
    "power_default_w": 700.0, "sm_mhz": 1700, "sm_max_mhz": 1980, "ecc_uncorrected": 0, "xids": [],
    "remap_pending": 0, "remap_failed": 0, "mig": False, "pcie_lanes": 16, "pcie_max_lanes": 16,
    "ecc": True, "persistence": True, "vbios": "96.00.99",
}  # fmt: skip


def made(nodes, seed, gpus=8, slowed=()):
    """(rates, hosts) of a cluster whose GPUs differ by 1.5 %, links by 3 % and networks at greater
    distance by more. `slowed` has (kind, words of an end or of both, factor): rates of a kind at
    such ends."""
    noise = random.Random(seed)
    name = "node{} gpu {}".format
    rates = []

    def add(kind, ends, value, spread, distance=0):
        factor = 1.0
        for of, where, slower in slowed:
            parts = where.split(" - ")
            if kind.startswith(of) and all(
                any(f"{end} ".startswith(f"{part} ") for end in ends) for part in parts
            ):
                factor = min(factor, slower)
        measured = value * factor * noise.gauss(1, spread)
        rates.append(Rate(kind, "", ends, measured, value, distance))

    for node in range(nodes):
        for gpu in range(gpus):
            for kind, value in SINGLE.items():
                add(kind, (name(node, gpu),), value, 0.03 if kind == "host to GPU" else 0.015)
        for kind in ("all-gather", "reduce-scatter", "all-to-all"):
            add(f"{kind} in a node", (f"node{node}",), 300.0, 0.03)
        for distance in range(1, gpus):
            for a, b in pairs(gpus, distance):
                if a < b:
                    add(judge.IN_NODE, (name(node, a), name(node, b)), 380.0, 0.03)
    for distance in distances(judge.BETWEEN_NODES, nodes):
        for a, b in pairs(nodes, distance):
            for gpu in range(gpus if a < b else 0):
                ends = name(a, gpu), name(b, gpu)
                add(judge.BETWEEN_NODES, ends, 48.0 - distance % 7, 0.03, distance)
    usual = {"skew_s": 0.01, "settings": {"driver": "590.0"}, "files": {"latency_s": 0.01}}
    hosts = {
        f"node{node}": {**usual, "gpus": {name(node, gpu): dict(FACTS) for gpu in range(gpus)}}
        for node in range(nodes)
    }
    return rates, hosts


def test_a_healthy_cluster_has_no_finding():
    for seed in range(20):
        assert judge.judge(*made(2, seed)) == []


SLOWED = {
    "throttled": (2, [("bf16", "node1 gpu 3", 0.85), ("fp8", "node1 gpu 3", 0.85)], "gpu",
                  "node1 gpu 3: bf16 matmuls 1"),
    "dead NVLinks": (2, [(judge.IN_NODE, "node0 gpu 5", 0.5), ("all", "node0", 0.6)], "gpu",
                     "node0 gpu 5: exchange in a node"),
    "adapter of two nodes": (2, [(judge.BETWEEN_NODES, "node0 gpu 5", 0.5)], "network",
                             "node0 gpu 5 - node1 gpu 5: exchange between nodes"),
    "adapter": (3, [(judge.BETWEEN_NODES, "node0 gpu 5", 0.5)], "network",
                "node0 gpu 5: exchange between nodes"),
    "a node's collectives": (8, [("all-gather", "node6", 0.5)], "gpu", "node6: all-gather in a"),
    "host": (1, [("host", "node0 gpu 2", 0.5)], "gpu", "node0 gpu 2: host to GPU"),
}  # fmt: skip
"""Nodes, what is slowed and how much, cause, and the beginning of the only finding."""


@pytest.mark.parametrize("case", SLOWED)
def test_what_is_slow_is_named_alone(case):
    nodes, slowed, cause, text = SLOWED[case]
    for seed in range(2):
        (finding,) = judge.judge(*made(nodes, seed, slowed=slowed))
        assert str(finding).startswith(text)
        assert finding.cause == cause
        where = text.partition(":")[0]
        assert finding.nodes == (() if " - " in where else (where.partition(" ")[0],))


BETWEEN = {
    "adapter": (["node1 gpu 5"], None),
    "two adapters": (["node0 gpu 5", "node1 gpu 5"], None),
    "two at an even number of bits": (["node0 gpu 5", "node3 gpu 5"], None),
    "node": (["node2"], None),
    "path": (["node0 gpu 5 - node1 gpu 5"], None),
    "path of all GPUs": (["node0 - node2"], None),
    "adapter and path": (["node3 gpu 1", "node0 gpu 1 - node1 gpu 1"], None),
    "most partners": ([f"node0 gpu 5 - node{1 << n} gpu 5" for n in range(6)], "node0 gpu 5"),
}  # fmt: skip
"""What is slow between nodes, and what is named instead of that."""


@pytest.mark.parametrize("nodes", [4, 8, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", BETWEEN)
def test_the_slow_end_of_a_link_is_told(case, nodes):
    slow, instead = BETWEEN[case]
    slowed = [(judge.BETWEEN_NODES, where, 0.5) for where in slow]
    for seed in range(3):
        found = [f for f in judge.judge(*made(nodes, seed, slowed=slowed)) if f.cause]
        assert [f.where for f in found] == ([instead] if instead else slow)
        for f in found:
            path = " - " in f.where
            assert f.what.endswith(judge.PATH if path else "partners")
            assert f.nodes == (() if path else (judge.node_of(f.where),))


@pytest.mark.parametrize("nodes", [8, pytest.param(256, marks=pytest.mark.slow)])
def test_two_bad_nodes_are_told(nodes):
    """Of four, two slow down five of six pairs, which only the tables tell."""
    slowed = [(judge.BETWEEN_NODES, node, 0.5) for node in ("node0", "node3")]
    found = judge.judge(*made(nodes, 0, slowed=slowed))
    assert [f.where for f in found] == ["node0", "node3"]
    *_, remark = judge.judge(*made(4, 0, slowed=slowed))
    assert "below the expected" in str(remark)


def test_of_two_nodes_either_end_may_be_bad():
    (finding,) = judge.judge(*made(2, 0, slowed=[(judge.BETWEEN_NODES, "node0 gpu 5", 0.5)]))
    assert finding.what.endswith(
        "; either end may be bad, so leave one of the two out and check again"
    )
    finding, *_ = judge.judge(*made(2, 0, slowed=[("all-gather", "node1", 0.5)]))
    assert str(finding) == "node1: all-gather in a node 33 % below the median of 2"


def write_adapter(root, name, firmware="28.39.1002", rate="400 Gb/sec (4X NDR)", state="4: ACTIVE"):
    """What Linux tells of an adapter with one port."""
    contents = {
        "fw_ver": firmware, "hca_type": "MT4129", "board_id": "MT_0000000838",
        "ports/1/state": state, "ports/1/rate": rate, "ports/1/link_layer": "InfiniBand",
        "device/current_link_width": "16",
    }  # fmt: skip
    for file, content in contents.items():
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_text(f"{content}\n")


def test_another_firmware_or_link_of_an_adapter_is_named(tmp_path):
    """And two nodes that differ are both named, since neither is like most."""
    rates, hosts = made(3, 0)
    for name in hosts:
        write_adapter(tmp_path / name, "mlx5_0")
        write_adapter(tmp_path / name, "mlx5_1")
    write_adapter(tmp_path / "node1", "mlx5_1", firmware="28.36.1010")
    write_adapter(tmp_path / "node1", "mlx5_0", rate="200 Gb/sec (4X HDR)")
    write_adapter(tmp_path / "node2", "mlx5_1", state="1: DOWN")
    for name, told in hosts.items():
        told["settings"] = host_facts.settings(False, tmp_path / name)
        told["ports"] = host_facts.ports(tmp_path / name)
    assert hosts["node0"]["ports"] == {"mlx5_0 port 1": 400.0, "mlx5_1 port 1": 400.0}
    assert hosts["node0"]["settings"]["mlx5_0 board"] == "MT_0000000838"
    assert hosts["node0"]["settings"]["mlx5_0 PCIe speed"] is None
    slow, down, firmware = judge.judge(rates, hosts)
    assert str(slow) == "node1: mlx5_0 port 1: 200, but 400 Gb/s elsewhere"
    assert str(down) == "node2: mlx5_1 port 1: no link, but 400 Gb/s elsewhere"
    assert (down.cause, down.nodes) == ("network", ("node2",))
    assert str(firmware) == "node1: mlx5_1 firmware 28.36.1010, but 28.39.1002 elsewhere"
    assert firmware.cause is None
    del hosts["node2"], hosts["node1"]["ports"]["mlx5_1 port 1"]
    (absent, *_) = judge.judge([], hosts)
    assert str(absent).endswith("mlx5_1 port 1: no link, but 400 Gb/s elsewhere")
    del hosts["node0"]["ports"]["mlx5_1 port 1"]
    slow, firmware = judge.judge([], hosts)
    assert slow.where == "node1"
    both = "mlx5_1 firmware 28.39.1002: node0; mlx5_1 firmware 28.36.1010: node1"
    assert str(firmware) == f"all: {both}"


TOLD = {
    "nvlinks_up": (15, "3 of 18 NVLinks are down"),
    "power_limit_w": (500.0, "power limit 500 W instead of 700"),
    "reasons": (
        ["hardware thermal slowdown"],
        "1700 of 1980 MHz under load: hardware thermal slow",
    ),
    "ecc_uncorrected": (2, "uncorrected ECC errors: 2"),
    "remap_pending": (1, "remapped memory rows need a reset of the GPU"),
    "mig": (True, "MIG is on"),
    "pcie_lanes": (8, "8 of 16 PCIe lanes"),
    "unreached": ([3], "no NVLink to gpu 3"),
    "xids": ([79], "XIDs in the kernel's log: 79"),
    "ecc": (False, "ECC is off"),
}


@pytest.mark.parametrize("key", TOLD)
def test_what_the_driver_tells_is_judged(key):
    value, text = TOLD[key]
    rates, hosts = made(2, 0)
    hosts["node1"]["gpus"]["node1 gpu 2"][key] = value
    (finding,) = judge.judge(rates, hosts)
    assert str(finding).startswith(f"node1 gpu 2: {text}")
    assert (finding.cause is None) == (key in ("xids", "ecc"))
    hosts["node1"]["gpus"]["node1 gpu 2"] = dict.fromkeys(FACTS)  # a driver that tells nothing
    assert judge.judge(rates, hosts) == []


def test_what_all_gpus_share_is_the_clusters():
    """Cards without NVLink, of a site that lowers the power."""
    rates, hosts = made(2, 0)
    for told in hosts.values():
        for gpu in told["gpus"].values():
            gpu |= {"nvlinks_up": 0, "unreached": [*range(7)], "power_limit_w": 500.0}
    (finding,) = judge.judge(rates, hosts)
    assert str(finding) == "node0 gpu 0 and 15 more: power limit 500 W instead of 700"
    assert finding.cause is None
    hosts["node0"]["gpus"]["node0 gpu 0"] |= {"power_limit_w": 700.0, "pcie_lanes": 32}
    (finding,) = judge.judge(rates, hosts)  # of one that has more the others are no faults
    assert str(finding) == "node0 gpu 1 and 14 more: power limit 500 W instead of 700"
    assert finding.cause is None


def test_hosts_and_tables_are_remarked():
    rates, hosts = made(3, 0)
    hosts["node2"]["gpus"]["node2 gpu 4"]["vbios"] = "96.00.68"
    hosts["node2"] |= {"settings": {"driver": "580.1"}, "skew_s": -4.0, "files": {"lock": False}}
    hosts["node1"]["files"] = {"problem": "x cannot be written: Read-only file system"}
    rates = [replace(r, expected=r.value / 0.6) if r.kind == "memory" else r for r in rates]
    first, *remarks = judge.judge(rates, hosts)
    assert (first.where, first.cause, first.nodes) == ("node1", "storage", ("node1",))
    assert {remark.cause for remark in remarks} == {None}
    text = "\n".join(map(str, remarks))
    assert "all: memory" in text
    assert "no locks" in text
    assert "-4.0 s" in text
    assert "node2: driver 580.1, but 590.0 elsewhere" in text
    assert "node2 gpu 4: VBIOS 96.00.68, but 96.00.99 elsewhere" in text


@pytest.mark.parametrize("repeated", [True, False])
def test_a_gpu_a_few_percent_slow_is_named_by_repeated_samples(repeated):
    noise = random.Random(0)
    rates = [
        Rate(judge.SUSTAINED, "", (f"node{n // 8} gpu {n % 8}",), noise.gauss(700, 2),
             noise=0.001 if repeated else None)
        for n in range(64)
    ]  # fmt: skip
    rates[19] = replace(rates[19], value=675.0)
    found = [(f.where, f.nodes) for f in judge.judge(rates, {})]
    assert found == ([("node2 gpu 3", ("node2",))] if repeated else [])


GREW = {
    "ecc_uncorrected": (1, "1 uncorrected ECC errors under load", "gpu"),
    "xids": (2, "2 XIDs under load", "gpu"),
    "hot_ms": (1001, "1001 ms with a clock that heat held down under load", "gpu"),
    "nvlink_errors": (3, "3 errors on NVLinks under load", None),
    "link_downed": (1, "1 losses of the link under load", "network"),
}


@pytest.mark.parametrize("key", GREW)
def test_counters_that_grew_under_load_are_judged(key):
    count, text, cause = GREW[key]
    rates, hosts = made(2, 0)
    hosts["node1"]["grew"] = {"node1 gpu 2": {key: count}}
    (finding,) = judge.judge(rates, hosts)
    assert (str(finding), finding.cause) == (f"node1 gpu 2: {text}", cause)
    hosts["node1"]["grew"] = {"node1 gpu 2": {"hot_ms": 1000}}
    assert judge.judge(rates, hosts) == []


def test_only_growth_counts():
    before = {"gpu 0": {"xids": 3, "ecc_corrected": 1}, "gpu 1": {"xids": 1}}
    after = {"gpu 0": {"xids": 5, "ecc_corrected": 1, "hot_ms": 9}, "gpu 1": {"xids": 0}}
    assert host_facts.grew(before, after) == {"gpu 0": {"xids": 2}}


def test_a_port_counts_its_errors(tmp_path):
    write_adapter(tmp_path, "mlx5_0")
    folder = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    folder.mkdir()
    (folder / "symbol_error").write_text("7\n")
    (folder / "link_downed").write_text("N/A (no PMA)\n")
    (counts,) = host_facts.counters({}, tmp_path).values()
    assert counts == {"symbol_error": 7}


def test_a_bad_gpu_does_not_hide_the_network_of_its_node():
    slowed = [("bf16", "node0 gpu 1", 0.7), (judge.BETWEEN_NODES, "node0", 0.4)]
    found = judge.judge(*made(6, 0, gpus=4, slowed=slowed))
    assert {f.where: f.cause for f in found} == {"node0 gpu 1": "gpu", "node0": "network"}


def test_a_full_file_system_blames_no_node():
    rates, hosts = made(3, 0)
    for host in hosts.values():
        host["files"] = {"problem": "/stage cannot be written: Disk quota exceeded"}
    found = judge.judge(rates, hosts)
    assert {(f.cause, f.nodes) for f in found} == {("storage", ())}
    hosts["node0"]["files"] = {}
    assert {f.nodes for f in judge.judge(rates, hosts)} == {("node1",), ("node2",)}


def test_heat_is_seen_although_a_hot_gpu_takes_less_power(monkeypatch):
    cool, hot = (
        nvml.Sample(sm_mhz=mhz, power_w=watts, reasons=bits)
        for mhz, watts, bits in ((1980, 700, 4), (1200, 450, 64))
    )
    samples = iter([cool, hot, *[cool] * 10**6])
    monkeypatch.setattr(nvml.Gpu, "sample", lambda gpu: next(samples))
    facts = [{}]
    with host_facts.under_load([nvml.Gpu(0)], facts):
        time.sleep(4 * host_facts.SAMPLE_S)
    assert facts[0]["sm_mhz"] == 1200
    assert facts[0]["reasons"] == ["hardware thermal slowdown"]


def test_a_full_disk_keeps_no_file_of_the_check(tmp_path, monkeypatch):
    def full(_):
        assert [*tmp_path.iterdir()]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_facts.os, "fsync", full)
    found = host_facts.files(tmp_path)
    assert found == {"problem": f"{tmp_path} cannot be written: No space left on device"}
    assert not [*tmp_path.iterdir()]


DCGM = "| Persistence Mode | Pass |\n| Page Retirement/Row Remap | Fail - GPU: 3 |\n"


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        (DCGM, 226, ["Page Retirement/Row Remap Fail - GPU: 3"]),
        ("| Persistence Mode | Pass |", 0, []),
        ("Error: unable to establish a connection to the specified host", 255, None),
    ],
)
def test_what_dcgm_says(text, status, found, tmp_path, monkeypatch):
    (tmp_path / "dcgmi").write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert host_facts.diagnosis() == found
    rates, hosts = made(1, 0)
    hosts["node0"]["diagnosis"] = found
    assert [f.where for f in judge.judge(rates, hosts)] == ["node0"] * bool(found)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all-reduce", 1.75), ("all-gather", 0.875), ("reduce-scatter", 0.875), ("all-to-all", 0.875)],
)
def test_rates_of_collectives_are_those_of_nccl_tests(kind, factor):
    """Of eight GPUs; in nccl-tests, doc/PERFORMANCE.md."""
    assert bus_factor(kind, 8) == factor


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_the_expected_time_is_the_forecasts(kind):
    known, size = tables.load("h100"), 2**28
    seconds = expected_seconds(kind, size, tuple(range(8)), hardware.H100, known)
    assert seconds == pytest.approx(known.values["collective", kind][8, size] / 1e6)
    across = expected_seconds(kind, size, tuple(range(16)), hardware.H100, known)
    assert across > seconds
    busbw = size / 1e9 / across * bus_factor(kind, 16)
    rails = 1 if kind == "all-to-all" else 8  # a ring leaves a node over all of its adapters
    share = known.values["network", "direct" if rails == 1 else "ring"][(2,)]
    assert busbw < share * hardware.H100.nic * rails * (15 / 8 if rails == 1 else 1)


def test_collectives_far_below_the_expected_are_remarked():
    line = {"collective": "all-reduce", "bytes": 2**30, "busbw": 150.0, "expected": 300.0}
    small = line | {"bytes": 8, "busbw": 0.1, "expected": 1.0}  # latencies are no fault
    (finding,) = judge.size_findings([small, line])
    assert str(finding).endswith("busbw 150 GB/s, 50 % below the expected 300")
    assert finding.cause is None
    assert [*judge.size_findings([small, line | {"busbw": 230.0}])] == []


@pytest.mark.slow
def test_one_gpu_of_two_thousand_is_named():
    (finding,) = judge.judge(*made(256, 0, slowed=[("bf16", "node17 gpu 3", 0.8)]))
    assert re.fullmatch(r"node17 gpu 3: bf16 matmuls \d+ % below the median of 2048", str(finding))


@pytest.mark.parametrize("number", range(1, 10))
def test_every_node_has_a_partner_in_logarithmic_rounds(number):
    rounds = distances(judge.BETWEEN_NODES, number)
    assert len(rounds) == (number - 1).bit_length() + (number > 2)
    found = [pair for distance in rounds for pair in pairs(number, distance)]
    assert {a for a, _ in found} == (set(range(number)) if number > 1 else set())
    assert all((b, a) in found for a, b in found)


def test_a_folder_in_use_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    """By a run or by another check, whose check.json would be lost."""
    monkeypatch.setattr(command, "find_cluster", lambda told: pytest.fail("it measures"))
    with owned(tmp_path):
        words = ["--output", str(tmp_path)]
        assert_mistake(command.main, words, f"{tmp_path} is in use by process ", capsys)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_command_in_two_processes(tmp_path):
    processes = commands.start_two(
        "--cpu-devices", 2, "--output", tmp_path, "--sizes", module="jaxbench.check"
    )
    (out, err), _ = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], err
    assert "not judged: rates, since CPU devices share the host's cores" in out
    assert "check: no fault in 4 devices of 1 node" in out
    report = json.loads((tmp_path / "check.json").read_text())
    assert len(report["rates"]["exchange in a node"]["values"]) == 6
    largest = {line["collective"]: line for line in report["sizes"]}["all-reduce"]
    assert largest["bytes"] == 8**5
    assert largest["algbw"] == pytest.approx(largest["bytes"] / largest["time_us"] / 1e3)
    assert list(tmp_path.iterdir()) == [tmp_path / "check.json"]


@pytest.mark.slow
def test_a_node_may_have_any_number_of_gpus(tmp_path):
    status, _, err = commands.run(
        "--cpu-devices", 3, "--output", tmp_path, "--sizes", module="jaxbench.check"
    )
    assert status == 0, err
    rates = json.loads((tmp_path / "check.json").read_text())["rates"]
    assert {"all-gather in a node", "reduce-scatter in a node", "all-to-all in a node"} <= {*rates}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "times"), [(["--sizes"], 1), ([], 0)])
def test_one_gpu_has_no_collectives_by_size(tmp_path, options, times):
    words = ["--cpu-devices", 1, "--output", tmp_path, *options]
    status, out, err = commands.run(*words, module="jaxbench.check")
    assert status == 0, err
    line = "not judged: collectives by size, since there is only one GPU, and nothing to measure"
    assert out.count(line) == times
