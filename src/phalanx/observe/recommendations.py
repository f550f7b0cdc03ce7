"""What to try next: one small pure function for each rule, a number in each text, and the recipe's key to change.

A rule sees the Summary and, where the shape of a curve matters, the History. It returns None when there is nothing to
say; none has anything to say about a healthy run. `max_gain` is the share of the run's time (or of its steps) that the
advice could save at best, so that advices sort; those about quality or safety have a gain of 0 and come last, except
`is_urgent` ones, which come first.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from phalanx import formatting
from phalanx.observe.history import RunHistory
from phalanx.observe.summary import RunSummary
from phalanx.run.event_types import NonFiniteStep


@dataclass(frozen=True)
class Recommendation:
    """One finding. `recipe_key` is the recipe's dotted key to change, or None when the recipe is not to blame."""

    rule_name: str
    finding: str
    advice: str
    recipe_key: str | None
    max_gain: float = 0.0
    is_urgent: bool = False

    @property
    def full_text(self) -> str:
        """Finding and advice as one sentence or two."""
        return f"{self.finding}: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "full_text": self.full_text}


def find_recommendations(summary: RunSummary, history: RunHistory) -> list[Recommendation]:
    """Every rule's finding: urgent first, then the greatest gain."""
    recommendations = filter(None, (rule(summary, history) for rule in RECOMMENDATION_RULES))
    return sorted(recommendations, key=lambda recommendation: (not recommendation.is_urgent, -recommendation.max_gain))


def _step_share(summary: RunSummary, component: str) -> float:
    """A part's share of the step; 0 for runs too short to judge."""
    shares = summary.breakdown_shares
    return shares[component] if shares and summary.last_step >= 5 else 0.0


