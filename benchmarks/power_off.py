"""Seconds from the request to power a node off until it is acted on: through Slurm (its SuspendProgram starts) and over
Redfish (the controller has taken it). How long a real SuspendProgram or controller then needs is not in it.

    python benchmarks/power_off.py [--repeats 20]

Needs root, Debian's slurm-wlm and munge, and sushy-tools: a Slurm of four nodes and an emulated controller on this
machine.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from phalanx.fleet.telemetry.redfish import RedfishOptions
from phalanx.fleet.thermal.redfish_power import open_power_switch
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.spec import Job, JobState

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from server_processes import find_free_port, find_program, run_server
from slurm_cluster import SlurmCluster

POWER_SAVING = "SuspendProgram={suspend}\nResumeProgram={suspend}\nSuspendTime=604800\n"
IGNORE_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def time_slurm(folder: Path) -> dict[str, float]:
    """Power off an idle node, and one with a job that ignores SIGTERM, each at a random moment of Slurm's period."""
    begun, suspend = folder / "begun", folder / "suspend"
    suspend.write_text(f"#!/bin/sh\ndate +%s.%N >>{begun}\n")
    suspend.chmod(0o755)
    found = {}
    with SlurmCluster(more=POWER_SAVING.format(suspend=suspend)) as rig:
        slurm = SlurmBackend(rig.run, folder / "state")
        job = slurm.submit(
            slurm.render(
                Job("long", (sys.executable, "-c", IGNORE_SIGTERM), folder, backend_options={"nodelist": "n2"})
            )
        )
        rig.wait_for(lambda: slurm.poll(job).state is JobState.RUNNING, "the job to run")
        time.sleep(2.0)  # until its step ignores the signal
        for node, what in (("n1", "idle node"), ("n2", "node with a job that ignores SIGTERM")):
            begun.write_text("")
            time.sleep(random.random())
            asked = time.time()
            problems = slurm.power_off_nodes([node], "leak") | slurm.finish_power_off([node], "leak")
            found[f"Slurm, {what}: drained again"] = time.time() - asked
            assert problems == {}
            rig.wait_for(lambda: begun.read_text().endswith("\n"), "SuspendProgram to start")
            found[f"Slurm, {what}: SuspendProgram starts"] = float(begun.read_text()) - asked
    return found


def time_redfish(folder: Path) -> dict[str, float]:
    """Have an emulated controller power its node off."""
    port, program = find_free_port(), find_program("sushy-emulator")
    assert program is not None, "sushy-emulator is not installed"
    words = [program, "--fake", "--interface", "127.0.0.1", "--port", str(port)]
    with run_server(words, port, folder / "emulator.log"):
        switch = open_power_switch(RedfishOptions(url=f"http://127.0.0.1:{port}"), {})
        asked = time.time()
        switch.power_off()
        found = {"Redfish: the controller has taken it": time.time() - asked}
        switch.close()
    return found


def main() -> None:
    """Print the median and the range of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    times: dict[str, list[float]] = {}
    for _ in range(parser.parse_args().repeats):
        with tempfile.TemporaryDirectory() as folder:
            for what, seconds in (time_slurm(Path(folder)) | time_redfish(Path(folder))).items():
                times.setdefault(what, []).append(seconds)
    for what, each in times.items():
        print(f"{what}: {median(each):.2f} s ({min(each):.2f} to {max(each):.2f}, {len(each)} times)")


if __name__ == "__main__":
    main()
