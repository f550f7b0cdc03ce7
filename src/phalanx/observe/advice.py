"""What to try next: one small pure function for each rule, a number in each text, and the recipe's key to change.

A rule sees the Summary and, where the shape of a curve matters, the History. It returns None when there is nothing to
say; none has anything to say about a healthy run. `gain` is the share of the run's time (or of its steps) that the
advice could save at best, so that advices sort; those about quality or safety have a gain of 0 and come last, except
`urgent` ones, which come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phalanx.observe import units
from phalanx.observe.history import History, number
from phalanx.observe.metrics import smooth
from phalanx.observe.summary import Summary
from phalanx.run.event_types import NonFiniteStep


@dataclass(frozen=True)
class Advice:
    """One finding. `key` is the recipe's dotted key to change, or None when the recipe is not to blame."""

    rule: str
    finding: str
    advice: str
    key: str | None
    gain: float = 0.0
    urgent: bool = False

    @property
    def text(self) -> str:
        """Finding and advice as one sentence or two."""
        return f"{self.finding}: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "text": self.text}


def advise(summary: Summary, history: History) -> list[Advice]:
    """Every rule's finding: urgent first, then the greatest gain."""
    found = [advice for rule in RULES if (advice := rule(summary, history)) is not None]
    return sorted(found, key=lambda advice: (not advice.urgent, -advice.gain))


def _share(summary: Summary, part: str) -> float:
    """A part's share of the step; 0 for runs too short to judge."""
    shares = summary.split_shares
    return shares[part] if shares and summary.last_step >= 5 else 0.0


def data_wait(summary: Summary, history: History) -> Advice | None:
    """The step waits for its samples."""
    share = _share(summary, "data")
    if share < 0.05:
        return None
    return Advice(
        "data-wait",
        f"data wait is {units.percent(share)} of the step",
        "give the reader a core of its own (one thread less for training), or prepare the data once with `phalanx data"
        " prepare`, onto a fast local disk, and name that directory",
        "num_threads, data.source.prepared",
        gain=share,
    )


def exchange(summary: Summary, history: History) -> Advice | None:
    """Workers spend too much of the step on each other's gradients."""
    share = _share(summary, "exchange")
    if share < 0.10 or summary.what.world == 1:
        return None
    batch = summary.what.global_batch
    larger = f" (it is {batch}; twice that halves the synchronizations per sample)" if batch else ""
    return Advice(
        "grad-sync",
        f"gradient synchronization is {units.percent(share)} of the step on {summary.what.world} workers",
        f"raise the global batch{larger} and its learning rate with care, or use fewer workers with more threads each",
        "batch.global_size",
        gain=share,
    )


def checkpoint_stalls(summary: Summary, history: History) -> Advice | None:
    """Training stands still for saves."""
    wall, saves, every = summary.durations.wall, summary.checkpoints, summary.what.checkpoint_every
    share = max(_share(summary, "checkpoint"), saves.stall / wall if wall > 0 else 0.0)
    if share < 0.03 or not saves.count:
        return None
    rarer = f" every {_round_up(every * share / 0.01)} steps instead of every {every}" if every else " more rarely"
    return Advice(
        "checkpoint-stalls",
        f"checkpoint stalls took {units.percent(share)} of the time"
        f" ({units.duration(saves.stall)} over {units.times(saves.count, 'save')})",
        f"save{rarer}, which brings it to 1%, or put the run onto a faster disk",
        "checkpoint.every",
        gain=share,
    )


