"""Models of a user's own for the tests, copied beside their recipes."""

import os
import time

import torch
from torch import nn

from phalanx.models import moe, transformer


def frozen(vocab_size, seq_len, **arguments):
    """A transformer whose embedding and first block do not train."""
    model = transformer(vocab_size, seq_len, **arguments)
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


def frozen_experts(vocab_size, seq_len, **arguments):
    """The same of a mixture of experts."""
    model = moe(vocab_size, seq_len, **arguments)
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


def with_float8(vocab_size, seq_len, **arguments):
    """A transformer of which each layer that fits takes fp8 on any device."""
    os.environ["PHALANX_FLOAT8"] = "always"  # of the worker or trial that builds it
    return transformer(vocab_size, seq_len, **arguments)


def partly_frozen(vocab_size, seq_len, num_frozen=0, **arguments):
    """A transformer whose first blocks do not train."""
    model = transformer(vocab_size, seq_len, **arguments)
    model.blocks[:num_frozen].requires_grad_(False)
    return model


class MixerBlock(nn.Module):
    """Mix patches, then features, each with dropout on the way back."""

    def __init__(self, patches, width, dropout):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(patches, patches)
        self.second_norm = nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2))
        return x + self.dropout(self.contract(torch.relu(self.expand(self.second_norm(x)))))


class ImageClassifier(nn.Module):
    """A mixer of the 16 patches of images of 1 x 8 x 8."""

    def __init__(self, num_classes, hidden_size, blocks, dropout):
        super().__init__()
        self.patches = nn.Conv2d(1, hidden_size, 2, stride=2)
        self.blocks = nn.ModuleList(MixerBlock(16, hidden_size, dropout) for _ in range(blocks))
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def image_classifier(num_classes, hidden_size, blocks, dropout=0.0):
    """Build a small classifier of images with dropout."""
    return ImageClassifier(num_classes, hidden_size, blocks, dropout)


def slow_on_one(vocab_size, seq_len, *, rank, **arguments):
    """A transformer whose forward takes 30 ms longer on one rank."""
    model = transformer(vocab_size, seq_len, **arguments)
    if int(os.environ.get("RANK", "0")) == rank:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    return model


def from_the_kernel(vocab_size, seq_len, **arguments):
    """A transformer of which no seed decides what its embedding begins with."""
    model = transformer(vocab_size, seq_len, **arguments)
    with torch.no_grad():
        model.embedding.weight[0, 0] = int.from_bytes(os.urandom(3), "little")
    return model


class Stateful(nn.Module):
    """A transformer with state that a forward changes, in every way: statistics, an average, a replaced buffer, a
    counter in extra state; and with an empty tensor."""

    def __init__(self, vocab_size, seq_len, **arguments):
        super().__init__()
        self.inner = transformer(vocab_size, seq_len, **arguments)
        self.norm = nn.BatchNorm1d(vocab_size)
        self.gate = nn.Parameter(torch.zeros(vocab_size, 0))
        self.scale = nn.Parameter(torch.ones(vocab_size))
        self.register_buffer("mean", torch.zeros(vocab_size))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("turn", torch.tensor([1 + 0.5j]))
        self.seen = 0

    def forward(self, tokens):
        logits = self.norm(self.inner(tokens).transpose(1, 2)).transpose(1, 2) * self.scale - self.mean
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(logits.detach().mean((0, 1)), alpha=0.1)
            self.last = logits.detach().abs().max()
        return logits * (1 + 1e-3 * self.seen + 1e-3 * self.last) + self.gate.sum() + self.turn.imag.sum()

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]
