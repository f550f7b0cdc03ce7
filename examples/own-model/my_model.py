"""A language model that has never heard of Phalanx: embedding, GRU, output layer."""

import torch
from torch import nn


class Gru(nn.Module):
    """Tokens [batch, sequence] -> scores [batch, sequence, vocab_size] of what comes next."""

    def __init__(self, vocab_size: int, seq_len: int, width: int = 64, layers: int = 1):
        super().__init__()
        self.sequence = seq_len
        self.embedding = nn.Embedding(vocab_size, width)
        self.recurrent = nn.GRU(width, width, num_layers=layers, batch_first=True)
        self.output = nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.output(hidden)
