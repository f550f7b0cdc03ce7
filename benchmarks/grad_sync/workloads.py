"""What is trained in the benchmarks of the exchange: models, their input on a node and step, and their pace.

    python benchmarks/grad_sync/workloads.py gpt-1024        # prints its pace on one thread of this machine, as JSON

The GPT is that of examples/gpt-python.yaml with a width of 256 (3.3 M parameters, 256 tokens in a sample); NiN and
GoogLeNet have images of 224 x 224 as ImageNet's, 1000 classes (8 images a node are FireCaffe's batch of 1,024 on 128
nodes), or as those of Fashion-MNIST resized: one channel and 10 classes. Their values do not matter to the pace; they
are random.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.models import googlenet, nin, transformer
from rate_limited import ComputeTiming, measure_timing

VOCAB, SEQUENCE, SIDE = 256, 256, 224


@dataclass(frozen=True)
class Workload:
    """A model, and what a node has of a batch: `inputs` for its forward, and the `targets` [...] of its logits."""

    told: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]


def _gpt(tokens: int) -> Workload:
    drawn = partial(torch.randint, VOCAB, (tokens // SEQUENCE, SEQUENCE))
    return Workload(f"GPT, {tokens:,} tokens a node", partial(transformer, VOCAB, SEQUENCE), drawn, drawn)


def _images(name: str, model: Callable[..., nn.Module], images: int, classes: int, channels: int) -> Workload:
    return Workload(
        f"{name}, {images} images a node",
        partial(model, classes, channels),
        partial(torch.rand, images, channels, SIDE, SIDE),
        partial(torch.randint, classes, (images,)),
    )


WORKLOADS: dict[str, Workload] = {
    **{f"gpt-{tokens}": _gpt(tokens) for tokens in (1024, 4096, 16384)},
    **{f"nin-{images}": _images("NiN", nin, images, 1000, 3) for images in (8, 64, 256)},
    **{f"nin-fashion-{images}": _images("NiN for Fashion-MNIST", nin, images, 10, 1) for images in (64, 256)},
    **{f"googlenet-{images}": _images("GoogLeNet", googlenet, images, 1000, 3) for images in (8, 32, 64)},
    "googlenet-fashion-32": _images("GoogLeNet for Fashion-MNIST", googlenet, 32, 10, 1),
}


def measure(workload: Workload) -> ComputeTiming:
    """The pace of the real model on one thread of this machine, in fp32."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs, targets = workload.build(), workload.inputs(), workload.targets()

    def loss() -> Tensor:
        logits: Tensor = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    return measure_timing(model, loss)


if __name__ == "__main__":
    print(json.dumps(measure(WORKLOADS[sys.argv[1]]).as_dict()))
