"""Models of a user's own for the tests, copied beside their recipes."""

import os
import time

from phalanx.models import moe, transformer


def frozen(vocab, sequence, **arguments):
    """A transformer whose embedding and first block do not train."""
    model = transformer(vocab, sequence, **arguments)
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


def frozen_experts(vocab, sequence, **arguments):
    """The same of a mixture of experts."""
    model = moe(vocab, sequence, **arguments)
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


def slow_on_one(vocab, sequence, *, rank, **arguments):
    """A transformer whose forward takes 30 ms longer on one rank."""
    model = transformer(vocab, sequence, **arguments)
    if int(os.environ.get("RANK", "0")) == rank:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    return model
