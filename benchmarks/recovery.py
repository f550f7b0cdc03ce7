"""Time to recover from a killed worker: ours and torchrun's, in turns, in one run on one machine.

    python benchmarks/recovery.py [--kills 12] [--width 128] [--layers 2]

Two workers train the same transformer on the CPU and save every ten steps; the second one is killed by SIGKILL, again
and again. Counted is the time from the kill to the end of the next step that is done, less the duration of that step:
noticing, ending the others, starting, meeting, reading the state; and the wasted progress in steps.
Ours is run without in-memory checkpoints, so from the checkpoint in storage; with them; and under
`determinism: elastic`, where the other worker goes on from memory and a new one joins it later; and so with four
workers, each two of which hold a replica together.
torchrun runs a plain DDP loop with torch.save; both agents have their default settings. Each of the loop's attempts has
its own prefix in torchrun's store: without it the second or third restart hangs.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import torch

from phalanx.models import transformer
from phalanx.run import Event, EventTail, Run
from phalanx.run.event_types import StepDone, WorkerStarted
from phalanx.run.lines import LineTail

CHECKPOINT_EVERY = 10
"""Steps between two checkpoints."""
SAVING = {"every": CHECKPOINT_EVERY, "keep": 2}
STEPS_BETWEEN_KILLS = (25, 34)
"""Steps between two kills, in turns so that they strike at any distance from a checkpoint."""
RESUME_TIMEOUT_S = 120.0
PHALANX_VARIANTS: dict[str, dict[str, object]] = {
    "phalanx train, from the checkpoint": {"checkpoint": {**SAVING, "in_memory_every": None}},
    "phalanx train, from an in-memory checkpoint": {"checkpoint": {**SAVING, "in_memory_every": 2}},
    "phalanx train, determinism: elastic": {"determinism": "elastic"},
    "phalanx train, determinism: elastic of two workers": {
        "determinism": "elastic",
        "parallelism": {"replicate": 2, "shard": 2},
        "batch": {"global_size": 8, "micro_size": 2},
    },
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
Shape = dict[str, int]
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

    count = 4 if "parallelism" in changes else 2
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        "recipe.yaml",
        "--run",
        str(run.path),
        "--nproc-per-node",
        str(count),
    ]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="turns among which the kills are divided")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    shape: Shape = {"layers": given.layers, "hidden_size": given.width, "num_heads": 4}
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
    millions = sum(parameter.numel() for parameter in transformer(256, 64, **shape).parameters()) / 1e6
    print(
        f"`{' '.join(['python', 'benchmarks/recovery.py', *sys.argv[1:]])}`, {datetime.date.today().isoformat()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, {millions:.1f} M parameters."
    )
    print("", *rows, sep="\n")


if __name__ == "__main__":
    main()
