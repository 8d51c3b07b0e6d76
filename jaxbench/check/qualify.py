"""The command `jaxbench qualify`: checks the nodes of a Slurm cluster one by one, then in pairs,
then 2, 4, 8 and so on together, at last all, and ends with one table of nodes.

Every check is a job of its own, `srun jaxbench check`, so busy and broken nodes hold up no other.
GPUs are compared with those of all nodes, and the links of each pair with those of all pairs. Nodes
with a fault take no part in what comes next. Needs no JAX.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.base.errors import STATUS, RecipeError, counted, listed
from jaxbench.base.files import json_object, owned, write_json
from jaxbench.base.terminal import command, console, plain_table, write
from jaxbench.check import acceptance, rows
from jaxbench.check.arguments import FILE as CHECKED
from jaxbench.check.judge import Finding, fall_findings, from_json, judge, node_of, size_findings
from jaxbench.check.qualify_options import Options, parse_options
from jaxbench.cluster.jobs import environment, slurm

FILE, PAGE = "qualify.json", "qualify.html"

JOB_NAME = f"jaxbench-qualify-{os.getpid()}"

AT_A_TIME = 64
"""Jobs that this command starts at a time."""

BUSY = re.compile(
    r"srun: .*(Unable to allocate resources|nodes? .*(busy|not available|DOWN|DRAINED))", re.I
)
"""What srun says if it gets no nodes."""


class Stage(NamedTuple):
    """Checks of the same kind: the folder of their records, whether GPUs are loaded for `--minutes`
    and whether collectives are measured by size."""

    folder: str
    loads: bool
    sizes: bool

    def minutes(self, options: Options) -> int:
        """For how long GPUs are loaded."""
        return (self.loads and options.minutes) or 0


NODES, PAIRS = Stage("nodes", loads=True, sizes=False), Stage("pairs", loads=False, sizes=False)
SOME, ALL = Stage("together", loads=False, sizes=True), Stage("together", loads=True, sizes=True)


@dataclass(frozen=True)
class Check:
    """A check of some nodes: its report (check.json), or why there is none."""

    nodes: tuple[str, ...]
    report: dict[str, Any] | None = None
    why: str = ""

    @property
    def reached(self) -> bool:
        """Whether Slurm gave it its nodes."""
        return self.report is not None or not BUSY.match(self.why)


@dataclass
class Verdicts:
    """What is known of the nodes. `faults` are by node, each with its cause; `links` are slow links
    between nodes, neither of which is known to be at fault."""

    nodes: Sequence[str]
    unreached: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[Finding]] = field(default_factory=dict)
    links: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Pairs and greater groups of nodes that Slurm did not give in time."""
    remarks: list[str] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    """The records of checks of single nodes, then those of more and more nodes together."""
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def healthy(self) -> list[str]:
        """Nodes that were reached and have no fault."""
        return [n for n in self.nodes if n not in self.unreached and n not in self.faults]

    def add(self, found: Iterable[Finding]) -> None:
        """Adds faults, slow links and remarks. What is known is not added again."""
        known = {str(fault) for faults in self.faults.values() for fault in faults}
        for finding in found:
            if finding.cause is None:
                if str(finding) not in self.remarks:
                    self.remarks.append(str(finding))
            elif not finding.nodes:
                if finding.where not in [link.where for link in self.links]:
                    self.links.append(finding)
            elif str(finding) not in known:
                for node in finding.nodes:
                    self.faults.setdefault(node, []).append(finding)

    def add_unreported(self, checks: Sequence[Check]) -> None:
        """Adds the checks that have no report. If a check of several nodes fails, no node is known
        to be at fault."""
        for check in checks:
            number = len(check.nodes)
            name = " - ".join(check.nodes) if number <= 2 else f"{number} nodes together"
            if check.report is None and check.reached:
                cause, nodes = ("failed", check.nodes) if number == 1 else ("network", ())
                self.add([Finding(name, f"the check failed: {check.why}", cause, nodes)])
            elif check.report is None and number == 1:
                self.unreached[name] = check.why
            elif check.report is None:
                self.unchecked.append(f"{name}: {check.why}")

    @property
    def ordered(self) -> list[str]:
        """The nodes, those that fail first, then those that were not reached."""
        order = {"fail": 0, "not reached": 1, "pass": 2}
        return sorted(self.nodes, key=lambda node: order[self.verdict_of(node)[0]])

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """What the nodes told, the first time."""
        reports = reversed(self.reports)
        return {node: host for report in reports for node, host in report["hosts"].items()}

    def verdict_of(self, node: str) -> tuple[str, str]:
        """(verdict, why) of a node."""
        if node in self.unreached:
            return "not reached", self.unreached[node]
        if node in self.faults:
            return "fail", "; ".join(map(str, self.faults[node]))
        its = (
            str(link) for link in self.links
            if node in map(node_of, link.where.split(" - "))
        )  # fmt: skip
        return "pass", "; ".join(its)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all nodes pass, the exit status of the first fault (`base.errors.STATUS`), or 1
    if nodes were not reached."""
    options = parse_options(argv)
    nodes = find_nodes(options.nodes, options.partition)
    for row in options.row:
        rows.submit(row, nodes, options, dry_run=True)
    options.output.mkdir(parents=True, exist_ok=True)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    with owned(options.output):
        try:
            found = qualify(nodes, options)
            tell_failures(found, options)
            if found.healthy:
                found.rows += [rows.run(row, found.healthy, options) for row in options.row]
        except KeyboardInterrupt:
            note = "interrupted; finished checks are kept, and the same command continues"
            print(note, file=sys.stderr)
            return 130
    show(found)
    verdicts = {name: found.verdict_of(name) for name in found.ordered}
    notes = [*map(str, found.links), *found.unchecked, *found.remarks]
    path = options.output / PAGE
    write(acceptance.page(verdicts, found.hosts, found.reports, notes, found.rows), path)
    print(f"acceptance page: {path}")
    if found.faults:
        return STATUS[next(iter(found.faults.values()))[0].cause or "gpu"]
    slow = any(row["verdict"] not in ("pass", "not comparable") for row in found.rows)
    return int(bool(found.unreached or found.links or found.unchecked or slow))


def find_nodes(names: str | None, partition: str | None) -> list[str]:
    """The names of the nodes. Raises RecipeError if there are none."""
    if names:
        nodes = slurm("scontrol", "show", "hostnames", names).split()
    elif partition:
        answer = slurm("sinfo", "--noheader", f"--partition={partition}", "--Node", "--format=%N")
        nodes = [*dict.fromkeys(answer.split())]
    else:
        raise RecipeError("name nodes (--nodes) or a partition (--partition)")
    if not nodes:
        raise RecipeError(f"no node is in {names or partition}")
    return nodes


def qualify(nodes: Sequence[str], options: Options) -> Verdicts:
    """Checks nodes, pairs of healthy nodes, and more and more healthy nodes together. What some
    nodes together show is no fault of a node: all of them together are judged at last."""
    found = Verdicts(nodes)
    alone = run_checks([(node,) for node in nodes], NODES, options)
    found.add_unreported(alone)
    found.add(findings_of(alone))
    paired: list[Check] = []
    for apart in rounds(found.healthy):
        paired += run_checks(apart, PAIRS, options)
    found.add_unreported(paired)
    found.add(findings_of(paired))
    *fewer, everyone = growing(found.healthy)
    some = [check for group in fewer for check in run_checks([group], SOME, options)]
    every = run_checks([everyone], ALL, options) if len(everyone) > 1 else []
    found.add_unreported([*some, *every])
    found.add(findings_of(every))
    together = [check.report for check in (*some, *every) if check.report]
    found.add(fall_findings(together))
    if together:
        found.add(size_findings(together[-1].get("sizes") or ()))
    found.reports = [*(check.report for check in alone if check.report), *together]
    unknown = Counter(line for report in found.reports for line in report.get("unknown") or ())
    found.add(
        Finding(counted(number, "check"), f"not judged: {line}") for line, number in unknown.items()
    )
    return found


def findings_of(checks: Iterable[Check]) -> list[Finding]:
    """The findings of several checks, as if they were one."""
    reports = [check.report for check in checks if check.report is not None]
    hosts = {node: host for report in reports for node, host in report["hosts"].items()}
    on_gpus = any(report["device"] != "cpu" for report in reports)
    rates = [rate for report in reports for rate in from_json(report["rates"])]
    return judge(rates, hosts, comparable=on_gpus)


def rounds(nodes: Sequence[str]) -> Iterator[Sequence[tuple[str, ...]]]:
    """Pairs of neighbours on a ring, in rounds in which each node has one partner at most. Each
    node has two partners in all, so that a slow link can be told from a slow node."""
    ring = [*zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)]
    if len(nodes) % 2:
        yield from (some for some in (ring[:-1:2], ring[1:-1:2], ring[-1:]) if len(nodes) > 1)
    elif len(nodes) > 2:
        yield from (ring[::2], ring[1::2])
    elif nodes:
        yield ring[:1]


def growing(nodes: Sequence[str]) -> list[tuple[str, ...]]:
    """2, 4, 8 and so on of some nodes, and at last all. Up to 8 are neighbours in Slurm's order.
    More are spread evenly, since they are to use the switches between all of them."""

    def some(count: int) -> tuple[str, ...]:
        every = len(nodes) if count > 8 else count
        return tuple(nodes[n * every // count] for n in range(count))

    return [*(some(2**n) for n in range(1, (len(nodes) - 1).bit_length())), tuple(nodes)]


def run_checks(groups: Sequence[tuple[str, ...]], stage: Stage, options: Options) -> list[Check]:
    """Runs a check on each group of nodes, many at a time, unless the folder has its report
    already. No node is in two groups. Cancels all jobs if it is interrupted."""
    began = time.monotonic()
    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        futures = [pool.submit(run_check, group, stage, options) for group in groups]
        checks = [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        with suppress(RecipeError):
            slurm("scancel", "--me", f"--name={JOB_NAME}")
        raise
    pool.shutdown()
    done = sum(check.report is not None for check in checks)
    minutes = (time.monotonic() - began) / 60
    what = {NODES: "node", PAIRS: "pair"}.get(stage) or f"group of {len(groups[0])} nodes"
    print(f"{stage.folder}: {done} of {counted(len(groups), what)} checked, {minutes:.1f} minutes")
    return checks


def serves(
    report: Mapping[str, Any], nodes: tuple[str, ...], stage: Stage, options: Options
) -> bool:
    """True if the report of an earlier check says what this check would say."""
    return (
        {*report["hosts"]} == {*nodes}  # others may have been healthy then
        and (report["device"] == "cpu") == bool(options.cpu_devices)  # a rehearsal
        and report.get("devices") == len(nodes) * options.devices_per_node
        and (report.get("minutes") or 0) >= stage.minutes(options)
    )


def run_check(nodes: tuple[str, ...], stage: Stage, options: Options) -> Check:
    """The check of some nodes, from the folder or from a job."""
    folder = options.output / stage.folder / (str(len(nodes)) if stage.sizes else "-".join(nodes))
    report = read(folder)
    if report is None or not serves(report, nodes, stage, options):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CHECKED).unlink(missing_ok=True)
        done = subprocess.run(
            srun(nodes, folder, stage, options), env=environment(), capture_output=True, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        (folder / "log.txt").write_text(done.stdout + done.stderr)
        if (report := read(folder)) is None:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if "error" in line.lower()]
            return Check(nodes, why=(errors or lines or [f"exit status {done.returncode}"])[0])
    if {*report["hosts"]} != {*nodes}:
        return Check(nodes, why=f"{folder / CHECKED} is of {listed([*report['hosts']], 3)}")
    return Check(nodes, report)


def srun(nodes: tuple[str, ...], folder: Path, stage: Stage, options: Options) -> list[str]:
    """The command that checks some nodes in a job of their own."""
    minutes = stage.minutes(options)
    own = {
        "job-name": JOB_NAME, "nodelist": ",".join(nodes), "nodes": len(nodes),
        "ntasks-per-node": 1 if options.cpu_devices else options.gpus_per_node,
        "immediate": 60 * options.wait, "time": options.limit + minutes, "mem": 0,
        "account": options.account, "partition": options.partition,
        "gres": options.gres and f"gpu:{options.gres}",
    }  # fmt: skip
    words = [f"--{key}={value}" for key, value in own.items() if value is not None]
    devices = f"--cpu-devices={options.cpu_devices}" if options.cpu_devices else "--local-devices=1"
    check = [sys.executable, "-m", "jaxbench", "check", devices, f"--output={folder.absolute()}"]
    check += [*([f"--minutes={minutes}"] if minutes else []), *(["--sizes"] if stage.sizes else [])]
    # As launch/slurm.sbatch starts it: Slurm's default may be one core for each process.
    words += ["--cpu-bind=none", "--mpi=none", "--distribution=block", "--kill-on-bad-exit=1"]
    return ["srun", "--exclusive", *words, *(f"--{option}" for option in options.srun), *check]


def read(folder: Path) -> dict[str, Any] | None:
    """The report of a check that has ended; None if there is none."""
    report = json_object(folder / CHECKED)
    return report if {"rates", "hosts", "device"} <= report.keys() else None


def tell_failures(found: Verdicts, options: Options) -> None:
    """Writes qualify.json, and runs the command of `--on-fail` for nodes that have failed since
    they last passed. If most nodes fail because their check ends with an error, it runs the command
    for none of these: the cause is then probably the same, such as an option that is missing."""
    path = options.output / FILE
    before = json_object(path)
    named, known = before.get("told"), before.get("gpus")
    told = {*named} - {*found.healthy} if isinstance(named, list) else set()
    verdicts = {node: found.verdict_of(node) for node in found.nodes}
    content = {
        "nodes": {
            node: {"verdict": verdict, "why": why} for node, (verdict, why) in verdicts.items()
        },
        "links": [*map(str, found.links)],
        "not_checked": found.unchecked,
        "gpus": follow_gpus(found, known if isinstance(known, dict) else {}),
    }
    write_json(path, content | {"told": sorted(told)})
    if not options.on_fail:
        return
    errors = [node for node, faults in found.faults.items() if faults[0].cause == "failed"]
    if len(errors) > max(1, len(found.nodes) / 2):
        why = "most checks ended with an error, probably for a common reason"
        print(f"warning: --on-fail is not run for {counted(len(errors), 'node')}: {why}",
              file=sys.stderr)  # fmt: skip
    else:
        errors = []
    for node, faults in found.faults.items():
        if node not in told and node not in errors:
            about = {"NODE": node, "CAUSE": faults[0].cause or "", "EVIDENCE": verdicts[node][1]}
            done = subprocess.run(options.on_fail, shell=True, env=environment() | about)
            if done.returncode:
                print(f"warning: --on-fail for {node}: exit status {done.returncode}",
                      file=sys.stderr)  # fmt: skip
                continue
            told.add(node)
            write_json(path, content | {"told": sorted(told)})


def follow_gpus(found: Verdicts, before: Mapping[str, Any]) -> dict[str, Any]:
    """Each GPU by its serial number: `where` it is, and all `faults` that it has had, by place. A
    GPU that had faults in another place is a remark."""
    gpus = dict(before)
    faults = [fault for some in found.faults.values() for fault in some]
    every = (gpu for host in found.hosts.values() for gpu in host["gpus"].items())
    places = {str(facts["serial"]): where for where, facts in every if facts.get("serial")}
    for serial, where in places.items():
        past = dict(gpus.get(serial, {}).get("faults", {}))
        if elsewhere := [str(fault) for place in past if place != where for fault in past[place]]:
            said = "; ".join(elsewhere)
            found.remarks.append(f"{where} (serial number {serial}) had faults before: {said}")
        here = [*past.get(where, []), *(str(fault) for fault in faults if fault.where == where)]
        past |= {where: [*dict.fromkeys(here)]} if here else {}
        gpus[serial] = {"where": where, "faults": past}
    return gpus


def show(found: Verdicts) -> None:
    """Prints the table of nodes, those that fail first, the largest collectives by number of nodes,
    and how many nodes there are of each kind."""
    nodes = plain_table("node", "verdict", "why")
    for node in found.ordered:
        nodes.add_row(node, *found.verdict_of(node))
    console().print(nodes)
    collectives = plain_table("collective", figures=("nodes", "bytes", "busbw GB/s", "expected"))
    for line in acceptance.by_nodes(found.reports):
        rates = ("" if line[key] is None else f"{line[key]:.4g}" for key in ("busbw", "expected"))
        collectives.add_row(line["collective"], str(line["nodes"]), str(line["bytes"]), *rates)
    if collectives.row_count:
        console().print(collectives)
    ran = [f"{row['recipe']}: {row['verdict']}: {row['reason']}" for row in found.rows]
    for name, lines in (
        ("link", found.links), ("remark", found.remarks), ("row", ran),
        ("not checked", found.unchecked),
    ):  # fmt: skip
        for said in lines:
            print(f"{name}: {said}")
    print(
        f"qualify: {len(found.healthy)} pass, {len(found.faults)} fail, "
        f"{len(found.unreached)} not reached, of {counted(len(found.nodes), 'node')}"
    )
