"""What one step asks of a machine, as values: operations with their shapes, the communication that dividing a model
adds, weights, and what backward needs kept. No torch here: `tracing.py` fills it in, costs and memory read it.

A quantity that grows with the samples of a micro-batch is a `Size`: `fixed + each x samples`. Context parallelism cuts
a sample into parts, so `samples` may be a fraction. What tensor parallelism divides is marked, not divided: one profile
serves every layout, micro-batch and way of recomputing.
"""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

Phase = Literal["forward", "backward"]
Divided = Literal["m", "n", "k", "count", ""]
"""Which dimension of a product tensor parallelism divides; "" for none."""


@dataclass(frozen=True)
class Size:
    """`fixed + each x samples`."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, samples: float) -> float:
        """The quantity for a micro-batch of so many samples."""
        return self.fixed + self.each * samples

    def __add__(self, other: "Size") -> "Size":
        return Size(self.fixed + other.fixed, self.each + other.each)


@dataclass(frozen=True)
class Product:
    """`count` products [m, k] x [k, n] of elements of `width` bytes, results included."""

    phase: Phase
    count: Size
    m: Size
    n: Size
    k: Size
    width: int
    divided: Divided = ""
    expert: bool = False
    """Whether it belongs to experts, of which each rank of expert parallelism has a part."""
    grouped: bool = False
    """Whether all `count` are one launch, as those of experts are."""
    weight: bool = False
    """Whether one side is a weight: it may be computed in a lower precision than activations alone."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention of `queries` on `keys` tokens, fused: the matrix of scores is never stored."""

    phase: Phase
    samples: Size
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool
    width: int
    divided: bool = False

    @property
    def flops_a_sample(self) -> float:
        """Of the phase: 4 q k d a head forward, 2.5 times that backward (one product is done again), half if causal
        (Dao 2023, FlashAttention-2, section 4.1)."""
        whole = 4.0 * self.heads * self.queries * self.keys * self.head_dim
        return whole * (0.5 if self.causal else 1.0) * (2.5 if self.phase == "backward" else 1.0)


@dataclass(frozen=True)
class Move:
    """An operation bound by memory: bytes read and written when it runs alone (`moved`), and its part when a compiler
    fuses it with its neighbours (`fused`), of which `leads` is the first."""

    phase: Phase
    name: str
    moved: Size
    fused: Size
    leads: bool
    divided: bool = False
    shape: tuple[int, ...] = ()
    """Of its largest tensor, for one sample."""
    width: int = 4
    """Bytes of an element of that."""


@dataclass(frozen=True)
class Reduce:
    """Tensor-parallel ranks add their parts of an activation of so many bytes; where the sequence is divided, too, it
    is a reduce-scatter here and an all-gather before the next product, which moves as much as an all-reduce."""

    phase: Phase
    size: Size


@dataclass(frozen=True)
class Dispatch:
    """Tokens travel to the ranks that hold their experts, and back: bytes of what one rank sends each way, each token
    in so many `copies`, one for each of its experts."""

    phase: Phase
    size: Size
    copies: float


Operation = Product | Attention | Move | Reduce | Dispatch


