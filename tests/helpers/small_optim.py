"""A tiny transformer and steps to train it, for tests of optimizers."""

import torch
from torch import Tensor, nn

from phalanx.models import transformer
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.optim.container import OptimizerContainer

VOCAB, SEQUENCE = 32, 16


def model(seed: int = 0, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return transformer(vocab_size=VOCAB, seq_len=SEQUENCE, layers=1, hidden_size=width, num_heads=2)


def optim(name: str = "adamw", **changes: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"name": name, **changes})


def batch(step: int, count: int = 8) -> tuple[Tensor, Tensor]:
    """Sequences that can be learned: each token is the one before it times 5, plus 1, with now and then another."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.empty(count, SEQUENCE + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, VOCAB, (count,), generator=generator)
    strange = torch.rand(count, SEQUENCE, generator=generator) < 0.1
    other = torch.randint(0, VOCAB, (count, SEQUENCE), generator=generator)
    for i in range(SEQUENCE):
        tokens[:, i + 1] = torch.where(strange[:, i], other[:, i], (5 * tokens[:, i] + 1) % VOCAB)
    return tokens[:, :-1], tokens[:, 1:]


def train(network: nn.Module, optimizer: OptimizerContainer, steps: range, lr: float) -> list[float]:
    """The losses of these steps."""
    losses = []
    for step in steps:
        tokens, targets = batch(step)
        network.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(network(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step(lr)
        losses.append(loss.item())
    return losses


def copied(optimizer: OptimizerContainer) -> dict[str, Tensor]:
    """Its state, as a checkpoint would give it back."""
    return {key: value.clone(memory_format=torch.contiguous_format) for key, value in optimizer.state().items()}


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters have the same bits."""
    return all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
