"""What the model computes in, and the loss scale of fp16."""

from collections.abc import Iterator

import pytest
import torch

from phalanx.train.precision import GradScaler, autocast_context, set_matmul_precision

CPU = torch.device("cpu")


def test_an_overflow_halves_the_scale_and_starts_counting_again() -> None:
    scale = GradScaler(scale=1024.0, good_steps=7, dynamic=True)
    scale.update(overflow=True)
    assert (scale.scale, scale.good_steps) == (512.0, 0)


def test_the_scale_doubles_after_an_interval_of_good_steps() -> None:
    scale = GradScaler(scale=8.0, dynamic=True, growth_interval=3)
    seen = []
    for _ in range(7):
        scale.update(overflow=False)
        seen.append(scale.scale)
    assert seen == [8, 8, 16, 16, 16, 32, 32]


def test_the_scale_has_a_bottom_where_lowering_helps_no_more() -> None:
    scale = GradScaler(scale=2.0**-13, dynamic=True)
    assert not scale.at_min_scale
    for _ in range(3):
        scale.update(overflow=True)
    assert scale.scale == 2.0**-14
    assert scale.at_min_scale


def test_a_fixed_scale_never_changes_and_is_at_its_bottom() -> None:
    scale = GradScaler()
    scale.update(overflow=True)
    assert scale == GradScaler()
    assert scale.at_min_scale
    assert scale.state() == {}


def test_the_state_goes_through_tensors_and_back() -> None:
    scale = GradScaler(scale=2.0**-3, good_steps=1999, dynamic=True)
    other = GradScaler.for_precision("fp16", 1)
    other.load(scale.state())
    assert other == scale


def test_a_scale_takes_nothing_from_a_run_that_had_none() -> None:
    scale = GradScaler.for_precision("fp16", 16)
    scale.load(GradScaler().state())
    assert scale == GradScaler.for_precision("fp16", 16)


@pytest.mark.parametrize(("terms", "scale"), [(1, 65536.0), (16, 4096.0), (17, 2048.0), (2**20, 1.0)])
def test_the_first_scale_is_lower_by_the_number_of_terms(terms: int, scale: float) -> None:
    assert GradScaler.for_precision("fp16", terms).scale == scale


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp8"])
def test_only_fp16_needs_a_scale(precision: str) -> None:
    assert GradScaler.for_precision(precision, 4096) == GradScaler()


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8", torch.bfloat16),
    ],
)
def test_matmuls_compute_in_the_precision(precision: str, dtype: torch.dtype) -> None:
    with autocast_context(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


@pytest.fixture
def torchs_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("torchs_settings")
@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("bf16", "highest"), ("tf32", "high")])
def test_on_a_gpu_only_tf32_rounds_what_enters_products_of_fp32(precision: str, products: str) -> None:
    set_matmul_precision(precision, torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == products
    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
