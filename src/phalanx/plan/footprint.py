"""How much memory of a device a step needs, part by part, for any setup: the training state (holdings.py), activations
by the pipeline's order of work, what comes and goes at the fullest moment of backward, and what lies outside tensors.

Activations: what backward needs of each segment was found by following the model (profile.py, passage.py). A pipeline
rank holds it for every micro-batch between its forward and its backward (Narayanan et al. 2021; Qi et al. 2023 for zero
bubble, where the half that is put off keeps all of it). The fullest moment is looked for at each backward, in each
segment from the last to the first.

All quantities are bytes on one device. What is measured elsewhere comes under three names: `allocated` is what torch's
`max_memory_allocated` counts, `reserved` `max_memory_reserved`, `total` what `nvidia-smi` shows for the process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cluster.description import Accelerator
from phalanx.plan.holdings import LEAST, Elements, Held, Keeping, elements, held, keeping
from phalanx.plan.passage import GIB, Loss, Passage, passage
from phalanx.plan.pipeline import Kind, Schedule, order
from phalanx.plan.setup import Setup
from phalanx.plan.step import Chunk, chunks

Reading = Literal["allocated", "reserved", "total"]
CONTEXT = 0.6 * GIB
"""Of a GPU's driver context with torch's kernels, loaded when they are needed."""
COMMUNICATOR = 0.3 * GIB
"""Of NCCL for each group of ranks that a device talks in."""
PROCESS = 0.3 * GIB
"""Of a Python process with torch, on a CPU: measured, torch 2.11, resident after the first backward."""
FRAGMENTED = 0.03
"""What torch's allocator reserves beyond what is allocated at the peak, as a share, where its segments can grow."""
UNSURE = (0.02, 0.25, 0.5)
"""By what share the training state; activations and temporaries; and all the rest may be off. Of the 264 measured runs
that tests/unit/plan/memory_rows.py reads nineteen of twenty are within."""


@dataclass(frozen=True)
class Outside:
    """What a stack needs that no tensor of the model shows: fragmentation as a share of what is allocated, bytes of the
    context, and bytes of buckets in which gradients and weights travel."""

    fragmented: float = FRAGMENTED
    context: float = CONTEXT
    buckets: float = 0.0


