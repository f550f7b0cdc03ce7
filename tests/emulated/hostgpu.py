"""A GPU whose kernels are the CPU's: on the emulated one, each operation is done by the CPU in the same memory.

`install()` enters a mode for this thread, and for autograd's: tensors "on cuda" keep their storage, which is the host's
memory, and an operation sees it as tensors of the CPU. So numbers are right, bit for bit those of the CPU, while the
allocator, streams, pinned copies and host code are the GPU's. Eager only: compiled code would call kernels that do
nothing, so `environment` has torch.compile do nothing. Attention is `math`; fp8 products are computed in fp32. With
NULLGPU_DELAY, and behind collectives (nullnccl.c), what is computed waits for what its stream was given before, and for
nothing else (nullrt.c).
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
NATIVE = {  # they compute nothing: storage is made, looked at or recorded
    aten.detach.default,
    aten.alias.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.record_stream.default,
    aten.is_pinned.default,
    aten._pin_memory.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.resize_.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.lift_fresh.default,
    aten.is_same_size.default,
    aten.sym_size.int,
}
NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "prim")


def on_host(tensor: Tensor) -> Tensor:
    """The memory of an emulated GPU's tensor as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if not (size := storage.nbytes()):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    whole = raw[: size // tensor.dtype.itemsize * tensor.dtype.itemsize].view(tensor.dtype)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU in memory of the emulated GPU."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    wait_for_stream(device)
    if tensor.numel():
        on_host(made).copy_(tensor)
    return made


RUNTIME = ctypes.CDLL(None)  # the preloaded one among others


def wait_for_stream(device: torch.device) -> None:
    """Wait for copies and collectives that were given to the stream on which something is computed now."""
    RUNTIME.nullgpu_compute(ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: None = None,
    scale_result: None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    return ((a.float() * scale_a.float()) @ (b.float() * scale_b.float())).to(out_dtype or torch.bfloat16)


def addmm_out(x: Tensor, a: Tensor, b: Tensor, _: Any, *, beta: float = 1, alpha: float = 1, out: Tensor) -> Tensor:
    return out.copy_(x * beta + alpha * (a.float() @ b.float()))


OURS = {"aten._scaled_mm.default": scaled_mm, "aten.addmm.dtype_out": addmm_out}
"""Operations of which the CPU has no kernel."""


def is_transfer(func: Any, args: Any, to: Any, dtype: Any) -> bool:
    """Whether this is a plain copy between the host and the GPU, which the runtime does."""
    source = args[1] if func is aten.copy_.default else args[0]
    if func is aten.copy_.default:
        target = args[0]
        plain = target.dtype == source.dtype and target.device.type != source.device.type and target.is_contiguous()
    else:
        plain = to is not None and torch.device(to).type != source.device.type and dtype in (None, source.dtype)
    return plain and source.is_contiguous()


class HostGpu(TorchDispatchMode):
    """Does operations of tensors on the emulated GPU with the CPU's kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on = next((x.device for x in tensors if x.device.type == "cuda"), None)
        to = kwargs.get("device")
        to_cuda = to is not None and torch.device(to).type == "cuda"
        if (on is None and not to_cuda) or func in NATIVE or func.namespace in NAMESPACES or (func.is_view and on):
            return func(*args, **kwargs)
        if func in (aten.copy_.default, aten._to_copy.default) and is_transfer(func, args, to, kwargs.get("dtype")):
            return func(*args, **kwargs)
        if on is None:  # it makes a tensor
            made = func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})
            return on_device(made, torch.device("cuda", torch.cuda.current_device()))
        return self.compute(func, args, kwargs, on, func is aten._to_copy.default and to is not None and not to_cuda)

    def compute(self, func: Any, args: Any, kwargs: Any, device: torch.device, stays: bool) -> Any:
        """`func` by the CPU; what it makes goes to `device` unless it `stays`."""
        known: list[tuple[Tensor, Tensor]] = []

        def lower(x: Any) -> Any:
            if isinstance(x, Tensor) and x.device.type == "cuda":
                known.append((on_host(x), x))
                return known[-1][0]
            if isinstance(x, torch.Generator):
                return None
            return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x

        def lift(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.device.type != "cpu" or stays:
                return x
            for host, given in known:  # computed in place
                if x is host or (x.numel() and x.data_ptr() == host.data_ptr() and x.shape == host.shape):
                    return given
            return on_device(x, device)

        wait_for_stream(device)
        args, kwargs = tree_map(lower, (args, kwargs))
        try:
            found = OURS.get(str(func), func)(*args, **kwargs)
        except NotImplementedError:
            found = decomposition_table[func](*args, **kwargs)
        return tree_map(lift, found)


def plain_attention() -> None:
    """Have attention be computed by products and a softmax, on the CPU as well."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def install() -> None:
    """Enter the mode, for the rest of this process."""
    plain_attention()
    HostGpu().__enter__()
