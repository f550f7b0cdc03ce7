"""The kernel of the cross-entropy against torch's, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("vocab", [50, 8192, 50304])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_gradient_are_torchs(vocab: int, dtype: torch.dtype) -> None:
    from phalanx.train.ops.cross_entropy_kernel import triton_cross_entropy

    torch.manual_seed(0)
    logits = (5 * torch.randn(37, vocab, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (37,), device="cuda")
    targets[3] = -100
    expected = F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=-100)
    found = triton_cross_entropy(logits, targets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    (grad,), (reference,) = (torch.autograd.grad(3.0 * loss, logits) for loss in (found, expected))
    assert (grad - reference).float().norm() < (1e-5 if dtype == torch.float32 else 0.01) * reference.float().norm()


def test_a_target_that_is_no_token_gives_nan() -> None:
    from phalanx.train.ops.cross_entropy_kernel import triton_cross_entropy

    assert triton_cross_entropy(torch.zeros(2, 8, device="cuda"), torch.tensor([1, 8], device="cuda")).isnan()
