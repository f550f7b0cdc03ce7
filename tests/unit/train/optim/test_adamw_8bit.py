"""Block-wise quantisation to 8 bits, and AdamW with its moments kept so."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.optim.adamw_low_precision import (
    AdamW8bit,
    ParamOrigin,
    dequantize_blockwise,
    make_dynamic_table,
    quantize_blockwise,
)

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chances(shape: torch.Size, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(x: Tensor, table: Tensor, chance: Tensor | float = 0.5) -> Tensor:
    return dequantize_blockwise(*quantize_blockwise(x, table, chance), table)


def test_gaussian_numbers_come_back_within_a_few_percent() -> None:
    x = normal(16, 1024)
    error = there_and_back(x, make_dynamic_table(True, CPU)) - x
    assert error.norm() / x.norm() < 0.02
    assert there_and_back(x.square(), make_dynamic_table(False, CPU)).sub(x.square()).norm() / x.square().norm() < 0.02


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_of_a_block_is_exact_with_either_sign(sign: int) -> None:
    x = normal(1, 256) / 10
    x[0, 77] = sign * 3.3
    assert there_and_back(x, make_dynamic_table(True, CPU), chances(x.shape))[0, 77] == x[0, 77]


def test_quantising_again_changes_nothing() -> None:
    x = normal(8, 700)
    for table, value in ((make_dynamic_table(True, CPU), x), (make_dynamic_table(False, CPU), x.square())):
        once = there_and_back(value, table, chances(x.shape))
        assert there_and_back(once, table, 0.5).equal(once)


def test_rounding_is_right_on_average() -> None:
    x = normal(1, 256).abs()
    mean = there_and_back(x.repeat(20000, 1), make_dynamic_table(False, CPU), chances(torch.Size([20000, 256]))).mean(0)
    above_smallest = x[0] > 1e-4 * x.max()
    torch.testing.assert_close(mean[above_smallest], x[0][above_smallest], rtol=2e-3, atol=2e-3 * float(x.max()))


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    x = torch.full((1, 256), 1e-12)
    x[0, 0], x[0, 1] = 1.0, 0.0
    back = there_and_back(x, make_dynamic_table(False, CPU))
    assert back[0, 1] == 0
    assert (back[0, 2:] > 0).all()


def test_a_block_knows_nothing_of_its_neighbours() -> None:
    x = normal(2, 600)
    other = x.clone()
    other[0, 256:512] *= 1000
    other[1] *= 1000
    codes, scale = quantize_blockwise(x, make_dynamic_table(True, CPU), 0.5)
    changed, scale_of_changed = quantize_blockwise(other, make_dynamic_table(True, CPU), 0.5)
    assert changed[0, :256].equal(codes[0, :256])
    assert changed[0, 512:].equal(codes[0, 512:])
    assert scale_of_changed[0, ::2].equal(scale[0, ::2])


def test_not_a_number_does_not_hide() -> None:
    x = normal(1, 256)
    x[0, 3] = float("nan")
    assert there_and_back(x, make_dynamic_table(True, CPU)).isnan().any()


def optimizer_for(*parameters: nn.Parameter, row: int = 0) -> AdamW8bit:
    origins: dict[Tensor, ParamOrigin] = {p: ParamOrigin(f"w{i}", row) for i, p in enumerate(parameters)}
    return AdamW8bit([{"params": list(parameters)}], 0.01, origins=origins, seed=0)


def test_a_parameter_takes_about_two_bytes() -> None:
    matrix = nn.Parameter(normal(64, 512))
    optimizer = optimizer_for(matrix)
    matrix.grad = normal(64, 512, seed=1)
    optimizer.step()
    held = sum(value.numel() * value.element_size() for value in optimizer.state[matrix].values())
    assert held / matrix.numel() < 2.05


def test_vectors_and_short_rows_stay_in_fp32() -> None:
    found = [nn.Parameter(normal(*shape)) for shape in ((500,), (64, 3, 3), (64, 64), (), (8, 7, 3, 3))]
    optimizer = optimizer_for(*found)
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in found]
    assert dtypes == [torch.float32, torch.float32, torch.uint8, torch.float32, torch.float32]


def test_other_memory_layouts_take_the_same_steps() -> None:
    one = nn.Parameter(normal(4, 32, 3, 3))
    other = nn.Parameter(normal(4, 32, 3, 3).to(memory_format=torch.channels_last))
    optimizer = optimizer_for(one), optimizer_for(other)
    for step in range(3):
        one.grad = normal(4, 32, 3, 3, seed=step)
        other.grad = one.grad.to(memory_format=torch.channels_last)
        for each in optimizer:
            each.step()
    assert one.equal(other)
