"""`jaxbench qualify`: what it concludes from the records of checks, which are made here. Real Slurm
runs them in tests/null_gpu/test_null_qualify.py."""

import json
import sys
from collections import defaultdict

import pytest
from launching import slurm
from test_check import made

from jaxbench.base.errors import RecipeError
from jaxbench.check import acceptance, qualify, rows
from jaxbench.check.judge import BETWEEN_NODES, Finding, node_of, to_json


def sized(**busbw):
    """The collectives by size of a check, with two sizes; names have a _ for each -."""
    return [
        {"collective": kind.replace("_", "-"), "bytes": size, "time_us": 10.0, "algbw": rate,
         "busbw": rate * size / 64, "expected": expected}
        for kind, (rate, expected) in busbw.items()
        for size in (8, 64)
    ]  # fmt: skip


def record(folder, nodes, rates, hosts, sizes=()):
    """Writes check.json as a check of these nodes does."""
    mine = [rate for rate in rates if {*map(node_of, rate.ends)} <= {*nodes}]
    report = {
        "rates": to_json(mine), "hosts": {name: hosts[name] for name in nodes}, "device": "H100",
        "nodes": len(nodes), "devices": 8 * len(nodes), "sizes": sizes, "minutes": None,
        "unknown": [], "null": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "check.json").write_text(json.dumps(report))


@pytest.fixture
def qualified(tmp_path, capsys):
    """What a qualification concludes if all its checks have run already."""

    def conclude(number, slowed, sizes=lambda nodes: {}):
        rates, hosts = made(number, 0, slowed=slowed)
        args = qualify.parse_options(["--output", str(tmp_path)])
        names = [*hosts]
        single = [rate for rate in rates if rate.kind != BETWEEN_NODES]
        for name in names:
            record(tmp_path / "nodes" / name, [name], single, hosts)
        for a in names:
            for b in names:
                if a != b:
                    record(tmp_path / "pairs" / f"{a}-{b}", [a, b], rates, hosts)
        healthy = [n for n in names if not any(n in where for _, where, _ in slowed)]
        for some in qualify.growing(healthy):
            folder = tmp_path / "together" / str(len(some))
            record(folder, some, rates, hosts, sized(**sizes(len(some))))
        return qualify.qualify(names, args)

    return conclude


def test_a_node_whose_gpus_are_all_slow_is_found_among_the_others(qualified):
    """A check of this node alone has nothing to compare them with."""
    found = qualified(8, [("bf16 matmuls", "node3", 0.85)])
    assert found.healthy == [f"node{n}" for n in range(8) if n != 3]
    verdict, why = found.verdict_of("node3")
    assert verdict == "fail"
    assert why.startswith("node3: bf16 matmuls 1")
    assert "below the median of 64" in why


def test_collectives_over_more_nodes_tell_where_they_fall(qualified, capsys):
    """No node is at fault. A rate that is expected to fall is none, nor is a fall by less than a
    quarter, nor that of an all-to-all whose rate is not known."""

    def rates(nodes):
        slow = nodes > 4
        return {
            "all_reduce": (20 if slow else 40, 48),
            "all_gather": (20 if slow else 40, 24 if slow else 48),
            "reduce_scatter": (31 if slow else 40, None),
            "all_to_all": (80 / nodes, None),
        }  # fmt: skip

    found = qualified(12, [], rates)
    assert len(found.healthy) == 12
    assert found.remarks == [
        "8 nodes: all-reduce of 6.4e-08 GB: busbw 20 GB/s, but 40 over 2 nodes; look at the "
        "switches between them, their routing and SHARP",
        "all: all-reduce of 6.4e-08 GB: busbw 20 GB/s, 58 % below the expected 48",
    ]
    lines = acceptance.by_nodes(found.reports)
    assert [(line["collective"], line["nodes"], line["busbw"]) for line in lines[:4]] == [
        ("all-reduce", nodes, rate) for nodes, rate in ((2, 40), (4, 40), (8, 20), (12, 20))
    ]
    qualify.show(found)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all-reduce", "12", "64", "20", "48"] in shown


def test_some_nodes_are_not_judged_together(tmp_path, qualified, monkeypatch):
    """All of them are, at last. Records of fewer nodes that are missing or of other nodes are made
    again, and a job that fails is no fault of a node."""
    qualified(5, [])
    monkeypatch.setenv("PATH", slurm(tmp_path))  # whose srun checks nothing
    slower, hosts = made(5, 0, slowed=[("bf16 matmuls", "node1", 0.8)])
    for number in (2, 4):
        for path in (folder := tmp_path / "together" / str(number)).iterdir():
            path.unlink()
        folder.rmdir()
    record(tmp_path / "together" / "4", [f"node{n}" for n in range(4)], slower, hosts)
    args = qualify.parse_options(["--output", str(tmp_path)])
    found = qualify.qualify([*hosts], args)
    assert len(found.healthy) == 5
    assert [*map(str, found.links)] == ["node0 - node1: the check failed: exit status 0"]
    assert [report["nodes"] for report in found.reports[5:]] == [4, 5]


