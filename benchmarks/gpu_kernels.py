"""Kernels that a training step could use, each against the field's: attention, norm with rotation, SwiGLU, the loss.

    python benchmarks/gpu_kernels.py [--toy] [--seconds 0.04] [--budget 75]

Prints one JSON object: by shape and part, forward and backward together of each way, in milliseconds (medians between
CUDA events, after a warm-up) and TFLOP/s or GB/s. A library that is not installed is listed as missing. None is begun
after `budget` seconds: what was not measured is listed as left out.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_ceilings import attempt, milliseconds

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "src"))  # a machine for some minutes has nothing installed

LIGER, FA3 = "liger_kernel", "flash_attn_interface"
MISSING = {"missing": True}


@dataclass(frozen=True)
class Shape:
    """Of a model and its micro-batch."""

    samples: int
    sequence: int
    heads: int
    kv_heads: int
    head: int  # features of one
    ffn: int
    vocab: int

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence

    @property
    def width(self) -> int:
        return self.heads * self.head


SHAPES = {
    "gpt2": Shape(32, 1024, 12, 12, 64, 3072, 50304),
    "1b3": Shape(8, 2048, 16, 16, 128, 8192, 50304),
    "8b-4k": Shape(2, 4096, 32, 8, 128, 14336, 128256),
}
TOYS = {"toy": Shape(2, 128, 4, 2, 64, 512, 512)}


@dataclass
class Way:
    """One way to compute a part: `make` gives what runs it once, forward and backward. `needs`: a module."""

    name: str
    make: Callable[[], Callable[[], object]]
    needs: str | None = None


@dataclass
class Part:
    """Ways to compute the same, and what one run takes at least: floating-point operations or bytes."""

    name: str
    ways: list[Way]
    flops: float | None = None
    moved: float | None = None


def random(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16).requires_grad_()


def both(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Forward and backward; the gradient that comes in is made once."""
    grad = torch.ones_like(forward().detach())

    def run() -> object:
        return torch.autograd.grad(forward(), inputs, grad)

    return run


def attention(shape: Shape) -> Part:
    """Causal. FLOPs are those of full attention, as MFU counts them: 4 b h s^2 d forward, 2.5 times that backward."""
    b, s, h, g, d = shape.samples, shape.sequence, shape.heads, shape.kv_heads, shape.head
    q, k, v = random(b, h, s, d), random(b, g, s, d), random(b, g, s, d)
    inputs = (q, k, v)

    def sdpa(kernel: SDPBackend, strict: bool = False) -> Callable[[], object]:
        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=g != h)

        def within() -> object:
            torch.use_deterministic_algorithms(strict)
            try:
                with sdpa_kernel(kernel):
                    return run()
            finally:
                torch.use_deterministic_algorithms(False)

        with sdpa_kernel(kernel):
            run = both(forward, inputs)
        return within

    def flex() -> Callable[[], object]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda _, __, i, j: i >= j, None, None, s, s, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return both(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=g != h), inputs)

    def flash3() -> Callable[[], object]:
        from flash_attn_interface import flash_attn_func

        turned = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs)

        def forward() -> Tensor:
            found = flash_attn_func(*turned, causal=True)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out

        return both(forward, turned)

    ways = [
        Way("SDPA, cuDNN", lambda: sdpa(SDPBackend.CUDNN_ATTENTION)),
        Way("SDPA, flash", lambda: sdpa(SDPBackend.FLASH_ATTENTION)),
        Way("SDPA, flash, deterministic", lambda: sdpa(SDPBackend.FLASH_ATTENTION, strict=True)),
        Way("FlashAttention 3", flash3, FA3),
        Way("flex_attention, compiled", flex),
    ]
    return Part("attention", ways, flops=3.5 * 4 * b * h * s * s * d)


def norm_and_rotation(shape: Shape) -> Part:
    """RMSNorm of each head of queries and keys, then rotary positions. At least: read and written once forward; two
    read and one written backward."""
    b, s, d = shape.samples, shape.sequence, shape.head
    q, k = random(b, s, shape.heads, d), random(b, s, shape.kv_heads, d)
    weight = torch.ones(d, device="cuda", requires_grad=True)
    inputs = (q, k, weight)

    def turns() -> tuple[Tensor, Tensor]:
        from phalanx.models.transformer import rope_angles

        angles = rope_angles(s, d, 10000.0, q.device)
        return angles.cos(), angles.sin()

    def ours() -> Callable[[], object]:
        from phalanx.models.norm_rotate import norm_rotate

        cos, sin = turns()
        parts = [lambda x=x: norm_rotate(x, weight, cos, sin, 1e-6) for x in (q, k)]
        return both(lambda: torch.cat([part().flatten() for part in parts]), inputs)

    def inductor() -> Callable[[], object]:
        from phalanx.models.transformer import apply_rotary

        cos, sin = turns()

        def one(x: Tensor) -> Tensor:
            return apply_rotary(F.rms_norm(x.float(), (d,), weight, 1e-6), (cos, sin)).to(x.dtype)

        compiled = torch.compile(one, dynamic=False)
        return both(lambda: torch.cat([compiled(q).flatten(), compiled(k).flatten()]), inputs)

    def liger() -> Callable[[], object]:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction

        cos, sin = (torch.cat([x, x], -1).view(1, s, d).to(q.dtype) for x in turns())

        def forward() -> Tensor:
            normed = [LigerRMSNormFunction.apply(x, weight, 1e-6).transpose(1, 2) for x in (q, k)]
            turned = LigerRopeFunction.apply(*normed, cos, sin)
            return torch.cat([x.flatten() for x in turned])

        return both(forward, inputs)

    ways = [Way("Phalanx, Triton", ours), Way("inductor", inductor), Way("liger", liger, LIGER)]
    return Part("norm and rotation (with one concatenation)", ways, moved=2.0 * 5 * (q.numel() + k.numel()))


