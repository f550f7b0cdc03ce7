"""LARS and LAMB against their papers, written out for one matrix and one vector."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.optim.lars_lamb import LAMB, LARS

DECAY = 0.2


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(5, 7, generator=generator)), nn.Parameter(torch.randn(7, generator=generator))


def groups(matrix: nn.Parameter, vector: nn.Parameter) -> list[dict[str, object]]:
    return [{"params": [matrix], "weight_decay": DECAY}, {"params": [vector], "weight_decay": 0.0}]


def gradient(parameter: Tensor, step: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))


def run(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = gradient(parameter, step)
        optimizer.step()


def test_lars_follows_algorithm_1() -> None:
    matrix, vector = parameters()
    w, b, v, u = matrix.detach().clone(), vector.detach().clone(), torch.zeros(5, 7), torch.zeros(7)
    run(LARS(groups(matrix, vector), 8.0, momentum=0.9, trust=0.01), 3)
    for step in range(3):
        g, h = gradient(w, step), gradient(b, step)
        rate = 0.01 * w.norm() / (g.norm() + DECAY * w.norm())
        v = 0.9 * v + 8.0 * rate * (g + DECAY * w)
        u = 0.9 * u + 8.0 * h
        w, b = w - v, b - u
    torch.testing.assert_close(matrix.detach(), w)
    torch.testing.assert_close(vector.detach(), b)


def test_lamb_follows_algorithm_2() -> None:
    matrix, vector = parameters()
    values = [matrix.detach().clone(), vector.detach().clone()]
    moments = [[torch.zeros_like(x), torch.zeros_like(x)] for x in values]
    run(LAMB(groups(matrix, vector), 0.02, betas=(0.9, 0.99)), 4)
    for step in range(1, 5):
        for i, (x, pair) in enumerate(zip(values, moments, strict=True)):
            g = gradient(x, step - 1)
            pair[0] = 0.9 * pair[0] + 0.1 * g
            pair[1] = 0.99 * pair[1] + 0.01 * g * g
            update = pair[0] / (1 - 0.9**step) / ((pair[1] / (1 - 0.99**step)).sqrt() + 1e-6)
            if x.dim() == 2:
                update = update + DECAY * x
                update = update * x.norm() / update.norm()
            values[i] = x - 0.02 * update
    torch.testing.assert_close(matrix.detach(), values[0])
    torch.testing.assert_close(vector.detach(), values[1])


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_matrix_of_zeros_gets_off_the_ground(kind: type) -> None:
    matrix = nn.Parameter(torch.zeros(3, 4))
    run(kind([matrix], 0.1), 1)
    assert matrix.isfinite().all()
    assert (matrix != 0).all()


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_gradient_of_zeros_moves_nothing(kind: type) -> None:
    matrix, _ = parameters()
    before = matrix.detach().clone()
    matrix.grad = torch.zeros_like(matrix)
    kind([matrix], 0.1).step()
    assert matrix.equal(before)
