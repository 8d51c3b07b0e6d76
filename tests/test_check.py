"""`jaxbench check`: its judgement of made measurements, and the command on CPU devices."""

import json
import random
import re
from dataclasses import replace

import commands
import pytest

from jaxbench.check import judge
from jaxbench.check.judge import Rate
from jaxbench.check.measure import pairs

SINGLE = {"bf16 products": 700.0, "fp8 products": 1300.0, "memory": 2660.0, "host to GPU": 50.0}
FACTS = {
    "nvlinks": 18, "nvlinks_up": 18, "unreached": [], "power_limit_w": 700.0, "reasons": [],
    "power_default_w": 700.0, "sm_mhz": 1700, "sm_max_mhz": 1980, "ecc_uncorrected": 0, "xids": [],
    "remap_pending": 0, "remap_failed": 0, "mig": False, "pcie_lanes": 16, "pcie_max_lanes": 16,
    "ecc": True, "persistence": True,
}  # fmt: skip


def made(nodes, seed, gpus=8, slowed=()):
    """(rates, hosts) of a cluster whose GPUs differ by 1.5 %, links by 3 % and networks at greater
    distance by more. `slowed` has (kind, words of an end, factor): rates of a kind at such ends."""
    noise = random.Random(seed)
    name = "node{} gpu {}".format
    rates = []

    def add(kind, ends, value, spread, distance=0):
        for of, where, factor in slowed:
            if kind.startswith(of) and any(f"{end} ".startswith(f"{where} ") for end in ends):
                value *= factor
        rates.append(Rate(kind, "", ends, value * noise.gauss(1, spread), value, distance))

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
    for distance in (1 << bit for bit in range((nodes - 1).bit_length())):
        for a, b in pairs(nodes, distance):
            for gpu in range(gpus if a < b else 0):
                ends = name(a, gpu), name(b, gpu)
                add(judge.BETWEEN_NODES, ends, 48.0 - distance % 7, 0.03, distance)
    host = {"skew_s": 0.01, "settings": {"driver": "590.0"}, "files": {"latency_s": 0.01}}
    hosts = {
        f"node{node}": {**host, "gpus": {name(node, gpu): dict(FACTS) for gpu in range(gpus)}}
        for node in range(nodes)
    }
    return rates, hosts


def test_a_healthy_cluster_has_no_finding():
    for seed in range(20):
        assert judge.judge(*made(2, seed)) == []


SLOWED = {
    "throttled": (2, [("bf16", "node1 gpu 3", 0.85), ("fp8", "node1 gpu 3", 0.85)], "gpu",
                  "node1 gpu 3: bf16 products 1"),
    "dead NVLinks": (2, [(judge.IN_NODE, "node0 gpu 5", 0.5), ("all", "node0", 0.6)], "gpu",
                     "node0 gpu 5: exchange in a node"),
    "adapter of two nodes": (2, [(judge.BETWEEN_NODES, "node0 gpu 5", 0.5)], "network",
                             "node0 gpu 5 - node1 gpu 5: exchange between nodes"),
    "adapter": (3, [(judge.BETWEEN_NODES, "node1 gpu 5", 0.5)], "network",
                "node1 gpu 5: exchange between nodes"),
    "a node's network": (8, [(judge.BETWEEN_NODES, "node2", 0.5)], "network",
                         "node2: exchange between nodes"),
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


TOLD = {
    "nvlinks_up": (15, "3 of 18 NVLinks are down"),
    "power_limit_w": (500.0, "power limit 500 W of 700"),
    "reasons": (
        ["hardware thermal slowdown"],
        "1700 of 1980 MHz under load: hardware thermal slow",
    ),
    "ecc_uncorrected": (2, "uncorrected ECC errors: 2"),
    "remap_pending": (1, "remapping of memory rows waits for a reset"),
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
    for host in hosts.values():
        for gpu in host["gpus"].values():
            gpu |= {"nvlinks_up": 0, "unreached": [*range(7)], "power_limit_w": 500.0}
    (finding,) = judge.judge(rates, hosts)
    assert str(finding) == "node0 gpu 0 and 15 more: power limit 500 W of 700"
    assert finding.cause is None


def test_hosts_and_tables_are_remarked():
    rates, hosts = made(3, 0)
    hosts["node2"] |= {"settings": {"driver": "580.1"}, "skew_s": -4.0, "files": {"lock": False}}
    hosts["node1"]["files"] = {"problem": "x cannot be written: Read-only file system"}
    rates = [replace(r, expected=r.value / 0.6) if r.kind == "memory" else r for r in rates]
    first, *remarks = judge.judge(rates, hosts)
    assert (first.where, first.cause, first.nodes) == ("node1", "storage", ("node1",))
    assert {remark.cause for remark in remarks} == {None}
    text = "\n".join(map(str, remarks))
    assert "all: memory" in text
    assert "no locks" in text
    assert "clock differs by -4.0 s" in text
    assert "driver 580.1, elsewhere 590.0" in text


@pytest.mark.slow
def test_one_gpu_of_two_thousand_is_named():
    (finding,) = judge.judge(*made(256, 0, slowed=[("bf16", "node17 gpu 3", 0.8)]))
    assert re.fullmatch(r"node17 gpu 3: bf16 products \d+ % below the median of 2048", str(finding))


@pytest.mark.parametrize("number", range(1, 10))
def test_every_node_has_a_partner_in_logarithmic_rounds(number):
    found = [pair for bit in range((number - 1).bit_length()) for pair in pairs(number, 1 << bit)]
    assert {a for a, _ in found} == (set(range(number)) if number > 1 else set())
    assert all((b, a) in found for a, b in found)


@pytest.mark.slow
def test_the_command_in_two_processes(tmp_path):
    processes = commands.start_two(
        "--cpu-devices", 2, "--output", tmp_path, module="jaxbench.check"
    )
    (out, err), _ = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], err
    assert "not judged: CPU devices share the host's cores" in out
    assert "check: no fault in 4 devices of 1 node" in out
    report = json.loads((tmp_path / "check.json").read_text())
    assert len(report["rates"]["exchange in a node"]["values"]) == 6
    assert list(tmp_path.iterdir()) == [tmp_path / "check.json"]
