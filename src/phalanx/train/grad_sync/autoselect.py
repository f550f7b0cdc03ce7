"""Measure the exposed communication of gradient synchronization, and apply `grad_sync.algorithm: auto`.

The measurements are the phase times of every step. The workers reduce them to common values after the first steps with
an algorithm, and then every REMEASURE_EVERY_STEPS steps; the decision (`selection.py`) is a function of these values
and therefore equal on all workers. Exposed time is the wait of the worker that arrives last; the other workers also
wait for it, which no algorithm can shorten. If there is only one candidate, its exposed communication is reported once,
with what `determinism: off` might gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.recipe import Recipe
from phalanx.recipe.grad_sync_defaults import auto_algorithms
from phalanx.run.event_types import GradSyncSelected
from phalanx.run.events import ReportEventFn
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_reduce_max
from phalanx.train.grad_sync import BucketedReducer
from phalanx.train.grad_sync.reducer import GradReducer, find_bucketed_reducer
from phalanx.train.grad_sync.selection import (
    MAX_EXPOSED_FRACTION,
    SelectionState,
    StepTiming,
    compute_efficiencies,
    predict_lossy_gain,
    resume_selection,
    update_selection,
)

if TYPE_CHECKING:
    from phalanx.train.train_state import TrainState

WARMUP_STEPS = 2
"""First steps with an algorithm, which open connections and allocate memory and are not measured."""
MIN_MEASURED_STEPS = 8
"""Number of steps that measure an algorithm."""
REMEASURE_EVERY_STEPS = 50
"""Steps between two checks after an algorithm was selected."""


class GradSyncSelector:
    """Selects the algorithm on one worker. Every worker creates it and calls it at the same steps. `num_backwards` is
    the number of this worker's micro-batches in a step; only the last backward overlaps with communication."""

    def __init__(
        self,
        recipe: Recipe,
        dist_env: DistEnv,
        reducer: GradReducer,
        num_backwards: int,
        train_state: TrainState,
        report_event: ReportEventFn,
    ):
        self._recipe, self._dist_env, self._train_state, self._report_event = (
            recipe,
            dist_env,
            train_state,
            report_event,
        )
        self._reducer = find_bucketed_reducer(reducer)
        self._num_backwards = num_backwards
        self._candidates = auto_algorithms(recipe, dist_env.device.type)
        self._timings: list[StepTiming] = []
        self._steps_to_skip = WARMUP_STEPS
        if len(self._candidates) > 1 and self._reducer is not None:
            self._apply_selection(
                resume_selection(train_state.grad_sync_selection, self._candidates, self._reducer.world_size)
            )

    def record_step(self, step_s: float, seconds_by_phase: Mapping[str, float]) -> None:
        """Record a step of `step_s` seconds and the seconds of its phases."""
        if self._reducer is None or self._reducer.world_size == 1:
            return
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            return
        backward = seconds_by_phase["backward"] / self._num_backwards
        self._timings.append(
            StepTiming(step_s - seconds_by_phase["checkpoint_stall"], seconds_by_phase["grad_sync"], backward)
        )

    def select_if_due(self) -> None:
        """Decide, between two steps, if it is time. All workers use the same algorithm from the next step on."""
        reducer = self._reducer
        if reducer is None or len(self._timings) < MIN_MEASURED_STEPS:
            return
        is_final = self._train_state.grad_sync_selection.is_final
        if is_final and len(self._timings) < REMEASURE_EVERY_STEPS:
            return
        if len(self._candidates) == 1 and is_final:  # it was reported already
            self._timings.clear()
            return
        timing = self._agree_on_timing()
        if len(self._candidates) == 1:
            self._report_fixed_algorithm(reducer, timing)
            return
        old_state = self._train_state.grad_sync_selection
        new_state, reason = update_selection(old_state, self._candidates, timing)
        self._apply_selection(new_state)
        if reason:
            timings = {**old_state.timings, old_state.algorithm: timing}
            self._report_selection(old_state.algorithm, reason, timing, timings, new_state.predicted_efficiency)

    def _agree_on_timing(self) -> StepTiming:
        """Return the timing of the steps since the last check, equal on all workers."""
        median = [
            statistics.median(values)
            for values in zip(*((each.step_s, -each.exposed_s, each.backward_s) for each in self._timings), strict=True)
        ]
        self._timings.clear()
        seconds, exposed, backward = all_reduce_max(self._dist_env, median)
        return StepTiming(seconds, -exposed, backward)

    def _apply_selection(self, selection: SelectionState) -> None:
        """Use this selection from now on."""
        assert self._reducer is not None
        if selection.algorithm != self._train_state.grad_sync_selection.algorithm:
            self._steps_to_skip, self._timings = WARMUP_STEPS, []
        self._train_state.grad_sync_selection = selection
        self._reducer.switch_algorithm(selection.algorithm)

    def _report_selection(
        self, before: str, reason: str, timing: StepTiming, timings: Mapping[str, StepTiming], predicted: float | None
    ) -> None:
        now = self._train_state.grad_sync_selection
        self._report_event(
            GradSyncSelected(
                step=self._train_state.step,
                selected=now.algorithm,
                previous=before,
                reason=reason,
                exposed_fraction=timing.exposed_fraction,
                efficiency_by_choice=compute_efficiencies(timings),
                predicted_efficiency=predicted,
                is_final=now.is_final,
            )
        )

    def _report_fixed_algorithm(self, reducer: BucketedReducer, timing: StepTiming) -> None:
        """Report the exposed communication of the only candidate, once in a run."""
        determinism, algorithm = self._recipe.determinism, self._candidates[0]
        name = "fixed tree" if determinism == "elastic" else algorithm
        self._train_state.grad_sync_selection = SelectionState(name, reducer.world_size, {name: timing}, is_final=True)
        reason = f"{timing.exposed_fraction:.1%} of a step is exposed (efficiency {1 - timing.exposed_fraction:.2f})"
        predicted = None
        if determinism != "off" and timing.exposed_fraction > MAX_EXPOSED_FRACTION:
            other, predicted = predict_lossy_gain(timing)
            reason += f"; determinism: off would allow {other}, with an efficiency of {predicted:.2f} at best"
        self._report_selection(name, reason, timing, {name: timing}, predicted)
