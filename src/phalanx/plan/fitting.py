"""Whether a run fits into a device's memory, and if not, by how much, and which single change of its recipe would make
it fit: told in words that an error message can end with. Predicted by footprint.py; nothing is tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.plan.footprint import Footprint, footprint, is_cpu
from phalanx.plan.passage import GIB, Loss
from phalanx.plan.profile import Attention
from phalanx.plan.setup import Setup
from phalanx.recipe.checks import divisors

Verdict = Literal["yes", "probably", "hardly", "no"]
MOST_DEVICES = 1024
"""How many times as many devices are thought of at most."""
WORDS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "activations": "activations",
    "temporaries": "what comes and goes in backward",
    "buffers": "buffers of communication and of checkpoints",
    "fragmentation": "fragmentation",
    "fixed": "the device's context",
}


@dataclass(frozen=True)
class How:
    """How a run is trained, beside its setup; as the keywords of `footprint`."""

    optimizer: str = "adamw"
    state: str = "fp32"
    offload: bool = False
    loss: Loss = "whole"
    momentum: float = 0.9

    def footprint(self, setup: Setup) -> Footprint:
        """Of a setup trained so."""
        return footprint(setup, **vars(self))


@dataclass(frozen=True)
class Change:
    """Overrides of a recipe, and the memory that it needs then."""

    overrides: str
    needed: Footprint


@dataclass(frozen=True)
class Fit:
    """A run in `capacity` bytes of a device."""

    capacity: float
    needed: Footprint
    changes: tuple[Change, ...] = ()
    """Each of which alone would make it fit, what costs least first; none where it fits."""
    together: Change | None = None
    """All that saves memory at once, on as few devices as it takes, where no single change is enough."""

    @property
    def missing(self) -> float:
        """Bytes that the prediction is above the capacity; negative: that are left."""
        return self.needed.total - self.capacity

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, as sure as the prediction is."""
        low, high = self.needed.between()
        if high <= self.capacity:
            return "yes"
        if self.missing <= 0:
            return "probably"
        return "hardly" if low <= self.capacity else "no"

    @property
    def words(self) -> str:
        """All of it in a few sentences, in GiB."""
        low, high = self.needed.between()
        needs = f"needs {_gib(self.needed.total)} GiB ({_gib(low)} to {_gib(high)}) of a device that has "
        needs += _gib(self.capacity)
        if self.missing <= 0:
            return f"{needs}: {_gib(-self.missing)} are left"
        parts = sorted(((getattr(self.needed, name), word) for name, word in WORDS.items()), reverse=True)
        largest = ", ".join(f"{word} {_gib(size)}" for size, word in parts[:3])
        told = f"{needs}, {_gib(self.missing)} too many; most are {largest}. "
        if self.changes:
            return told + "Would fit: " + ", or ".join(_told(each) for each in self.changes)
        if self.together is None:
            return told + "Use a smaller model or sequence"
        enough = self.together.needed.total <= self.capacity
        what = "together would fit" if enough else "not even together would fit"
        return f"{told}No single change is enough; {what}: {_told(self.together)}"


def what_would_fit(
    setup: Setup,
    *,
    optimizer: str = "adamw",
    state: str = "fp32",
    offload: bool = False,
    loss: Loss = "whole",
    momentum: float = 0.9,
    capacity: float | None = None,
) -> Fit:
    """Whether a run fits into `capacity` bytes (those of the cluster's device), and else what would help. The other
    arguments are those of `footprint`."""
    how = How(optimizer, state, offload, loss, momentum)
    room = setup.cluster.node.accelerator.memory_gib * GIB if capacity is None else capacity
    needed = how.footprint(setup)
    if needed.total <= room:
        return Fit(room, needed)
    found = []
    for kind in (_losses, _micros, _recomputed, _states, _sharded, _tensors, _pipelines, _offloaded, _devices):
        for overrides, changed, trained in kind(setup, how):
            if (then := trained.footprint(changed)).total <= room:
                found.append(Change(overrides, then))
                break
    return Fit(room, needed, tuple(found), None if found else _together(setup, how, room))


# --- kinds of changes, each from the mildest on -----------------------------------------------------------------------

Candidates = Iterator[tuple[str, Setup, How]]


def _losses(setup: Setup, how: How) -> Candidates:
    if how.loss != "chunked" and setup.profile.tokens > 1:
        yield "memory.chunked_loss=true", setup, replace(how, loss="chunked")


def _micros(setup: Setup, how: How) -> Candidates:
    for size in divisors(setup.micro)[::-1]:
        if size < setup.micro:
            yield f"batch.micro_size={size}", replace(setup, micro=size), how


