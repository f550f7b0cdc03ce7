"""What the live page costs with a large fleet: `phalanx serve` over many runs and the agents of a fake fleet, and
TensorBoard over the same runs.

    python fleet/benchmarks/serve.py [--out fleet/docs/benchmarks/serve.md] [--runs 10000] [--live 200] [--nodes 1000]

The runs are copies of one made run; the live ones get a step a second each. A fake agent for each node, on an address
of the loopback network of its own, sends a sample of eight devices a second. Three browsers are held open: the list of
runs, one live run, the nodes. Measured: seconds from the start of the process to the first page with runs, and to the
last run; then, over `--seconds`, CPU time and memory of the server, and how late a step appears on the run's page (the
time from writing it to its arrival in the browser's stream) and a sample on the page of nodes; after that, with the
three browsers still open, seconds until another one has the list of runs.

With `--large` nothing else is measured: one run of a million steps and one log of 2 GB, and how long the server takes
for their pages.

TensorBoard, where it is installed, gets event files with the same losses, and is measured from its start to the first
answer of its list of runs, to the answer that has all of them, and for CPU time and memory after that. It reloads every
5 s by default and shows no nodes.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil

from phalanx.run.event_types import FORMAT_VERSION, AttemptStarted, LogOpened, RunEnded, RunEvent, StepDone, StepPhases
from phalanx.run.fields import to_fields, to_json
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason

STEPS_PER_RUN = 100
LIVE_STEPS = 100_000
DEVICES_PER_NODE = 8
START_TIMEOUT_S = 240.0
LARGE_STEPS, LARGE_LOG_BYTES = 1_000_000, 2_000_000_000
LOG_TEXT = "INFO step finished with no problem of any kind, and some more words fill the line\n" * 1000


@dataclass(frozen=True)
class Result:
    """Seconds, bytes, and shares of a core."""

    name: str
    first_page_s: float
    all_runs_s: float
    cpu_share: float
    memory_bytes: float
    run_delay_s: tuple[float, float] | None = None
    """Median and highest."""
    node_age_s: tuple[float, float] | None = None
    page_s: tuple[float, float] | None = None
    """For the list of runs, of a server that has read all."""


def write_events(path: Path, events: list[RunEvent], mode: str = "w") -> None:
    with open(path / "events.jsonl", mode) as file:
        file.writelines(json.dumps(to_fields(event)) + "\n" for event in events)


def make_step(step: int, moment: float, total: int) -> StepDone:
    return StepDone(
        time=moment,
        step=step,
        loss=4.0 * (1 - step / total) + 1.0,
        grad_norm=1.0,
        lr=1e-3,
        units=4096,
        duration_s=1.0,
        breakdown_s=StepPhases(forward=0.3, backward=0.6, other=0.1),
    )


def make_run(path: Path, is_live: bool, now: float, live_steps: int = LIVE_STEPS) -> None:
    path.mkdir(parents=True)
    total = live_steps if is_live else STEPS_PER_RUN
    began = now - STEPS_PER_RUN - 1
    opened = LogOpened(time=began, format=FORMAT_VERSION, phalanx_version="0.1.0")
    start = AttemptStarted(
        time=began, world_size=8, attempt=0, start_step=0, total_steps=total, device="cuda", num_micro_batches=8
    )
    steps = [make_step(step, began + step, total) for step in range(1, STEPS_PER_RUN + 1)]
    ends = [] if is_live else [RunEnded(time=now, status="done", step=total)]
    write_events(path, [opened, start, *steps, *ends])


class LiveRunWriter:
    """Appends a step a second to each live run."""

    def __init__(self, paths: list[Path]):
        self._paths, self._stop = paths, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "LiveRunWriter":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        step, due = STEPS_PER_RUN, time.monotonic()
        while not self._stop.is_set():
            step += 1
            for path in self._paths:
                write_events(path, [make_step(step, time.time(), LIVE_STEPS)], "a")
            due += 1.0
            self._stop.wait(max(0.0, due - time.monotonic()))


def node_address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


def make_sample(node: str) -> NodeSample:
    devices = tuple(
        DeviceSample(
            id=f"GPU-{node}-{index}",
            name="NVIDIA H100 80GB HBM3",
            power_instant_w=612.3,
            power_mean_w=598.7,
            power_cap_w=700.0,
            energy_joules=1234567.8,
            core_temperature_c=61.0,
            memory_temperature_c=72.0,
            thermal_margin_c=26.0,
            core_clock_hz=1.98e9,
            memory_clock_hz=2.6e9,
            slow_reasons=SlowReason(0),
            utilization=0.99,
            memory_used_bytes=6.1e10,
            memory_size_bytes=8.5e10,
            ecc_corrected_total=0.0,
            ecc_uncorrected_total=0.0,
            xid=0.0,
            xids_total=0.0,
            pcie_replays_total=0.0,
            nvlink_sent_bytes_total=9.9e12,
            nvlink_received_bytes_total=9.9e12,
        )
        for index in range(DEVICES_PER_NODE)
    )
    return NodeSample(time.time(), HostSample(cpu_power_w=300.0, cpu_utilization=0.2), devices)


def run_fake_agents(port: int, read_sample: Callable[[str], NodeSample | None] = make_sample) -> None:
    """Answer on every address of the loopback network as the agent of that node, which sends nothing without a
    sample."""

    def make_line(node: str, sample: NodeSample) -> bytes:
        return json.dumps({"node": node, **to_json(sample)}, separators=(",", ":")).encode() + b"\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while (await reader.readline()).strip():
                pass
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            node = writer.get_extra_info("sockname")[0]
            await asyncio.sleep(hash(node) % 1000 / 1000)
            while True:
                if (sample := read_sample(node)) is not None:
                    writer.write(make_line(node, sample))
                    await writer.drain()
                await asyncio.sleep(1.0)

    async def serve() -> None:
        async with await asyncio.start_server(answer, "0.0.0.0", port, backlog=4096) as server:
            await server.serve_forever()

    asyncio.run(serve())


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as response:
        return str(response.read().decode(errors="replace"))


def wait_for(check: Callable[[], bool], began: float, interval_s: float = 0.05) -> float:
    """Seconds since `began` when the check first holds; infinity after START_TIMEOUT_S."""
    while True:
        with contextlib.suppress(OSError):
            if check():
                return time.monotonic() - began
        if time.monotonic() - began > START_TIMEOUT_S:
            return math.inf
        time.sleep(interval_s)


class Stream:
    """A browser's stream: calls `on_message` with each message and the time of its arrival."""

    def __init__(self, address: str, on_message: Callable[[str, float], None]):
        self._response = urllib.request.urlopen(address, timeout=60)
        self._on_message, self._is_open = on_message, True
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False

    def _read(self) -> None:
        for line in self._response:
            if not self._is_open:
                return
            if line.startswith(b"data: "):
                self._on_message(line[6:].decode(), time.time())


