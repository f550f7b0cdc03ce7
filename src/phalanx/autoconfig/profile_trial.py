"""Profile a model: its parameters, the FLOPs of a sample, and the peak memory of forward and backward.

What a sample adds to the peak is the largest difference between runs of one and of two samples at the same operation.
What does not grow with the samples drops out.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.autoconfig.causality_check import check_causal, check_document_masking, check_packing, check_split
from phalanx.autoconfig.trial_model import activation_checkpointing, compute_loss, open_trial, select_trial_device
from phalanx.autoconfig.trial_names import ADAPTERS_KEY, OUT_OF_MEMORY_KEY, PACKING_KEY, UNCALLED_ADAPTERS_KEY
from phalanx.compat import fake_tensor_mode, observe_operations
from phalanx.data import RunData
from phalanx.errors import RecipeError
from phalanx.pytree import iterate_tensors
from phalanx.recipe import describe_exception
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.grad_sync_defaults import CHANGED_PARAMETERS_KEY, CHANGED_STATE_KEY, GPU_ONLY_MODULES_KEY
from phalanx.train.adapters.targets import describe_adapters, find_uncalled_adapters, is_adapter_name
from phalanx.train.builder import count_units_per_sample, make_lm_head
from phalanx.train.distributed.activation_checkpoint import ActivationCheckpointing
from phalanx.train.distributed.buffer_sync import find_forward_changes, format_names, snapshot_weight_versions
from phalanx.train.distributed.failures import is_gpu_failure, is_out_of_memory
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.module_state import get_persistent_buffers
from phalanx.train.loss import LossFn
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.ops.random_draws import seed_everything
from phalanx.train.optim.container import trainable_parameters
from phalanx.train.precision import autocast_context
from phalanx.train.step_callbacks import new_buffer, other_parameter
from phalanx.train.tasks import LanguageModeling, Task, drop_images
from phalanx.train.train_step import to_device

FLOPS_RULE = (
    "matmuls, convolutions and attention (full, not causal-half) of one forward pass, x 3 for forward and backward; "
    "recomputation not counted"
)
CHECKPOINTING_MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")


def profile_model(payload: dict[str, Any]) -> dict[str, Any]:
    """Measure what a sample of `recipe` (sources prepared) needs: parameters, FLOPs, and the peak bytes of forward and
    backward, for each of the `losses` and each mode of activation checkpointing in `ways`; None where a mode ran out of
    memory or does not work with the model. `{"out_of_memory": 1.0}` when forward alone runs out of memory. Computes
    with `threads` threads."""
    try:
        return _profile_opened(payload)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {OUT_OF_MEMORY_KEY: 1.0}


def profile_model_meta(payload: dict[str, Any]) -> dict[str, Any]:
    """`profile_model` with tensors that have neither memory nor values, for a model that no worker holds whole: no
    weight is read and nothing is computed. Memory is counted as on a CPU, and whether the model looks ahead is not
    checked. Empty for a model of at most `num_small` parameters, and for one that cannot be followed so, because what
    it does depends on values."""
    try:
        with fake_tensor_mode(symbols=False):
            return _profile_opened(payload, with_values=False)
    except Exception:  # noqa: BLE001 any model may fail here in its own way; `profile_model` raises the actual error
        return {}


def _profile_opened(payload: dict[str, Any], with_values: bool = True) -> dict[str, Any]:
    torch.set_num_threads(payload["threads"])  # with more threads than free cores they would wait for each other
    model, task, data = open_trial(payload, with_values)
    if not with_values and sum(parameter.numel() for parameter in model.parameters()) <= payload.get("num_small", 0):
        return {}
    built, buffers = dict(model.named_parameters()), get_persistent_buffers(model)
    device = select_trial_device(payload) if with_values else torch.device("cpu")
    if not with_values:
        allocate_meta_parameters([model], device)
    # FLOPs do not depend on the precision, but in fp32 a GPU has no kernel for grouped heads that keeps no scores.
    precision = payload.get("precision", "fp32") if device_kind_of(device.type).is_gpu else "fp32"
    if with_values and isinstance(task, LanguageModeling):
        check_document_masking(model, task, to_device(data.read_training(0, 1), device))
    packing = ""
    if with_values and data.records is not None and "documents" in (sample := data.read_training(0, 1)):
        packing = check_packing(model, to_device(sample, device))
    flops, before = [], snapshot_weight_versions(model, with_values)

    def count(samples: int) -> None:
        counter, batch = FlopCounterMode(display=False), to_device(data.read_training(0, samples), device)
        seed_everything(0, device)
        with _without_gradients(model), counter, torch.no_grad():
            compute_loss(LossFn(task, precision, device), model, batch)
        flops.append(counter.get_total_flops())

    has_adapters = any(map(is_adapter_name, built))
    uncalled_adapters = find_uncalled_adapters(model, lambda: count(1)) if has_adapters else []
    changed = find_forward_changes(model, lambda: count(1)) if with_values else []
    if not with_values:
        count(1)
    count(2)
    if with_values and (
        what := other_parameter(built, dict(model.named_parameters()))
        or new_buffer(buffers, get_persistent_buffers(model))
    ):
        raise RecipeError(f"a trial forward of the model: {what}")
    now = snapshot_weight_versions(model, with_values)
    if with_values and isinstance(task, LanguageModeling):  # a failing forward has already raised
        with autocast_context(precision, device):
            check_causal(model, task, drop_images(to_device(data.read_training(0, 1), device)))
            if payload.get("context", 1) > 1:
                check_split(model, task, to_device(data.read_training(0, 1), device))
    parameters = sum(p.numel() for p in trainable_parameters(model).values())
    sync_norms = [name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    loss_fns = _make_loss_fns(payload, model, task, data, device)
    return {
        "trainable_parameters": parameters,
        "frozen_parameters": sum(p.nbytes for p in model.parameters() if not p.requires_grad) // 4,
        "flops_per_sample": 3.0 * (flops[-1] - flops[0]),
        "flops_rule": FLOPS_RULE,
        "data_info": asdict(data.info),
        "unit": "tokens" if data.info.kind == "tokens" else "samples",
        "units_per_sample": count_units_per_sample(data.info),
        "blocks": len(find_blocks(model)),
        PACKING_KEY: packing,
        ADAPTERS_KEY: describe_adapters(model) if has_adapters else "",
        UNCALLED_ADAPTERS_KEY: uncalled_adapters,
        CHANGED_PARAMETERS_KEY: [name for name, weight in before.items() if now.get(name) != weight],
        CHANGED_STATE_KEY: format_names(changed),
        GPU_ONLY_MODULES_KEY: format_names(sync_norms),
        "peaks": {loss: _measure_peaks(payload, model, loss_fn, data, device) for loss, loss_fn in loss_fns.items()},
    }


def _make_loss_fns(
    payload: dict[str, Any], model: nn.Module, task: Task, data: RunData, device: torch.device
) -> dict[str, LossFn]:
    """The losses to follow, by name. Where the model's output layer cannot be left out, the whole loss stands for the
    one in chunks, as it does in the run."""
    precision, losses = payload.get("precision", "fp32"), payload.get("losses", ["whole"])
    found = {loss: LossFn(task, precision, device) for loss in losses}
    if "chunked" in found:
        found["chunked"].lm_head = make_lm_head(model, task, data)
        if found["chunked"].lm_head is None:
            found = {"whole": found["chunked"]}
    return found


def _measure_peaks(
    payload: dict[str, Any], model: nn.Module, loss_fn: LossFn, data: RunData, device: torch.device
) -> dict[str, int | None]:
    """Peak bytes of a sample by way of recomputing."""
    found: dict[str, int | None] = dict.fromkeys(CHECKPOINTING_MODES)
    for mode in payload.get("ways", CHECKPOINTING_MODES):
        if mode != "none" and not find_blocks(model) and found["none"] is not None:
            found[mode] = found["none"]  # nothing would be recomputed
            continue
        with activation_checkpointing(model, mode):
            found[mode] = _measure_peak(mode, model, loss_fn, data, device)
    return found


def _measure_peak(
    mode: ActivationCheckpointing, model: nn.Module, loss_fn: LossFn, data: RunData, device: torch.device
) -> int | None:
    def forward(samples: int) -> Tensor:
        return compute_loss(loss_fn, model, to_device(data.read_training(0, samples), device))[0][1]

    try:
        return measure_bytes_per_sample(model, forward, device)
    except Exception as error:
        # Selective recomputation refuses models that change in place what it keeps; others take another way then.
        if is_out_of_memory(error) or (mode != "none" and isinstance(error, RuntimeError)):
            return None
        if isinstance(error, RecipeError) or is_gpu_failure(error):
            raise
        raise RecipeError(f"a trial backward of the model failed: {describe_exception(error)}") from error


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """The model with parameters that ask for no gradient, which a count of operations cannot follow without one."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@dataclass
class MemoryTrace:
    """Bytes in use after each operation; on a GPU the most there were during it. `bytes_after_forward`: when forward
    had ended."""

    bytes_after_op: list[int] = field(default_factory=list)
    bytes_after_forward: int = 0


