"""How far a run is, how fast it is and when it will be done, kept up to date event by event."""

from collections import deque
from dataclasses import dataclass

from phalanx.observe.peak_rate import PeakRate
from phalanx.run import Event, Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationDone,
    EvaluationProgress,
    NonFiniteStep,
    StepDone,
)

SPEED_WINDOW_S = 10.0
"""Seconds of steps that the shown speed is the mean of."""


@dataclass(frozen=True)
class RunFacts:
    """What a display must know that events do not say. `matmul_flops_per_worker` is the measured matmul rate of one
    worker in the run's precision, in FLOP/s; without it, or without FLOPs a sample, no share of it is shown."""

    name: str = "run"
    unit: str = "tokens"
    units_per_sample: int = 1
    flops_per_sample: float | None = None
    matmul_flops_per_worker: float | None = None
    evaluation_interval_steps: int | None = None


def read_run_facts(run: Run) -> RunFacts:
    """Read the facts of a run from its resolved recipe, plan and cluster files; facts that are missing are not
    shown."""
    from phalanx.observe.metrics import measured_matmul_flops
    from phalanx.observe.run_info import read_resolved_recipe

    recipe, plan, cluster = (
        read_resolved_recipe(run),
        run.read_json_or_empty(run.plan),
        run.read_json_or_empty(run.cluster),
    )
    task, evaluation = recipe.get("task"), recipe.get("evaluation")
    interval = evaluation.get("every") if isinstance(evaluation, dict) else None
    return RunFacts(
        name=str(recipe.get("name", run.path.name)),
        unit=str(plan.get("unit") or ("samples" if task == "classification" else "tokens")),
        units_per_sample=int(plan.get("units_per_sample") or 1),
        flops_per_sample=plan.get("flops_per_sample"),
        matmul_flops_per_worker=measured_matmul_flops(cluster, str(recipe.get("precision")), 1),
        evaluation_interval_steps=interval if isinstance(interval, int) and interval > 0 else None,
    )


class RunProgress:
    """What the displays show, kept up to date event by event."""

    def __init__(self, total_steps: int, facts: RunFacts):
        self.total_steps, self.run_facts = total_steps, facts
        self.step = self.world_size = self.skipped_steps = self.rollbacks = 0
        self.last_step_event: StepDone | None = None
        self.last_evaluation: EvaluationDone | None = None
        self.evaluation_under_way: EvaluationProgress | None = None
        self.last_checkpoint: CheckpointSaved | None = None
        rate = facts.matmul_flops_per_worker
        self._peak_of_worker = PeakRate(rate) if rate else None
        self._window: deque[tuple[float, float, float]] = deque()
        self._window_units = self._window_s = 0.0
        self._first_step: tuple[float, int] | None = None
        self._evaluation_s = self._evaluation_s_before_step = 0.0

    def add_event(self, event: Event) -> None:
        """Count an event in."""
        if isinstance(event, StepDone | AttemptStarted | EvaluationDone | EvaluationProgress):
            self.evaluation_under_way = event if isinstance(event, EvaluationProgress) else None
        if isinstance(event, StepDone):
            t, units, seconds = event.time, event.units, event.duration_s
            self.last_step_event = event
            self.step = event.step
            window = self._window
            window.append((t, units, seconds))
            self._window_units += units
            self._window_s += seconds
            self._evaluation_s_before_step = self._evaluation_s
            while window[0][0] < t - SPEED_WINDOW_S:
                _, old_amount, old_seconds = window.popleft()
                self._window_units -= old_amount
                self._window_s -= old_seconds
            if self._first_step is None or self.step <= self._first_step[1]:
                self._first_step = (t, self.step)
                self._evaluation_s = self._evaluation_s_before_step = 0.0
        elif isinstance(event, AttemptStarted):
            self.world_size, self.total_steps, self.step = event.world_size, event.total_steps, event.start_step
            self._first_step = None
            self._window.clear()
            self._window_units = self._window_s = 0.0
        elif isinstance(event, EvaluationDone):
            self.last_evaluation = event
            if self.run_facts.evaluation_interval_steps is not None:  # else they stay in the pace
                self._evaluation_s += event.duration_s
        elif isinstance(event, CheckpointSaved):
            self.last_checkpoint = event
        elif isinstance(event, NonFiniteStep):
            if event.action == "rollback":
                self.rollbacks += 1
            else:
                self.skipped_steps += 1

    @property
    def units_per_s(self) -> float | None:
        """Units a second within the steps of the window."""
        return self._window_units / self._window_s if self._window_s > 1e-9 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean step time in the window."""
        return self._window_s / len(self._window) if self._window and self._window_s > 1e-9 else None

    @property
    def mfu(self) -> float | None:
        """MFU relative to the measured peak of all workers."""
        facts, speed = self.run_facts, self.units_per_s
        if not facts.flops_per_sample or self._peak_of_worker is None or speed is None:
            return None
        flops_per_s = facts.flops_per_sample * speed / facts.units_per_sample
        return self._peak_of_worker.compute_mfu(flops_per_s / max(1, self.world_size))

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of this attempt since its first step, with saves, and with the evaluations to come
        once one was measured. The first step itself is left out: it warms up and compiles."""
        if self._first_step is None or self.last_step_event is None:
            return None
        began, first = self._first_step
        if self.step == first:
            step_s = self.step_seconds
        else:
            step_s = (self.last_step_event.time - began - self._evaluation_s_before_step) / (self.step - first)
        if step_s is None:
            return None
        evaluation_s = self._evaluations_left() * (self.last_evaluation.duration_s if self.last_evaluation else 0.0)
        return max(0, self.total_steps - self.step) * step_s + evaluation_s

    def _evaluations_left(self) -> int:
        """Evaluations after this step, the last of them at the end."""
        every = self.run_facts.evaluation_interval_steps
        return 0 if every is None else max(0, -(-self.total_steps // every) - self.step // every)
