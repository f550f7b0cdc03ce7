"""Profile a few training steps: time by phase, by kind of operation, and a Chrome trace file."""

import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from phalanx.data import Prefetcher, RankBatch
from phalanx.errors import UsageError, describe_os_error
from phalanx.run.directory import write_output
from phalanx.train.lr_schedule import compute_learning_rate
from phalanx.train.step_callbacks import BufferUpdates, count_nonfinite
from phalanx.train.step_timer import STEP_PHASES, make_step_timer
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import TrainState

OP_KINDS = {
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
"""Kinds of operations by substrings of their names, tried in this order; others are `element-wise and other`."""
OTHER_OP_KIND = "element-wise and other"


@dataclass(frozen=True)
class ProfileResult:
    """Means over the traced steps, in seconds. `kinds_s` and `ops` count an operation's self time only."""

    steps: int
    step_s: float
    breakdown_s: dict[str, float]
    kinds_s: dict[str, float]
    ops: list[tuple[str, float, int]]  # name, seconds per step, calls per step


def classify_op(name: str) -> str:
    """Return the kind of an operation by its name in the profiler."""
    bare = name.removeprefix("aten::").strip("_").lower()
    for kind, words in OP_KINDS.items():
        if any(word in bare for word in words):
            return kind
    return OTHER_OP_KIND


@contextlib.contextmanager
def _discard_native_logs() -> Iterator[None]:
    """Discard what libkineto writes to file descriptor 2 when it starts and stops."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def profile_steps(context: TrainContext, steps: int, warm_up: int, trace_path: Path | None) -> ProfileResult:
    """Run `warm_up` steps of a single worker, then `steps` under the profiler; write the Chrome trace to `trace_path`.
    The steps change the weights."""
    recipe, dist_env = context.recipe, context.dist_env
    timer, train_state = make_step_timer(dist_env.device), TrainState()
    train_step = context.make_train_step(timer, [BufferUpdates(context, timer, context.reporter.report_event)])
    total, phase_sums = 0.0, dict.fromkeys(STEP_PHASES, 0.0)
    on_gpu = dist_env.device.type != "cpu"
    activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, dist_env.device.type.upper())] if on_gpu else [])]
    rank_batch = RankBatch(recipe.batch.global_size, recipe.batch.micro_size)
    with Prefetcher(context.data, rank_batch, samples_consumed=0) as feed:

        def one_step(number: int) -> None:
            timer.start()
            micro_batches = next(feed)
            timer.lap("data_wait")
            train_step.accumulate(number, micro_batches)
            totals = train_step.reduce()
            result = train_step.apply(totals, compute_learning_rate(recipe, number))
            train_step.finish(result)
            count_nonfinite(train_state, context.scaler, result.skip_reason)  # lowers the loss scale of fp16

        for number in range(1, warm_up + 1):
            one_step(number)
        with _discard_native_logs(), profile(activities=activities) as profiler:
            for number in range(warm_up + 1, warm_up + steps + 1):
                one_step(number)
                step_s, seconds_by_phase = timer.stop()
                total += step_s
                for phase, value in seconds_by_phase.items():
                    phase_sums[phase] += value
    if trace_path is not None:
        _write_trace(profiler, trace_path)
    kinds: Counter[str] = Counter()
    operations = []
    for event in profiler.key_averages():
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        kinds[classify_op(event.key)] += own / steps
        operations.append((event.key, own / steps, event.count // steps))
    operations.sort(key=lambda operation: -operation[1])
    means = {phase: value / steps for phase, value in phase_sums.items()}
    return ProfileResult(steps, total / steps, means, dict(kinds.most_common()), operations)


def _write_trace(profiler: profile, path: Path) -> None:
    """Write the Chrome trace. Kineto replaces a device by a file, and ignores a full disk: it writes to a folder of its
    own here. Raises UsageError when the trace cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        if not exported.is_file():
            raise UsageError(
                f"{exported}: the trace could not be written there; is the disk full? TMPDIR names another"
            )
        try:
            write_output(path, exported.read_text(encoding="utf-8"))
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk names no file
            raise UsageError(f"--out: the trace cannot be written: {describe_os_error(error)}") from None
