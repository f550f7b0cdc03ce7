"""A callback that brings about planned faults, for the tests: copied beside their recipes, it never imports phalanx.

`RUN.faults.json` lists faults as {"step", "do", "ranks", "attempt", "when", "delay"}. `attempt` null means every one.
when: `boundary` (default) strikes between the step and what follows it; `within` so many seconds (`delay`) later, in
the middle of whatever is done then; `saving` as soon as a checkpoint that is being written has its temporary directory,
plus `delay`; `saved` as soon as a checkpoint is whole, plus `delay`; `told` at the first boundary from the step on when
one is and all know it, and until it is steps take `delay` longer; `start` before the first step; `evaluation` after one
at or beyond the step.
do: `kill` or `term` this worker, `exit` (sys.exit(0)), `vanish` (os._exit(0)), `kill-agent`, `hang-up` (break all
connections to others), `raise`, `block`, `slow` (every step from there on, until the file `until` exists),
`limit-files` (no file of this process may grow beyond a few bytes, as on a full disk), `free-files`, `freeze` (as
SIGSTOP holds it still), `lone-collective` (issue one that the others do not), `fail-storage` (this process
can open, make, rename, list or remove nothing in the run's
directory, and sync nothing: EIO), `mend-storage`, `fail-read` (as a read that storage refuses), `lose-gpu` (raises what
torch does when a GPU failed), `gpu` (the emulated GPU of this worker gives the `error`, a number of CUDA's, after so
many more `calls` that give it work: tests/emulated/nullrt.c), `collective` (a `signal` to this worker in the middle of
a collective between emulated GPUs, after so many more `calls`: tests/emulated/nullnccl.c).
"""

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

AT_BOUNDARY = "boundary"
FILE_AUDIT_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
"""Audit events of what touches files, with the path as the first argument."""
STEPS_TO_TELL = 3
"""After these all workers have agreed that a checkpoint is whole, and told it."""
failing = []  # the folder whose storage fails


class Faults:
    def on_train_start(self, run):
        plan = run.path.with_name(run.path.name + ".faults.json")
        attempt = int(os.environ.get("PHALANX_ATTEMPT", "0"))
        self.faults = [
            fault
            for fault in (json.loads(plan.read_text()) if plan.exists() else [])
            if fault["attempt"] in (None, attempt) and (fault["ranks"] is None or run.rank in fault["ranks"])
        ]
        for fault in self.faults:
            fault["run"] = str(run.path)
            if fault.get("when") == "start":
                inject(fault)

    def post_step(self, run, event):
        for fault in self.faults:
            when = fault.get("when", AT_BOUNDARY)
            if fault["do"] == "slow" and event.step >= fault["step"]:
                if not os.path.exists(fault.get("until", "")):
                    time.sleep(fault["delay"])
            elif when == "told" and event.step >= fault["step"]:
                inject_when_announced(run.path / "checkpoints", fault)
            elif event.step != fault["step"]:
                continue
            elif when == AT_BOUNDARY:
                inject(fault)
            elif when == "within":
                run_in_thread(lambda fault=fault: (time.sleep(fault["delay"]), inject(fault)))
            elif when in ("saving", "saved"):
                run_in_thread(lambda fault=fault: inject_at_checkpoint(run.path / "checkpoints", fault))

    def post_evaluation(self, run, event):
        for fault in self.faults:
            if fault.get("when") == "evaluation" and event.step >= fault["step"]:
                inject(fault)

    def on_train_end(self, run, event):
        for fault in self.faults:
            if fault.get("when") == "end":
                inject(fault)


def run_in_thread(work):
    threading.Thread(target=work, daemon=True).start()


def is_whole(name):
    return name.startswith("step-") and ".tmp-" not in name


def inject_at_checkpoint(checkpoints: Path, fault):
    def there(name):
        return ".tmp-" in name if fault["when"] == "saving" else is_whole(name)

    while not any(map(there, os.listdir(checkpoints))):
        pass
    time.sleep(fault.get("delay", 0.0))
    inject(fault)


def inject_when_announced(checkpoints: Path, fault):
    if not any(map(is_whole, os.listdir(checkpoints))):
        time.sleep(fault["delay"])  # however slow the disk is, it ends in time
        return
    fault["since"] = fault.get("since", 0) + 1
    if fault["since"] > STEPS_TO_TELL:
        inject(fault)


def inject(fault):
    do = fault["do"]
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif do == "kill-agent":
        os.kill(find_agent(), signal.SIGKILL)
    elif do == "hang-up":
        break_connections()
    elif do == "raise":
        raise RuntimeError("a mistake in the user's own code")
    elif do == "exit":
        sys.exit(0)
    elif do == "vanish":
        os._exit(0)
    elif do == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "lone-collective":
        import torch
        import torch.distributed

        torch.distributed.broadcast(torch.zeros(1), 0)
    elif do == "block":
        time.sleep(600)
    elif do == "limit-files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.get("bytes", 1000), resource.RLIM_INFINITY))
    elif do == "free-files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif do == "fail-storage":
        fail_storage(fault["run"])
    elif do == "mend-storage":
        failing.clear()
    elif do == "fail-read":
        raise make_io_error(fault["run"])
    elif do == "lose-gpu":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    elif do == "gpu":
        ctypes.CDLL(None).nullgpu_fail(fault["error"], ctypes.c_long(fault.get("calls", 0)))
    elif do == "collective":
        ctypes.CDLL(None).nullnccl_strike(fault["signal"], ctypes.c_long(fault.get("calls", 0)))
    elif do == "crash":
        ctypes.string_at(0)
    else:
        raise ValueError(f"no fault {do!r}")


def make_io_error(path):
    return OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def fail_storage(folder):
    sync = os.fsync

    def refuse(event, arguments):
        if failing and event in FILE_AUDIT_EVENTS and str(arguments[0]).startswith(failing[0]):
            raise make_io_error(arguments[0])

    def refuse_to_sync(fd):
        if failing:
            raise make_io_error(folder)
        sync(fd)

    os.fsync = refuse_to_sync
    sys.addaudithook(refuse)
    failing.append(folder)


def break_connections():
    """What the others see of a process that dies slowly: its connections break, and it is still there."""
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / name
        if path.is_symlink() and os.readlink(path).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(name))) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if connection.family == socket.AF_INET and not listens:
                    connection.shutdown(socket.SHUT_RDWR)
    time.sleep(600)


def find_agent():
    """The parent of our parent, the fork server."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