class _LiveStorages:
    """Bytes of storages that were made while this watched, and are still there."""

    def __init__(self) -> None:
        self.bytes = 0
        self._storage_ids: set[int] = set()

    def track_result(self, result: Any) -> None:
        """Count the storages of an operation's results. A sparse tensor has none, but what it is made of has."""
        for tensor in iterate_tensors(result):
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._storage_ids or not storage.nbytes():
                continue
            size = storage.nbytes()
            self._storage_ids.add(key)
            self.bytes += size
            weakref.finalize(storage, self._on_freed, key, size).atexit = False

    def _on_freed(self, key: int, size: int) -> None:
        self._storage_ids.discard(key)
        self.bytes -= size


def trace_memory(forward: Callable[[], Tensor], device: torch.device) -> MemoryTrace:
    """The course of a forward, which returns a loss, and its backward. On a GPU run it once before, so that what is
    made at the first use of all is there."""
    trace, live = MemoryTrace(), _LiveStorages()
    counted = device_kind_of(device.type).is_gpu
    gpu = torch.get_device_module(device)

    def after_op(result: Any) -> None:
        if counted:
            trace.bytes_after_op.append(gpu.max_memory_allocated(device))
            gpu.reset_peak_memory_stats(device)
        else:
            live.track_result(result)
            trace.bytes_after_op.append(live.bytes)

    if counted:
        gpu.reset_peak_memory_stats(device)
    with observe_operations(after_op):
        loss = forward()
        trace.bytes_after_forward = gpu.memory_allocated(device) if counted else live.bytes
        loss.backward()
    return trace


def compute_sample_growth(one: MemoryTrace, two: MemoryTrace) -> int:
    """Bytes by which a second sample raises what is needed, at the operation where it raises it most. Where the number
    of operations depends on the samples: the difference of the peaks, or of what forward left, whichever is more."""
    if len(one.bytes_after_op) == len(two.bytes_after_op):
        steps = [b - a for a, b in zip(one.bytes_after_op, two.bytes_after_op, strict=True)]
    else:
        steps = [
            max(two.bytes_after_op, default=0) - max(one.bytes_after_op, default=0),
            two.bytes_after_forward - one.bytes_after_forward,
        ]
    return max(0, *steps) if steps else 0


def measure_bytes_per_sample(model: nn.Module, forward: Callable[[int], Tensor], device: torch.device) -> int:
    """What a sample adds at the peak of forward and backward; `forward(samples)` returns a loss. Gradients exist before
    and are dropped afterwards."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        if device_kind_of(device.type).is_gpu:
            forward(1).backward()
        one, two = (trace_memory(lambda count=samples: forward(count), device) for samples in (1, 2))  # type: ignore[misc]
    finally:
        model.zero_grad(set_to_none=True)
    return compute_sample_growth(one, two)
