"""What telemetry costs a step on a GPU, and what it says while a run trains.

    python benchmarks/gpu_telemetry.py [--seconds 40] [--toy]

`effect`: GPT-2 trains in a process of its own. Here, as in an agent, the node is sampled once a second for some
seconds, then not, in turn. Prints JSON: mean and median of a step's seconds with and without, and what a sample took.
`watch` is part of the phase `default` of benchmarks/gpu_session.py.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu
from loop_overhead import make_dataset
from phalanx.run import EventTail
from phalanx.run.event_types import StepDone
from phalanx.telemetry.record import NodeSampler, SamplingThread, open_local_sources
from phalanx.telemetry.sample import NodeSample

WINDOW_S = 4.0
"""Seconds of sampling, then as many without."""
METRICS_PORT = 9431
SERVE_PORT = 8431
ASK_S = 20.0
"""Seconds to wait for an answer."""


class TimedSampler(NodeSampler):
    """Keeps how long each sample took, in seconds, and the last one."""

    took: list[float]
    last: NodeSample

    def read(self) -> NodeSample:
        begun = time.perf_counter()
        self.last = super().read()
        self.took.append(time.perf_counter() - begun)
        return self.last


def effect(task: dict[str, Any], folder: Path, patience: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Steps of a contender of benchmarks/gpu.py with and without the sampler, in windows that take turns."""
    sources, problems = open_local_sources()
    made: list[TimedSampler] = []

    def make() -> NodeSampler:
        sampler = TimedSampler(open_local_sources()[0], "here")
        sampler.took = []
        made.append(sampler)
        return sampler

    for source in sources:
        source.close()
    ended, windows = threading.Event(), []

    def take_turns() -> None:
        while not ended.is_set():
            begun, thread = time.perf_counter(), SamplingThread(make)
            ended.wait(WINDOW_S)
            thread.stop()
            windows.append((begun, time.perf_counter()))
            ended.wait(WINDOW_S)

    turns = threading.Thread(target=take_turns)
    turns.start()
    try:
        result = gpu.run_child(task, folder, patience, environment)
    finally:
        ended.set()
        turns.join()
    if "began" not in result:
        return {"failed": result.get("refused", "no result"), "problems": problems}
    sampled, free, now = [], [], result["began"]
    for seconds in result["seconds"]:
        begun, now = now, now + seconds
        if any(start <= begun and now <= end for start, end in windows):
            sampled.append(seconds)
        elif not any(start < now and begun < end for start, end in windows):
            free.append(seconds)
    took = [each for sampler in made for each in sampler.took]
    found: dict[str, Any] = {"problems": problems, "window_s": WINDOW_S, "samples": len(took)}
    found["sample_s"] = {"median": statistics.median(took), "most": max(took)}
    for name, steps in (("with", sampled), ("without", free)):
        found[name] = {"steps": len(steps)}
        if len(steps) > 1:
            found[name] |= {"mean_s": statistics.mean(steps), "median_s": statistics.median(steps)}
            found[name]["deviation_s"] = statistics.stdev(steps)
    found["last_sample"] = [vars(device) for device in made[-1].last.devices]
    return found


# ---- what can be seen while a run trains


def watch(run: Path, step: int, environment: Mapping[str, str], alive: Callable[[], bool]) -> dict[str, Any]:
    """Once a run with PHALANX_METRICS_PORT has done `step`: its agent's metrics, and the live page."""
    tail, done = EventTail(run / "events.jsonl"), 0
    while alive() and done < step:
        done = max([done, *(event.step for event in tail.read() if isinstance(event, StepDone))])
        time.sleep(0.05)
    if done < step:
        return {"failed": f"the run ended at step {done}"}
    found: dict[str, Any] = {"agent_metrics": values_of(ask(METRICS_PORT, "/metrics"))}
    command = [sys.executable, "-m", "phalanx", "serve", str(run.parent), "--no-token", "--port", str(SERVE_PORT)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        begun = time.monotonic()
        pages = {"runs": wait_for(SERVE_PORT, "/", server)}
        found["serve_s"] = time.monotonic() - begun
        if link := re.search(r'href="(/run/[^"]+)"', pages["runs"]):
            pages["run"] = ask(SERVE_PORT, link[1])
        found["serve_metrics"] = values_of(ask(SERVE_PORT, "/metrics"))
        found["pages"] = {name: words_of(page) for name, page in pages.items()}
    finally:
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            found["serve_output"] = server.communicate(timeout=ASK_S)[0][-1500:]
        server.kill()
    return found


def ask(port: int, path: str) -> str:
    """The body of an answer, or why there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ASK_S) as answer:
            return str(answer.read().decode())
    except OSError as error:
        return f"no answer: {error}"


def wait_for(port: int, path: str, server: "subprocess.Popen[str]") -> str:
    """The answer of a server that may still be starting."""
    end = time.monotonic() + ASK_S
    while (answer := ask(port, path)).startswith("no answer") and "refused" in answer:
        if server.poll() is not None or time.monotonic() > end:
            break
        time.sleep(0.1)
    return answer


def values_of(metrics: str) -> list[str]:
    """Lines with values."""
    return [line for line in metrics.splitlines() if not line.startswith("#")][:150]


def words_of(page: str) -> str:
    """What a page says."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())[:2500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of training")
    parser.add_argument("--toy", action="store_true", help="at toy size")
    options = parser.parse_args()
    case = (gpu.TOYS if options.toy else gpu.CASES)["gpt2"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dataset = make_dataset(folder, megabytes=1 if options.toy else 16)
        task = {"case": vars(case), "name": gpu.PHALANX, "folder": str(folder), "dataset": str(dataset)}
        task |= {"seconds": options.seconds, "compile": True, "whole": False, "kernels": False}
        print(json.dumps(effect(task, folder, options.seconds + 120, os.environ), default=str))


if __name__ == "__main__":
    main()
