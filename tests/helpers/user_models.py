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
    counter in extra state; and with an empty, an expanded and a conjugate tensor."""

    def __init__(self, vocab_size, seq_len, **arguments):
        super().__init__()
        self.inner = transformer(vocab_size, seq_len, **arguments)
        self.norm = nn.BatchNorm1d(vocab_size)
        self.gate = nn.Parameter(torch.zeros(vocab_size, 0))
        self.scale = nn.Parameter(torch.ones(1).expand(vocab_size))
        self.register_buffer("mean", torch.zeros(vocab_size))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("turn", torch.tensor([1 + 0.5j]).conj())
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
