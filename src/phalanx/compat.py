"""The one place for names that torch does not promise to keep. Nothing else may use them."""

import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn


def import_torch() -> None:
    """Import torch with all that a first training step would import on its own, which takes a second."""
    import torch._dynamo
    import torch.distributed  # noqa: F401


def scale_in_place(tensors: "list[torch.Tensor]", factor: float) -> None:
    """Multiply every tensor by `factor`, in one call for the whole list."""
    import torch

    if tensors:
        torch._foreach_mul_(tensors, factor)


def call_foreach(operation: str, *arguments: Any, **options: Any) -> Any:
    """torch's `operation` on whole lists of tensors, `call_foreach("mul_", tensors, 2.0)`: few launches for many
    tensors."""
    import torch

    function: Callable[..., Any] = getattr(torch, f"_foreach_{operation}")
    return function(*arguments, **options)


def all_gather_into(
    out: "torch.Tensor", part: "torch.Tensor", group: "dist.ProcessGroup | None" = None, *, wait: bool = True
) -> "dist.Work | None":
    """Gather all ranks' equal parts into `out`; without `wait`, work to wait for. Torch 2.13 renamed it."""
    import torch.distributed as dist

    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, part, group=group, async_op=not wait)
    return work


def reduce_scatter_into(
    part: "torch.Tensor", whole: "torch.Tensor", group: "dist.ProcessGroup | None" = None, *, wait: bool = True
) -> "dist.Work | None":
    """Sum all ranks' `whole` and keep this rank's part of it; without `wait`, work to wait for. Torch 2.13 renamed
    it."""
    import torch.distributed as dist

    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(part, whole, group=group, async_op=not wait)
    return work


@contextmanager
def fake_tensor_mode(symbols: bool = True) -> Iterator[object]:
    """A context in which new tensors have shape, dtype and device but no data, and operations only follow these. Where
    code asks for a value it gets a symbol, or without `symbols` an exception. torch logs no traceback of an operation
    that fails: the exception is the caller's."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv() if symbols else None
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, torch_log.disabled = torch_log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=env) as mode:
            yield mode
    finally:
        torch_log.disabled = was_disabled


def scaled_mm(
    a: "torch.Tensor",
    b: "torch.Tensor",
    scale_a: "torch.Tensor",
    scale_b: "torch.Tensor",
    dtype: "torch.dtype",
    fast: bool = False,
) -> "torch.Tensor":
    """(a * scale_a) @ (b * scale_b) in `dtype`, of matrices in fp8 with fp32 scales (0-d): a [n, k] by rows, b [k, m]
    by columns. `fast` lets tensor cores add with fewer digits.

    torch.compile can follow the public `F.scaled_mm` since torch 2.13 only: before, each product breaks the graph
    (21 breaks in two blocks with torch 2.11), and it has no kernel for CPUs."""
    import torch
    import torch.nn.functional as F

    if torch_version() >= (2, 13):
        whole = F.ScalingType.TensorWise
        return F.scaled_mm(a, b, scale_a, whole, scale_b, whole, output_dtype=dtype, use_fast_accum=fast)
    out: torch.Tensor = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    return out


def torch_version() -> tuple[int, int]:
    """Major and minor version of torch."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def set_deterministic(on: bool) -> None:
    """Let torch use deterministic kernels only: an operation that has none raises RuntimeError (`warn_only` would leave
    the backward of attention nondeterministic: ATen takes the fast kernels then). New tensors are not filled with NaN,
    which torch does by default in this mode: it doubles the number of launches."""
    import torch
    import torch.utils.deterministic

    torch.use_deterministic_algorithms(on)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def find_nondeterministic_op(error: RuntimeError) -> str | None:
    """The operation that torch refuses in deterministic mode; None for any other error."""
    text = str(error)
    return text.split(" ", 1)[0] if "does not have a deterministic implementation" in text else None