def _recomputed(setup: Setup, how: How) -> Candidates:
    ways = ("none", "selective", "full")
    now = 0 if setup.recompute == "attention" else ways.index(setup.recompute)
    for way in ways[now + 1 :]:
        yield f"memory.activation_checkpointing={way}", replace(setup, recompute=way), how


def _states(setup: Setup, how: How) -> Candidates:
    formats = ("fp32", "bf16", "int8")
    if how.optimizer == "adamw" and not how.offload:
        for state in formats[formats.index(how.state) + 1 :]:
            yield f"optimizer.state_dtype={state}", setup, replace(how, state=state)


def _sharded(setup: Setup, how: How) -> Candidates:
    now = setup.layout.shard if setup.zero == 3 else 1
    for ranks in divisors(setup.parts):
        if ranks > now:
            yield _shard(setup, ranks, setup.parts // ranks), _with(setup, ranks, setup.parts // ranks), how


def _tensors(setup: Setup, how: How) -> Candidates:
    heads = [op.kv_heads for each in setup.profile.segments for op in each.operations if isinstance(op, Attention)]
    for ranks, changed in _taken_from_replicas(setup, "tensor"):
        if heads and ranks <= setup.cluster.domain and all(count % ranks == 0 for count in heads):
            yield f"parallelism.tensor={ranks} {_left(changed)}", changed, how


def _pipelines(setup: Setup, how: How) -> Candidates:
    for ranks, changed in _taken_from_replicas(setup, "pipeline"):
        if ranks <= setup.profile.blocks and changed.micros >= ranks:
            yield f"parallelism.pipeline={ranks} {_left(changed)}", changed, how


def _offloaded(setup: Setup, how: How) -> Candidates:
    if not how.offload and how.optimizer in ("adamw", "sgd") and not is_cpu(setup.cluster.node.accelerator):
        yield "optimizer.offload=true", setup, replace(how, offload=True)


def _devices(setup: Setup, how: How) -> Candidates:
    """Shards on more devices, of which each has its part of the same batch."""
    times = 2
    while times <= MOST_DEVICES and setup.batch % (setup.parts * times * setup.micro) == 0:
        ranks = setup.parts * times
        cluster = setup.cluster.model_copy(update={"nodes": setup.cluster.nodes * times})
        changed = _with(replace(setup, cluster=cluster), ranks, 1)
        yield f"{changed.layout.world} devices with {_shard(setup, ranks, 1)}", changed, how
        times *= 2


def _together(setup: Setup, how: How, room: float) -> Change:
    """Everything at once, without tensor or pipeline ranks; on more devices if it takes them and they are enough."""
    overrides, changed, trained = [], setup, how
    for kind in (_losses, _micros, _recomputed, _sharded, _offloaded):
        for override, changed_so, trained_so in list(kind(changed, trained))[-1:]:
            overrides.append(override)
            changed, trained = changed_so, trained_so
    here = Change(" ".join(overrides), trained.footprint(changed))
    if here.needed.total > room:
        for override, changed_so, _ in _devices(changed, trained):
            if (then := trained.footprint(changed_so)).total <= room:
                return Change(f"{override} {here.overrides}".strip(), then)
    return here


def _taken_from_replicas(setup: Setup, dimension: str) -> Iterator[tuple[int, Setup]]:
    """Twice as many ranks in a dimension, and so on, on the same devices: what divides the batch gets fewer."""
    layout = setup.layout
    ranks, replicate, shard = getattr(layout, dimension), layout.replicate, layout.shard
    while replicate % 2 == 0 or shard % 2 == 0:
        replicate, shard = (replicate // 2, shard) if replicate % 2 == 0 else (replicate, shard // 2)
        ranks *= 2
        update = {dimension: ranks, "replicate": replicate, "shard": shard}
        if layout.expert > shard * layout.context or (dimension == "pipeline" and layout.layers_per_stage):
            return
        yield ranks, replace(setup, layout=layout.model_copy(update=update))


def _with(setup: Setup, shard: int, replicate: int) -> Setup:
    layout = setup.layout.model_copy(update={"shard": shard, "replicate": replicate})
    return replace(setup, layout=layout, zero=3)


def _shard(setup: Setup, shard: int, replicate: int) -> str:
    same = replicate == setup.layout.replicate
    return f"parallelism.shard={shard}" + ("" if same else f" parallelism.replicate={replicate}")


def _left(setup: Setup) -> str:
    layout = setup.layout
    return f"parallelism.replicate={layout.replicate} parallelism.shard={layout.shard}"


def _told(change: Change) -> str:
    return f"{change.overrides} ({_gib(change.needed.total)} GiB)"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
