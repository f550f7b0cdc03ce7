"""A decoder-only mixture-of-experts transformer, as plain PyTorch modules: no import of the rest of Phalanx.

The decoder of `transformer`, with feed-forwards of which each token uses a few: a router picks `top_k` of `experts`
small SwiGLU feed-forwards for each token (Shazeer et al. 2017). Experts have no capacity limit, so no token is dropped
(Gale et al. 2022). A shared expert that every token uses is optional (Dai et al. 2024).

**Load balancing.** Without it a few experts get all tokens. So the loss of each token has a term added,
`balance x experts x sum over e of load[e] x p[e]`, with p the router's probabilities for the token and `load` the share
of assignments that expert e got (Fedus et al. 2021, equations 4 to 6): 1 x balance where all is even, more where it is
not. It is a sum over tokens, as the rest of the loss, and needs no place in the loss function (`_AddAuxLoss`).

`load` is that of the whole global batch of the *last* step. The load of this step is only known for the current
micro-batch, since backward begins before the other micro-batches have run. The gradient would then depend on how a
batch is divided, and a small micro-batch would be penalized for having one topic (Qiu et al. 2025). With the last
step's load it does not depend on micro-batches, ranks or packing, and a run that resumes from a checkpoint, which
contains `load`, is bit-identical.

The trainer calls `after_step(all_reduce_sum)` of every module that has it after each optimizer step, on all ranks.

Shapes in comments: n tokens, w width, f inner width of one expert, E experts, k experts a token, m = n k assignments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.models.transformer import (
    DecoderConfig,
    FeedForward,
    Transformer,
    check_decoder_sizes,
    default_ffn_hidden_size,
)

_GROUPED_MM_ALIGNMENT = 8  # bf16 elements in the 16 bytes to which the rows of a grouped product must be aligned


class _AddAuxLoss(torch.autograd.Function):
    """x as it is; in backward, `scale` x the gradient of `loss` is added to that of the loss that x leads to. So a
    layer deep in a model, or in another stage of a pipeline, adds to the loss without handing anything on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return grad, scale.float().clone(), None


class PermuteRows(torch.autograd.Function):
    """Rows `indices[i] // repeats` of x, where `indices` is a permutation and `inverse` its inverse: each row comes
    `repeats` times. Backward gathers and adds in a fixed order: quicker than the scattered addition of plain indexing,
    and always the same bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.copies = repeats
        ctx.save_for_backward(inverse)
        return x[indices // repeats]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        rows = grad[back]
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None


class _MetaReshape(torch.autograd.Function):
    """A tensor of another shape, on the meta device, where counts of rows are unknown and there is nothing to copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.shape), None