OUTSIDE = {"megatron-2021": Outside(fragmented=0.08, context=1573 * 2.0**20, buckets=2 * 2 * 5e8)}
"""Stacks from before segments could grow and kernels were loaded one by one: all of them took 1573 MiB on an A100
(measured with nvidia-smi; BLOOM, chronicles-prequel). DeepSpeed's two buckets have 5e8 elements of 16 bits each."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device at the fullest moment of a step, by part."""

    rank: int
    """Of the pipeline."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    """What comes and goes: a block that is computed again, gradients of activations, logits, gathered weights."""
    buffers: float
    """Of communication; on a CPU of the checkpoint that is being written, which replicas share out."""
    fragmentation: float
    fixed: float
    """The device's context; on a CPU the process."""

    @property
    def state(self) -> float:
        """What is there all the time."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """What torch's `max_memory_allocated` says."""
        return self.state + self.activations + self.temporaries

    @property
    def reserved(self) -> float:
        """What `max_memory_reserved` says."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """All of it, as `nvidia-smi` shows it."""
        return self.reserved + self.buffers + self.fixed

    def between(self, reading: Reading = "total") -> tuple[float, float]:
        """The lowest and the highest that a measurement may show: from how far the measured runs of
        `UNSURE` were off."""
        of_state, of_passing, of_rest = UNSURE
        rest = {"allocated": 0.0, "reserved": self.fragmentation}.get(
            reading, self.fragmentation + self.buffers + self.fixed
        )
        off = of_state * self.state + of_passing * (self.activations + self.temporaries) + of_rest * rest
        middle = float(getattr(self, reading))
        return middle - off, middle + off


def footprint(
    setup: Setup,
    *,
    optimizer: str = "adamw",
    state: str = "fp32",
    offload: bool = False,
    loss: Loss = "whole",
    momentum: float = 0.9,
) -> Footprint:
    """Of the pipeline rank that needs most. `optimizer`, its `momentum`, `state` (fp32, bf16, 8bit: of adamw's moments)
    and `offload` (of the optimizer, to the host) as in a recipe; `loss`: whether logits exist in fp32 (whole), in 16
    bits alone (fused) or never all at once (chunked). KeyError: no such optimizer or state."""
    found = footprints(setup, optimizer=optimizer, state=state, offload=offload, loss=loss, momentum=momentum)
    return max(found, key=lambda each: each.total)


def least_bytes(setup: Setup, kept: Keeping = LEAST) -> float:
    """Bytes that the same setup needs at least with any micro-batch, loss and way of recomputing: its footprint without
    activations and what comes and goes."""
    of_model, pipeline = chunks(setup), setup.layout.pipeline
    states = [_state(setup, rank, of_model[rank::pipeline], kept)[1] for rank in range(pipeline)]
    return max(_made(setup, rank, state, 0.0, 0.0).total for rank, state in enumerate(states))


def footprints(
    setup: Setup,
    *,
    optimizer: str = "adamw",
    state: str = "fp32",
    offload: bool = False,
    loss: Loss = "whole",
    momentum: float = 0.9,
) -> list[Footprint]:
    """Of each pipeline rank, in order; see `footprint`."""
    if setup.stack.name == "phalanx" and loss == "whole":
        if setup.layout.tensor > 1:
            loss = "chunked"  # ranks that divide the vocabulary never have all logits
        elif not is_cpu(setup.cluster.node.accelerator):
            loss = "fused"  # one kernel from the logits to their gradient (train/ops/cross_entropy.py)
    kept, of_model = keeping(optimizer, state, offload, momentum), chunks(setup)
    pipeline = setup.layout.pipeline
    return [_of_rank(setup, rank, of_model[rank::pipeline], kept, loss) for rank in range(pipeline)]


def _of_rank(setup: Setup, rank: int, mine: Sequence[Chunk], kept: Keeping, loss: Loss) -> Footprint:
    parts, state = _state(setup, rank, mine, kept)
    activations, temporaries = _fullest(setup, rank, [passage(setup, chunk, parts, loss) for chunk in mine])
    return _made(setup, rank, state, activations, temporaries)


def _state(setup: Setup, rank: int, mine: Sequence[Chunk], kept: Keeping) -> tuple[Elements, Held]:
    """Parameters of a rank, and the bytes of its training state."""
    layout = setup.layout
    parts = elements(setup, [pair for chunk in mine for pair in chunk.segments])
    if 0 < rank == layout.pipeline - 1:  # a tied weight stands at both ends
        parts = replace(parts, dense=parts.dense + setup.profile.tied / layout.tensor)
    return parts, held(setup, parts, kept)


def _made(setup: Setup, rank: int, state: Held, activations: float, temporaries: float) -> Footprint:
    layout = setup.layout
    allocated = state.parameters + state.gradients + state.optimizer + activations + temporaries
    around = OUTSIDE.get(setup.stack.name, Outside())
    on_cpu = is_cpu(setup.cluster.node.accelerator)
    groups = sum(size > 1 for size in (setup.parts, layout.tensor, layout.pipeline, layout.context, layout.expert))
    saved = (state.parameters + state.optimizer) / layout.replicate
    return Footprint(
        rank=rank,
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations,
        temporaries=temporaries,
        buffers=saved
        if on_cpu
        else COMMUNICATOR * groups + (around.buckets if setup.zero and setup.parts > 1 else 0.0),
        fragmentation=around.fragmented * allocated,
        fixed=PROCESS if on_cpu else around.context,
    )


def is_cpu(device: Accelerator) -> bool:
    """Whether a device is a host's own processor, whose memory is the host's."""
    return device.generation == "cpu" or "CPU" in device.name


def _fullest(setup: Setup, rank: int, passages: Sequence[Passage]) -> tuple[float, float]:
    """Bytes that are held for backward, and that come and go, at the fullest moment of a rank: its work in order, and
    each moment of every backward."""
    now, held_then, passing_then = 0.0, 0.0, 0.0
    for kind, chunk, ends in _course(setup, rank):
        through = passages[chunk]
        if kind == "F":
            now += through.held
        elif kind == "B":
            for moment in through.moments:
                if now - moment.let_go + moment.passing > held_then + passing_then:
                    held_then, passing_then = now - moment.let_go, moment.passing
        if ends:
            now -= through.held
    return held_then, passing_then


def _course(setup: Setup, rank: int) -> Iterator[tuple[Kind, int, bool]]:
    """What a rank does, as (kind, chunk, whether it is the last that needs what forward kept). Twice as many
    micro-batches as ranks fill a pipeline, more hold no more; fewer are what is left of a full one."""
    ranks, micros = setup.layout.pipeline, setup.micros
    schedule: Schedule = "interleaved" if setup.chunks > 1 else setup.layout.pipeline_schedule
    last = "W" if schedule == "zero-bubble" else "B"
    enough = micros if schedule == "gpipe" else 2 * ranks
    for kind, chunk, micro in order(schedule, rank, ranks, setup.chunks, enough):
        if micro < micros:
            yield kind, chunk, kind == last