@dataclass(frozen=True)
class Weights:
    """Parameters of a segment, in elements: those that tensor parallelism divides, those that it copies, those of
    experts; `frozen` are among them and have neither gradient nor optimizer state."""

    divided: int = 0
    whole: int = 0
    expert: int = 0
    frozen: int = 0
    largest: int = 0
    """Elements of the largest one."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.divided + self.whole + self.expert

    @property
    def trained(self) -> float:
        """Those that are not frozen, as a share."""
        return 1.0 - self.frozen / self.count if self.count else 1.0


@dataclass(frozen=True)
class Kept:
    """Bytes that backward needs of a segment: `divided` by tensor parallelism or `whole` (which sequence parallelism
    divides, too)."""

    divided: Size = Size()
    whole: Size = Size()

    def at(self, samples: float, tensor: int, sequence_parallel: bool) -> float:
        """Bytes on one of `tensor` ranks."""
        whole = self.whole.at(samples) / (tensor if sequence_parallel else 1)
        return whole + self.divided.at(samples) / tensor

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.divided + other.divided, self.whole + other.whole)


@dataclass(frozen=True)
class Segment:
    """A part of a model that is computed as a whole: a block that is repeated, or what stands between blocks."""

    name: str
    repeats: int
    operations: tuple[Operation, ...]
    weights: Weights
    kept: Kept
    """With no recomputation, operation by operation as autograd does it."""
    fused: Kept
    """With no recomputation, where a compiler or hand-written kernels fuse what is bound by memory."""
    selective: Kept
    """Where the results of products and attention are kept and the rest is computed again."""
    boundary: Size
    """Bytes of what enters it: all that full recomputation keeps."""
    fullest: tuple[Kept, ...] = ()
    """Bytes alive at its fullest moments, what forward kept among them, operation by operation; weights and their
    gradients apart. Several, since which of them is fullest depends on how many tensor ranks divide it."""
    fullest_fused: tuple[Kept, ...] = ()
    """The same where what is bound by memory is fused."""
    is_block: bool = True
    experts: int = 0
    """How many it has, of which each token uses a few."""

    def of(self, phase: Phase) -> tuple[Operation, ...]:
        """Its operations of one phase, in their order."""
        return self._forward if phase == "forward" else self._backward

    @cached_property
    def has_logits(self) -> bool:
        """Whether it makes scores of a vocabulary or of classes: it is no block and has a product with a weight."""
        return not self.is_block and any(isinstance(op, Product) and op.weight for op in self._forward)

    # A search asks for these thousands of times.
    @cached_property
    def _forward(self) -> tuple[Operation, ...]:
        return tuple(each for each in self.operations if each.phase == "forward")

    @cached_property
    def _backward(self) -> tuple[Operation, ...]:
        return tuple(each for each in self.operations if each.phase == "backward")


@dataclass(frozen=True)
class Profile:
    """A whole model with its loss. `tokens`: units that a sample has (1 for an image)."""

    segments: tuple[Segment, ...]
    tokens: int
    tied: int = 0
    """Elements of weights that are used in more than one segment; counted once, in the first."""
    facts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def width(self) -> int:
        """Bytes of a number in what it was followed in: those of its first product, 2 where it has none."""
        return next((op.width for each in self.segments for op in each.operations if isinstance(op, Product)), 2)

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(each.repeats * each.weights.count for each in self.segments)

    @property
    def blocks(self) -> int:
        """Number of repeated blocks: what pipeline stages are made of."""
        return sum(each.repeats for each in self.segments if each.is_block)

    def flops(self, phase: Phase | None = None) -> float:
        """Of the products and attention of one sample, without recomputation; attention causal-halved."""
        return sum(each.repeats * flops_of(op) for each in self.segments for op in each.operations if _is(op, phase))


KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Product, Attention, Move, Reduce, Dispatch)}


def to_plain(profile: Profile) -> dict[str, Any]:
    """A profile as JSON values."""
    value = asdict(profile)
    for segment, plain in zip(profile.segments, value["segments"], strict=True):
        for operation, fields in zip(segment.operations, plain["operations"], strict=True):
            fields["is"] = type(operation).__name__
    return value


def from_plain(value: dict[str, Any]) -> Profile:
    """What `to_plain` made."""
    segments = [
        Segment(
            **{
                **{name: _value(each) for name, each in plain.items()},
                "operations": tuple(_operation(each) for each in plain["operations"]),
                "weights": Weights(**plain["weights"]),
            }
        )
        for plain in value["segments"]
    ]
    return Profile(tuple(segments), value["tokens"], value["tied"], value["facts"])


def _operation(value: dict[str, Any]) -> Operation:
    found: Operation = KINDS[value["is"]](**{name: _value(each) for name, each in value.items() if name != "is"})
    return found


def _value(value: Any) -> Any:
    """A field: sizes, what is kept, tuples of either, and plain values."""
    if isinstance(value, list | tuple):
        return tuple(_value(each) for each in value)
    if isinstance(value, dict) and set(value) == {"fixed", "each"}:
        return Size(**value)
    if isinstance(value, dict) and set(value) == {"divided", "whole"} and isinstance(value["whole"], dict):
        return Kept(Size(**value["divided"]), Size(**value["whole"]))
    return value


def flops_of(operation: Operation, samples: float = 1.0) -> float:
    """Of a product (2 m n k) or attention; others have none worth counting."""
    if isinstance(operation, Product):
        sides = operation.m.at(samples) * operation.n.at(samples) * operation.k.at(samples)
        return 2.0 * operation.count.at(samples) * sides
    if isinstance(operation, Attention):
        return operation.flops_a_sample * operation.samples.at(samples)
    return 0.0


def _is(operation: Operation, phase: Phase | None) -> bool:
    return phase is None or operation.phase == phase