def measure_process(pid: int, seconds: float) -> tuple[float, float]:
    """CPU time as a share of a core, and the most memory, of a process and its children."""

    def read() -> tuple[float, float]:
        root = psutil.Process(pid)
        cpu = memory = 0.0
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu, memory = cpu + times.user + times.system, memory + process.memory_info().rss
        return cpu, memory

    began, (cpu, most) = time.monotonic(), read()
    while time.monotonic() - began < seconds:
        time.sleep(1.0)
        now, memory = read()
        most = max(most, memory)
    return (now - cpu) / (time.monotonic() - began), most


@contextlib.contextmanager
def started(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def measure_serve(root: Path, live: list[Path], num_runs: int, num_nodes: int, seconds: float) -> Result:
    nodes_file, agent_port = root.parent / "nodes.yaml", free_port()
    names = "".join(f"  - name: {node_address(number)}\n" for number in range(num_nodes))
    nodes_file.write_text(f"nodes:\n{names}")
    agents = [sys.executable, __file__, "--fake-agents", str(agent_port)]
    serve = [sys.executable, "-m", "phalanx", "serve", str(root), "--port", "0", "--no-token"]
    serve += ["--nodes", str(nodes_file)]
    state = {**os.environ, "PHALANX_STATE_DIR": str(root.parent / "state")}
    with started(agents), LiveRunWriter(live):
        began = time.monotonic()
        with started([*serve, "--agent-port", str(agent_port)], env=state) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[1].rstrip("/")
            first_s = wait_for(lambda: '"run/' in fetch(f"{address}/"), began)
            all_s = wait_for(lambda: f">{num_runs} runs," in fetch(f"{address}/"), began)
            page = fetch(f"{address}/?q={live[0].name}")
            run = re.search(r'href="(/run/[0-9a-f]+)"', page)
            assert run is not None
            delays: list[float] = []
            ages: list[float] = []
            steps: dict[int, float] = {}

            def on_run(message: str, now: float) -> None:
                if found := re.search(r"(\d+) of 100000 steps", message):
                    steps.setdefault(int(found[1]), now)

            def on_nodes(message: str, now: float) -> None:
                ages.extend(now - float(each) for each in re.findall(r'data-time=\\"([0-9.]+)', message))

            streams = [
                Stream(f"{address}/stream/runs", lambda message, now: None),
                Stream(f"{address}{run[1]}/stream", on_run),
                Stream(f"{address}/stream/nodes", on_nodes),
            ]
            time.sleep(15)
            ages.clear()
            steps.clear()
            cpu, memory = measure_process(server.pid, seconds)
            written = {
                event["step"]: event["time"]
                for event in map(json.loads, (live[0] / "events.jsonl").read_text().splitlines())
                if event["kind"] == "step"
            }
            pages = [seconds_for(f"{address}/")[0] for _ in range(20)]
            delays = [arrived - written[step] for step, arrived in steps.items() if step in written]
            for stream in streams:
                stream.close()
    spreads = (middle_and_highest(values) for values in (delays, ages, pages))
    return Result("phalanx serve", first_s, all_s, cpu, memory, *spreads)


def measure_large(folder: Path) -> list[str]:
    """Rows of what the pages of a long run and of a large log take."""
    run = folder / "runs" / "large"
    make_run(run, True, time.time(), 2 * LARGE_STEPS)
    with open(run / "events.jsonl", "a") as file:
        for step in range(STEPS_PER_RUN + 1, LARGE_STEPS + 1):
            file.write(json.dumps(to_fields(make_step(step, time.time(), 2 * LARGE_STEPS))) + "\n")
    (run / "logs").mkdir()
    with open(run / "logs" / "attempt-0-rank-0.log", "w") as file:
        for _ in range(LARGE_LOG_BYTES // len(LOG_TEXT)):
            file.write(LOG_TEXT)
        file.write("the end\n")
    with started([sys.executable, "-m", "phalanx", "serve", str(run.parent), "--port", "0", "--no-token"]) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1].rstrip("/")
        wait_for(lambda: '"run/' in fetch(f"{address}/"), time.monotonic())
        link = re.search(r'href="(/run/[0-9a-f]+)"', fetch(f"{address}/"))
        assert link is not None
        page = f"{address}{link[1]}"
        times = {
            "first page of the run: what was read up to then": seconds_for(page)[0],
            "all steps on that page": wait_for(lambda: f"{LARGE_STEPS} of " in fetch(page), time.monotonic(), 1.0),
            "a page of the whole run": seconds_for(page)[0],
            "last lines of the log": seconds_for(f"{page}/logs")[0],
            "search of its last 512 MB": seconds_for(f"{page}/logs?q=nowhere")[0],
        }
        memory = psutil.Process(server.pid).memory_info().rss
    rows = [f"| {name} | {seconds:.2f} s |" for name, seconds in times.items()]
    return ["| | |", "|---|---:|", *rows, f"| memory of the server | {memory / 1e6:.0f} MB |"]


def seconds_for(address: str) -> tuple[float, str]:
    """How long a page takes, and the page."""
    began = time.monotonic()
    page = fetch(address)
    return time.monotonic() - began, page


def middle_and_highest(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)


def write_tensorboard_files(root: Path, num_runs: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    first = root / "0"
    writer = EventFileWriter(str(first))
    for step in range(1, STEPS_PER_RUN + 1):
        value = Summary.Value(tag="train/loss", simple_value=4.0 * (1 - step / STEPS_PER_RUN) + 1.0)
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
    writer.close()
    for number in range(1, num_runs):
        shutil.copytree(first, root / str(number))


def measure_tensorboard(folder: Path, num_runs: int, seconds: float) -> Result:
    write_tensorboard_files(folder, num_runs)
    port = free_port()
    began = time.monotonic()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port), "--bind_all"]
    with started(command) as server:
        address = f"http://127.0.0.1:{port}/data/runs"
        first_s = wait_for(lambda: len(json.loads(fetch(address))) > 0, began)
        all_s = wait_for(lambda: len(json.loads(fetch(address))) >= num_runs, began)
        cpu, memory = measure_process(server.pid, seconds)
    return Result("TensorBoard", first_s, all_s, cpu, memory)