def test_numbers_of_nodes_double_up_to_all_of_them():
    def sizes(number):
        return [len(some) for some in qualify.growing([f"n{n}" for n in range(number)])]

    assert [sizes(n) for n in range(5)] == [[0], [1], [2], [2, 3], [2, 4]]
    assert sizes(256) == [2, 4, 8, 16, 32, 64, 128, 256]
    nodes = "abcdefghijklmnopqrstuvwx"
    assert ["".join(some) for some in qualify.growing([*nodes])[2:]] == [
        "abcdefgh", "abdeghjkmnpqstvw", nodes,
    ]  # fmt: skip


def test_rounds_give_each_node_two_partners_and_one_at_a_time():
    assert [*qualify.rounds([])] == []
    assert [*qualify.rounds(["a"])] == []
    assert [*qualify.rounds(["a", "b"])] == [[("a", "b")]]
    for number in range(3, 10):
        partners = defaultdict(set)
        for some in qualify.rounds([f"n{n}" for n in range(number)]):
            busy = [name for pair in some for name in pair]
            assert len(busy) == len({*busy})
            for a, b in some:
                partners[a].add(b)
                partners[b].add(a)
        assert {len(names) for names in partners.values()} == {2}
        assert len(partners) == number


def test_a_record_of_other_nodes_or_an_incomplete_one_is_no_result(tmp_path, monkeypatch):
    rates, hosts = made(2, 0)
    record(tmp_path / "nodes" / "node0", ["node1"], rates, hosts)
    args = qualify.parse_options(["--output", str(tmp_path)])
    monkeypatch.setenv("PATH", slurm(tmp_path))  # whose srun checks nothing
    check = qualify.run_check(("node0",), qualify.NODES, args)
    assert (check.report, check.why) == (None, "exit status 0")
    assert check.reached
    for text in ("{", "[]", '{"rates": {}}'):
        (tmp_path / "nodes" / "node0" / "check.json").write_text(text)
        assert qualify.read(tmp_path / "nodes" / "node0") is None


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 8), ("NVIDIA H100 80GB HBM3", 4)])
def test_a_rehearsal_is_no_result_for_gpus(device, gpus, tmp_path, monkeypatch):
    """Nor is a check of fewer GPUs. Both are in the default folder."""
    rates, hosts = made(1, 0)
    folder = tmp_path / "nodes" / "node0"
    record(folder, ["node0"], rates, hosts)
    path = folder / "check.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": device, "devices": gpus}))
    args = qualify.parse_options(["--output", str(tmp_path)])
    monkeypatch.setenv("PATH", slurm(tmp_path))  # whose srun checks nothing
    assert qualify.run_check(("node0",), qualify.NODES, args).report is None


@pytest.mark.parametrize(
    ("why", "reached"),
    [
        ("srun: error: Unable to allocate resources: Requested nodes are busy", False),
        ("srun: Required node not available (down, drained or reserved)", False),
        ("error: all CUDA-capable devices are busy or unavailable", True),
        ("srun: error: n4: task 0: Exited with exit code 2", True),
    ],
)
def test_a_broken_gpu_is_not_a_busy_node(why, reached):
    assert qualify.Check(("n4",), why=why).reached == reached


def failing(tmp_path, nodes, failed, cause):
    """Tells of failures of some nodes; returns what the command of --on-fail was told."""
    tell = f'echo "$NODE" "$EVIDENCE" >> {tmp_path}/told'
    args = qualify.parse_options(["--output", str(tmp_path), "--on-fail", tell])
    found = qualify.Verdicts(nodes)
    found.add(Finding(n, "$(touch bad); 'x'", cause, (n,)) for n in failed)
    qualify.tell_failures(found, args)
    told = tmp_path / "told"
    return told.read_text().splitlines() if told.exists() else []


def test_a_failure_is_told_once_and_again_after_the_node_passed(tmp_path, capsys):
    line = "n2 n2: $(touch bad); 'x'"
    assert failing(tmp_path, ["n1", "n2", "n3"], ["n2"], "gpu") == [line]
    assert failing(tmp_path, ["n1", "n2", "n3"], ["n2"], "gpu") == [line]
    assert failing(tmp_path, ["n1", "n2", "n3"], [], "gpu") == [line]
    assert failing(tmp_path, ["n1", "n2", "n3"], ["n2"], "gpu") == [line, line]
    most = failing(tmp_path, ["n4", "n5", "n6"], ["n4", "n5"], "failed")
    assert most == [line, line]
    assert "--on-fail is not run for 2 nodes" in capsys.readouterr().err


def test_a_slow_link_is_told_once_and_next_to_both_nodes():
    """A check of two nodes finds it, and one of all nodes again."""
    found = qualify.Verdicts(["n1", "n2", "n3"])
    for count in (48, 72):
        link = Finding("n1 gpu 3 - n2 gpu 3", f"40 % below the median of {count}", "network")
        found.add([link])
    assert len(found.links) == 1
    why = "n1 gpu 3 - n2 gpu 3: 40 % below the median of 48"
    assert [found.verdict_of(node) for node in found.nodes] == [
        ("pass", why), ("pass", why), ("pass", ""),
    ]  # fmt: skip


