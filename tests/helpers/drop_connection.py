"""A callback that tears one worker out of a step that others finish: copied beside recipes. It stands for connections
that are cut at a moment that no fault from outside can be sure to hit.

`RUN.torn.json` is {"step", "rank", "victim"}. When the rank has its sums of the step, and so has everybody, it waits
until the worker of rank `victim` is gone, and then finds that its connections are. The plan is removed when that has
come true.
"""

import json
import os
import time

from phalanx.train.grad_sync.reducer import HSDPTreeReducer


class DropConnection:
    def start(self, run):
        if os.environ["PHALANX_ATTEMPT"] != "0":  # one that comes later
            return
        self.plan = json.loads(plan_file(run).read_text())
        if run.rank == self.plan["victim"]:
            pid_file(run).write_text(str(os.getpid()))
        if run.rank == self.plan["rank"]:
            self.patch(run)

    def patch(self, run):
        norm = HSDPTreeReducer.grad_norm

        def torn(gradients):
            found = norm(gradients)
            if run.step + 1 == self.plan["step"]:
                victim = pid_file(run).read_text()
                while os.path.exists(f"/proc/{victim}"):
                    time.sleep(0.001)
                HSDPTreeReducer.grad_norm = norm
                plan_file(run).unlink()
                raise RuntimeError("[gloo/transport] Connection closed by peer")
            return found

        HSDPTreeReducer.grad_norm = torn


def plan_file(run):
    return run.path.with_name(run.path.name + ".torn.json")


def pid_file(run):
    return run.path.with_name(run.path.name + ".victim")
