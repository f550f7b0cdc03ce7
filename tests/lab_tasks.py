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

HERE = Path(__file__).parent
RANK = os.environ.get("RANK")
ATTEMPT = os.environ.get("PHALANX_ATTEMPT")


class Plain:
    """Next-byte prediction."""

    def inputs(self, batch):
        return (batch["tokens"],), {}

    def loss(self, output, batch):
        targets = batch["targets"].flatten()
        return F.cross_entropy(output.flatten(0, 1).float(), targets, reduction="sum"), targets.numel()


class Recording(Plain):
    """Writes the checksums of each training micro-batch's samples, a line each, to samples/ATTEMPT-RANK."""

    def inputs(self, batch):
        if torch.is_grad_enabled() and ATTEMPT is not None:  # neither evaluation nor a trial
            with open(HERE / "samples" / f"{ATTEMPT}-{RANK}", "a") as file:
                print(json.dumps([checksum(row) for row in batch["tokens"]]), file=file)
        return super().inputs(batch)


class Loud(Plain):
    """Gradients that fp16 cannot hold until the loss scale has come down a few times."""

    def loss(self, output, batch):
        total, terms = super().loss(output, batch)
        return total * 4096.0, terms


class Poisoned(Plain):
    """Where the first sample of a micro-batch is in a list of poison.json, beside this file, something is not a number:
    its loss (list `loss`) or only its gradient (list `gradient`)."""

    def loss(self, output, batch):
        total, terms = super().loss(output, batch)
        if torch.is_grad_enabled() and ATTEMPT is not None:
            poison = json.loads((HERE / "poison.json").read_text())
            sample = checksum(batch["tokens"][0])
            if sample in poison.get("loss", ()):
                total = total * float("nan")
            if sample in poison.get("gradient", ()):
                total = total + (output * 0.0).sum().sqrt()
        return total, terms


class StopsInEvaluation(Plain):
    """This worker is asked to stop in the middle of an evaluation of its first attempt."""

    def inputs(self, batch):
        if not torch.is_grad_enabled() and ATTEMPT == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().inputs(batch)


class Mistaken(Plain):
    """Fails as a user's code does, on the ranks of mistaken.json beside this file."""

    def loss(self, output, batch):
        if ATTEMPT is not None and int(RANK) in json.loads((HERE / "mistaken.json").read_text()):
            raise KeyError("no such column: 'label'")
        return super().loss(output, batch)


def checksum(row):
    return zlib.crc32(row.numpy().tobytes())
