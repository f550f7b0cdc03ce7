"""What a run did, as one frozen value: read from the run directory, shown by `text_report.py` and
`html_report/report.py`, judged by `recommendations.py`. `Summary.to_json()` is what `phalanx report --json` prints.
Nothing here is formatted for people.

A field is None when the run did not say it or it was not measured; a run that has only just started has many of these.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataError
from phalanx.formatting import format_bytes, format_duration, format_plural
from phalanx.observe import goodput, metrics
from phalanx.observe.history import AttemptRecord, RunHistory, StepTable, as_float
from phalanx.observe.progress import describe_straggler
from phalanx.observe.run_info import RunInfo, int_or_none, read_run_info, recipe_and_losses
from phalanx.run import Run, event_types
from phalanx.run.directory import drop_malformed
from phalanx.run.fields import read_as
from phalanx.run.mixture import MIXTURE_KEY, SourceMixture

RUN_OUTCOMES = ("done", "interrupted", "failed")
"""What result.json may say of how a run ended."""


@dataclass(frozen=True)
class LossSummary:
    """Training loss and validation scores. `final_mean` is the mean over the last 5% of the steps (at least 1, at most
    100), which is less noisy than `last`."""

    first: float | None = None
    last: float | None = None
    final_mean: float | None = None
    num_nonfinite: int = 0
    validation_first: float | None = None
    validation_last: float | None = None
    validation_best: float | None = None
    validation_best_step: int | None = None
    num_validation_samples: int | None = None
    """Samples of the last evaluation."""
    metrics: dict[str, float] | None = None
    """Metrics of the last evaluation."""
    tasks: tuple[event_types.TasksEvaluated, ...] = ()
    """Scores of `evaluation.tasks`, by step."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, as last estimated; None until enough steps have added to the estimate."""


@dataclass(frozen=True)
class SpeedSummary:
    """How fast. Rates are units (tokens or samples) a second within steps, times are seconds."""

    unit: str
    median_per_s: float | None = None
    mean_per_s: float | None = None
    step_median_s: float | None = None
    step_p95_s: float | None = None
    """95% of the steps took at most this long."""
    predicted_step_s: float | None = None
    calibrated_step_s: float | None = None
    """From what `phalanx calibrate` measured; `predicted_step_s` is from trials of this very model."""
    largest_error: metrics.PredictionError | None = None
    """The part of a step with the largest prediction error."""
    model_flops_per_s: float | None = None
    """FLOP/s of the model's forward and backward."""
    flops_rule: str | None = None
    matmul_flops_per_s: float | None = None
    """FLOP/s in matmul that all workers together were measured to reach, in the run's precision."""
    mfu_measured: float | None = None
    data_sheet_flops_per_s: float | None = None
    data_sheet_source: str | None = None
    mfu_data_sheet: float | None = None


@dataclass(frozen=True)
class DataSummary:
    """Prepared data that all workers read. `needed_bytes_per_s`: with it no step would have waited."""

    location: str
    bytes_per_s: float
    needed_bytes_per_s: float
    wait_share: float
    """Share of the step that waits for data."""


@dataclass(frozen=True)
class CheckpointSummary:
    """Checkpoints. `total_stall_s`: seconds for which training waited for all of them, in `step_stall_s` within steps
    that count and in the rest for saves after the last step of an attempt."""

    count: int = 0
    last_bytes: int | None = None
    """Size of the newest checkpoint."""
    total_stall_s: float = 0.0
    step_stall_s: float = 0.0
    last_step: int | None = None
    rejected: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    uploads: str = ""
    """The uploads to a store."""


