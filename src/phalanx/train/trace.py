"""A profile of a few training steps: time by part of the step, by kind of operation, and a Chrome trace file."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from phalanx.data import Feed
from phalanx.train.objective import Objective
from phalanx.train.parts import Parts
from phalanx.train.timing import PARTS, stopwatch

KINDS = {
    "matmul": ("mm", "addmm", "bmm", "linear", "matmul", "baddbmm"),
    "attention": ("attention",),
    "convolution": ("conv", "mkldnn_convolution"),
    "normalisation": ("norm",),
    "optimizer": ("fused_adam", "fused_sgd", "newton"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy"),
    "embedding": ("embedding",),
    "communication": ("c10d", "gloo", "nccl", "all_reduce", "all_gather", "all_to_all"),
    "copies and casts": ("copy", "to_copy", "clone", "contiguous", "cat", "stack"),
}
"""Kinds of operations by parts of their names, in this order; the rest is `element-wise and other`."""
OTHER = "element-wise and other"


@dataclass(frozen=True)
class Trace:
    """Means over the traced steps, in seconds. `kinds` and `operations` count an operation's own time only."""

    steps: int
    seconds: float
    parts: dict[str, float]
    kinds: dict[str, float]
    operations: list[tuple[str, float, int]]  # name, seconds a step, calls a step


def kind_of(name: str) -> str:
    """The kind of operation that a profiler's name belongs to."""
    bare = name.removeprefix("aten::").strip("_").lower()
    for kind, words in KINDS.items():
        if any(word in bare for word in words):
            return kind
    return OTHER


def trace(parts: Parts, objective: Objective, steps: int, warm_up: int, out: Path | None) -> Trace:
    """Run `warm_up` steps, then `steps` under the profiler; the Chrome trace goes to `out`. Weights do change."""
    recipe, stepper, place = parts.recipe, parts.stepper, parts.place
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)
    watch = stopwatch(place.device)
    total, sums = 0.0, dict.fromkeys(PARTS, 0.0)
    on_gpu = place.device.type != "cpu"
    activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, place.device.type.upper())] if on_gpu else [])]
    with Feed(parts.data, global_batch=recipe.batch.global_size, micro=micro, rank=0, world=1, consumed=0) as feed:

        def one_step(number: int) -> None:
            watch.start()
            batches = next(feed)
            watch.lap("data")
            stepper.begin(number)
            for arrays in batches:
                stepper.seed()
                ((_, loss, terms),) = objective(parts.convert(arrays))
                stepper.backward(loss, terms, lambda: (), watch)
            _, factor = stepper.settle(stepper.finish(watch))
            stepper.update(factor, recipe.optimizer.lr)
            watch.lap("optimizer")

        for number in range(warm_up):
            one_step(number)
        with profile(activities=activities) as profiler:
            for number in range(warm_up, warm_up + steps):
                one_step(number)
                seconds, times = watch.stop()
                total += seconds
                for part, value in times.items():
                    sums[part] += value
    if out is not None:
        profiler.export_chrome_trace(str(out))
    kinds: Counter[str] = Counter()
    operations = []
    for event in profiler.key_averages():
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        kinds[kind_of(event.key)] += own / steps
        operations.append((event.key, own / steps, event.count // steps))
    operations.sort(key=lambda operation: -operation[1])
    means = {part: value / steps for part, value in sums.items()}
    return Trace(steps, total / steps, means, dict(kinds.most_common()), operations)
