"""Time to recover from a killed worker: ours and torchrun's, in turns, in one run on one machine.

    python benchmarks/recovery.py [--kills 12] [--width 128] [--layers 2]
    python benchmarks/recovery.py --nodes [--kills 6]

Two workers train the same transformer on the CPU and save every ten steps; the second one is killed by SIGKILL, again
and again. Counted is the time from the kill to the end of the next step that is done, less the duration of that step:
noticing, ending the others, starting, meeting, reading the state; and the wasted progress in steps.
Ours is run without in-memory checkpoints, so from the checkpoint in storage; and with them.
torchrun runs a plain DDP loop with torch.save; both agents have their default settings. Each of the loop's attempts has
its own prefix in torchrun's store: without it the second or third restart hangs.

`--nodes`: three nodes of one worker (agents of this machine) with `PHALANX_NUM_NODES=1:3`. An agent is killed, in turns
the last node's and the leader's, and started again. Counted is the time from the kill to the next step on two nodes,
and from the return to the next step on three; for a node also from the leader's notice of the loss.
Where torchft is installed, so are three of its replica groups of one process, with its default settings: one is killed,
and counted is the time from the kill to the next step that the two others commit. They go on in the same processes.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from phalanx.models import transformer
from phalanx.run import Event, EventTail, Run
from phalanx.run.event_types import AttemptStarted, RunEvent, RunWarning, StepDone, WorkerFailure, WorkerStarted
from phalanx.run.events import LineTail

CHECKPOINT_EVERY = 10
"""Steps between two checkpoints."""
SAVING = {"every": CHECKPOINT_EVERY, "keep": 2}
STEPS_BETWEEN_KILLS = (25, 34)
"""Steps between two kills, in turns so that they strike at any distance from a checkpoint."""
RESUME_TIMEOUT_S = 120.0
PHALANX_VARIANTS: dict[str, dict[str, object]] = {
    "phalanx train, from the checkpoint": {"checkpoint": {**SAVING, "in_memory_every": None}},
    "phalanx train, from an in-memory checkpoint": {"checkpoint": {**SAVING, "in_memory_every": 2}},
}
BASE_RECIPE = {
    "name": "recovery",
    "model": {"build": "phalanx.models:transformer"},
    "data": {"source": {"text": "text.txt"}, "seq_len": 64},
    "evaluation": {"every": None},
    "checkpoint": SAVING,
    "batch": {"global_size": 8, "micro_size": 4},
    "precision": "fp32",
    "num_threads": 1,
    "steps": 100_000,
    "compile": False,
}
NODES_BATCH = {"global_size": 12, "micro_size": 2}
"""Divided by one, two and three workers."""
Shape = dict[str, int]
E = TypeVar("E", bound=RunEvent)
TORCHRUN_SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from phalanx.models import transformer

torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# without a prefix of its own each restart reads addresses of the workers that died, and hangs
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("attempt" + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
torch.manual_seed(0)
model = transformer(256, 64, **json.loads(sys.argv[2]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder, step = sys.argv[1], 0
saved = os.path.join(folder, "state.pt")
if os.path.exists(saved):
    state = torch.load(saved)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); step = state["step"]
ddp = DistributedDataParallel(model)
log = open(os.path.join(folder, f"rank-{rank}.jsonl"), "a", buffering=1)
log.write(json.dumps({"pid": os.getpid(), "t": time.time()}) + "\\n")
while True:
    begun = time.time()
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(step * 2 + rank))
    loss = torch.nn.functional.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()
    step += 1
    log.write(json.dumps({"step": step, "t": time.time(), "seconds": time.time() - begun}) + "\\n")
    if rank == 0 and step % 10 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved + ".new")
        os.replace(saved + ".new", saved)
"""

TORCHFT_SCRIPT = """
import json, os, sys, time
import torch
from torchft import Manager, Optimizer, ProcessGroupGloo
from phalanx.models import transformer

torch.set_num_threads(1)
node, folder = int(sys.argv[1]), sys.argv[2]
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = torch.distributed.TCPStore(*address, is_master=True, wait_for_workers=False)  # as torchrun has one
torch.manual_seed(0)
model = transformer(256, 64, **json.loads(sys.argv[3]))
plain = torch.optim.AdamW(model.parameters(), lr=1e-3)

def load(state):
    model.load_state_dict(state["model"]); plain.load_state_dict(state["optimizer"])

manager = Manager(
    pg=ProcessGroupGloo(), min_replica_size=1, replica_id=f"node{node}", load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
)
optimizer = Optimizer(manager, plain)  # without its DDP, of which 0.2.0 fails an assertion when a node is lost
log = open(os.path.join(folder, f"node-{node}.jsonl"), "a", buffering=1)
while True:
    begun, before = time.time(), manager.current_step()
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(before * 3 + node))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for parameter in model.parameters():
        manager.allreduce(parameter.grad).wait()
    optimizer.step()
    if manager.current_step() > before:
        now = time.time()
        line = {"step": manager.current_step(), "nodes": manager.num_participants(), "t": now, "seconds": now - begun}
        log.write(json.dumps(line) + "\\n")
"""


