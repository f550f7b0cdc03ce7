"""What a run did, as one frozen value: read from the run directory, shown by `report.py` and `html.py`, judged by
`advice.py`. `Summary.to_json()` is what `phalanx report --json` prints. Nothing here is formatted for people.

A field is None when the run did not say it or it was not measured; a run that has only just started has many of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataError
from phalanx.observe import metrics
from phalanx.observe.foretold import Difference, largest_difference
from phalanx.observe.history import GROWN, History, Steps, number
from phalanx.observe.ledger import Ledger, ledger_of
from phalanx.observe.sentences import straggler_in_words
from phalanx.observe.what import What, recipe_and_losses, sane, what_ran
from phalanx.run import Run
from phalanx.run.event_types import (
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    Compiled,
    EnergyUsed,
    NonFiniteStep,
    RunWarning,
    StragglerDetected,
    WorkerFailure,
)

ENDS = ("done", "interrupted", "failed")
"""What result.json may say of how a run ended."""


@dataclass(frozen=True)
class Loss:
    """Training loss and scores on held-out data. `end` is the mean over the last 5% of the steps (at least 1, at most
    100), which says more than the single noisy `last`."""

    first: float | None = None
    last: float | None = None
    end: float | None = None
    not_finite: int = 0
    held_out_first: float | None = None
    held_out_last: float | None = None
    held_out_best: float | None = None
    held_out_best_step: int | None = None
    metrics: dict[str, float] | None = None
    """Of the last evaluation."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, as last estimated; None until enough steps have added to the estimate."""


@dataclass(frozen=True)
class Speed:
    """How fast. Rates are units (tokens or samples) a second within steps, times are seconds."""

    unit: str
    median: float | None = None
    mean: float | None = None
    step_median: float | None = None
    step_slow: float | None = None
    """95% of the steps took at most this long."""
    step_predicted: float | None = None
    step_foretold: float | None = None
    """From what `phalanx calibrate` measured; `step_predicted` is from trials of this very model."""
    differs_most: Difference | None = None
    """The part of a step that differs most from what was foretold."""
    flops: float | None = None
    """FLOP/s of the model's forward and backward."""
    flops_rule: str | None = None
    matmul_rate: float | None = None
    """FLOP/s in matmul that all workers together were measured to reach, in the run's precision."""
    mfu_measured: float | None = None
    data_sheet_rate: float | None = None
    data_sheet_source: str | None = None
    mfu_data_sheet: float | None = None


@dataclass(frozen=True)
class Durations:
    """Seconds. wall = productive + redone + evaluating + starting + down + rest; time between a proper end and the next
    start (`paused`) does not count as wall."""

    wall: float = 0.0
    productive: float = 0.0
    redone: float = 0.0
    evaluating: float = 0.0
    starting: float = 0.0
    compiling: float = 0.0
    """Of starting: torch.compile at work before the first step."""
    down: float = 0.0
    """From the last step, evaluation or save of an attempt that died to the next start."""
    rest: float = 0.0
    paused: float = 0.0

    @property
    def restarts(self) -> float:
        """What restarts cost: work done again and time when nobody worked."""
        return self.redone + self.down


@dataclass(frozen=True)
class Life:
    """One attempt, in short."""

    number: int
    world: int
    from_step: int
    began: float | None
    seconds: float
    steps: int
    redone_steps: int
    redone_seconds: float
    ended: str | None


@dataclass(frozen=True)
class Checkpoints:
    """Saves. `stall` is the time training stood still for them, in seconds, summed; `background` is writing time."""

    count: int = 0
    bytes: int | None = None
    """Of the newest."""
    stall: float = 0.0
    stall_longest: float = 0.0
    background: float = 0.0
    last_step: int | None = None
    rejected: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """Energy that GPUs drew while workers ran, by their own counters: those of the leading node."""

    joules: float
    devices: int
    per_unit: float | None
    """Joules for a token (or sample) that counted; None where other nodes trained, too."""


