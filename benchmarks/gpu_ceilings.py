"""What one GPU can do at best, in one process: products, copies, launches, attention, losses, the optimizer.

    python benchmarks/gpu_ceilings.py [--toy] [--seconds 0.15]

Prints one JSON object. Times are medians in milliseconds between CUDA events; each is taken after a warm-up.
`benchmarks/gpu_session.py` runs it first: what a training step takes is compared with these figures of the same card.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"gpt2": (32, 1024, 12, 12, 64), "1b3": (8, 2048, 16, 16, 128), "8b-4k": (2, 4096, 32, 8, 128)}
"""Of attention: batch, sequence, heads, key-value heads, features of a head."""
LOSSES = {"gpt2": (32 * 1024, 50304, 768), "8b-4k": (2 * 4096, 128256, 4096)}
"""Of the loss: rows, vocabulary, width."""
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def milliseconds(run: Callable[[], object], seconds: float) -> float:
    """The median time of `run` on the GPU."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < seconds:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def attempt(function: Callable[[], Any]) -> Any:
    """What a measurement gives, or why it cannot be done here: the others must not be lost with it."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 a compiler's, a library's, the driver's
        torch.cuda.empty_cache()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]}


def products(size: int, seconds: float) -> dict[str, Any]:
    """TFLOP/s of size^3 products of random matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = {"bf16": 2 * size**3 / milliseconds(lambda: a @ b, seconds) / 1e9}
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")

    def product() -> Tensor:
        out: Tensor = torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return out

    found["fp8"] = 2 * size**3 / milliseconds(product, seconds) / 1e9
    return found


def memory(gigabytes: float, seconds: float) -> dict[str, float]:
    """GB/s of a copy on the device, counted read and written, and microseconds of a launch and a wait."""
    n = int(gigabytes * 1e9) // 4
    a, b = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    found = {"copy_gb_per_s": 8 * n / milliseconds(lambda: b.copy_(a), seconds) / 1e6}
    small = torch.zeros(1, device="cuda")
    for _ in range(100):
        small.add_(1)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(1000):
        small.add_(1)
    found["launch_us"] = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(100):
        small.item()
    found["wait_us"] = (time.perf_counter() - begun) * 1e4
    return found


def host_copies() -> dict[str, float]:
    """Host milliseconds of a non-blocking copy of 512 KB while the GPU is busy, from pageable and pinned memory."""
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, pinned in (("pageable", False), ("pinned", True)):
        batch = torch.zeros(32, 2048, dtype=torch.int64)
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            for _ in range(20):
                busy @ busy
            begun = time.perf_counter()
            (batch.pin_memory() if pinned else batch).to("cuda", non_blocking=True)
            times.append((time.perf_counter() - begun) * 1e3)
        found[f"{name}_ms"] = statistics.median(times)
    return found


def pinning(nbytes: int) -> dict[str, float]:
    """Seconds until host memory for a checkpoint is page-locked, by torch and by Phalanx, the longest that a launch
    waited meanwhile (ms), and the rate of copies into it."""
    from phalanx.train.checkpoint.shard_file import PinnedBuffer

    begun = time.perf_counter()
    torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    found = {"torch_s": time.perf_counter() - begun}
    small, longest = torch.zeros(1, device="cuda"), 0.0
    torch.cuda.synchronize()
    begun = time.perf_counter()
    buffer = PinnedBuffer(nbytes, torch.device("cuda", 0))
    waiter = threading.Thread(target=buffer.wait)
    waiter.start()
    while waiter.is_alive():
        launched = time.perf_counter()
        small.add_(1)
        torch.cuda.synchronize()
        longest = max(longest, time.perf_counter() - launched)
    found |= {"phalanx_s": time.perf_counter() - begun, "longest_launch_ms": longest * 1e3}
    target = torch.from_numpy(buffer.bytes[: min(nbytes, 1 << 26)])
    source = torch.ones(len(target), dtype=torch.uint8, device="cuda")
    took = milliseconds(lambda: target.copy_(source, non_blocking=True), 0.1)
    return {**found, "locked": float(buffer.is_pinned), "copy_gb_per_s": len(target) / took / 1e6}