Step = tuple[float, float, int]


class RecoveryCompetitor:
    """A run that goes on until it is stopped. `steps`: end, duration and number of each step so far."""

    def __init__(self, command: list[str], folder: Path, steps: Callable[[], list[Step]]):
        self.steps = steps
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.output = folder / "said"
        with open(self.output, "wb") as said:
            self.process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=environment)

    def kill_and_measure(self, victim: Callable[[], int], steps: int) -> tuple[float, int]:
        """Let it train for so many steps, kill a worker, and return the seconds until training goes on, and the wasted
        steps."""
        before = len(self.steps())
        self.wait_until(lambda: len(self.steps()) >= before + steps)
        pid, killed = victim(), time.time()
        os.kill(pid, signal.SIGKILL)
        seen = len(self.steps())
        self.wait_until(lambda: any(end - seconds > killed for end, seconds, _ in self.steps()[max(0, seen - 1) :]))
        found = self.steps()
        index = next(i for i, (end, seconds, _) in enumerate(found) if end - seconds > killed)
        end, seconds, number = found[index]
        return end - seconds - killed, max(step for _, _, step in found[:index]) + 1 - number

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + RESUME_TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                said = self.output.read_text()[-2000:]
                raise SystemExit(f"{self.process.args!r}: ended with {self.process.poll()} or took too long:\n{said}")
            time.sleep(0.005)

    def close(self) -> None:
        """End it with all its workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait()


@contextlib.contextmanager
def ours(
    folder: Path, shape: Shape, changes: dict[str, object]
) -> Iterator[tuple[RecoveryCompetitor, Callable[[], int]]]:
    """`phalanx train` of the recipe, and the second worker's process."""
    folder.mkdir()
    (folder / "text.txt").write_text("never lost, whatever falls. " * 20_000)
    (folder / "recipe.yaml").write_text(json.dumps(BASE_RECIPE | {"model": {"args": shape}} | changes))
    run = Run(folder / "run")
    # each line is read once: reading the whole log at every poll would take a core from the run that is measured
    tail = EventTail(run.events)
    events: list[Event] = []

    def steps() -> list[Step]:
        events.extend(tail.read())
        done = [event for event in events if isinstance(event, StepDone)]
        return [(event.time, event.duration_s, event.step) for event in done]

    def victim() -> int:
        events.extend(tail.read())
        return [event for event in events if isinstance(event, WorkerStarted) and event.rank == 1][-1].pid

    command = [sys.executable, "-m", "phalanx", "train", "recipe.yaml", "--run", str(run.path), "--nproc-per-node", "2"]
    contender = RecoveryCompetitor(command, folder, steps)
    try:
        yield contender, victim
    finally:
        contender.close()


@contextlib.contextmanager
def torchrun(folder: Path, shape: Shape) -> Iterator[tuple[RecoveryCompetitor, Callable[[], int]]]:
    """The plain loop under torchrun, and the second worker's process."""
    folder.mkdir()
    (folder / "loop.py").write_text(TORCHRUN_SCRIPT)

    tails = [LineTail(folder / f"rank-{rank}.jsonl") for rank in range(2)]
    done: list[Step] = []
    pids: list[int] = []

    def steps() -> list[Step]:
        lines = [json.loads(line) for line in tails[0].read()]
        done.extend((line["t"], line["seconds"], int(line["step"])) for line in lines if "step" in line)
        return done

    def victim() -> int:
        lines = [json.loads(line) for line in tails[1].read()]
        pids.extend(int(line["pid"]) for line in lines if "pid" in line)
        return pids[-1]

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1000", "loop.py", str(folder), json.dumps(shape)]
    contender = RecoveryCompetitor(command, folder, steps)
    try:
        yield contender, victim
    finally:
        contender.close()


