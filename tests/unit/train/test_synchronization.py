"""The host waits for the device once a step, to learn loss, norm and flags, and nowhere else: each further wait would
leave a GPU without work. Counted on a CPU by what makes a host wait: reading a value of a tensor."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.data import Prefetcher, RankBatch
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.grad_sync.compression import QUANT_BLOCK_ELEMENTS, _LowRankGrad, reset_bad_residuals
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.step_callbacks import BufferUpdates
from phalanx.train.step_timer import GpuStepTimer
from phalanx.train.train_state import TrainState
from phalanx.train.train_step import TrainStep
from phalanx.train.trainer import Trainer
from small_train import GLOBAL, MICRO, SmallParts, make_parts, steps_of

STEPS = 6
INSIDE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal")
"""Operations whose result, or its shape, the host must know; item(), float() and bool() come down to the first."""
OUTSIDE = (Tensor.tolist, Tensor.cpu, Tensor.numpy)
"""Functions that on a CPU come down to no operation."""


class Inside(TorchDispatchMode):
    """`at_hand` gives tensors that lie on the host wherever the model is: to read these makes nobody wait."""

    def __init__(self, waits: list[str], at_hand: Callable[[], list[Tensor]] = list):
        super().__init__()
        self._waits, self._at_hand = waits, at_hand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        masked = name == "aten::index" and any(mask is not None and mask.dtype == torch.bool for mask in args[1])
        if (name in INSIDE or masked) and args[0].data_ptr() not in {tensor.data_ptr() for tensor in self._at_hand()}:
            self._waits.append(name)
        return func(*args, **(kwargs or {}))


class Outside(TorchFunctionMode):
    def __init__(self, waits: list[str]):
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OUTSIDE:
            self._waits.append(func.__name__)
        return func(*args, **(kwargs or {}))


def waits_of(parts: SmallParts, steps: int = STEPS) -> list[list[str]]:
    """What made the host wait in each of the next steps, from its first micro-batch to the report."""
    found = []
    waits: list[str] = []

    def steps_taken() -> list[Tensor]:  # optimizers that read this number keep it on the CPU
        return [value for name, value in parts.optimizer.state().items() if name.endswith("/step")]

    with Inside(waits, steps_taken), Outside(waits):
        for _ in steps_of(Trainer(parts, TrainState(), {})):
            found.append(list(waits))
            waits.clear()
    assert len(found) == steps
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_waits_once(precision: str, tmp_path: Path) -> None:
    assert waits_of(make_parts(tmp_path, precision=precision)) == [["tolist"]] * STEPS


@pytest.mark.parametrize(
    "optim",
    [{"name": name} for name in ("adamw", "sgd", "muon", "lars", "lamb")]
    + [{"state_dtype": state} for state in ("bf16", "int8")],
    ids=lambda optim: next(iter(optim.values())),
)
def test_no_optimizer_waits(optim: dict[str, str], tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    parts.optimizer = parts.accumulator.optimizer = OptimizerContainer(
        parts.model, OptimizerConfig.model_validate({"lr": 0.01, **optim})
    )
    assert waits_of(parts) == [["tolist"]] * STEPS


def test_a_step_that_is_skipped_waits_no_more_than_others(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, precision="fp16", steps=2)
    parts.scaler.scale = 2.0**40  # overflows
    assert waits_of(parts, 2) == [["tolist"]] * 2


def forbid_waits() -> None:
    """Have each wait for the GPU raise; torch warns that this mode is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_nothing_waits_but_the_agreement(tmp_path: Path) -> None:
    device = torch.device("cuda")
    parts = make_parts(tmp_path)
    parts.model.to(device)
    stepper = parts.accumulator
    stepper.dist_env = type(stepper.dist_env)(device=device)
    parts.optimizer = stepper.optimizer = OptimizerContainer(parts.model, OptimizerConfig())
    stepper._parameters = list(parts.optimizer.parameter_names)
    watch = GpuStepTimer()
    buffers = BufferUpdates(parts, watch, parts.reporter.report_event)
    train_step = TrainStep(stepper, parts.optimizer, parts.objective, lambda batch: batch, 1.0, watch, [buffers])
    with Prefetcher(parts.data, RankBatch(GLOBAL, MICRO), samples_consumed=0) as feed:
        for step in range(1, 4):
            watch.start()
            batches = [{k: torch.from_numpy(v).to(device) for k, v in arrays.items()} for arrays in next(feed)]
            try:
                forbid_waits()
                train_step.accumulate(step, batches)
                totals = train_step.reduce()
                torch.cuda.set_sync_debug_mode("default")
                result = train_step.apply(totals, 0.001)
                forbid_waits()
                train_step.finish(result)
                watch.stop()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_exchanges_that_hold_back_what_they_round_look_at_no_number_on_the_host() -> None:
    waits: list[str] = []
    matrix, left = torch.randn(6, 4), torch.randn(6, 2)
    thin = _LowRankGrad(0, matrix, torch.randn(4, 2), left, torch.zeros(4, 2))
    with Inside(waits), Outside(waits):
        thin.project()
        reset_bad_residuals(torch.randn(1, 2, QUANT_BLOCK_ELEMENTS), torch.ones(1, 2, 1))
    assert waits == []
