"""The GPT that Korthikanti et al. 2022 count the activations of, as plain modules: LayerNorm, GELU, biases, dropout
after attention and feed-forward. Attention's own dropout stands in `BYTES_PER_ATTENTION_SCORE`, with the scores."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.trace.trace_model import build_on_meta, language_modeling_forward, profile_model

VOCAB = 8  # theirs is left out of the closed forms


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # x [b, s, w] -> [b, s, w]
        y = self.norm(x)
        query, key, value = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.ffn_norm(x)))), 0.1)


class Gpt(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int, width: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        # tokens [b, s] -> logits [b, s, v]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@cache
def gpt(layers: int, width: int, heads: int, sequence: int = 2048) -> ModelProfile:
    """Its profile."""
    return profile_text_model(lambda vocab, sequence: Gpt(layers, width, heads), VOCAB, sequence)


def profile_text_model(
    build: Callable[..., nn.Module], vocab: int, sequence: int, dtype: torch.dtype = torch.bfloat16, **sizes: object
) -> ModelProfile:
    """The profile of the language model that `build` makes of a vocabulary, a sequence and these sizes."""
    model = build_on_meta(lambda: build(vocab, sequence, **sizes), dtype)
    return profile_model(model, language_modeling_forward(vocab, sequence), sequence)