class ElasticNodes:
    """Three agents of one run that trains on those that are there."""

    def __init__(self, folder: Path, shape: Shape):
        folder.mkdir()
        (folder / "text.txt").write_text("never lost, whatever falls. " * 20_000)
        changes = {"checkpoint": {**SAVING, "in_memory_every": 2}, "determinism": "elastic", "batch": NODES_BATCH}
        (folder / "recipe.yaml").write_text(json.dumps(BASE_RECIPE | {"model": {"args": shape}} | changes))
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(32))
        self.token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.run = folder, Run(folder / "run")
        self.tail, self.events = EventTail(self.run.events), list[Event]()
        self.agents = {node: self.start(node) for node in range(3)}

    def start(self, node: int) -> "subprocess.Popen[bytes]":
        variables = {
            "PHALANX_NUM_NODES": "1:3",
            "PHALANX_NODE_RANK": str(node),
            "PHALANX_LEADER_ADDR": f"127.0.0.1:{self.port}",
            "PHALANX_TOKEN_FILE": str(self.token),
            "PHALANX_IN_MEMORY_DIR": str(self.folder / f"memory-{node}"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "phalanx", "train", "recipe.yaml", "--run", str(self.run.path)]
        with open(self.folder / f"node-{node}.log", "ab") as out:
            return subprocess.Popen(
                [*command, "--nproc-per-node", "1"], cwd=self.folder, stdout=out, stderr=out, env=os.environ | variables
            )

    def find_leader(self) -> int:
        """Return the node whose agent writes the run's events."""
        writers = [
            node
            for node, agent in self.agents.items()
            if str(self.run.events) in {file.path for file in psutil.Process(agent.pid).open_files()}
        ]
        return writers[0]

    def find_other(self) -> int:
        """Return the last node that does not lead."""
        return max(node for node in self.agents if node != self.find_leader())

    def kill_and_measure(self, node: int) -> dict[str, float]:
        """Kill a node's agent, and start it again. Returns seconds: `kill` to the next step on two nodes, `notice` from
        the leader's notice, `rejoin` from the decision to take it in to the next step on three."""
        self.wait_for_steps(3, 30)
        killed = time.time()
        self.agents[node].kill()
        self.agents[node].wait()
        begun = self.wait_for_steps(2, 1)
        seconds = {"kill": begun - killed}
        if losses := [event.time for event in self.new_events(WorkerFailure, killed)]:
            seconds["notice"] = begun - losses[0]
        self.wait_for_steps(2, 10)
        self.agents[node] = self.start(node)
        begun = self.wait_for_steps(3, 1)
        decided = [event.time for event in self.new_events(RunWarning, killed) if "then restarting on 3" in event.text]
        return seconds | {"rejoin": begun - decided[0]}

    def new_events(self, kind: type[E], since: float) -> list[E]:
        return [event for event in self.events if isinstance(event, kind) and event.time > since]

    def wait_for_steps(self, num_nodes: int, count: int) -> float:
        """Wait until an attempt on `num_nodes` has done `count` steps. Returns when the first of them began."""
        since, end = time.time(), time.monotonic() + RESUME_TIMEOUT_S
        while time.monotonic() < end:
            self.events.extend(self.tail.read())
            starts = [(index, each) for index, each in enumerate(self.events) if isinstance(each, AttemptStarted)]
            if starts and starts[-1][1].world_size == num_nodes:
                steps = [event for event in self.events[starts[-1][0] :] if isinstance(event, StepDone)]
                recent = [step for step in steps if count == 1 or step.time > since]
                if len(recent) >= count:
                    return recent[0].time - recent[0].duration_s
            time.sleep(0.005)
        raise SystemExit("".join((self.folder / f"node-{node}.log").read_text()[-1500:] for node in self.agents))

    def close(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(agent.pid)
                for each in [*process.children(recursive=True), process]:
                    each.kill()
            agent.wait()


class TorchftNodes:
    """Three replica groups of one process each, and their lighthouse."""

    def __init__(self, folder: Path, shape: Shape):
        folder.mkdir()
        (folder / "loop.py").write_text(TORCHFT_SCRIPT)
        self.folder, self.shape = folder, shape
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.lighthouse_url = f"http://127.0.0.1:{port}"
        program = shutil.which("torchft_lighthouse")
        assert program is not None
        self.lighthouse = self.open([program, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"])
        self.nodes = {node: self.start(node) for node in range(3)}

    def open(self, command: list[str], **variables: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / "said", "ab") as out:
            return subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=os.environ | variables)

    def start(self, node: int) -> "subprocess.Popen[bytes]":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables = {
            "TORCHFT_LIGHTHOUSE": self.lighthouse_url,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "loop.py", str(node), str(self.folder), json.dumps(self.shape)]
        return self.open(command, **variables)

    def kill_and_measure(self) -> float:
        """Kill a node and start it again. Returns the seconds from the kill to the next step of the two others."""
        self.wait_for_steps(3, 30)
        killed = time.time()
        self.nodes[2].kill()
        self.nodes[2].wait()
        begun = self.wait_for_steps(2, 1, killed)
        self.wait_for_steps(2, 10)
        self.nodes[2] = self.start(2)
        return begun - killed

    def wait_for_steps(self, num_nodes: int, count: int, since: float | None = None) -> float:
        """Wait for steps of the first node on `num_nodes` that begin after `since`: now. Returns when the first did."""
        since, end = time.time() if since is None else since, time.monotonic() + RESUME_TIMEOUT_S
        tail, found = LineTail(self.folder / "node-0.jsonl"), list[float]()
        while len(found) < count and time.monotonic() < end:
            lines = [json.loads(line) for line in tail.read()]
            starts = [line["t"] - line["seconds"] for line in lines if line["nodes"] == num_nodes]
            found.extend(start for start in starts if start > since)
            time.sleep(0.005)
        if len(found) < count:
            raise SystemExit((self.folder / "said").read_text()[-3000:])
        return found[0]

    def close(self) -> None:
        for process in (*self.nodes.values(), self.lighthouse):
            process.kill()
            process.wait()


def measure_torchft(shape: Shape, kills: int, found: dict[str, list[float]]) -> None:
    """Add the times of a lost node under torchft, if it is installed."""
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed: pip install torchft")
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-torchft-") as scratch:
        nodes = TorchftNodes(Path(scratch) / "nodes", shape)
        try:
            found["torchft, node kill"] = [nodes.kill_and_measure() for _ in range(kills)]
        finally:
            nodes.close()


def measure_nodes(shape: Shape, kills: int) -> None:
    """Print the times of a lost node, and of a lost leader."""
    found: dict[str, list[float]] = {}
    measure_torchft(shape, kills, found)
    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as scratch:
        nodes = ElasticNodes(Path(scratch) / "nodes", shape)
        try:
            nodes.wait_for_steps(3, 1)
            for turn in range(kills):
                is_leader = turn % 2 == 1
                victim = nodes.find_leader() if is_leader else nodes.find_other()
                for what, seconds in nodes.kill_and_measure(victim).items():
                    found.setdefault(f"{'leader' if is_leader else 'node'} {what}", []).append(seconds)
        finally:
            nodes.close()
    print("", "| | times | median | least | most |", "|---|---|---|---|---|", sep="\n")
    for name in sorted(found):
        figures = [statistics.median(found[name]), min(found[name]), max(found[name])]
        print(f"| {name} | {len(found[name])} | {' | '.join(f'{figure:.3f} s' for figure in figures)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="turns among which the kills are divided")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--nodes", action="store_true", help="lose nodes of a run that trains on those that are there")
    given = parser.parse_args()
    shape: Shape = {"layers": given.layers, "hidden_size": given.width, "num_heads": 4}
    if given.nodes:
        print_header(shape)
        measure_nodes(shape, given.kills)
        return
    starts = {name: partial(ours, changes=changes) for name, changes in PHALANX_VARIANTS.items()} | {
        "torchrun": torchrun
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as scratch:
        for turn in range(given.rounds):
            for number, (name, start) in enumerate(starts.items()):
                with start(Path(scratch) / f"{number}-{turn}", shape) as (contender, victim):
                    for kill in range(-(-given.kills // given.rounds)):
                        found[name].append(
                            contender.kill_and_measure(victim, STEPS_BETWEEN_KILLS[kill % len(STEPS_BETWEEN_KILLS)])
                        )
    peer = statistics.median(seconds for seconds, _ in found["torchrun"])
    rows = ["| | kills | median | least | most | wasted | torchrun / this |", "|---|---|---|---|---|---|---|"]
    for name, pauses in found.items():
        seconds = [pause for pause, _ in pauses]
        figures = [statistics.median(seconds), min(seconds), max(seconds)]
        told = " | ".join(f"{figure:.3f} s" for figure in figures)
        again = statistics.mean(steps for _, steps in pauses)
        rows.append(f"| {name} | {len(seconds)} | {told} | {again:.1f} steps | {peer / figures[0]:.1f} |")
    print_header(shape)
    print("", *rows, sep="\n")


def print_header(shape: Shape) -> None:
    """Print the command, the machine and the model."""
    millions = sum(parameter.numel() for parameter in transformer(256, 64, **shape).parameters()) / 1e6
    print(
        f"`{' '.join(['python', 'benchmarks/recovery.py', *sys.argv[1:]])}`, {datetime.date.today().isoformat()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, {millions:.1f} M parameters."
    )


if __name__ == "__main__":
    main()
