"""Tasks of a user's own for the tests, copied beside their recipes; they never import phalanx.

A trial of the model before the run has no PHALANX_ATTEMPT: there nothing is recorded or poisoned.
"""

import json
import os
import signal
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F

TASKS_DIR = Path(__file__).parent
RANK = os.environ.get("RANK")
ATTEMPT = os.environ.get("PHALANX_ATTEMPT")


class NextByteTask:
    """Next-byte prediction."""

    def inputs(self, batch):
        return (batch["tokens"],), {}

    def loss(self, output, batch):
        targets = batch["targets"].flatten()
        return F.cross_entropy(output.flatten(0, 1).float(), targets, reduction="sum"), targets.numel()


class MetricPerByteTask(NextByteTask):
    """Scores each byte that occurs in a micro-batch, so micro-batches differ in the metrics they have."""

    def metrics(self, output, batch):
        targets, hits = batch["targets"], output.argmax(-1) == batch["targets"]
        return {
            f"byte_{byte}": (hits[targets == byte].sum(), (targets == byte).sum()) for byte in targets.unique().tolist()
        }


class CheckCollectives:
    """A callback that has the workers compare their collectives, as the variable does for a whole command."""

    def __init__(self):
        os.environ["PHALANX_CHECK_COLLECTIVES"] = "1"

    def post_step(self, run, event):
        pass


class RecordingTask(NextByteTask):
    """Writes the checksums of each training micro-batch's samples, a line each, to samples/ATTEMPT-RANK."""

    def inputs(self, batch):
        if torch.is_grad_enabled() and ATTEMPT is not None:  # neither evaluation nor a trial
            with open(TASKS_DIR / "samples" / f"{ATTEMPT}-{RANK}", "a") as file:
                print(json.dumps([checksum(row) for row in batch["tokens"]]), file=file)
        return super().inputs(batch)


class OverflowingTask(NextByteTask):
    """Gradients that fp16 cannot hold until the loss scale has come down a few times."""

    def loss(self, output, batch):
        total, terms = super().loss(output, batch)
        return total * 4096.0, terms


class OverflowOnLastRankTask(NextByteTask):
    """On the last rank, and only there, the gradient of the first micro-batch is too large for any format."""

    calls = 0

    def loss(self, output, batch):
        total, terms = super().loss(output, batch)
        if torch.is_grad_enabled() and ATTEMPT is not None and int(RANK) == int(os.environ["WORLD_SIZE"]) - 1:
            self.calls += 1
            if self.calls == 1:
                total = total + (output * 0.0).sum().sqrt()  # the root has no slope there: 0, and a gradient of NaN
        return total, terms


class NonFiniteTask(NextByteTask):
    """Where the first sample of a micro-batch is in a list of poison.json, beside this file, something is not a number:
    its loss (list `loss`) or only its gradient (list `gradient`)."""

    def loss(self, output, batch):
        total, terms = super().loss(output, batch)
        if torch.is_grad_enabled() and ATTEMPT is not None:
            poison = json.loads((TASKS_DIR / "poison.json").read_text())
            sample = checksum(batch["tokens"][0])
            if sample in poison.get("loss", ()):
                total = total * float("nan")
            if sample in poison.get("gradient", ()):
                total = total + (output * 0.0).sum().sqrt()
        return total, terms


class StopDuringEvaluationTask(NextByteTask):
    """This worker is asked to stop in the middle of an evaluation of its first attempt."""

    def inputs(self, batch):
        if not torch.is_grad_enabled() and ATTEMPT == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().inputs(batch)


class RaisingTask(NextByteTask):
    """Fails as a user's code does, on the ranks of mistaken.json beside this file."""

    def loss(self, output, batch):
        if ATTEMPT is not None and int(RANK) in json.loads((TASKS_DIR / "mistaken.json").read_text()):
            raise KeyError("no such column: 'label'")
        return super().loss(output, batch)


class OutOfMemoryTask(NextByteTask):
    """Runs out of memory with more samples at once than `limit` of hungry.json beside this file, after so many
    micro-batches; with `trial`, a trial does so, too, as the kernel ends it."""

    calls = 0

    def inputs(self, batch):
        hungry = json.loads((TASKS_DIR / "hungry.json").read_text())
        if torch.is_grad_enabled() and len(batch["tokens"]) > hungry["limit"]:
            if ATTEMPT is None and hungry.get("trial"):
                os.kill(os.getpid(), signal.SIGKILL)
            if ATTEMPT is not None:
                self.calls += 1
                if self.calls > hungry.get("after", 0):
                    raise torch.OutOfMemoryError("CUDA out of memory")
        return super().inputs(batch)


def checksum(row):
    return zlib.crc32(row.numpy().tobytes())