@dataclass(frozen=True)
class RunSummary:
    """Everything that `phalanx report` knows. See the fields' own classes for units."""

    run_info: RunInfo
    status: str
    last_step: int
    planned_steps: int | None
    started_at: float | None
    last_event_at: float | None
    num_units: float
    """Tokens (or samples) that counted."""
    epochs: tuple[float, ...] | None
    """How often each source was passed through."""
    loss: LossSummary
    speed: SpeedSummary
    breakdown_s: dict[str, float] | None
    """Mean seconds of a step by part; they sum to the mean step."""
    durations: goodput.RunDurations
    device_time: goodput.DeviceTime
    attempts: tuple[AttemptRecord, ...]
    num_restarts: int
    wasted_steps: int
    skipped_steps: int
    nonfinite_actions: dict[str, int]
    """How often, by `what: action`."""
    num_rollbacks: int
    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    checkpoints: CheckpointSummary
    data: DataSummary | None
    energy: goodput.EnergySummary | None
    cost: goodput.CostSummary | None
    """None without prices: PHALANX_CLUSTER was not set."""
    digest: str | None
    lost: tuple[str, ...] = ()
    """What of the run is missing or damaged, so that this is not all."""

    @property
    def breakdown_shares(self) -> dict[str, float] | None:
        """The time split as shares of the step."""
        return metrics.breakdown_shares(self.breakdown_s)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity become null, as strict JSON has neither."""
        values = asdict(self)
        values["breakdown_shares"] = self.breakdown_shares
        values["goodput"] = self.device_time.goodput_share
        values["ettr"] = {"value": self.durations.ettr, "definition": goodput.ETTR_DEFINITION}
        return {name: _to_strict_json(value) for name, value in values.items()}


def build_summary(run: Run, history: RunHistory) -> RunSummary:
    """Summarize a run directory, of which `history` has the events. Parts stay empty where files are not there yet;
    raises DataError when one of its files is malformed."""
    recipe, lost = recipe_and_losses(run)
    begun, ended = bool(history.attempts), any(attempt.end_status == "done" for attempt in history.attempts)
    plan, cluster = (_read(run, path, begun, lost) for path in (run.plan, run.cluster))
    environment = _read(run, run.environment, begun, lost)
    result = _read(run, run.result, ended, lost) or {}
    run_info = read_run_info(run, recipe, plan, cluster, environment, history)
    steps = history.steps
    status, last_step = _end(run, history, result, lost)
    is_finished = status not in ("incomplete", "not started") and result.get("steps") == last_step
    guards, failures = history.of(event_types.NonFiniteStep), history.of(event_types.WorkerFailure)
    warnings = [event.text for event in history.of(event_types.RunWarning)]
    device_time, num_units = goodput.compute_device_time(history), float(np.nansum(steps.tokens))
    energy = goodput.summarize_energy(run, history, status in RUN_OUTCOMES)
    prices = goodput.read_run_prices(cluster)
    return RunSummary(
        run_info=run_info,
        status=status,
        last_step=last_step,
        planned_steps=history.planned_steps or int_or_none(recipe.get("steps")),
        started_at=history.first_event_at,
        last_event_at=history.last_event_at,
        num_units=num_units,
        epochs=_count_epochs(plan, last_step, run_info.global_batch),
        loss=_summarize_loss(history),
        speed=_summarize_speed(steps, run_info, plan, cluster, history),
        breakdown_s=metrics.mean_breakdown(steps),
        durations=goodput.summarize_durations(history),
        device_time=device_time,
        attempts=history.attempts,
        num_restarts=history.num_restarts,
        wasted_steps=sum(attempt.wasted_steps for attempt in history.attempts),
        skipped_steps=int(np.nansum(steps.skipped)),
        nonfinite_actions=dict(Counter(f"{event.reason}: {event.action}" for event in guards)),
        num_rollbacks=sum(event.action == "rollback" for event in guards),
        failures=tuple(f"rank {each.rank}: {each.what} ({each.message})" for each in failures),
        warnings=(*warnings, *map(describe_straggler, history.of(event_types.StragglerDetected))),
        checkpoints=_summarize_checkpoints(history),
        data=_summarize_data(recipe, plan or {}, run_info.global_batch, metrics.mean_breakdown(steps)),
        energy=energy,
        cost=None if prices is None else goodput.summarize_cost(prices, device_time.allocated_s, energy, num_units),
        digest=str(result["digest"]) if is_finished and result.get("digest") else None,
        lost=tuple(lost),
    )


def _read(run: Run, path: Path, expected: bool, lost: list[str]) -> dict[str, Any] | None:
    """One of the run's JSON files; where it is damaged, or missing although `expected`, that is said in `lost`."""
    try:
        found = run.read_json(path)
    except DataError as error:
        lost.append(str(error))
        return None
    if not found and expected:
        lost.append(f"{path}: is {'missing' if found is None else 'empty'}")
    return None if found is None else drop_malformed(found)


