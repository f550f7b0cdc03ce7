"""A callback that kills a worker at a moment of its part in a checkpoint, in the thread that writes it: copied beside
recipes. It stands for a kill from outside that hits this very moment.

`RUN.unwritten.json` is {"step", "rank", "moment"}, and `delay_writes` for storage that is slow: what the other workers
of the
first attempt write of this step takes until they have done so many more steps, or, if it is `lost`, until they have met
without the one that falls, or are fewer than `world`. Moments: `within` its file, `record` within its record, `written`
right after that, when those `list_mates` that would be ended with it have written theirs, too; `evaluated` after an
evaluation and `guarded` when a guard goes back, both when these parts are written; for the worker that commits
`publish` before the checkpoint gets its name, `published` right after.
"""

import json
import os
import signal
import threading
import time

from phalanx.train.checkpoint import commit, durable

HALF_DIVISOR = 2
UNTIL_LOST = "lost"


class KillDuringSave:
    def start(self, run):
        self.resumed = threading.Event()
        self.plan = None
        path = run.path.with_name(run.path.name + ".unwritten.json")
        if os.environ["PHALANX_ATTEMPT"] == "0" and path.exists():  # not one that comes later
            self.plan = json.loads(path.read_text())
            self.is_victim = run.rank == self.plan["rank"]  # in another world another may have this rank
            if self.is_victim:
                install_kill(self.plan)
            elif self.plan.get("hold") == UNTIL_LOST:
                world = self.plan.get("world", run.world_size)
                if run.rank not in list_mates(self.plan):
                    delay_writes(self.plan, lambda: poll(lambda: run.world_size < world))
            elif "hold" in self.plan:
                delay_writes(self.plan, self.resumed.wait)

    def step(self, run, event):
        plan = self.plan
        if plan is not None and plan.get("hold") != UNTIL_LOST and event.step >= plan["step"] + plan.get("hold", 0):
            self.resumed.set()

    def evaluation(self, run, event):
        self.kill_at("evaluated", run)

    def nonfinite_step(self, run, event):
        if event.action == "rollback":
            self.kill_at("guarded", run)

    def kill_at(self, moment, run):
        plan = self.plan
        if plan is not None and self.is_victim and moment == plan["moment"]:
            parts = [f"step-{plan['step']:09d}.tmp-*/rank-{rank:05d}.json" for rank in (run.rank, *list_mates(plan))]
            poll(lambda: all(any(map(is_whole, (run.path / "checkpoints").glob(part))) for part in parts))
            die()


def is_of_step(plan, path):
    return f"step-{plan['step']:09d}.tmp-" in str(path)


def install_kill(plan):
    """Have this process end at the moment of the plan."""
    image, record, rename = durable.write_with_checksums, durable.write_synced, commit._rename_to_final
    moment = plan["moment"]

    def write_image(path, content, given_up=None):
        if is_of_step(plan, path) and moment == "within":
            path.write_bytes(content.data[: len(content) // HALF_DIVISOR])
            die()
        return image(path, content, given_up)

    def write_synced(path, content):
        if is_of_step(plan, path) and moment == "record":
            path.write_bytes(content[: len(content) // HALF_DIVISOR])
            die()
        record(path, content)
        if is_of_step(plan, path) and moment == "written":
            poll(lambda: all(is_whole(path.with_name(f"rank-{mate:05d}.json")) for mate in list_mates(plan)))
            die()

    def put(temporary, final):
        if is_of_step(plan, temporary) and moment == "publish":
            die()
        rename(temporary, final)
        if is_of_step(plan, temporary) and moment == "published":
            die()

    durable.write_with_checksums, durable.write_synced, commit._rename_to_final = write_image, write_synced, put


def is_whole(record):
    try:
        json.loads(record.read_text().partition("\n")[2])  # after its hash
    except (FileNotFoundError, ValueError):
        return False
    return True


def list_mates(plan):
    return plan.get("mates", ())


def poll(condition):
    while not condition():
        time.sleep(0.001)


def delay_writes(plan, wait):
    image = durable.write_with_checksums

    def write_image(path, content, given_up=None):
        if is_of_step(plan, path):
            wait()
        return image(path, content, given_up)

    durable.write_with_checksums = write_image


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
