"""A model of a user's own that draws random numbers in every way, copied beside recipes."""

import torch
import torch.nn.functional as F
from torch import nn

PLAN = {
    "blocks.*.attention": "region",
    "blocks.*.ffn": "region",
    "blocks.*.attention.query": "columns",
    "blocks.*.attention.key": "columns",
    "blocks.*.attention.value": "columns",
    "blocks.*.attention.out": "rows",
    "blocks.*.ffn.up": "columns",
    "blocks.*.ffn.down": "rows",
}


class Attention(nn.Module):
    """Causal attention that drops out scores, before and after which there is noise."""

    def __init__(self, width, head_dim, own):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head_dim, self.own, self.before, self.after = head_dim, own, nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        x = self.before(x)
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q = F.dropout(q, 0.1, self.training)
        if self.own:  # folded heads, as torch.bmm takes them
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.mT / self.head_dim**0.5).masked_fill(hidden, -torch.inf).softmax(-1).flatten(0, 1)
            mixed = torch.bmm(F.dropout(scores, 0.1, self.training), v.flatten(0, 1)).view_as(v)
        else:
            p = 0.1 if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.after(self.out(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Noise among the hidden features, which tensor-parallel ranks divide."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 40), nn.Linear(40, width), nn.Dropout(0.1)
        self.alpha = nn.AlphaDropout(0.05)

    def forward(self, x):
        hidden = self.drop(F.gelu(self.up(x)))
        if self.training:
            hidden = hidden + 0.02 * torch.randn_like(hidden) + 0.02 * torch.rand(hidden.shape)
        return self.alpha(self.down(self.drop(hidden.flatten(0, 1)).view_as(hidden)))


class Block(nn.Module):
    """Stochastic depth by sample, and noise on hidden states."""

    def __init__(self, width, head_dim, own):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.ffn = Attention(width, head_dim, own), FeedForward(width)
        self.positions, self.drop = nn.Dropout1d(0.1), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.depth(self.attention(self.norms[0](x)))
        x = x + self.depth(self.positions(self.ffn(self.norms[1](x))))
        if not self.training:
            return x
        x = self.drop(x.transpose(1, 2)).transpose(1, 2)
        rows = F.dropout(x.flatten(0, 1), 0.05, inplace=True)
        x = rows.view_as(x) * torch.bernoulli(torch.full_like(x, 0.95)) + torch.normal(0.0, 0.01, x.shape)
        x = x + 0.01 * torch.randint_like(x, 0, 3) + 0.01 * F.gumbel_softmax(x, -1)
        return x * x.new_empty(*x.shape[:2], 1).bernoulli_(0.95)

    def depth(self, x):
        return x * (torch.rand(len(x), 1, 1) < 0.8) if self.training else x


class NoisyModel(nn.Module):
    """tokens [b, s] -> logits [b, s, v]."""

    def __init__(self, vocab_size, seq_len, layers, width, own_attention):
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocab_size, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, 6, own_attention) for _ in range(layers))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embedding(tokens) + self.places(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x))


def noisy(vocab_size, seq_len, layers=2, width=24, own_attention=False):
    """Such a model."""
    return NoisyModel(vocab_size, seq_len, layers, width, own_attention)