class TopKRouter(nn.Module):
    """Chooses for each token its `top_k` experts and their weights, and keeps the load even (see the file's head).

    `load` [E] is the share of assignments in the last step, `counts` [E] the number in this one so far, in training
    only. Forward counts; where a forward is done twice for recomputation, all of the router's are, and the shares stay
    the same.
    """

    load: Tensor
    counts: Tensor
    scale: Tensor
    keeps_precision = True
    """Scores decide: they are not for formats of few digits, such as fp8."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, aux_loss_coef: float):
        super().__init__()
        self.top_k, self.aux_loss_coef = top_k, aux_loss_coef
        self.score = nn.Linear(hidden_size, num_experts, bias=False)
        self.register_buffer("load", torch.full((num_experts,), 1 / num_experts))
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward, 1 unless the engine, training in fp16, sets it."""
        return self.scale.item()

    @loss_scale.setter
    def loss_scale(self, scale: float | Tensor) -> None:
        self.scale.fill_(scale)  # a number in a compiled graph would have it compiled again for each new one

    def reset_buffers(self) -> None:
        """Reset to a uniform load of all experts."""
        self.load.fill_(1 / len(self.load))
        self.counts.zero_()
        self.scale.fill_(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, w] -> weights [n, k] (fp32), the order [m] that sorts assignments by expert, and the experts' counts
        [E] (int64). Assignment i is that of token i // k. Equal ones keep their order."""
        probabilities = self.score(x).float().softmax(-1)  # [n, E]
        weights, expert_ids = probabilities.topk(self.top_k, dim=-1)  # [n, k]
        if self.top_k > 1:  # a single weight would become 1, and the router learn nothing from the task
            weights = weights / weights.sum(-1, keepdim=True)
        sorted_experts, order = expert_ids.flatten().sort(stable=True)  # [m]
        # Of sorted numbers the ends of runs tell the counts; adding up one by one would need atomics on a GPU.
        ends = torch.searchsorted(sorted_experts, torch.arange(len(self.load), device=x.device), right=True)  # [E]
        counts = ends.diff(prepend=ends.new_zeros(1))
        if self.training:
            self.counts.add_(counts)
            if self.aux_loss_coef:
                per_expert = probabilities.sum(0)  # [E]
                loss = self.aux_loss_coef * len(self.load) * (self.load.float() * per_expert).sum()
                weights = _AddAuxLoss.apply(weights, loss, self.scale)
        return weights, order, counts

    @torch.no_grad()
    def after_step(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """End a step: `all_reduce_sum` gives the sum of a tensor over all ranks that hold other tokens. On every
        rank."""
        counts = all_reduce_sum(self.counts)
        total = counts.sum()
        self.load.copy_(torch.where(total > 0, counts / total.clamp(min=1), self.load))
        self.counts.zero_()


class GroupedExperts(nn.Module):
    """SwiGLU feed-forwards side by side, their weights stacked with the expert as first dimension.

    `expert_parallel` says that the first dimension of all parameters may be divided over ranks, and that forward takes
    as many experts as it finds weights for; `casts_parameters` that it reads them in the dtype of matrix products only.
    """

    expert_parallel = True
    casts_parameters = True

    def __init__(self, num_experts: int, hidden_size: int, ffn_hidden_size: int):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all weights again."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [m, w], rows sorted by expert, `counts` [E] (int64) of them for each -> [m, w]."""
        gate, up, down = (weight.to(x.dtype) for weight in (self.gate, self.up, self.down))
        if can_use_grouped_mm(x, gate):
            ends = counts.cumsum(0).to(torch.int32)
            hidden = F.silu(F.grouped_mm(x, gate.mT, offs=ends)) * F.grouped_mm(x, up.mT, offs=ends)  # [m, f]
            return F.grouped_mm(hidden, down.mT, offs=ends)
        if x.is_meta:
            even = _MetaReshape.apply(x, (len(gate), -(-len(x) // len(gate)), x.shape[1]))
            hidden = F.silu(even @ gate.mT) * (even @ up.mT)
            outputs: Tensor = _MetaReshape.apply(hidden @ down.mT, tuple(x.shape))
            return outputs
        parts = x.split(counts.tolist())
        # unbind: its backward stacks once, where indexing would fill a whole gradient for each expert.
        weights = zip(parts, gate.unbind(), up.unbind(), down.unbind(), strict=True)
        return torch.cat([F.linear(F.silu(F.linear(part, g)) * F.linear(part, u), d) for part, g, u, d in weights])


def can_use_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether one product for all experts can be had: public since torch 2.13, and for bf16. On a GPU it spares the
    wait for the counts; on one and two CPU cores it took 0.81 to 1.02 of the time of a loop over 8 and 32 experts. On
    the meta device as many rows for each expert stand in for it, since counters of operations do not know it."""
    aligned = weight.shape[1] % _GROUPED_MM_ALIGNMENT == 0 and weight.shape[2] % _GROUPED_MM_ALIGNMENT == 0
    return hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0 and not x.is_meta


class MoE(nn.Module):
    """A feed-forward made of experts: the weighted sum of those that the router chose, and of the shared one."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        ffn_hidden_size: int,
        shared_expert_hidden_size: int,
        aux_loss_coef: float,
    ):
        super().__init__()
        self.router = TopKRouter(hidden_size, num_experts, top_k, aux_loss_coef)
        self.experts = GroupedExperts(num_experts, hidden_size, ffn_hidden_size)
        self.shared = (
            FeedForward(hidden_size, shared_expert_hidden_size, "swiglu") if shared_expert_hidden_size else None
        )

    def forward(self, x: Tensor) -> Tensor:
        # x [b, s, w] -> [b, s, w]
        rows = x.flatten(0, -2)  # [n, w]
        weights, order, counts = self.router(rows)
        inverse = order.argsort()
        top_k = weights.shape[1]
        sorted_rows = PermuteRows.apply(rows, order, inverse, top_k)  # [m, w], by expert
        outputs = self.experts(sorted_rows, counts)
        outputs = PermuteRows.apply(outputs, inverse, order, 1).unflatten(0, (-1, top_k))  # [n, k, w], by token
        mixed: Tensor = (outputs * weights.to(outputs.dtype)[:, :, None]).sum(1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)


class MoETransformer(Transformer):
    """The decoder that `moe` builds: tokens [b, s] -> logits [b, s, v]."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all weights again, as `Transformer` does, and reset what the routers counted."""
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, TopKRouter):
                module.reset_buffers()


def moe(
    vocab_size: int,
    seq_len: int,
    layers: int = 4,
    hidden_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    num_experts: int = 8,
    top_k: int = 2,
    expert_hidden_size: int | None = None,
    shared_expert_hidden_size: int = 0,
    dense_layers: int = 0,
    aux_loss_coef: float = 0.01,
    tie_embeddings: bool = True,
    qk_norm: bool = True,
    rope_base: float = 10000.0,
    dropout: float = 0.0,
    head_dim: int | None = None,
) -> MoETransformer:
    """A decoder-only mixture-of-experts language model; forward(tokens [b, s], documents [b, s] or None) -> logits
    [b, s, vocab_size].

    Each token uses `top_k` of the `num_experts` of a layer. `expert_hidden_size` is the inner width of one expert; by
    default a token's experts together are as wide as the feed-forward of `transformer`: 8/3 x hidden_size / top_k,
    rounded to a multiple of 64. `shared_expert_hidden_size` is the inner width of an expert that every token uses in
    addition (0: none). The first `dense_layers` layers have the feed-forward of `transformer`. `aux_loss_coef` is the
    weight of the loss that keeps the experts evenly used (0: none). The parameters are keys of a recipe's
    `model.args`; all others are as in `transformer`. Raises ValueError when the sizes do not fit together.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "layers": layers, "num_experts": num_experts}
    dim = check_decoder_sizes(hidden_size, num_heads, num_kv_heads, dropout, head_dim, **sizes)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}")
    expert_size = (
        max(64, round(hidden_size * 8 / 3 / top_k / 64) * 64) if expert_hidden_size is None else expert_hidden_size
    )
    if expert_size < 1:
        raise ValueError(f"expert_hidden_size={expert_size} must be at least 1")
    if shared_expert_hidden_size < 0:
        raise ValueError(
            f"shared_expert_hidden_size={shared_expert_hidden_size} must be at least 0: 0 for no shared expert"
        )
    if not 0 <= dense_layers < layers:
        raise ValueError(f"dense_layers={dense_layers} must be at least 0 and below layers={layers}")
    if aux_loss_coef < 0:
        raise ValueError(f"aux_loss_coef={aux_loss_coef} must be at least 0")

    def feed_forward(layer: int) -> nn.Module:
        if layer < dense_layers:
            return FeedForward(hidden_size, default_ffn_hidden_size(hidden_size), "swiglu")
        return MoE(hidden_size, num_experts, top_k, expert_size, shared_expert_hidden_size, aux_loss_coef)

    return MoETransformer(
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
        feed_forward,
    )
