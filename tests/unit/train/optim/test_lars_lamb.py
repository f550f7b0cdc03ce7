"""LARS and LAMB against their papers, written out for one matrix and one vector."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms
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


@pytest.mark.parametrize("scale", [0.1, 1e3])
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_step_is_in_proportion_to_the_matrix_whatever_the_gradient(kind: type, scale: float) -> None:
    def moved(factor: float) -> Tensor:
        matrix, _ = parameters()
        before = matrix.detach().clone()
        optimizer = kind([matrix], 0.1)
        matrix.grad = gradient(matrix, 0) * factor
        optimizer.step()
        return matrix.detach() - before

    torch.testing.assert_close(moved(scale), moved(1.0), rtol=1e-2, atol=1e-4)


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


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_parameter_without_a_gradient_stays_and_has_no_state(kind: type) -> None:
    matrix, vector = parameters()
    before = matrix.detach().clone()
    optimizer = kind([matrix, vector], 0.1)
    vector.grad = gradient(vector, 0)
    optimizer.step()
    assert matrix.equal(before)
    assert matrix not in optimizer.state


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_one_call_gives_all_norms_of_a_step(kind: type) -> None:
    calls: list[list[tuple[int, ...]]] = []

    def counted(of: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        calls.append([tuple(p.shape) for p in of])
        return compute_norms(of, tensors)

    matrix, vector = parameters()
    other = nn.Parameter(torch.ones(2, 2))
    run(kind([*groups(matrix, vector), {"params": [other], "weight_decay": 0.1}], 0.1, norm_fn=counted), 1)
    assert calls == [[(5, 7), (2, 2), (5, 7), (2, 2)]]


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_halves_with_the_norms_of_the_whole_take_the_wholes_step(kind: type) -> None:
    """What tensor parallel does: each rank updates its half with norms that its `norm_of` has summed over ranks."""
    whole, _ = parameters()
    halves = [nn.Parameter(part.detach().clone()) for part in whole.split([3, 2])]
    gradients = gradient(whole, 0).split([3, 2])
    squares: list[list[Tensor]] = []

    def noted(of: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        squares.append([tensor.square().sum() for tensor in tensors])
        return compute_norms(of, tensors)

    def of_both(of: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        return [(one + other).sqrt() for one, other in zip(*squares, strict=True)]

    def step(parameter: nn.Parameter, grad: Tensor, norm_of: NormFn) -> None:
        parameter.grad = grad.clone()
        kind([{"params": [parameter], "weight_decay": DECAY}], 0.1, norm_fn=norm_of).step()

    for half, grad in zip(halves, gradients, strict=True):
        step(nn.Parameter(half.detach().clone()), grad, noted)
    for half, grad in zip(halves, gradients, strict=True):
        step(half, grad, of_both)
    step(whole, torch.cat(gradients), compute_norms)
    torch.testing.assert_close(torch.cat([half.detach() for half in halves]), whole.detach())