def test_the_history_of_a_gpu_follows_it():
    found = qualify.Verdicts(["n1", "n2"])
    gpus = {"n1 gpu 0": {"serial": "17"}, "n1 gpu 1": {"serial": None}}
    found.reports = [{"hosts": {"n1": {"gpus": gpus}}}]
    found.add([Finding("n1 gpu 0", "MIG is on", "gpu", ("n1",))])
    known = qualify.follow_gpus(found, {})
    assert known == {"17": {"where": "n1 gpu 0", "faults": {"n1 gpu 0": ["n1 gpu 0: MIG is on"]}}}
    assert found.remarks == []
    moved = qualify.Verdicts(["n1", "n2"])
    moved.reports = [{"hosts": {"n2": {"gpus": {"n2 gpu 3": {"serial": "17"}}}}}]
    again = qualify.follow_gpus(moved, known)
    assert again == {"17": {"where": "n2 gpu 3", "faults": {"n1 gpu 0": ["n1 gpu 0: MIG is on"]}}}
    (remark,) = moved.remarks
    assert remark == "n2 gpu 3 (serial number 17) had faults before: n1 gpu 0: MIG is on"


def test_a_longer_load_repeats_a_check(tmp_path, monkeypatch):
    rates, hosts = made(1, 0)
    record(tmp_path / "nodes" / "node0", ["node0"], rates, hosts)
    monkeypatch.setenv("PATH", slurm(tmp_path))  # whose srun checks nothing
    for minutes, kept in (((), True), (("--minutes", "5"), False)):
        words = ["--output", str(tmp_path), *minutes]
        args = qualify.parse_options(words)
        check = qualify.run_check(("node0",), qualify.NODES, args)
        assert (check.report is not None) == kept


def test_a_row_is_submitted_on_nodes_that_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", slurm(tmp_path), prepend=":")
    monkeypatch.setenv("STAGE_PATH", str(tmp_path))
    monkeypatch.setenv("JAXBENCH_VENV", sys.prefix)
    words = ["--account", "physics", "--srun", "qos=high", "--output", str(tmp_path)]
    args = qualify.parse_options(words)
    nodes = ["n1", "n4", "n5"]
    row = "llama31_8b_fp8 --time 0:10:00"
    rows.run(row, nodes, args)
    job, folder, its_nodes = json.loads((tmp_path / rows.FILE).read_text())[row]
    assert its_nodes == ["n1", "n4"]
    script = (tmp_path / f"script-{job}").read_text()
    assert folder.endswith(f"/16/{job}")
    for line in ("nodelist=n1,n4", "account=physics", "qos=high", "time=0:10:00", "nodes=2"):
        assert f"#SBATCH --{line}\n" in script
    with pytest.raises(RecipeError, match="32 GPUs, but 3 nodes have 24"):
        rows.submit("llama31_8b_fp8 --gpus 32", nodes, args)
    for text, message in (("llama31_8b_fp8 --gpu 8", "--gpu"), ("llama9", "llama9")):
        with pytest.raises(RecipeError, match=message):
            rows.submit(text, nodes, args, dry_run=True)


def test_the_page_shows_all_that_was_found(tmp_path):
    _, hosts = made(1, 0)
    hosts["node0"]["gpus"] = {"node0 gpu 0": {"name": "NVIDIA H100", "serial": "165"}}
    lines = [
        {"collective": "all-reduce", "bytes": n, "time_us": 10.0, "algbw": n / 1e4,
         "busbw": n / 1e4, "expected": n / 8e3}
        for n in (8, 64, 512)
    ]  # fmt: skip
    together = {"sizes": lines, "devices": 8, "nodes": 2, "minutes": 5}
    alone = {"devices": 4, "nodes": 1, "minutes": 5}
    runs = [{"recipe": "llama31_8b_fp8:8", "verdict": "slow", "reason": "90.1 %", "gpus": 8,
             "step_time_s": 2.0, "published_s": 1.8}]  # fmt: skip
    verdicts = {"node0": ("pass", ""), "node1": ("fail", "<b>"), "node2": ("not reached", "busy")}
    page = acceptance.page(verdicts, hosts, [together, alone], ["a - b: slow"], runs)
    for text in (
        "1 of 3 nodes passed, 1 failed, 1 not reached. 0 of 1 row passed.", "&lt;b&gt;",
        "1 x NVIDIA H100", "165", "a - b: slow", "8 GPUs of 2 nodes", "512 B", "90.1", "590.0",
        "collectives for 5 minutes", "Accepted by",
    ):  # fmt: skip
        assert text.replace(" %", "\xa0%") in page.replace("&nbsp;", "\xa0"), text
    assert ">80</td>" in page  # percent of the expected rate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name nodes (--nodes) or a partition (--partition)"),
        (["--nodes", "n1", "--wait", "0"], "--wait = 0 must be above 0"),
        (["--nodes", "n1"], "there is no scontrol here"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    assert qualify.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
