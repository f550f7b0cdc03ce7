"""A decoder-only transformer, as plain PyTorch modules: no loss, no generation, and of the rest of Phalanx compat
only.

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention with normalised queries and keys, and a SwiGLU
or squared-ReLU feed-forward, without biases (Touvron et al. 2023; Ainslie et al. 2023; Dehghani et al. 2023;
So et al. 2021). Which kernel computes attention is for attention.py to choose.

Shapes in comments: b batch, s sequence, v vocabulary, w width, h heads, g key-value heads, d = w / h, f inner width of
the feed-forward.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.compat import has_compiler
from phalanx.models.attention import AttentionPlan, KeyValueCache, attend, make_continuation_mask, plan_attention

RMS_NORM_EPS = 1e-6  # of RMSNorm
HAS_TRITON = importlib.util.find_spec("triton") is not None and has_compiler()
"""Whether kernels of Triton can be launched."""


def rope_angles(seq_len: int, dim: int, base: float, device: torch.device) -> Tensor:
    """Angles [s, 1, d/2] in fp32 by which position and pair of features are turned (Su et al. 2021)."""
    return rope_angles_at(torch.arange(seq_len, dtype=torch.float32, device=device), dim, base)


def rope_angles_at(positions: Tensor, dim: int, base: float) -> Tensor:
    """The same [..., s, 1, d/2] for any positions [..., s]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    return (positions.to(torch.float32)[..., None] * base**-exponents)[..., None, :]