def _round_up(steps: float) -> int:
    """To two leading digits, upwards: 1234 -> 1300."""
    power = 10 ** max(0, len(str(int(steps))) - 2)
    return int(-(-steps // power) * power)


def optimizer_share(summary: Summary, history: History) -> Advice | None:
    """The update costs much against the gradient it applies."""
    share = _share(summary, "optimizer")
    if share < 0.20:
        return None
    batch = summary.what.global_batch
    return Advice(
        "optimizer-share",
        f"the optimizer is {units.percent(share)} of the step",
        f"its cost does not grow with the batch, so raise the global batch{f' from {batch}' if batch else ''}"
        " (more samples for each update) and train fewer steps",
        "batch.global_size",
        gain=share / 2,
    )


def low_mfu(summary: Summary, history: History) -> Advice | None:
    """Computing itself is far from what the machine does in a plain matmul."""
    share = summary.split_shares
    mfu = summary.speed.mfu_measured
    if mfu is None or share is None or summary.last_step < 5:
        return None
    computing = share["forward"] + share["backward"]
    within = mfu / computing if computing > 0 else 0.0
    if computing < 0.3 or within >= 0.20:
        return None
    micro, width = summary.what.micro_batch, summary.what.model_args.get("hidden_size")
    if micro is not None and micro <= 4:
        why, key = f"micro-batches of {micro} are small; try batch.micro_size={micro * 4}", "batch.micro_size"
    elif isinstance(width, int) and width < 256:
        why, key = f"a width of {width} is too narrow to keep the units busy; compile may help", "compile"
    else:
        why, key = "see which operations take the time with `phalanx profile`, and try compile=true", "compile"
    return Advice(
        "low-mfu",
        f"forward and backward reach {units.percent(within)} of the machine's measured peak (MFU {units.percent(mfu)})",
        why,
        key,
        gain=computing * (1 - within / 0.4),
    )


def slow_precision(summary: Summary, history: History) -> Advice | None:
    """Another precision is much faster in matmul on this very machine."""
    rates, used, shares = summary.what.matmul_tflops, summary.what.precision, summary.split_shares
    mine = rates.get(used, 0.0)
    others = {name: rate for name, rate in rates.items() if name != used}
    if not others or mine <= 0 or not shares:
        return None
    best = max(others, key=lambda name: others[name])
    factor = others[best] / mine
    if factor < 1.5:
        return None
    return Advice(
        "slow-precision",
        f"{best} would be {factor:.1f}x in matmul on this machine but {used} was used",
        f"try precision={best}, and compare the losses of both",
        "precision",
        gain=(shares["forward"] + shares["backward"]) * (1 - 1 / factor),
    )


def idle_cores(summary: Summary, history: History) -> Advice | None:
    """Most of the processor was not asked to do anything."""
    what = summary.what
    if what.device != "cpu" or not what.cores or not what.threads:
        return None
    used = what.threads * what.world / what.nodes
    if used >= what.cores * 0.5:
        return None
    return Advice(
        "idle-cores",
        f"{used:.0f} of the machine's {what.cores} cores were used ({units.times(what.world, 'worker')} of "
        f"{units.times(what.threads, 'thread')})",
        "give each worker more threads, or start more workers with --nproc-per-node",
        "num_threads",
        gain=1 - used / what.cores,
    )


def slower_than_predicted(summary: Summary, history: History) -> Advice | None:
    """The prediction did not hold: something was not as it was measured before the run."""
    speed = summary.speed
    if not speed.step_predicted or not speed.step_median or summary.last_step < 5:
        return None
    factor = speed.step_median / speed.step_predicted
    if factor < 1.3:
        return None
    return Advice(
        "slower-than-predicted",
        f"a step took {units.duration(speed.step_median)}, {factor:.1f}x the predicted"
        f" {units.duration(speed.step_predicted)}",
        "see whether something else used this machine; `phalanx profile` shows which part of the step is slow",
        None,
        gain=1 - 1 / factor,
    )


def uneven_steps(summary: Summary, history: History) -> Advice | None:
    """Some steps take far longer than most."""
    speed = summary.speed
    if not speed.step_slow or not speed.step_median or not speed.mean or not speed.median or summary.last_step < 40:
        return None
    lost = 1 - speed.mean / speed.median
    if speed.step_slow < 1.5 * speed.step_median or lost < 0.05:
        return None
    return Advice(
        "uneven-steps",
        f"one step in twenty takes more than {units.duration(speed.step_slow)}, while half of them take less than"
        f" {units.duration(speed.step_median)}",
        "something disturbs the run from time to time: another program, a slow disk, or heat",
        None,
        gain=lost,
    )


def evaluation_share(summary: Summary, history: History) -> Advice | None:
    """Scoring takes a good part of the run."""
    wall, evaluating = summary.durations.wall, summary.durations.evaluating
    if wall <= 0 or evaluating / wall < 0.10 or summary.last_step < 5:
        return None
    every = summary.what.evaluate_every
    return Advice(
        "evaluation-share",
        f"evaluating took {units.percent(evaluating / wall)} of the time",
        f"evaluate more rarely{f' than every {every} steps' if every else ''}, or on fewer samples "
        f"(evaluation.max_samples)",
        "evaluation.every",
        gain=evaluating / wall,
    )


def restart_cost(summary: Summary, history: History) -> Advice | None:
    """Work done again, and time when nobody worked."""
    durations = summary.durations
    share = durations.restarts / durations.wall if durations.wall > 0 else 0.0
    if share < 0.03:
        return None
    every = summary.what.checkpoint_every
    often = f"save more often than every {every} steps" if every else "save checkpoints (checkpoint.every)"
    if durations.redone < durations.down:
        advice = "most of it is waiting for the next start: see logs/ for the cause"
    else:
        advice = f"{often}, so that less progress is wasted"
    return Advice(
        "restart-cost",
        f"restarts and rollbacks cost {units.percent(share)} of the time"
        f" ({units.times(summary.redone_steps, 'step')} wasted, {units.duration(durations.down)} unavailable)",
        advice,
        "checkpoint.every",
        gain=share,
    )


def guards_fired(summary: Summary, history: History) -> Advice | None:
    """Losses or gradients were not finite."""
    fired = sum(summary.guards.values())
    if not fired:
        return None
    steps = sorted({event.step for event in history.of(NonFiniteStep)})
    first = f"from step {steps[0]} on" if len(steps) > 1 else f"at step {steps[0]}"
    back = f", {units.times(summary.rollbacks, 'rollback')}" if summary.rollbacks else ""
    wider = "; or precision=bf16, whose range is that of fp32" if summary.what.precision == "fp16" else ""
    return Advice(
        "nonfinite-steps",
        f"{units.times(fired, 'step')} had a loss or gradient that was not finite, {first}{back}",
        f"lower the learning rate, lengthen the warm-up (optimizer.schedule.warmup_steps) or clip lower "
        f"(optimizer.max_grad_norm){wider}",
        "optimizer.lr",
        urgent=True,
    )


def bad_checkpoints(summary: Summary, history: History) -> Advice | None:
    """Files on disk were not what was written, or could not be written."""
    saves = summary.checkpoints
    if not saves.rejected and not saves.failed:
        return None
    found = [
        f"{units.times(len(saves.failed), 'checkpoint')} could not be saved" if saves.failed else "",
        f"{units.times(len(saves.rejected), 'checkpoint')} did not pass verification" if saves.rejected else "",
    ]
    first = (*saves.failed, *saves.rejected)[0]
    lower = " (lower checkpoint.keep to need less space)" if saves.failed else ""
    return Advice(
        "failed-checkpoints",
        f"{' and '.join(filter(None, found))} ({first})",
        f"see to the disk before you trust it with a longer run{lower}",
        "checkpoint.keep" if saves.failed else None,
        urgent=True,
    )


def still_falling(summary: Summary, history: History) -> Advice | None:
    """The run ended while the loss was still going down by more than its noise."""
    loss = history.steps.loss[np.isfinite(history.steps.loss)]
    if summary.status != "done" or len(loss) < 50:
        return None
    tenth = len(loss) // 10
    before, after = loss[-2 * tenth : -tenth], loss[-tenth:]
    fall = float(before.mean() - after.mean())
    noise = float(np.sqrt((before.var() + after.var()) / tenth))
    if fall < 3 * noise or fall < 0.01 * abs(float(before.mean())):
        return None
    return Advice(
        "train-longer",
        f"the loss was still falling at the end, by {units.significant(fall, 2)} over the last {tenth} steps",
        f"train longer, for instance steps={2 * summary.last_step}; this run resumes from its last checkpoint",
        "steps",
    )


def overfitting(summary: Summary, history: History) -> Advice | None:
    """Held-out loss rises while training loss goes on falling."""
    scores = [(event.step, number(event.loss)) for event in history.evals]
    scores = [(step, loss) for step, loss in scores if np.isfinite(loss)]
    if len(scores) < 3:
        return None
    best_step, best = min(scores, key=lambda score: score[1])
    later = [loss for step, loss in scores if step > best_step]
    if len(later) < 2 or later[-1] < best * 1.02:
        return None
    trend = smooth(history.steps.loss, 0.1)
    at_best = int(np.searchsorted(history.steps.step, best_step))
    if at_best >= len(trend) or not trend[-1] < trend[at_best]:
        return None
    return Advice(
        "overfitting",
        f"validation loss rises while training loss falls since step {best_step}"
        f" ({units.loss(best)} to {units.loss(later[-1])}): overfitting",
        "use the best checkpoint, and next time more data, fewer steps, or more weight decay (optimizer.weight_decay)",
        "steps",
        gain=1 - best_step / max(best_step, summary.last_step),
    )


RULES: tuple[Callable[[Summary, History], Advice | None], ...] = (
    guards_fired,
    bad_checkpoints,
    data_wait,
    exchange,
    checkpoint_stalls,
    optimizer_share,
    low_mfu,
    slow_precision,
    idle_cores,
    slower_than_predicted,
    uneven_steps,
    evaluation_share,
    restart_cost,
    overfitting,
    still_falling,
)