def raise_recompile_limit(parts: int) -> None:
    """Let torch.compile make as many variants of one function as a model has compiled parts, and a few for each: by
    default it silently stops compiling after eight."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 8 + 2 * parts)


def count_graph_breaks() -> int:
    """How often torch.compile has had to leave a part of a function uncompiled, in this process."""
    import torch._dynamo.utils

    return sum(torch._dynamo.utils.counters["graph_break"].values())


def is_compiled(module: "nn.Module") -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def call_after(module: "nn.Module", action: "Callable[[nn.Module], None]") -> None:
    """Call `action` after each forward of a module, outside of what `module.compile()` has compiled."""
    compiled: Callable[..., Any] | None = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        module.register_forward_hook(lambda module, args, output: action(module))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        action(module)
        return output

    module._compiled_call_impl = call


def causal_lower_right(queries: int, keys: int) -> "torch.Tensor":
    """The bias of torch.nn.attention by which the last query sees the last key. torch cannot make one while operations
    are dispatched to a mode, as selective recomputation, memory measurements and FLOP counters have them."""
    from torch.nn.attention import bias
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return bias.causal_lower_right(queries, keys)


def is_attention_bias(mask: object) -> bool:
    """Return whether a mask is a bias of torch.nn.attention. Nothing is imported for a mask that cannot be one."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def attend_with_bias(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    bias: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> "torch.Tensor":
    """Compute scaled_dot_product_attention with a bias of torch.nn.attention. torch's own function takes such a bias
    for a mask without values while another function stands in for it in torch.nn.functional."""
    result: torch.Tensor = type(bias)._dispatch(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
    return result


def observe_operations(on_result: "Callable[[Any], None]") -> "AbstractContextManager[object]":
    """A context in which `on_result` gets what each operation of torch returned, those of backward included."""

    def handle(operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        on_result(result)
        return result

    return intercept_operations(handle)


def intercept_operations(handler: "Callable[[Any, Any, Any], Any]") -> "AbstractContextManager[object]":
    """A context in which `handler` stands in for each operation of torch, those of backward included: it gets the
    operation, its arguments and its keyword arguments, and returns the result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Handling(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Nothing is compiled here, and telling the compiler to keep out would import it: 1.4 s.
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(func, args, kwargs or {})

    mode: AbstractContextManager[object] = Handling()
    return mode


def tensor_version(tensor: "torch.Tensor") -> int:
    """How often the tensor's memory was written to, as torch counts it; 0 where it does not (in inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def map_registered_tensors(function: "Callable[[torch.Tensor], torch.Tensor]", value: Any) -> Any:
    """Apply `function` to each tensor that FSDP finds in an output: in lists, dicts and classes registered with torch.

    `phalanx.pytree.map_tensors` does not know registered classes, such as dataclasses."""
    import torch
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, function, value)


def has_hooks(parameter: "torch.Tensor") -> bool:
    """Whether something is to happen to its gradient in backward."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_real_tensor(tensor: "torch.Tensor") -> bool:
    """Whether it is no tensor of `fake_tensor_mode`."""
    from torch._subclasses import FakeTensor

    return not isinstance(tensor, FakeTensor)


def set_allocator(settings: str) -> None:
    """Configure torch's allocator on the GPU, whatever its environment variable said when it was first used."""
    import torch

    torch._C._accelerator_setAllocatorSettings(settings)


def has_compiler() -> bool:
    """Whether there is what Triton, and so torch.compile, needs to launch kernels on a GPU: a C compiler and Python's
    headers."""
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    named = bool(os.environ.get("CC")) or any(shutil.which(name) is not None for name in ("gcc", "clang"))
    return named and headers.is_file()


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return torch's records of the last collectives of this process, of gloo and NCCL."""
    import json

    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    entries: list[dict[str, Any]] = json.loads(_dump_fr_trace_json()).get("entries", [])
    return entries


def list_process_groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each process group that this process belongs to, by the name in the flight
    recorder."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    return {name: tuple(dist.get_process_group_ranks(group)) for group, name in list(_world.pg_names.items())}