def apply_rotary(x: Tensor, rotations: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of neighbouring features of x [b, s, h, d] (fp32). `rotations` [s, 1, d/2] or [b, s, 1, d/2] is
    complex, for one complex product (a sixth of the time in eager mode on a CPU), or (cos, sin), for the same in reals,
    which compilers fuse."""
    paired = x.view(*x.shape[:-1], -1, 2)
    if isinstance(rotations, tuple):
        cos, sin = rotations
        even, odd = paired.unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    pairs = torch.view_as_complex(paired)  # [b, s, h, d/2]
    return torch.view_as_real(pairs * rotations).flatten(-2)


def cast_for_matmul(x: Tensor) -> Tensor:
    """x as autocast wants it in a matrix product: cast once here, not again in each projection that reads it."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _normalize(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """x [..., w] by the norm, computed in the dtype of its weight, in the dtype of matrix products."""
    return cast_for_matmul(norm(x.to(norm.weight.dtype)))


def _is_on_gpu(x: Tensor) -> bool:
    return x.device.type not in ("cpu", "meta")


def can_use_norm_rotate(x: Tensor) -> bool:
    """Whether norm_rotate.py takes x [b, s, h, d]: a GPU of NVIDIA or AMD with Triton, and heads of a power of two of
    features."""
    dim = x.shape[-1]
    return x.is_cuda and 16 <= dim <= 256 and dim & (dim - 1) == 0 and HAS_TRITON


class CausalSelfAttention(nn.Module):
    """Causal self-attention of `num_heads` queries over `num_kv_heads` keys and values."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, qk_norm: bool, head_dim: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.query = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=RMS_NORM_EPS) if qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_dim, eps=RMS_NORM_EPS) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotations: Tensor | tuple[Tensor, Tensor],
        attention_plan: AttentionPlan,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        # x [b, s, w] -> [b, s, w]
        batch, length, _ = x.shape
        value = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim)  # [b, s, g, d]
        query = self._norm_and_rotate(
            self.query(x).view(batch, length, self.num_heads, self.head_dim), self.query_norm, rotations
        )
        key = self._norm_and_rotate(
            self.key(x).view(batch, length, self.num_kv_heads, self.head_dim), self.key_norm, rotations
        )
        key = key.to(value.dtype)
        if cache is not None:
            key, value = cache.append(key, value)  # [b, t, g, d] of all t tokens so far
        attended = attend(query.to(value.dtype), key, value, attention_plan)  # [b, s, h, d]
        out: Tensor = self.out(attended.flatten(2))
        return out

    def _norm_and_rotate(self, x: Tensor, norm: nn.RMSNorm | None, rotations: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys [b, s, h, d], normalised and rotated in fp32: bf16 has too few digits for the angles of far
        positions. On a GPU by a kernel of its own, which gives the dtype of x."""
        if norm is None:
            return apply_rotary(x.float(), rotations)
        if isinstance(rotations, tuple) and can_use_norm_rotate(x):
            from phalanx.models.norm_rotate import norm_rotate

            return norm_rotate(x, norm.weight, *rotations, RMS_NORM_EPS)
        return apply_rotary(F.rms_norm(x.float(), (self.head_dim,), norm.weight.float(), RMS_NORM_EPS), rotations)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), or squared ReLU: down(relu(up(x))^2)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: str):
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_hidden_size, bias=False) if activation == "swiglu" else None
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # x [b, s, w] -> [b, s, f] -> [b, s, w]
        if self.gate is not None:
            hidden = F.silu(self.gate(x)) * self.up(x)
        else:
            hidden = F.relu(self.up(x)).square()
        out: Tensor = self.down(hidden)
        return out


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder, without those of its feed-forwards; see `transformer`."""

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool
    qk_norm: bool
    rope_base: float
    dropout: float


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); ffn is any module from [b, s, w] to [b, s, w]."""

    def __init__(self, config: DecoderConfig, ffn: nn.Module):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=RMS_NORM_EPS)
        self.attention = CausalSelfAttention(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.qk_norm, config.head_dim
        )
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=RMS_NORM_EPS)
        self.ffn = ffn
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotations: Tensor | tuple[Tensor, Tensor],
        attention_plan: AttentionPlan,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        # x [b, s, w] -> [b, s, w]
        attended = self.attention(_normalize(self.attention_norm, x), rotations, attention_plan, cache)
        x = x + self._apply_dropout(attended)
        return x + self._apply_dropout(self.ffn(_normalize(self.ffn_norm, x)))

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x


class Transformer(nn.Module):
    """The decoder that `transformer` builds: tokens [b, s] -> logits [b, s, v]. `feed_forward` builds the feed-forward
    of a layer, given the layer's number."""

    def __init__(self, config: DecoderConfig, feed_forward: Callable[[int], nn.Module]):
        super().__init__()
        self.seq_len = config.seq_len
        self.head_dim = config.head_dim
        self.rope_base = config.rope_base
        self.dropout = config.dropout
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(TransformerBlock(config, feed_forward(layer)) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=RMS_NORM_EPS)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_embeddings = config.tie_embeddings
        self.blocks_are_compiled = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all weights again, as after `to_empty` of a model that was built on the meta device.

        Matrices have deviation 0.02; those that write into the residual stream have it divided by sqrt(2 x layers), so
        that the stream's scale does not grow with depth (Radford et al. 2019).
        """
        if self.tie_embeddings:  # again, since `to_empty` gives each of the two places a tensor of its own
            self.head.weight = self.embedding.weight
        depth = math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():  # tied weights appear once
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                residual = name.removesuffix(".weight").endswith((".out", ".down"))
                nn.init.normal_(parameter, std=0.02 / depth if residual else 0.02)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Logits [b, s, v] for tokens [b, s] (int64). With documents [b, s], a number for the document of each token,
        no token sees another document; positions run on, which rotary attention, being relative, does not notice.
        `positions` [b, s] or [s] says where each token stands, when these are not the first s of their sequence.
        `caches`, one for each block (`make_caches`), hold the tokens before these, which they are appended to."""
        if tokens.shape[1] > self.seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens in a row, but the model was built for seq_len={self.seq_len}")
        x = self.embedding(tokens)  # [b, s, w]
        if _is_on_gpu(x):  # kernels of norms and sums wait for memory: in fp32 the residual stream takes twice as long
            x = cast_for_matmul(x)
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        num_cached = caches[0].num_tokens if caches else 0
        if num_cached:
            attention_plan: AttentionPlan = make_continuation_mask(num_cached, tokens)
            positions = num_cached + torch.arange(tokens.shape[1], device=tokens.device)
        else:
            attention_plan = plan_attention(tokens, documents, self.blocks_are_compiled)
        rotations = self._rotations(tokens, positions)
        for block, cache in zip(self.blocks, caches or repeat(None), strict=False):
            x = block(x, rotations, attention_plan, cache)
        logits: Tensor = self.head(self.norm(x.to(self.norm.weight.dtype)))
        return logits

    def make_caches(self) -> list[KeyValueCache]:
        """Make the empty caches of a text that is generated token by token."""
        return [KeyValueCache() for _ in self.blocks]

    def _rotations(self, tokens: Tensor, positions: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        # Computed in each forward, for microseconds: a buffer would be lost on the meta device, and rounded by
        # .to(bf16).
        if positions is None:
            angles = rope_angles(tokens.shape[1], self.head_dim, self.rope_base, tokens.device)
        else:
            angles = rope_angles_at(positions, self.head_dim, self.rope_base)
        if torch.compiler.is_compiling() or self.blocks_are_compiled or _is_on_gpu(tokens):
            return angles.cos(), angles.sin()
        return torch.polar(torch.ones_like(angles), angles)


def default_ffn_hidden_size(hidden_size: int, activation: str = "swiglu") -> int:
    """The usual inner width of a feed-forward: both activations then cost the same."""
    return max(64, round(hidden_size * 8 / 3 / 64) * 64) if activation == "swiglu" else 4 * hidden_size


def check_decoder_sizes(
    hidden_size: int, num_heads: int, num_kv_heads: int, dropout: float, head_dim: int | None, **sizes: int
) -> int:
    """The features of a head. Raises ValueError, naming the argument, when sizes of a decoder do not fit together."""
    sizes |= {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} must be a multiple of num_heads={num_heads}, or give head_dim")
    dim = hidden_size // num_heads if head_dim is None else head_dim
    if dim < 2 or dim % 2:
        what = "hidden_size / num_heads =" if head_dim is None else "head_dim ="
        raise ValueError(f"{what} {dim} must be even: rotary positions turn pairs of features")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
    return dim


def transformer(
    vocab_size: int,
    seq_len: int,
    layers: int = 4,
    hidden_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    ffn_hidden_size: int | None = None,
    activation: Literal["swiglu", "relu2"] = "swiglu",
    tie_embeddings: bool = True,
    qk_norm: bool = True,
    rope_base: float = 10000.0,
    dropout: float = 0.0,
    head_dim: int | None = None,
) -> Transformer:
    """A decoder-only language model; forward(tokens [b, s], documents [b, s] or None) -> logits [b, s, vocab_size].

    `seq_len` is the longest input. `num_kv_heads` (default: num_heads) divides `num_heads`. `ffn_hidden_size`, the
    feed-forward's inner width, defaults to 8/3 x hidden_size rounded to a multiple of 64 for "swiglu" and to
    4 x hidden_size for "relu2": both cost the same. `head_dim`, the features of a head, defaults to
    hidden_size / num_heads. `tie_embeddings` shares the embedding with the output layer. `dropout` acts on the
    embedding and on what each attention and feed-forward adds. The parameters are the keys of a recipe's `model.args`.
    Raises ValueError when the sizes do not fit together.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if activation not in ("swiglu", "relu2"):
        raise ValueError(f"activation={activation!r} must be 'swiglu' or 'relu2'")
    ffn_size = default_ffn_hidden_size(hidden_size, activation) if ffn_hidden_size is None else ffn_hidden_size
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "layers": layers, "ffn_hidden_size": ffn_size}
    dim = check_decoder_sizes(hidden_size, num_heads, num_kv_heads, dropout, head_dim, **sizes)
    return Transformer(
        DecoderConfig(
            vocab_size=vocab_size,
            seq_len=seq_len,
            num_layers=layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            tie_embeddings=tie_embeddings,
            qk_norm=qk_norm,
            rope_base=rope_base,
            dropout=dropout,
        ),
        lambda layer: FeedForward(hidden_size, ffn_size, activation),
    )
