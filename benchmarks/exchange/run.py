"""How near to linear gradients travel over slow links: every exchange of ours and every peer, in turns, in one run.

    python benchmarks/exchange/run.py --links 100mbit 1gbit 10gbit --workloads gpt-1024 gpt-4096 gpt-16384 nin-64
        [--strategies all-reduce ddp ...] [--nodes 4] [--steps 5] [--rounds 5] [--paces FILE] [--out results.json]

Nodes are network namespaces of this machine with links limited by tc (links.py; needs root), TCP is real, computing is
paced (paced.py): first the real model is measured alone on one thread, or `--paces` tells what an earlier run wrote
there. Bytes are what the kernel counts at interfaces. A round has a turn of each contender, in an order that rotates;
ratios are of medians over all rounds. figures.py tells what the best possible is. Whoever fails or hangs in a turn is
left out from then on, with the reason.

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
from contenders import CONTENDERS, NONE, OURS, PEERS
from figures import Row, Turn, row_of, table, turn_of
from links import MOST, bits, congestion_control, obstacle
from paced import Pace, shapes_of
from team import HERE, Team, TurnFailed
from workloads import WORKLOADS

MEASURE = 900.0
"""Seconds in which the pace of a workload has to be found."""
UNLIMITED = "none"


@dataclass
class Case:
    """Nodes, workload and link, and all turns so far by contender."""

    nodes: int
    workload: str
    link: str
    pace: Pace
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        return None if self.link == UNLIMITED else bits(self.link)

    def rows(self) -> list[Row]:
        alone = self.turns.get(NONE)
        if not alone:
            return []
        return [row_of(name, turns, alone, self.pace, self.rate) for name, turns in self.turns.items() if turns]

    def page(self) -> list[str]:
        pace = self.pace
        title = f"### {WORKLOADS[self.workload].told}, {self.nodes} nodes, {self.link}"
        told = f"Computing alone: {pace.forward * 1e3:.0f} ms forward, {pace.backward_seconds * 1e3:.0f} ms backward."
        return [title, "", told, "", *table(self.rows(), self.failed), ""]

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"nodes": self.nodes, "workload": self.workload, "link": self.link}
        facts |= {"told": WORKLOADS[self.workload].told, "bytes": gradient_bytes(self.workload), "failed": self.failed}
        turns = {name: [asdict(turn) for turn in turns] for name, turns in self.turns.items()}
        return {**facts, "rows": [asdict(row) for row in self.rows()], "turns": turns}


def gradient_bytes(workload: str) -> int:
    """Of all gradients of a model, in fp32."""
    with torch.device("meta"):
        shapes = shapes_of(WORKLOADS[workload].build())
    return 4 * sum(torch.Size(shape).numel() for shape in shapes.values())


class Field:
    """A team that is there when it is needed: made anew after a turn that failed."""

    def __init__(self, nodes: int, workload: str, pace: Pace, log: Path) -> None:
        with torch.device("meta"):
            self._shapes = shapes_of(WORKLOADS[workload].build())
        self._team = lambda: Team(nodes, self._shapes, pace, log)
        self._nodes, self._pace, self._bytes = nodes, pace, gradient_bytes(workload)
        self._stack = contextlib.ExitStack()
        self._now: Team | None = None
        self._turns = 0

    def turn(self, contender: str, link: str, options: argparse.Namespace) -> Turn:
        if self._now is None:
            self._now = self._stack.enter_context(self._team())
        self._turns += 1
        self._now.limit(None if link == UNLIMITED else link)
        asked = {"contender": contender, "turn": self._turns, "local": options.local_steps}
        asked |= {"warmup": options.warmup, "steps": options.steps}
        try:
            return turn_of(self._now.turn(asked, self._patience(link, options)))
        except TurnFailed:
            self.close()
            raise

    def close(self) -> None:
        self._now = None
        self._stack.close()

    def _patience(self, link: str, options: argparse.Namespace) -> float:
        """Twice what the worst exchange, through one server, would take, and what it takes to begin."""
        rate = min(2e9, 2e9 if link == UNLIMITED else bits(link))  # all nodes share the cores
        steps = sum(-(-each // options.local_steps) * options.local_steps for each in (options.warmup, options.steps))
        step = self._pace.seconds + 2 * self._nodes * self._bytes * 8 / rate
        return float(60 + 2 * max(steps, options.warmup + options.steps) * step)


def measured(workload: str) -> Pace:
    """The pace of a workload, measured in a process of its own, whose memory is gone then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "workloads.py"), workload]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=MEASURE, check=True)
    return Pace.from_dict(json.loads(done.stdout))


