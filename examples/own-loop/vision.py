"""A small convolutional network tells ten kinds of clothing apart, or drawings where Fashion-MNIST is missing."""

import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import phalanx

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist has it
IMAGES = 6400


class Fashion(data.Dataset):
    """The first images of Fashion-MNIST: floats [1, 28, 28], and the label."""

    def __init__(self):
        pixels = gzip.decompress((FASHION / "train-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((FASHION / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
        self.pixels = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 1, 28, 28)
        self.labels = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        return self.pixels[index].float() / 255, self.labels[index]


class Drawings(data.Dataset):
    """Ten kinds of stripes under noise: what an image shows depends on its index only."""

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
        angle = torch.tensor(index % 10 * 0.314)
        stripes = torch.sin((rows * angle.cos() + columns * angle.sin()) * 0.8)
        noise = torch.randn(28, 28, generator=torch.Generator().manual_seed(index))
        return (stripes + noise)[None], index % 10


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.head = nn.Linear(2 * width * 7 * 7, 10)

    def forward(self, images):
        x = F.relu(self.first(images))
        x = F.relu(self.norm(self.second(x)))
        return self.head(x.flatten(1))


def main():
    dataset = Fashion() if FASHION.exists() else Drawings()
    with phalanx.session(Path(__file__).with_suffix(".yaml")) as session:
        model, _ = session.prepare(Model, lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        for images, labels in session.micro_batches(dataset):
            session.backward_and_step(F.cross_entropy(model(images), labels, reduction="sum"), len(labels))


if __name__ == "__main__":
    main()