def swiglu(shape: Shape) -> Part:
    """silu(gate) x up, between the products. At least: two read and one written forward; three and two backward."""
    gate, up = random(shape.tokens, shape.ffn), random(shape.tokens, shape.ffn)

    def eager(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(x) * y

    def liger() -> Callable[[], object]:
        from liger_kernel.ops import LigerSiLUMulFunction

        return both(lambda: LigerSiLUMulFunction.apply(gate, up), (gate, up))

    compiled = torch.compile(eager, dynamic=False)
    ways = [
        Way("inductor", lambda: both(lambda: compiled(gate, up), (gate, up))),
        Way("eager", lambda: both(lambda: eager(gate, up), (gate, up))),
        Way("liger", liger, LIGER),
    ]
    return Part("SwiGLU", ways, moved=2.0 * 8 * gate.numel())


def loss(shape: Shape) -> Part:
    """Output layer and cross-entropy; fp32 weight. FLOPs are those of the three products."""
    n, w, v = shape.tokens, shape.width, shape.vocab
    hidden = random(n, w)
    weight = (torch.randn(v, w, device="cuda") / math.sqrt(w)).requires_grad_()
    targets = torch.randint(0, v, (n,), device="cuda")

    def whole(of_logits: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        def forward() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return of_logits(F.linear(hidden, weight), targets)

        return both(forward, (hidden, weight))

    def ours(chunked: bool) -> Callable[[], object]:
        from phalanx.train.ops.linear_cross_entropy import cross_entropy, linear_cross_entropy

        if not chunked:
            return whole(cross_entropy)

        def forward() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return linear_cross_entropy(hidden, weight, targets)

        return both(forward, (hidden, weight))

    def inductor() -> Callable[[], object]:
        def of_logits(logits: Tensor, right: Tensor) -> Tensor:
            return F.cross_entropy(logits.float(), right, reduction="sum")

        return whole(torch.compile(of_logits, dynamic=False))

    def liger() -> Callable[[], object]:
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        def forward() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                options = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
                found = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, *options)
            total: Tensor = found[0] if isinstance(found, tuple) else found
            return total

        return both(forward, (hidden, weight))

    ways = [
        Way("Phalanx, whole", lambda: ours(False)),
        Way("Phalanx, chunked", lambda: ours(True)),
        Way("inductor, whole", inductor),
        Way("liger, fused linear cross-entropy", liger, LIGER),
    ]
    return Part("output layer and loss", ways, flops=6.0 * n * w * v)


PARTS = (attention, norm_and_rotation, loss, swiglu)


def measured(part: Part, way: Way, seconds: float) -> dict[str, float]:
    """Milliseconds, the rate, and the most memory beyond what the inputs take."""
    run = way.make()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = {"ms": milliseconds(run, seconds)}
    found["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    if part.flops is not None:
        found["tflops"] = part.flops / found["ms"] / 1e9
    if part.moved is not None:
        found["gb_per_s"] = part.moved / found["ms"] / 1e6
    return found


@dataclass
class Found:
    """What is known so far."""

    shapes: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def measure(shapes: dict[str, Shape], seconds: float, until: float) -> Found:
    """Every part at every shape, in this order, as far as the time goes."""
    found = Found(missing=[name for name in (LIGER, FA3, "quack") if importlib.util.find_spec(name) is None])
    for (title, shape), make in _pairs(shapes):
        part = attempt(lambda make=make, shape=shape: make(shape))
        if isinstance(part, dict):
            found.shapes.setdefault(title, {})[make.__name__] = {"inputs": part}
            continue
        of_part = found.shapes.setdefault(title, {}).setdefault(part.name, {})
        for way in part.ways:
            if way.needs in found.missing:
                of_part[way.name] = MISSING
            elif time.perf_counter() > until:
                found.left_out.append(f"{title}: {part.name}: {way.name}")
            else:
                of_part[way.name] = attempt(lambda part=part, way=way: measured(part, way, seconds))
        del part, of_part
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return found


def _pairs(shapes: dict[str, Shape]) -> Iterator[tuple[tuple[str, Shape], Callable[[Shape], Part]]]:
    for item in shapes.items():
        for make in PARTS:
            yield item, make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a toy size: to see that it works")
    parser.add_argument("--seconds", type=float, default=0.04, help="for each figure")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds after which no figure is begun")
    options = parser.parse_args()
    until = time.perf_counter() + options.budget
    found = measure(TOYS if options.toy else SHAPES, options.seconds, until)
    print(json.dumps({"shapes": found.shapes, "missing": found.missing, "left_out": found.left_out}))


if __name__ == "__main__":
    main()