def accumulation(tokens: int, width: int, ffn: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a weight's gradient [ffn, width] that is added to what is there in fp32: as autograd does it
    (product in bf16, cast, sum), with the sum in bf16's place, and by one product that adds in fp32."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(tokens, ffn, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros(ffn, width, device="cuda")

    def cast() -> None:
        total.add_((g.t() @ x).float())

    def mixed() -> None:
        total.add_(g.t() @ x)

    def product() -> None:
        torch.addmm(total, g.t(), x, out_dtype=torch.float32, out=total)

    ways = {"product, cast, sum": cast, "product, sum": mixed, "one product": product, "product": lambda: g.t() @ x}
    return {name: milliseconds(run, seconds) for name, run in ways.items()}


def attention(shape: tuple[int, ...], seconds: float) -> dict[str, Any]:
    """Forward and backward milliseconds and TFLOP/s (full attention counted) by kernel; `deterministic` is flash under
    torch's strict mode; whether two backwards give the same bits."""
    b, s, h, g, d = shape
    q = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(b, g, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    flops = 4 * b * h * s * s * d

    def measured(kernel: SDPBackend, deterministic: bool = False) -> dict[str, Any]:
        torch.use_deterministic_algorithms(deterministic)
        try:
            with sdpa_kernel(kernel):

                def forward() -> Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=g != h)

                out = forward()
                grad = torch.randn_like(out)

                def backward() -> tuple[Tensor, ...]:
                    return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

                there, back = milliseconds(forward, seconds), milliseconds(backward, seconds)
                same = all(torch.equal(x, y) for x, y in zip(backward(), backward(), strict=True))
        finally:
            torch.use_deterministic_algorithms(False)
        rates = {"forward_tflops": flops / there / 1e9, "backward_tflops": 2.5 * flops / back / 1e9}
        return {"forward_ms": there, "backward_ms": back, **rates, "same_bits": same}

    found = {name: attempt(lambda kernel=kernel: measured(kernel)) for name, kernel in KERNELS.items()}
    found["flash deterministic"] = attempt(lambda: measured(SDPBackend.FLASH_ATTENTION, True))
    return found


def losses(shape: tuple[int, int, int], seconds: float) -> dict[str, Any]:
    """Milliseconds of the head and its loss, forward and backward, by way of computing it; and their peak memory."""
    from phalanx.train.ops.linear_cross_entropy import cross_entropy, linear_cross_entropy

    def eager(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    n, vocab, width = shape
    hidden = torch.randn(n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, width, device="cuda") * 0.02).requires_grad_()
    targets = torch.randint(0, vocab, (n,), device="cuda")

    def whole(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        def run() -> object:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                total = loss(F.linear(hidden, weight), targets)
            return torch.autograd.grad(total, (hidden, weight))

        return run

    def chunked() -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total = linear_cross_entropy(hidden, weight, targets)
        return torch.autograd.grad(total, (hidden, weight))

    def measured(run: Callable[[], object]) -> dict[str, float]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        took = milliseconds(run, seconds)
        return {"ms": took, "peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9}

    ways = {
        "whole, eager": whole(eager),
        "whole, compiled": whole(torch.compile(eager, dynamic=False)),
        "whole, Phalanx": whole(cross_entropy),
        "chunked, Phalanx": chunked,
    }
    return {name: attempt(lambda run=run: measured(run)) for name, run in ways.items()}


def adamw(parameters: int, seconds: float) -> dict[str, float]:
    """Milliseconds of fused AdamW and of the norm of all gradients, for so many parameters in pieces of 16 M."""
    size = min(parameters, 1 << 24)
    weights = [torch.zeros(size, device="cuda", requires_grad=True) for _ in range(parameters // size)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    found = {"adamw_ms": milliseconds(optimizer.step, seconds)}
    found["norm_ms"] = milliseconds(lambda: torch.nn.utils.get_total_norm(gradients), seconds)
    return {**found, "parameters": float(size * len(weights))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes: to see that it works")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each figure")
    options = parser.parse_args()
    seconds = options.seconds
    shapes = {"toy": (2, 128, 4, 2, 64)} if options.toy else SHAPES
    of_loss = {"toy": (256, 512, 64)} if options.toy else LOSSES
    found: dict[str, Any] = {"measured_matmul_tflops": attempt(lambda: products(256 if options.toy else 8192, seconds))}
    found["memory"] = attempt(lambda: memory(0.01 if options.toy else 4.0, seconds))
    found["host_copies"] = attempt(host_copies)
    found["pinning"] = attempt(lambda: pinning(1 << (26 if options.toy else 32)))
    torch.cuda.empty_cache()
    sizes = {"toy": (128, 64, 256)} if options.toy else {"1b3": (16384, 2048, 8192), "8b-4k": (8192, 4096, 14336)}
    found["accumulation"] = {
        name: attempt(lambda size=size: accumulation(*size, seconds)) for name, size in sizes.items()
    }
    found["attention"] = {name: attention(shape, seconds) for name, shape in shapes.items()}
    torch.cuda.empty_cache()
    found["losses"] = {name: attempt(lambda shape=shape: losses(shape, seconds)) for name, shape in of_loss.items()}
    torch.cuda.empty_cache()
    found["optimizer"] = attempt(lambda: adamw(1 << (20 if options.toy else 29), seconds))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