def format_start(seconds: float) -> str:
    return f"{seconds:.1f} s" if math.isfinite(seconds) else f"more than {START_TIMEOUT_S:.0f} s"


def to_table(results: list[Result]) -> str:
    rows = [
        "| | first page with runs | all runs | list of runs later | CPU | memory | a step is shown after "
        "| a node's reading is |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in results:
        delay, age, page = (
            "-" if value is None else f"{value[0]:.{digits}f} s (at most {value[1]:.{digits}f} s)"
            for value, digits in ((each.run_delay_s, 1), (each.node_age_s, 1), (each.page_s, 2))
        )
        old = age if age == "-" else f"{age} old"
        rows.append(
            f"| {each.name} | {format_start(each.first_page_s)} | {format_start(each.all_runs_s)} | {page} | "
            f"{each.cpu_share:.2f} cores "
            f"| {each.memory_bytes / 1e6:.0f} MB | {delay} | {old} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--large", action="store_true", help="measure a run of a million steps and a log of 2 GB")
    parser.add_argument("--fake-agents", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fake_agents:
        run_fake_agents(options.fake_agents)
        return
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        if options.large:
            print("\n".join(measure_large(Path(folder))))
            return
        root, now = Path(folder) / "runs", time.time()
        paths = [root / f"group-{number % 100}" / f"run-{number}" for number in range(options.runs)]
        template = Path(folder) / "template"
        make_run(template, False, now)
        for number, path in enumerate(paths):
            if number < options.live:
                make_run(path, True, now)
            else:
                shutil.copytree(template, path)
        results = [measure_serve(root, paths[: options.live], options.runs, options.nodes, options.seconds)]
        if importlib.util.find_spec("tensorboard") is None:
            print("TensorBoard is not installed: it is not measured", file=sys.stderr)
        else:
            results.append(measure_tensorboard(Path(folder) / "tensorboard", options.runs, options.seconds))
    table = to_table(results)
    command = f"python fleet/benchmarks/serve.py --runs {options.runs} --live {options.live} --nodes {options.nodes}"
    text = f"""# The live page with a large fleet

`{command} --seconds {options.seconds:g}`, {date.today()}, {os.cpu_count()} cores,
Python {platform.python_version()}. {options.runs} runs of which {options.live} live, {DEVICES_PER_NODE * options.nodes}
devices at 1 Hz, three open pages. How it is measured: the head of `fleet/benchmarks/serve.py`.

{table}
"""
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
