"""One micro-batch in one stage of a model: the bytes that it leaves between forward and backward, and those of each
moment of its backward, by layout, precision and way of recomputing (Korthikanti et al. 2022).
"""

from dataclasses import dataclass
from typing import Literal

from phalanx.plan.holdings import LOW, Elements, elements, fresh, gathered, scattered
from phalanx.plan.profile import Attention, Kept, Segment, Size
from phalanx.plan.setup import Setup
from phalanx.plan.step import Chunk

GIB = 2.0**30
Loss = Literal["whole", "fused", "chunked"]
"""Whether logits exist in fp32, in 16 bits alone (one kernel from there to the loss), or never all at once."""
IN_PLACE = ("megatron", "megatron-2021", "xla")
"""Stacks whose loss turns logits into fp32 probabilities and these into gradients in one place. Elsewhere a compiler,
if any, has the blocks alone, and there are three copies in fp32."""
PARALLEL_LOSS = {"torch": 4 / 3}
"""By what those copies are more where tensor ranks divide the vocabulary: torch's `loss_parallel` has four at a time in
backward (torch/distributed/tensor/parallel/loss.py)."""
GATHERED = {"torch": 4}
"""How many times what enters a block stands gathered along the sequence in its backward, where tensor ranks divide it:
the input of a product and the gradient of another's result, 2, if products gather their inputs again; torch's layers
keep theirs, two to a block."""
SELECTED = {"torch": 0.6}
"""What selective recomputation keeps of the results of products and attention: torchtitan's policy, every second
product and all attention, 0.6 of the bytes in a Llama."""
SCORES = 5.0
"""Bytes of a score where attention stores them: the softmax, dropout's mask and what it leaves (Korthikanti et al.
2022, section 4.1)."""
CHUNK_ROWS = 1024
"""Rows of logits that a chunked loss has at a time (train/vocab.py; Liger's are of the same order)."""


@dataclass(frozen=True)
class Moment:
    """A moment of backward: bytes of what forward kept that are gone by then, and of what comes and goes."""

    let_go: float
    passing: float


@dataclass(frozen=True)
class Passage:
    """A micro-batch in one stage: bytes held from forward to backward, and the moments of backward."""

    held: float
    moments: tuple[Moment, ...]


def passage(setup: Setup, chunk: Chunk, of_rank: Elements, loss: Loss) -> Passage:
    """Of a micro-batch through a stage of a rank that has such parameters in all its stages."""
    kept = [(segment, count, _kept(setup, segment, loss)) for segment, count in chunk.segments]
    standing = _standing(setup, chunk, of_rank)
    gone, waiting, moments = 0.0, 0.0, []
    for segment, count, size in reversed(kept):
        own = 0.0
        if not segment.is_block:
            own = fresh(setup, elements(setup, [(segment, 1)]))
            if loss == "chunked" and segment.has_logits and setup.stack.name == "phalanx":
                own *= 2  # added up in fp32; Liger does it in the weight's format
        full = _fullest(setup, segment, loss)
        moments.append(Moment(gone, standing + waiting + own + max(0.0, full - size)))
        gone += count * size
        if setup.zero == 3:
            waiting += own  # what is outside of blocks is scattered together, when backward is through
    return Passage(gone, tuple(moments))


def _standing(setup: Setup, chunk: Chunk, of_rank: Elements) -> float:
    """Bytes of copies of weights and gradients that are there in all of backward."""
    blocks = [elements(setup, [(segment, 1)]) for segment, _ in chunk.segments if segment.is_block]
    block = max(blocks, key=lambda each: each.count, default=Elements())
    if setup.zero < 3:
        return gathered(setup, of_rank) + fresh(setup, block)
    if setup.layout.pipeline > 1:
        # Torch's pipeline keeps weights gathered and whole fp32 gradients from the first micro-batch to the last.
        return gathered(setup, of_rank) + scattered(setup, of_rank) + fresh(setup, block)
    outside = elements(setup, [(segment, count) for segment, count in chunk.segments if not segment.is_block])
    # The block at work and the one that is gathered ahead; what is outside of blocks stays (FSDP2's root).
    return 2 * gathered(setup, block) + gathered(setup, outside) + fresh(setup, block) + scattered(setup, block)


def _kept(setup: Setup, segment: Segment, loss: Loss) -> float:
    """Bytes that a micro-batch leaves in one segment between forward and backward."""
    entered = Kept(whole=segment.boundary)
    if segment.is_block and setup.recompute == "full":
        return _at(setup, entered)
    if segment.is_block and setup.recompute == "selective":
        results = _at(setup, segment.selective) * SELECTED.get(setup.stack.name, 1.0) + _at(setup, entered)
        return min(results, _at(setup, _variant(setup, segment, loss)[0])) + _scores(setup, segment)
    stored = 0.0 if setup.recompute == "attention" else _scores(setup, segment)
    return _at(setup, _variant(setup, segment, loss)[0]) + stored


def _fullest(setup: Setup, segment: Segment, loss: Loss) -> float:
    """Bytes of a segment, what forward kept among them, in the fullest moment of its backward."""
    kept, moments = _variant(setup, segment, loss)
    full = max(_at(setup, each) for each in (kept, *moments))
    tensor = setup.layout.tensor
    if segment.is_block and tensor > 1 and setup.stack.sequence_parallel:
        full += GATHERED.get(setup.stack.name, 2) * (tensor - 1) * _at(setup, Kept(whole=segment.boundary))
    return full + _scores(setup, segment)


def _variant(setup: Setup, segment: Segment, loss: Loss) -> tuple[Kept, tuple[Kept, ...]]:
    """What a segment keeps without recomputation, and its fullest moments, by how it is computed."""
    plain, fused = (segment.kept, segment.fullest), (segment.fused, segment.fullest_fused)
    if segment.is_block or loss == "fused" or not segment.has_logits:
        return fused if setup.stack.fused else plain
    logits = segment.kept.divided  # in fp32
    if loss == "chunked":
        share = min(1.0, CHUNK_ROWS / (setup.profile.tokens * setup.micro / setup.layout.context))
        return Kept(Size(), segment.kept.whole), tuple(Kept(_times(it.divided, share), it.whole) for it in plain[1])
    if setup.stack.name in IN_PLACE:
        rest = segment.fused.whole
        return Kept(logits, rest), (Kept(_times(logits, 1.5), rest),)  # their gradient in 16 bits
    more = PARALLEL_LOSS.get(setup.stack.name, 1.0) if setup.layout.tensor > 1 else 1.0
    return segment.kept, tuple(Kept(_times(each.divided, more), each.whole) for each in segment.fullest)


def _scores(setup: Setup, segment: Segment) -> float:
    """Bytes of scores, where attention stores them."""
    if setup.stack.flash:
        return 0.0
    found, samples = 0.0, setup.micro / setup.layout.context
    for op in segment.of("forward"):
        if isinstance(op, Attention):
            heads = op.heads / setup.layout.tensor if op.divided else op.heads
            found += SCORES * heads * op.queries * op.keys * op.samples.at(samples)
    return found


def _at(setup: Setup, kept: Kept) -> float:
    """Bytes of a micro-batch on one rank, in the precision of the run."""
    size = kept.at(setup.micro / setup.layout.context, setup.layout.tensor, setup.stack.sequence_parallel)
    return size * (2 if setup.precision in LOW else 4) / setup.profile.width


def _times(size: Size, factor: float) -> Size:
    return Size(size.fixed * factor, size.each * factor)
