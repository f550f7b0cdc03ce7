"""What one step asks of a machine, as values: operations with their shapes, communication, weights, and what backward
needs kept. `trace/` fills it in, costs and memory read it; no torch here.

What tensor parallelism divides is marked, not divided: one profile serves every layout, micro-batch and checkpointing.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

PassDirection = Literal["forward", "backward"]
PASS_DIRECTIONS: tuple[PassDirection, PassDirection] = ("forward", "backward")
TpSplitDim = Literal["m", "n", "k", "count", ""]
"""Which dimension of a product tensor parallelism divides; "" for none."""


@dataclass(frozen=True)
class Affine:
    """`fixed + each x samples`."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def evaluate(self, samples: float) -> float:
        """The quantity for a micro-batch of `samples` samples."""
        return self.fixed + self.per_sample * samples

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)


@dataclass(frozen=True)
class Gemm:
    """`count` products [m, k] x [k, n] of elements of `element_bytes` bytes, results included."""

    phase: PassDirection
    count: Affine
    m: Affine
    n: Affine
    k: Affine
    element_bytes: int
    tp_dim: TpSplitDim = ""
    is_expert: bool = False
    """Whether it belongs to experts, of which each rank of expert parallelism has a part."""
    is_grouped: bool = False
    """Whether all `count` are one launch, as those of experts are."""
    has_weight: bool = False
    """Whether one side is a weight: it may be computed in a lower precision than activations alone."""


@dataclass(frozen=True)
class AttentionOp:
    """Softmax attention of `num_queries` on `num_keys` tokens, fused: the matrix of scores is never stored."""

    phase: PassDirection
    samples: Affine
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    causal: bool
    element_bytes: int
    tp_sharded: bool = False

    @property
    def flops_per_sample(self) -> float:
        """FLOPs in this pass: 4 q k d a head forward, 2.5 times that backward (one product is recomputed), half if
        causal (Dao 2023, FlashAttention-2, section 4.1)."""
        whole = 4.0 * self.num_heads * self.num_queries * self.num_keys * self.head_dim
        return whole * (0.5 if self.causal else 1.0) * (2.5 if self.phase == "backward" else 1.0)


@dataclass(frozen=True)
class MemoryOp:
    """An operation bound by memory: bytes read and written when it runs alone (`unfused_bytes`), and its part when a
    compiler fuses it with its neighbours (`fused`), of which `launches` is the first."""

    phase: PassDirection
    name: str
    unfused_bytes: Affine
    fused_bytes: Affine
    launches: bool
    tp_sharded: bool = False
    element_bytes: int = 4
    """Bytes of an element of its largest tensor."""


@dataclass(frozen=True)
class TensorAllReduce:
    """All-reduce of an activation over tensor-parallel ranks. With sequence parallelism it is a reduce-scatter here and
    an all-gather before the next product, which move as many bytes as an all-reduce."""

    phase: PassDirection
    num_bytes: Affine


@dataclass(frozen=True)
class ExpertAllToAll:
    """All-to-all that sends tokens to the ranks of their experts, and back: bytes that one rank sends each way. Each
    token is sent `copies_per_token` times, once for each of its experts."""

    phase: PassDirection
    num_bytes: Affine
    copies_per_token: float


ProfiledOp = Gemm | AttentionOp | MemoryOp | TensorAllReduce | ExpertAllToAll


@dataclass(frozen=True)
class SegmentWeights:
    """Parameters of a segment, in elements: those that tensor parallelism divides, those that it copies, those of
    experts; `frozen_count` are among them and have neither gradient nor optimizer state, and `int8_count` among these
    are held in 8 bits."""

    tp_sharded: int = 0
    replicated: int = 0
    expert: int = 0
    frozen_count: int = 0
    int8_count: int = 0
    largest_weight: int = 0
    """Elements of the largest one."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.tp_sharded + self.replicated + self.expert

    @property
    def trained_share(self) -> float:
        """Those that are not frozen, as a share."""
        return 1.0 - self.frozen_count / self.count if self.count else 1.0


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that backward needs of a segment: `divided` by tensor parallelism or `whole` (which sequence parallelism
    divides, too)."""

    tp_sharded: Affine = Affine()
    replicated: Affine = Affine()

    def bytes_on_rank(self, samples: float, tensor: int, sequence_parallel: bool) -> float:
        """Bytes on one of `tensor` ranks."""
        replicated_bytes = self.replicated.evaluate(samples) / (tensor if sequence_parallel else 1)
        return replicated_bytes + self.tp_sharded.evaluate(samples) / tensor

    def __add__(self, other: "SavedActivations") -> "SavedActivations":
        return SavedActivations(self.tp_sharded + other.tp_sharded, self.replicated + other.replicated)


