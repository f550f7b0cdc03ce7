"""A callback that kills a worker at a moment of its part in a checkpoint, in the thread that writes it: copied beside
recipes. It stands for a kill from outside that hits this very moment.

`RUN.unwritten.json` is {"step", "rank", "moment"}. Moments: `within` its file, `record` within its record, `written`
right after that; for the worker that commits `publish` before the checkpoint gets its name, `published` right after.
"""

import json
import os
import signal

from phalanx.train.checkpoint import durable

HALF_DIVISOR = 2


class KillDuringSave:
    def on_train_start(self, run):
        plan = json.loads(run.path.with_name(run.path.name + ".unwritten.json").read_text())
        if os.environ["PHALANX_ATTEMPT"] == "0" and run.rank == plan["rank"]:
            install_kill(plan)


def install_kill(plan):
    """Have this process end at the moment of the plan."""
    image, record, rename = durable.write_with_checksums, durable.write_synced, durable._rename_to_final
    moment = plan["moment"]

    def is_of_step(path):
        return f"step-{plan['step']:09d}.tmp-" in str(path)

    def write_image(path, content, given_up=None):
        if is_of_step(path) and moment == "within":
            path.write_bytes(content.data[: len(content) // HALF_DIVISOR])
            die()
        return image(path, content, given_up)

    def write_synced(path, content):
        if is_of_step(path) and moment == "record":
            path.write_bytes(content[: len(content) // HALF_DIVISOR])
            die()
        record(path, content)
        if is_of_step(path) and moment == "written":
            die()

    def put(temporary, final):
        if is_of_step(temporary) and moment == "publish":
            die()
        rename(temporary, final)
        if is_of_step(temporary) and moment == "published":
            die()

    durable.write_with_checksums, durable.write_synced, durable._rename_to_final = write_image, write_synced, put


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
