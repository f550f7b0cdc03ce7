"""Stochastic rounding, its random bits, and AdamW with moments in bf16."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.optim.adamw_low_precision import AdamWBf16, ParamOrigin, make_random_bits, round_to_bf16, take_half

CPU = torch.device("cpu")


def bits(rows: int, columns: int = 1, first: int = 0, key: int = 0x0123456789ABCDEF) -> Tensor:
    return make_random_bits((rows, columns), first, key, CPU)


def step_with(
    origin: ParamOrigin, seed: int = 0, steps: int = 2, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A matrix and its second moment after some steps."""
    matrix = nn.Parameter((torch.ones(6, 40) if weight is None else weight).clone())
    optimizer = AdamWBf16([{"params": [matrix]}], 0.1, origins={matrix: origin}, seed=seed)
    for step in range(steps):
        values = torch.randn(6, 40, generator=torch.Generator().manual_seed(step))
        matrix.grad = values[origin.row : origin.row + len(matrix)]
        optimizer.step()
    return matrix.detach(), optimizer.state[matrix]["exp_avg_sq"]


def test_random_bits_are_these() -> None:
    """lowbias32 with a key, in whole numbers. A change here would change the bits of every resumed run."""

    def expected(number: int, key: int) -> int:
        x = (number ^ key) & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x ^= key >> 32
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    for key in (0x0123456789ABCDEF, 0xFEDCBA9876543210):
        assert [value % 2**32 for value in bits(64, key=key).flatten().tolist()] == [
            expected(number, key) for number in range(64)
        ]


def test_random_bits_depend_on_the_number_of_the_element_only() -> None:
    assert bits(3, 5, first=10).equal(bits(5, 5)[2:])


def test_numbers_of_elements_may_pass_32_bits() -> None:
    assert bits(4, first=2**32 - 2)[2:].equal(bits(2))


@pytest.mark.parametrize("key", [0x1123456789ABCDEF, 0x1123456789ABCDEE, 0x0123456889ABCDEF])
def test_another_key_gives_other_bits_that_are_no_shift_of_these(key: int) -> None:
    here, there = bits(4096).flatten(), bits(4096, key=key).flatten()
    assert not set(here.tolist()) & set(there.tolist()[:64])


@pytest.mark.parametrize("half", [0, 1])
def test_random_numbers_are_uniform(half: int) -> None:
    numbers = take_half(bits(1 << 18), half).double() / 65536
    counts = torch.histc(numbers, 64, 0, 1)
    expected = (1 << 18) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 30 < chi_square < 110  # 63 degrees of freedom
    assert abs(float(torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1])) < 0.01


@pytest.mark.parametrize("value", [1.001, -1.001, 3.3e-5, -7e20, 1e-41])
def test_rounding_is_right_on_average(value: float) -> None:
    x = torch.full((1 << 16, 1), value)
    rounded = round_to_bf16(x, take_half(bits(1 << 16), 0))
    assert len(rounded.unique()) == 2
    gap = float(rounded.double().max() - rounded.double().min())
    assert abs(float(rounded.double().mean()) - float(x[0].double())) < 0.01 * gap


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, float("inf"), float("-inf")])
def test_what_bf16_can_hold_stays(value: float) -> None:
    rounded = round_to_bf16(torch.full((1000, 1), value), take_half(bits(1000), 0))
    assert (rounded == value).all()


def test_not_a_number_stays_one_whatever_its_pattern() -> None:
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(nan, torch.full((4,), 65535, dtype=torch.int32)).isnan().all()


def test_a_slow_second_moment_does_not_stand_still() -> None:
    """To the nearest, 1 - beta2 = 0.001 is less than half of bf16's spacing: it would stay 1 for good."""
    matrix = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamWBf16([{"params": [matrix]}], 0.0, origins={matrix: ParamOrigin("w")}, seed=0)
    matrix.grad = torch.zeros_like(matrix)
    optimizer.step()
    optimizer.state[matrix]["exp_avg_sq"].fill_(1.0)
    for _ in range(300):
        optimizer.step()
    assert optimizer.state[matrix]["exp_avg_sq"].float().mean() == pytest.approx(0.999**300, rel=0.01)


def test_the_update_itself_is_that_of_adamw_in_fp32() -> None:
    ours, theirs = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    mine = AdamWBf16([{"params": [ours], "weight_decay": 0.1}], 0.1, origins={ours: ParamOrigin("w")}, seed=0)
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    ours.grad = theirs.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    mine.step()
    reference.step()
    torch.testing.assert_close(ours, theirs)  # the first step reads no rounded moment


@pytest.mark.parametrize(("origin", "seed"), [(ParamOrigin("v"), 0), (ParamOrigin("w"), 1)])
def test_another_seed_or_name_rounds_otherwise(origin: ParamOrigin, seed: int) -> None:
    assert not step_with(origin, seed)[1].equal(step_with(ParamOrigin("w"))[1])


def test_the_size_of_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step_with(ParamOrigin("w"))
    monkeypatch.setattr("phalanx.train.optim.adamw_low_precision.CPU_CHUNK_ELEMENTS", 80)
    assert all(a.equal(b) for a, b in zip(step_with(ParamOrigin("w")), whole, strict=True))


def test_scalars_empty_parts_and_other_memory_layouts_are_updated() -> None:
    image = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    values = [torch.ones(()), torch.ones(0, 5), image, image.to(memory_format=torch.channels_last)]
    found = [nn.Parameter(value.clone()) for value in values]
    optimizer = AdamWBf16([{"params": found}], 0.1, origins={p: ParamOrigin("w") for p in found}, seed=0)
    for _ in range(2):
        for parameter in found:
            parameter.grad = torch.sin(parameter.detach())
        optimizer.step()
    assert found[0] < 0.9
    assert found[2].equal(found[3])
    assert optimizer.state[found[3]]["exp_avg"].stride() == found[3].stride()
