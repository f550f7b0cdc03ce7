"""Map exceptions to error messages and exit codes, for workers without our agent, which knows causes by exit status;
out of memory is detected on every device, and a smaller micro-batch suggested."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from phalanx.errors import ExitCode, PhalanxError, RecipeError, UnfitNodeError, describe_os_error, is_storage_error
from phalanx.recipe import describe_exception
from phalanx.run.node_env import find_node_name

OOM_MESSAGES = ("not enough memory", "allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
"""Messages of torch, of GPU drivers and of libraries (cuBLAS, cuDNN) when an allocation fails."""


class OutOfMemory(RecipeError):
    """The micro-batch is too large for the memory of the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OOM_MESSAGES)


@contextlib.contextmanager
def explain_out_of_memory(micro_size: int) -> Iterator[None]:
    """Turn an allocation failure into an OutOfMemory that names a smaller micro-batch size."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(format_oom_advice(micro_size)) from error


def format_oom_advice(micro_size: int) -> str:
    """Return the error message for a run that ran out of memory with micro-batches of `micro_size`: at most half of it,
    and a divisor, so that it divides batch.global_size, too."""
    text = f"batch.micro_size: out of memory with micro-batches of {micro_size}"
    smaller = max((size for size in range(1, micro_size // 2 + 1) if micro_size % size == 0), default=None)
    if smaller is None:
        return f"{text}; not even one sample fits: use a smaller model or sequence, or a device with more memory"
    return f"{text}; use batch.micro_size={smaller}"


GLOO_PEER_LOSS_MESSAGES = ("gloo/transport", "caused pair closure")
"""Messages of gloo, which has no exception type for a lost peer. Other threads get the second after a peer closed."""
GLOO_INTERFACE_MESSAGE = "Unable to find address for"
"""Message of gloo about a network interface of this machine that is missing or down, before it looks for peers."""

GPU_FAILURE_MESSAGES = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "devices unavailable",
    "device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "GPU is lost",
    "fell off the bus",
    "over nvlink or a hardware error",
    "integrity checks failed",
    "system not yet initialized",
    "CUDA error: unknown error",
)
"""Messages of CUDA and HIP, from torch, Triton or NCCL, about a GPU that failed or is gone; the last three are about a
driver, or the service of its links, that does not work."""


class PassingError(PhalanxError):
    """A failure that may not occur again if the run is restarted."""

    code = ExitCode.UNFINISHED


def cause_of(error: BaseException) -> PhalanxError | None:
    """Return the known cause of an exception; None if it is a bug in code."""
    if isinstance(error, PhalanxError):
        return error
    where = find_node_name()
    if is_gpu_failure(error):  # checked first: NCCL reports it in the same way as lost peers
        return UnfitNodeError(
            f"a GPU of {where} failed: {describe_exception(error)}; train on another machine, or reset the GPU"
        )
    if is_interface_failure(error):
        return UnfitNodeError(
            f"a network interface of {where} is missing or down: {describe_exception(error)}; bring it up, name "
            "another (GLOO_SOCKET_IFNAME), or train on another machine"
        )
    if is_peer_failure(error):
        return PassingError(f"the connection to another worker was lost ({describe_exception(error)}); start again")
    if isinstance(error, OSError) and is_storage_error(error):
        return PassingError(f"storage fails: {describe_os_error(error)}; start again when it is back")
    if is_out_of_memory(error):
        return RecipeError(
            f"out of memory on {where}, not in a micro-batch: {describe_exception(error)}; use a smaller model, a "
            "layout that cuts it, or devices with more memory"
        )
    return None


@contextlib.contextmanager
def naming_causes() -> Iterator[None]:
    """Turn exceptions with a known cause into a PhalanxError, unless an agent knows the cause by the exit status."""
    try:
        yield
    except Exception as error:
        by_status = "PHALANX_EVENTS_FD" in os.environ and not is_out_of_memory(error)
        known = None if by_status else cause_of(error)
        if known is None or known is error:
            raise
        raise known from error


def is_peer_failure(error: BaseException) -> bool:
    """Return whether a collective raised this because a peer is gone, so that this worker is not at fault."""
    if isinstance(error, dist.DistError):
        return True
    if is_interface_failure(error):
        return False
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_PEER_LOSS_MESSAGES)


def is_interface_failure(error: BaseException) -> bool:
    """Return whether gloo found no usable network interface on this machine."""
    return isinstance(error, RuntimeError) and GLOO_INTERFACE_MESSAGE in str(error)


def is_gpu_failure(error: BaseException) -> bool:
    """Return whether a GPU of this machine failed: a new process may be able to use it again, or only another machine.
    An illegal address or a failed launch is usually a bug in a program and does not count."""
    kinds = (RuntimeError, torch.cuda.DeferredCudaCallError)
    return isinstance(error, kinds) and any(words in str(error) for words in GPU_FAILURE_MESSAGES)