def _count_epochs(plan: Mapping[str, Any] | None, last_step: int, global_batch: int | None) -> tuple[float, ...] | None:
    try:
        return tuple(read_as(SourceMixture, (plan or {})[MIXTURE_KEY]).count_epochs(last_step, global_batch or 0))
    except (KeyError, ValueError, OverflowError, ZeroDivisionError):  # an earlier version's, or damaged
        return None


def _end(run: Run, history: RunHistory, result: Mapping[str, Any], lost: list[str]) -> tuple[str, int]:
    """Return how the run ended, and its last step: from its result where events that it implies are lost."""
    status, steps = result.get("status"), int_or_none(result.get("steps"))
    if history.num_unreadable_lines:
        damaged = format_plural(history.num_unreadable_lines, "line")
        lost.append(f"{run.events}: {damaged} cannot be read; what is shown leaves them out")
    saved = max((int(path.name[5:]) for path in run.checkpoints.glob("step-*") if path.name[5:].isdecimal()), default=0)
    known = any(life.end_status == status for life in history.attempts)
    beyond = steps is not None and (steps > history.last_step or status == "done")
    if status in RUN_OUTCOMES and steps is not None and beyond and not known:
        lost.append(f"{run.events}: ends at step {history.last_step}; {run.result.name} says {status} at step {steps}")
        return str(status), steps
    if not history.attempts and saved:
        what = "is damaged" if run.events.exists() else "is missing"
        lost.append(f"{run.events}: {what}; the last step is that saved")
        return "not known", saved
    return history.status, history.last_step