def recommend_for_data_wait(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """The step waits for its samples."""
    share = _step_share(summary, "data_wait")
    if share < 0.05:
        return None
    return Recommendation(
        "data-wait",
        f"data wait is {formatting.format_percent(share)} of the step",
        "give the reader a core of its own (one thread less for training), or prepare the data once with `phalanx data"
        " prepare`, onto a fast local disk, and name that directory",
        "num_threads, data.source.prepared",
        max_gain=share,
    )


def recommend_for_grad_sync(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """Workers spend too much of the step on each other's gradients."""
    share = _step_share(summary, "grad_sync")
    if share < 0.10 or summary.run_info.world_size == 1:
        return None
    batch, workers = summary.run_info.global_batch, f"{summary.run_info.world_size} workers"
    batch_text = f" (it is {batch}; twice that halves the synchronizations per sample)" if batch else ""
    return Recommendation(
        "grad-sync",
        f"gradient synchronization is {formatting.format_percent(share)} of the step on {workers}",
        f"raise the global batch{batch_text} and its learning rate with care, send fewer bytes "
        "(compression: bf16 or int8, with determinism: off), or use fewer workers with more threads each",
        "batch.global_size, grad_sync.compression",
        max_gain=share,
    )


def recommend_for_checkpoint_stalls(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """Training stands still for saves."""
    wall, checkpoints, every = summary.durations.wall_s, summary.checkpoints, summary.run_info.checkpoint_interval_steps
    share = checkpoints.total_stall_s / wall if wall > 0 else 0.0
    only_final = checkpoints.count == 1 and checkpoints.last_step == summary.last_step
    if share < 0.03 or not checkpoints.count or only_final:  # one save at the end cannot be made more rarely
        return None
    rarer = f"every {_round_up(every * share / 0.01)} steps instead of every {every}" if every else "more rarely"
    return Recommendation(
        "checkpoint-stalls",
        f"checkpoint stalls took {formatting.format_percent(share)} of the time"
        f" ({formatting.format_duration(checkpoints.total_stall_s)} over "
        f"{formatting.format_plural(checkpoints.count, 'save')})",
        f"save {rarer}, which brings it to 1%, or put the run onto a faster disk",
        "checkpoint.every",
        max_gain=share,
    )


def _round_up(steps: float) -> int:
    """To two leading digits, upwards: 1234 -> 1300."""
    power = 10 ** max(0, len(str(int(steps))) - 2)
    return int(-(-steps // power) * power)


def recommend_for_low_mfu(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """Computing itself is far from what the machine does in a plain matmul."""
    share = summary.breakdown_shares
    mfu = summary.speed.mfu_measured
    if mfu is None or share is None or summary.last_step < 5:
        return None
    compute_share = share["forward"] + share["backward"]
    matmul_efficiency = mfu / compute_share if compute_share > 0 else 0.0
    if compute_share < 0.3 or matmul_efficiency >= 0.20:
        return None
    micro, hidden_size = summary.run_info.micro_batch, summary.run_info.model_args.get("hidden_size")
    if micro is not None and micro <= 4:
        advice_text = f"micro-batches of {micro} are small; try batch.micro_size={micro * 4}"
        recipe_key = "batch.micro_size"
    elif isinstance(hidden_size, int) and hidden_size < 256:
        advice_text = f"a width of {hidden_size} is too narrow to keep the units busy; compile may help"
        recipe_key = "compile"
    else:
        advice_text = "see which operations take the time with `phalanx profile`, and try compile=true"
        recipe_key = "compile"
    return Recommendation(
        "low-mfu",
        f"forward and backward reach {formatting.format_percent(matmul_efficiency)} of the machine's measured "
        f"peak while they run (over the whole step it is the MFU, {formatting.format_percent(mfu)})",
        advice_text,
        recipe_key,
        max_gain=compute_share * (1 - matmul_efficiency / 0.4),
    )


def recommend_for_precision(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """Another precision is much faster in matmul on this very machine, and `auto` did not time the model in both."""
    run_info, shares = summary.run_info, summary.breakdown_shares
    rates, used = run_info.measured_matmul_tflops, run_info.precision
    own_rate, is_timed = rates.get(used, 0.0), ("precision", used) in {each[:2] for each in run_info.auto_choices}
    other_rates = {name: rate for name, rate in rates.items() if name != used}
    if not other_rates or own_rate <= 0 or not shares or is_timed:
        return None
    best = max(other_rates, key=lambda name: other_rates[name])
    factor = other_rates[best] / own_rate
    if factor < 1.5:
        return None
    return Recommendation(
        "slow-precision",
        f"{best} would be {factor:.1f}x in matmul on this machine but {used} was used",
        f"try precision={best}, and compare the losses of both",
        "precision",
        max_gain=(shares["forward"] + shares["backward"]) * (1 - 1 / factor),
    )


def recommend_for_restarts(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """Work that was repeated, and time without work."""
    durations = summary.durations
    share = (durations.wasted_s + durations.unavailable_s) / durations.wall_s if durations.wall_s > 0 else 0.0
    if share < 0.03:
        return None
    every = summary.run_info.checkpoint_interval_steps
    checkpoint_text = f"save more often than every {every} steps" if every else "save checkpoints (checkpoint.every)"
    if durations.wasted_s < durations.unavailable_s:
        advice = "most of it is waiting for the next start: see logs/ for the cause"
    else:
        advice = f"{checkpoint_text}, so that less progress is wasted"
    return Recommendation(
        "restart-cost",
        f"restarts and rollbacks cost {formatting.format_percent(share)} of the time"
        f" ({formatting.format_plural(summary.wasted_steps, 'step')} wasted, "
        f"{formatting.format_duration(durations.unavailable_s)} unavailable)",
        advice,
        "checkpoint.every",
        max_gain=share,
    )


def recommend_for_nonfinite(summary: RunSummary, history: RunHistory) -> Recommendation | None:
    """Losses or gradients were not finite."""
    num_nonfinite = sum(summary.nonfinite_actions.values())
    if not num_nonfinite:
        return None
    steps = sorted({event.step for event in history.of(NonFiniteStep)})
    first = f"from step {steps[0]} on" if len(steps) > 1 else f"at step {steps[0]}"
    rollback_text = f", {formatting.format_plural(summary.num_rollbacks, 'rollback')}" if summary.num_rollbacks else ""
    precision_text = "; or precision=bf16, with the range of fp32" if summary.run_info.precision == "fp16" else ""
    return Recommendation(
        "nonfinite-steps",
        f"{formatting.format_plural(num_nonfinite, 'step')} had a loss or gradient that was not finite, "
        f"{first}{rollback_text}",
        f"lower the learning rate, lengthen the warm-up (optimizer.schedule.warmup_steps) or clip lower "
        f"(optimizer.max_grad_norm){precision_text}",
        "optimizer.lr",
        is_urgent=True,
    )


RECOMMENDATION_RULES: tuple[Callable[[RunSummary, RunHistory], Recommendation | None], ...] = (
    recommend_for_nonfinite,
    recommend_for_data_wait,
    recommend_for_grad_sync,
    recommend_for_checkpoint_stalls,
    recommend_for_low_mfu,
    recommend_for_precision,
    recommend_for_restarts,
)
