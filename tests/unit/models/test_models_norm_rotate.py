"""The kernel of norm and rotation against the same in torch's operations, on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.models.transformer import apply_rotary, rope_angles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_the_operations(dim: int, batched: bool, dtype: torch.dtype) -> None:
    from phalanx.models.norm_rotate import norm_rotate

    torch.manual_seed(0)
    x = torch.randn(3, 50, 5, dim, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.rand(dim, device="cuda") + 0.5).requires_grad_()
    angles = rope_angles(50, dim, 10000.0, x.device)
    if batched:
        angles = angles + torch.arange(3, device="cuda")[:, None, None, None]
    turns = angles.cos(), angles.sin()
    grad = torch.randn_like(x)

    def results(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, (x, weight), grad)]

    expected = results(apply_rotary(F.rms_norm(x.float(), (dim,), weight, 1e-6), turns).to(dtype))
    limit = 1e-5 if dtype == torch.float32 else 0.01
    for found, reference in zip(results(norm_rotate(x, weight, *turns, 1e-6)), expected, strict=True):
        assert (found - reference).float().norm() < limit * reference.float().norm()