def _summarize_loss(history: RunHistory) -> LossSummary:
    steps, evals = history.steps, history.evaluations
    finite = steps.loss[np.isfinite(steps.loss)]
    tail = steps.loss[-min(100, max(1, len(steps) // 20)) :]
    tail = tail[np.isfinite(tail)]
    evaluations = [(as_float(event.loss), event.step) for event in evals]
    finite_evaluations = [(loss, step) for loss, step in evaluations if math.isfinite(loss)]
    best = min(finite_evaluations, default=None)
    return LossSummary(
        first=float(finite[0]) if len(finite) else None,
        last=float(steps.loss[-1]) if len(steps) else None,
        final_mean=float(tail.mean()) if len(tail) else None,
        num_nonfinite=len(steps) - len(finite),
        validation_first=evaluations[0][0] if evaluations else None,
        validation_last=evaluations[-1][0] if evaluations else None,
        validation_best=best[0] if best else None,
        validation_best_step=best[1] if best else None,
        num_validation_samples=evals[-1].num_samples if evals else None,
        metrics={name: as_float(value) for name, value in evals[-1].metrics.items()} if evals else None,
        tasks=history.task_scores,
        noise_scale=metrics.last_noise_scale(steps),
    )


def _summarize_speed(
    steps: StepTable,
    run_info: RunInfo,
    plan: dict[str, Any] | None,
    cluster: dict[str, Any] | None,
    history: RunHistory,
) -> SpeedSummary:
    throughput = metrics.compute_throughput(steps)
    median = throughput.median_per_s if throughput else None
    seconds = steps.step_s[np.isfinite(steps.step_s)]
    world_size = history.mean_world_size
    model_flops_per_s = metrics.model_flops_per_s(plan, median)
    matmul = metrics.measured_matmul_flops(cluster, run_info.precision, world_size)
    sheet = metrics.data_sheet_flops(cluster, run_info.precision, world_size, history.mean_num_nodes)
    return SpeedSummary(
        unit=run_info.unit,
        median_per_s=median,
        mean_per_s=throughput.mean_per_s if throughput else None,
        step_median_s=float(np.median(seconds)) if len(seconds) else None,
        step_p95_s=float(np.quantile(seconds, 0.95)) if len(seconds) else None,
        predicted_step_s=_positive_or_none((plan or {}).get("predicted_step_s")),
        calibrated_step_s=_positive_or_none((plan or {}).get("calibrated_step_s")),
        largest_error=metrics.largest_prediction_error(steps, plan),
        model_flops_per_s=model_flops_per_s,
        flops_rule=(plan or {}).get("flops_rule"),
        matmul_flops_per_s=matmul,
        mfu_measured=metrics.compute_mfu(model_flops_per_s, matmul),
        data_sheet_flops_per_s=sheet,
        data_sheet_source=(cluster or {}).get("data_sheet_source"),
        mfu_data_sheet=metrics.compute_mfu(model_flops_per_s, sheet),
    )


def _summarize_data(
    recipe: Mapping[str, Any], plan: Mapping[str, Any], global_batch: int | None, breakdown: dict[str, float] | None
) -> DataSummary | None:
    sample_bytes, step_s = plan.get("bytes_per_sample"), sum((breakdown or {}).values())
    if not sample_bytes or not global_batch or not breakdown or breakdown["data_wait"] >= step_s:
        return None
    config = recipe.get("data")
    sources = config.get("source") if isinstance(config, Mapping) else None
    sources = sources if isinstance(sources, list) else [sources]
    named = [str(each["prepared"]) for each in sources if isinstance(each, Mapping) and each.get("prepared")]
    nbytes, wait_s = sample_bytes * global_batch, breakdown["data_wait"]
    return DataSummary(" + ".join(named) or "storage", nbytes / step_s, nbytes / (step_s - wait_s), wait_s / step_s)


def _summarize_checkpoints(history: RunHistory) -> CheckpointSummary:
    events, work = history.of(event_types.CheckpointSaved), goodput.split_work(history)
    rejected = history.of(event_types.CheckpointRejected)
    return CheckpointSummary(
        count=len(events),
        last_bytes=events[-1].size_bytes if events else None,
        total_stall_s=work.checkpoint_stall_s,
        step_stall_s=work.step_stall_s,
        last_step=events[-1].step if events else None,
        rejected=tuple(f"{each.path}/{each.file}: {each.reason}" for each in rejected),
        failed=tuple(f"step {event.step}: {event.reason}" for event in history.of(event_types.CheckpointFailed)),
        uploads=_summarize_uploads(history.of(event_types.CheckpointUploaded)),
    )


def _summarize_uploads(events: Sequence[event_types.CheckpointUploaded]) -> str:
    if not events:
        return ""
    sent, skipped = sum(each.sent_bytes for each in events), sum(each.skipped_bytes for each in events)
    retries = sum((Counter(each.retries) for each in events), Counter[str]())
    seconds, requests = sum(each.duration_s for each in events), sum(each.requests or 0 for each in events)
    listed = "".join(f", {count} x {reason}" for reason, count in retries.most_common())
    return (
        f"{len(events)} to {events[-1].url}, the last of step {events[-1].step}; {format_bytes(sent)} sent in "
        f"{format_duration(seconds)}, {format_bytes(skipped)} there already; {format_plural(requests, 'request')}, "
        f"{retries.total()} repeated{listed}"
    )


def _to_strict_json(value: Any) -> Any:
    """NaN and infinities to None, tuples to lists, paths to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _to_strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_strict_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _positive_or_none(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