@dataclass(frozen=True)
class ModelSegment:
    """A part of a model that is computed as a whole: a block that is repeated, or what stands between blocks."""

    name: str
    repeats: int
    ops: tuple[ProfiledOp, ...]
    weights: SegmentWeights
    saved: SavedActivations
    """With no recomputation, operation by operation as autograd does it."""
    saved_when_fused: SavedActivations
    """With no recomputation, where a compiler or hand-written kernels fuse what is bound by memory."""
    saved_when_selective: SavedActivations
    """Where the results of products and attention are kept and the rest is computed again."""
    input_bytes: Affine
    """Bytes of what enters it: all that full recomputation keeps."""
    peaks: tuple[SavedActivations, ...] = ()
    """Bytes alive at the peaks of memory, with what forward saved among them, operation by operation; without weights
    and their gradients. There are several, since the highest one depends on the number of tensor ranks."""
    peaks_when_fused: tuple[SavedActivations, ...] = ()
    """The same where what is bound by memory is fused."""
    is_block: bool = True
    num_experts: int = 0
    """How many it has, of which each token uses a few."""

    def ops_of(self, phase: PassDirection) -> tuple[ProfiledOp, ...]:
        """Its operations of one phase, in their order."""
        return self._forward if phase == "forward" else self._backward

    @cached_property
    def has_logits(self) -> bool:
        """Whether it makes scores of a vocabulary or of classes: it is no block and has a product with a weight."""
        return not self.is_block and any(isinstance(op, Gemm) and op.has_weight for op in self._forward)

    # A search asks for these thousands of times.
    @cached_property
    def _forward(self) -> tuple[ProfiledOp, ...]:
        return tuple(each for each in self.ops if each.phase == "forward")

    @cached_property
    def _backward(self) -> tuple[ProfiledOp, ...]:
        return tuple(each for each in self.ops if each.phase == "backward")


@dataclass(frozen=True)
class ModelProfile:
    """A whole model with its loss. `units_per_sample`: units that a sample has (1 for an image)."""

    segments: tuple[ModelSegment, ...]
    units_per_sample: int
    tied_elements: int = 0
    """Elements of weights that are used in more than one segment; counted once, in the first."""

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of a number in what it was followed in: those of its first product, 2 where it has none."""
        return next((op.element_bytes for each in self.segments for op in each.ops if isinstance(op, Gemm)), 2)

    @property
    def num_parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(each.repeats * each.weights.count for each in self.segments)

    @cached_property
    def must_be_whole(self) -> bool:
        """Whether each worker must hold all of it: frozen weights in 8 bits are not divided."""
        return any(each.weights.int8_count for each in self.segments)

    @property
    def num_blocks(self) -> int:
        """Number of repeated blocks: what pipeline stages are made of."""
        return sum(each.repeats for each in self.segments if each.is_block)

    def flops(self, phase: PassDirection | None = None) -> float:
        """FLOPs of the products and attention of one sample, without recomputation; causal attention counts half."""
        return sum(
            each.repeats * op_flops(op) for each in self.segments for op in each.ops if phase in (None, op.phase)
        )


def op_flops(operation: ProfiledOp, samples: float = 1.0) -> float:
    """FLOPs of a product (2 m n k) or of attention; those of other operations are negligible."""
    if isinstance(operation, Gemm):
        sides = operation.m.evaluate(samples) * operation.n.evaluate(samples) * operation.k.evaluate(samples)
        return 2.0 * operation.count.evaluate(samples) * sides
    if isinstance(operation, AttentionOp):
        return operation.flops_per_sample * operation.samples.evaluate(samples)
    return 0.0