@dataclass(frozen=True)
class Summary:
    """Everything that `phalanx report` knows. See the fields' own classes for units."""

    what: What
    status: str
    last_step: int
    planned_steps: int | None
    began: float | None
    last_event: float | None
    units: float
    """Tokens (or samples) that counted."""
    loss: Loss
    speed: Speed
    split: dict[str, float] | None
    """Mean seconds of a step by part; they sum to the mean step."""
    durations: Durations
    ledger: Ledger
    attempts: tuple[Life, ...]
    redone_steps: int
    skipped_steps: int
    guards: dict[str, int]
    """How often, by `what: action`."""
    rollbacks: int
    faults: tuple[str, ...]
    warnings: tuple[str, ...]
    checkpoints: Checkpoints
    energy: Drawn | None
    digest: str | None
    lost: tuple[str, ...] = ()
    """What of the run is missing or damaged, so that this is not all."""

    @property
    def restarts(self) -> int:
        """Starts after an attempt that had not reached its end. Going on with more steps after `done` is none."""
        return sum(life.ended not in ("done", GROWN) for life in self.attempts[:-1])

    @property
    def split_shares(self) -> dict[str, float] | None:
        """The time split as shares of the step."""
        return metrics.shares(self.split)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity become null, as strict JSON has neither."""
        clean = _strict(
            {
                **asdict(self),
                "restarts": self.restarts,
                "split_shares": self.split_shares,
                "goodput": self.ledger.goodput,
            }
        )
        assert isinstance(clean, dict)
        return clean


def summary_of(run: Run, history: History) -> Summary:
    """Sum up a run directory whose events were read. Files that are not there yet leave their part empty; DataError
    when one of its files is not what it should be."""
    recipe, lost = recipe_and_losses(run)
    begun, ended = bool(history.attempts), any(life.ended == "done" for life in history.attempts)
    plan, cluster = (sane(_read(run, path, begun, lost)) for path in (run.plan, run.cluster))
    environment = _read(run, run.environment, begun, lost)
    result = sane(_read(run, run.result, ended, lost)) or {}
    what = what_ran(run, recipe, plan, cluster, environment, history)
    steps = history.steps
    status, last_step = _end(run, history, result, lost)
    finished = status not in ("incomplete", "not started") and result.get("steps") == last_step
    guards = history.of(NonFiniteStep)
    return Summary(
        what=what,
        status=status,
        last_step=last_step,
        planned_steps=history.planned_steps or _whole_or_none(recipe.get("steps")),
        began=history.first_t,
        last_event=history.last_t,
        units=float(np.nansum(steps.tokens)),
        loss=_loss(history),
        speed=_speed(steps, what, plan, cluster, history),
        split=metrics.time_split(steps),
        durations=durations(history),
        ledger=ledger_of(history),
        attempts=tuple(
            Life(
                number=life.number,
                world=life.world,
                from_step=life.from_step,
                began=life.began,
                seconds=life.last - life.began,
                steps=life.steps,
                redone_steps=life.redone_steps,
                redone_seconds=life.redone_seconds,
                ended=life.ended,
            )
            for life in history.attempts
        ),
        redone_steps=sum(life.redone_steps for life in history.attempts),
        skipped_steps=int(np.nansum(steps.skipped)),
        guards=dict(Counter(f"{guard.reason}: {guard.action}" for guard in guards)),
        rollbacks=sum(guard.action == "rollback" for guard in guards),
        faults=tuple(f"rank {each.rank}: {each.what} ({each.message})" for each in history.of(WorkerFailure)),
        warnings=(
            *(event.text for event in history.of(RunWarning)),
            *map(straggler_in_words, history.of(StragglerDetected)),
        ),
        checkpoints=_checkpoints(history),
        energy=_energy(history),
        digest=str(result["digest"]) if finished and result.get("digest") else None,
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
    return found


def _end(run: Run, history: History, result: Mapping[str, Any], lost: list[str]) -> tuple[str, int]:
    """How the run ended, and its last step: by its result where events that it tells of are lost."""
    status, steps = result.get("status"), _whole_or_none(result.get("steps"))
    saved = max((int(path.name[5:]) for path in run.checkpoints.glob("step-*") if path.name[5:].isdecimal()), default=0)
    known = any(life.ended == status for life in history.attempts)
    beyond = steps is not None and (steps > history.last_step or status == "done")
    if status in ENDS and steps is not None and beyond and not known:
        lost.append(f"{run.events}: ends at step {history.last_step}; {run.result.name} says {status} at step {steps}")
        return str(status), steps
    if not history.attempts and saved:
        lost.append(
            f"{run.events}: {'is damaged' if run.events.exists() else 'is missing'}; the last step is that saved"
        )
        return "not known", saved
    return history.status, history.last_step


def _energy(history: History) -> Drawn | None:
    if not (drawn := history.of(EnergyUsed)):
        return None
    joules, units = sum(event.energy_j for event in drawn), float(np.nansum(history.steps.tokens))
    alone = history.nodes == 1 and units > 0
    return Drawn(joules, drawn[-1].num_gpus, joules / units if alone else None)


def _loss(history: History) -> Loss:
    steps, evals = history.steps, history.evals
    finite = steps.loss[np.isfinite(steps.loss)]
    tail = steps.loss[-min(100, max(1, len(steps) // 20)) :]
    tail = tail[np.isfinite(tail)]
    scored = [(number(event.loss), event.step) for event in evals]
    held_out = [(loss, step) for loss, step in scored if math.isfinite(loss)]
    best = min(held_out, default=None)
    return Loss(
        first=float(finite[0]) if len(finite) else None,
        last=float(steps.loss[-1]) if len(steps) else None,
        end=float(tail.mean()) if len(tail) else None,
        not_finite=len(steps) - len(finite),
        held_out_first=scored[0][0] if scored else None,
        held_out_last=scored[-1][0] if scored else None,
        held_out_best=best[0] if best else None,
        held_out_best_step=best[1] if best else None,
        metrics={name: number(value) for name, value in evals[-1].metrics.items()} if evals else None,
        noise_scale=metrics.noise_scale(steps),
    )


def _speed(
    steps: Steps, what: What, plan: dict[str, Any] | None, cluster: dict[str, Any] | None, history: History
) -> Speed:
    pace = metrics.throughput(steps)
    median = pace.median if pace else None
    seconds = steps.seconds[np.isfinite(steps.seconds)]
    matmul = metrics.measured_rate(cluster, what.precision, what.world)
    sheet = metrics.data_sheet_rate(cluster, what.precision, what.world, history.nodes)
    return Speed(
        unit=what.unit,
        median=median,
        mean=pace.mean if pace else None,
        step_median=float(np.median(seconds)) if len(seconds) else None,
        step_slow=float(np.quantile(seconds, 0.95)) if len(seconds) else None,
        step_predicted=_positive((plan or {}).get("predicted_step_s")),
        step_foretold=_positive((plan or {}).get("calibrated_step_s")),
        differs_most=largest_difference(steps, plan),
        flops=metrics.model_flops(plan, median),
        flops_rule=(plan or {}).get("flops_rule"),
        matmul_rate=matmul,
        mfu_measured=metrics.mfu(plan, median, matmul),
        data_sheet_rate=sheet,
        data_sheet_source=(cluster or {}).get("data_sheet_source"),
        mfu_data_sheet=metrics.mfu(plan, median, sheet),
    )


def durations(history: History) -> Durations:
    """Where the run's wall time went."""
    if not history.attempts:
        return Durations()
    lives = history.attempts
    down = paused = starting = 0.0
    for before, after in pairwise(lives):
        idle = before.idle(after.began)
        down += idle
        paused += max(0.0, after.began - (before.last_work + idle if before.died else before.last))
    for life in lives:
        starting += max(0.0, (life.first_step_began or life.last) - life.began)
    wall = max(0.0, lives[-1].last - lives[0].began - paused)
    productive = float(np.nansum(history.steps.seconds))
    redone = sum(life.redone_seconds for life in lives)
    evaluating = sum(event.duration_s for event in history.evals)
    rest = max(0.0, wall - productive - redone - evaluating - starting - down)
    compiling = sum(event.duration_s for event in history.of(Compiled))
    return Durations(wall, productive, redone, evaluating, starting, compiling, down, rest, paused)


def _checkpoints(history: History) -> Checkpoints:
    saves = history.of(CheckpointSaved)
    return Checkpoints(
        count=len(saves),
        bytes=saves[-1].size_bytes if saves else None,
        stall=sum(event.stall_s for event in saves),
        stall_longest=max((event.stall_s for event in saves), default=0.0),
        background=sum(event.duration_s for event in saves),
        last_step=saves[-1].step if saves else None,
        rejected=tuple(f"{each.path}/{each.file}: {each.reason}" for each in history.of(CheckpointRejected)),
        failed=tuple(f"step {event.step}: {event.reason}" for event in history.of(CheckpointFailed)),
    )


def _whole_or_none(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _strict(value: Any) -> Any:
    """NaN and infinities to None, tuples to lists, paths to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