def paces_of(workloads: Sequence[str], path: Path | None) -> dict[str, Pace]:
    """Paces by workload: what `path` has of them is not measured again, what it lacks is added to it."""
    known = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    for workload in workloads:
        if workload not in known:
            pace = measured(workload)
            print(f"{workload}: {pace.forward:.3f} s forward, {pace.backward_seconds:.3f} s backward", flush=True)
            known[workload] = pace.as_dict()
            if path is not None:
                path.write_text(json.dumps(known))
    return {workload: Pace.from_dict(known[workload]) for workload in workloads}


def cases(options: argparse.Namespace, paces: dict[str, Pace], log: Path) -> Iterator[Case]:
    """Every case with all its turns."""
    names = [NONE, *(name for name in options.strategies if name != NONE)]
    for nodes in options.nodes:
        for workload in options.workloads:
            with contextlib.closing(Field(nodes, workload, paces[workload], log)) as ground:
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


def surroundings() -> str:
    return (
        f"`{shlex.join(['python', 'benchmarks/exchange/run.py', *sys.argv[1:]])}`, "
        f"{datetime.date.today().isoformat()}, {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}. Computing is paced by sleeping, alike with and without exchange, since all nodes "
        f"share these cores. Links are limited both ways by `tc tbf`, TCP's congestion control is "
        f"{congestion_control()}; bytes are the kernel's counts."
    )


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as tc writes them, or none")
    parser.add_argument("--workloads", nargs="+", default=["gpt-1024"], choices=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument(
        "--strategies", nargs="+", default=[*OURS, *PEERS], choices=list(CONTENDERS), metavar="STRATEGY"
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[4])
    parser.add_argument("--steps", type=int, default=5, help="in a turn; those with local steps do whole periods")
    parser.add_argument("--warmup", type=int, default=3, help="steps in a turn before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local-steps", type=int, default=25, help="of those that do not exchange in every step")
    parser.add_argument("--paces", type=Path, help="a file with paces: read where it has them, written where not")
    parser.add_argument("--out", type=Path, help="write all turns to this file, as JSON")
    options = parser.parse_args(argv)
    if not all(2 <= nodes <= MOST for nodes in options.nodes):
        parser.error(f"--nodes: {options.nodes} must be 2 to {MOST} each")
    for name in ("steps", "rounds", "local_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    for link in options.links:
        try:
            link == UNLIMITED or bits(link)
        except ValueError as error:
            parser.error(f"--links: {error}, nor none")
    return options


def main() -> None:
    options = options_of()
    why = obstacle()
    if why is not None:
        raise SystemExit(f"nothing is measured: {why}")
    print(surroundings(), "", sep="\n", flush=True)
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-exchange-") as scratch, contextlib.suppress(KeyboardInterrupt):
        paces = paces_of(options.workloads, options.paces)
        for case in cases(options, paces, Path(scratch) / "nodes.log"):
            print("\n".join(case.page()), flush=True)
            done.append(case.as_dict())
            if options.out:
                facts = {"surroundings": surroundings(), "paces": {name: p.as_dict() for name, p in paces.items()}}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({**facts, "cases": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
