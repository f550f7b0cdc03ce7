"""How near to linear gradients travel over slow links: every exchange of ours and every peer, in turns, in one run.

    python benchmarks/grad_sync/run.py --links 100mbit 1gbit 10gbit --workloads gpt-1024 gpt-4096 gpt-16384 nin-64
        [--strategies all-reduce ddp ...] [--nodes 4] [--steps 5] [--rounds 5] [--paces FILE] [--out results.json]

Nodes are network namespaces of this machine with links limited by tc (links.py; needs root), TCP is real, computing is
paced (rate_limited.py): first the real model is measured alone on one thread, or `--paces` tells what an earlier run
wrote there. Bytes are what the kernel counts at interfaces. A round has a turn of each contender, in an order that
rotates; ratios are of medians over all rounds. tables.py tells what the best possible is. Whoever fails or hangs in a
turn is left out from then on, with the reason.

Gradients are random. The error is how far their exchanged mean was from the true one in the steps for warm-up, so it
tells a wrong sum from a right one; of an exchange that counts on gradients being alike (PowerSGD: of low rank) it tells
nothing, and what a lossy one costs in training is told by loss.py.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from competitors import COMPETITORS, NO_SYNC, PEER_COMPETITORS, PHALANX_COMPETITORS
from links import MAX_NODES, congestion_control, find_obstacle, parse_rate
from node_processes import BENCHMARK_DIR, NodeProcesses, TurnFailed
from rate_limited import ComputeTiming, list_shapes
from tables import TableRow, Turn, format_table, make_row, make_turn
from workloads import WORKLOADS

MEASURE_TIMEOUT_S = 900.0
"""Seconds in which the pace of a workload has to be found."""
UNLIMITED_LINK = "none"


@dataclass
class Case:
    """Nodes, workload and link, and all turns so far by contender."""

    nodes: int
    workload: str
    link: str
    pace: ComputeTiming
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        return None if self.link == UNLIMITED_LINK else parse_rate(self.link)

    def rows(self) -> list[TableRow]:
        alone = self.turns.get(NO_SYNC)
        if not alone:
            return []
        return [make_row(name, turns, alone, self.pace, self.rate) for name, turns in self.turns.items() if turns]

    def page(self) -> list[str]:
        pace = self.pace
        title = f"### {WORKLOADS[self.workload].told}, {self.nodes} nodes, {self.link}"
        told = f"Computing alone: {pace.forward * 1e3:.0f} ms forward, {pace.backward_seconds * 1e3:.0f} ms backward."
        return [title, "", told, "", *format_table(self.rows(), self.failed), ""]

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"nodes": self.nodes, "workload": self.workload, "link": self.link}
        facts |= {"told": WORKLOADS[self.workload].told, "bytes": gradient_bytes(self.workload), "failed": self.failed}
        turns = {name: [asdict(turn) for turn in turns] for name, turns in self.turns.items()}
        return {**facts, "rows": [asdict(row) for row in self.rows()], "turns": turns}


def gradient_bytes(workload: str) -> int:
    """Of all gradients of a model, in fp32."""
    with torch.device("meta"):
        shapes = list_shapes(WORKLOADS[workload].build())
    return 4 * sum(torch.Size(shape).numel() for shape in shapes.values())


class Testbed:
    """A team that is there when it is needed: made anew after a turn that failed."""

    def __init__(self, nodes: int, workload: str, pace: ComputeTiming, log: Path) -> None:
        with torch.device("meta"):
            self._shapes = list_shapes(WORKLOADS[workload].build())
        self._team = lambda: NodeProcesses(nodes, self._shapes, pace, log)
        self._nodes, self._pace, self._bytes = nodes, pace, gradient_bytes(workload)
        self._stack = contextlib.ExitStack()
        self._now: NodeProcesses | None = None
        self._turns = 0

    def turn(self, competitor: str, link: str, options: argparse.Namespace) -> Turn:
        if self._now is None:
            self._now = self._stack.enter_context(self._team())
        self._turns += 1
        self._now.limit(None if link == UNLIMITED_LINK else link)
        request = {"contender": competitor, "turn": self._turns, "local": options.local_steps}
        request |= {"warmup": options.warmup, "steps": options.steps}
        try:
            return make_turn(self._now.run_turn(request, self._turn_timeout_s(link, options)))
        except TurnFailed:
            self.close()
            raise

    def close(self) -> None:
        self._now = None
        self._stack.close()

    def _turn_timeout_s(self, link: str, options: argparse.Namespace) -> float:
        """Twice what the worst exchange, through one server, would take, and what it takes to begin."""
        rate = min(2e9, 2e9 if link == UNLIMITED_LINK else parse_rate(link))  # all nodes share the cores
        steps = sum(-(-each // options.local_steps) * options.local_steps for each in (options.warmup, options.steps))
        step = self._pace.seconds + 2 * self._nodes * self._bytes * 8 / rate
        return float(60 + 2 * max(steps, options.warmup + options.steps) * step)


def measure_workload(workload: str) -> ComputeTiming:
    """The pace of a workload, measured in a process of its own, whose memory is gone then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARK_DIR / "workloads.py"), workload]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=MEASURE_TIMEOUT_S, check=True
    )
    return ComputeTiming.from_dict(json.loads(done.stdout))


