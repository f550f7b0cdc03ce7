"""Kernels run by Triton's interpreter on the CPU: prints by how much each result is off, relative to torch's."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import triton
from torch import Tensor
from torch.nn import functional as F


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def norm_rotate() -> list[float]:
    from phalanx.models import norm_rotate as kernels
    from phalanx.models.transformer import apply_rotary, rope_angles

    found = []
    for b, s, h, d, batched in (
        (2, 24, 3, 64, False),
        (2, 24, 3, 64, True),
        (1, 40, 2, 128, False),
        (2, 8, 1, 16, True),
    ):
        x = torch.randn(b, s, h, d, requires_grad=True)
        weight = (torch.rand(d) + 0.5).requires_grad_()
        angles = rope_angles(s, d, 10000.0, x.device)
        angles = (angles + torch.arange(b)[:, None, None, None]).contiguous() if batched else angles
        cos, sin = angles.cos(), angles.sin()
        out = apply_rotary(F.rms_norm(x, (d,), weight, 1e-6), (cos, sin))
        grad = torch.randn_like(out)
        by_x, by_weight = torch.autograd.grad(out, (x, weight), grad)
        count, heads, length, dim = kernels._kernel_sizes(x, cos)
        rows, programs = kernels.FEATURES_PER_PROGRAM // d, 3
        given = (x.detach(), weight.detach(), cos, sin)
        sizes = {"EPS": 1e-6, "D": dim, "ROWS": rows}
        mine, mine_x, mine_weight = torch.empty_like(x), torch.empty_like(x), torch.empty(programs, d)
        blocks = triton.cdiv(triton.cdiv(count, rows), programs)
        kernels._forward_kernel[(triton.cdiv(count, rows),)](*given, mine, count, heads, length, **sizes)
        kernels._backward_kernel[(programs,)](
            grad, *given, mine_x, mine_weight, count, heads, length, **sizes, BLOCKS=blocks
        )
        found += [off(mine, out), off(mine_x, by_x), off(mine_weight.sum(0), by_weight)]
    return found


def cross_entropy() -> list[float]:
    from phalanx.train.ops import cross_entropy_kernel

    found = []
    for n, vocab in ((5, 17), (4, 300)):
        logits = torch.randn(n, vocab, requires_grad=True)
        targets = torch.randint(0, vocab, (n,))
        targets[1] = -100
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        (by_logits,) = torch.autograd.grad(3 * loss, logits)
        losses, sums, slope = torch.empty(n), torch.empty(n), torch.empty(n, vocab)
        sizes = {"V": vocab, "IGNORE": -100, "BLOCK": 64}
        cross_entropy_kernel._forward_kernel[(n,)](logits.detach(), targets, losses, sums, **sizes)
        cross_entropy_kernel._backward_kernel[(n,)](logits.detach(), targets, sums, torch.tensor(3.0), slope, **sizes)
        found += [off(losses.sum(), loss), off(slope, by_logits)]
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(globals()[sys.argv[1]]()))
