"""A small language model learns Python's own source, byte by byte."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import phalanx

SEQUENCE = 64
PIECES = 3200


class Text(data.Dataset):
    """Pieces of the standard library, and for each byte the one that follows."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return PIECES

    def __getitem__(self, index):
        piece = self.bytes[index * SEQUENCE : (index + 1) * SEQUENCE + 1].long()
        return piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self, width=128, layers=2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(SEQUENCE, width)
        layer = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def main():
    with phalanx.session(Path(__file__).with_suffix(".yaml")) as session:
        model, _ = session.prepare(Model, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
        for tokens, targets in session.micro_batches(Text(), tokens=SEQUENCE):
            session.backward_and_step(loss_sum(model(tokens), targets), targets.numel())


if __name__ == "__main__":
    main()