def load_timings(workloads: Sequence[str], path: Path | None) -> dict[str, ComputeTiming]:
    """Paces by workload: what `path` has of them is not measured again, what it lacks is added to it."""
    known = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    for workload in workloads:
        if workload not in known:
            pace = measure_workload(workload)
            print(f"{workload}: {pace.forward:.3f} s forward, {pace.backward_seconds:.3f} s backward", flush=True)
            known[workload] = pace.as_dict()
            if path is not None:
                path.write_text(json.dumps(known))
    return {workload: ComputeTiming.from_dict(known[workload]) for workload in workloads}


def cases(options: argparse.Namespace, paces: dict[str, ComputeTiming], log: Path) -> Iterator[Case]:
    """Every case with all its turns."""
    names = [NO_SYNC, *(name for name in options.strategies if name != NO_SYNC)]
    for nodes in options.nodes:
        for workload in options.workloads:
            with contextlib.closing(Testbed(nodes, workload, paces[workload], log)) as ground:
                for link in options.links:
                    case = Case(nodes, workload, link, paces[workload], {name: [] for name in names})
                    for number in range(options.rounds):
                        start = number % len(names)
                        for name in names[start:] + names[:start]:
                            if name in case.failed:
                                continue
                            try:
                                case.turns[name].append(ground.turn(name, link, options))
                            except TurnFailed as error:
                                case.failed[name] = str(error)
                                del case.turns[name]
                    yield case


def describe_environment() -> str:
    return (
        f"`{shlex.join(['python', 'benchmarks/grad_sync/run.py', *sys.argv[1:]])}`, "
        f"{datetime.date.today().isoformat()}, {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}. Computing is paced by sleeping, alike with and without exchange, since all nodes "
        f"share these cores. Links are limited both ways by `tc tbf`, TCP's congestion control is "
        f"{congestion_control()}; bytes are the kernel's counts."
    )


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as tc writes them, or none")
    parser.add_argument("--workloads", nargs="+", default=["gpt-1024"], choices=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=[*PHALANX_COMPETITORS, *PEER_COMPETITORS],
        choices=list(COMPETITORS),
        metavar="STRATEGY",
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[4])
    parser.add_argument("--steps", type=int, default=5, help="in a turn; those with local steps do whole periods")
    parser.add_argument("--warmup", type=int, default=3, help="steps in a turn before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local-steps", type=int, default=25, help="of those that do not exchange in every step")
    parser.add_argument("--paces", type=Path, help="a file with paces: read where it has them, written where not")
    parser.add_argument("--out", type=Path, help="write all turns to this file, as JSON")
    options = parser.parse_args(argv)
    if not all(2 <= nodes <= MAX_NODES for nodes in options.nodes):
        parser.error(f"--nodes: {options.nodes} must be 2 to {MAX_NODES} each")
    for name in ("steps", "rounds", "local_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    for link in options.links:
        try:
            link == UNLIMITED_LINK or parse_rate(link)
        except ValueError as error:
            parser.error(f"--links: {error}, nor none")
    return options


def main() -> None:
    options = parse_options()
    why = find_obstacle()
    if why is not None:
        raise SystemExit(f"nothing is measured: {why}")
    print(describe_environment(), "", sep="\n", flush=True)
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-exchange-") as scratch, contextlib.suppress(KeyboardInterrupt):
        paces = load_timings(options.workloads, options.paces)
        for case in cases(options, paces, Path(scratch) / "nodes.log"):
            print("\n".join(case.page()), flush=True)
            done.append(case.as_dict())
            if options.out:
                facts = {
                    "surroundings": describe_environment(),
                    "paces": {name: p.as_dict() for name, p in paces.items()},
                }
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({**facts, "cases": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
