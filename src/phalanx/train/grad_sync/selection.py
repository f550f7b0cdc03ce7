"""Select the algorithm for `grad_sync: {algorithm: auto}` from step timings. Pure functions over values.

The most accurate algorithm with an exposed communication of at most MAX_EXPOSED_FRACTION is selected. Algorithms are
tried from the most accurate to the one with the fewest bytes, as long as none is below the limit and the next is
predicted to be faster. If none reaches the limit, the fastest is selected, or a more accurate one that is hardly
slower. After that the exposed fraction is checked regularly; a lasting change starts new trials. `autoselect.py` has
the clock and the all-reduce over workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.train.grad_sync.compression.int8 import INT8_BYTES_FRACTION

MAX_EXPOSED_FRACTION = 0.05
"""Target: maximum exposed fraction of a step."""
MAX_SLOWDOWN_FOR_ACCURACY = 0.03
"""Maximum slowdown accepted for a more accurate algorithm, as a fraction."""
MIN_PREDICTED_GAIN = 0.02
"""Minimum predicted gain for an algorithm to be tried, as a fraction of the step."""
MIN_FRACTION_CHANGE = 0.05
"""Difference in the exposed fraction that counts as a change."""
MIN_CHANGED_CHECKS = 2
"""Consecutive checks that must find a change before new trials start. It doubles with each restart, so that a network
with fluctuating speed does not keep a run in trials."""
MAX_CHANGED_CHECKS = 64
BYTES_FRACTION_BY_ALGORITHM = {"all-reduce": 1.0, "bf16": 0.5, "int8": INT8_BYTES_FRACTION}
"""Bytes that an algorithm sends, as a fraction of fp32."""


@dataclass(frozen=True)
class StepTiming:
    """Step timing with an algorithm, in seconds: the whole step, its exposed communication, and the backward that
    overlaps with communication."""

    step_s: float
    exposed_s: float
    backward_s: float

    @property
    def exposed_fraction(self) -> float:
        """Exposed communication as a fraction of the step."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True)
class SelectionState:
    """State of the selection, saved in every checkpoint.

    `algorithm` is in use among `num_replicas` replicas (0: nothing was decided yet). `timings` are those of the
    algorithms tried. `is_final`: the trials are over. `predicted_efficiency` is the prediction for which `algorithm` is
    on trial. `num_changed_checks` counts consecutive checks that found a change, `num_restarts` restarted trials."""

    algorithm: str = ""
    num_replicas: int = 0
    timings: Mapping[str, StepTiming] = field(default_factory=dict)
    is_final: bool = False
    predicted_efficiency: float | None = None
    num_changed_checks: int = 0
    num_restarts: int = 0

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "SelectionState":
        """Read the state from a checkpoint's metadata (`asdict`)."""
        return cls(
            **{**meta, "timings": {name: StepTiming(**timing) for name, timing in meta.get("timings", {}).items()}}
        )


def resume_selection(selection: SelectionState, candidates: Sequence[str], num_replicas: int) -> SelectionState:
    """Resume the selection; start over if the number of replicas has changed, since timings depend on it."""
    if selection.num_replicas == num_replicas and selection.algorithm in candidates:
        return selection
    return SelectionState(candidates[0], num_replicas)


def update_selection(
    selection: SelectionState, candidates: Sequence[str], timing: StepTiming
) -> tuple[SelectionState, str]:
    """Return the selection after a timing of the current algorithm, and the reason ("" if nothing was decided)."""
    if not selection.is_final:
        return _select_after_trial(
            replace(selection, timings={**selection.timings, selection.algorithm: timing}), candidates
        )
    before = selection.timings[selection.algorithm]
    has_changed = (
        abs(timing.exposed_fraction - before.exposed_fraction) > MIN_FRACTION_CHANGE
        and max(timing.exposed_fraction, before.exposed_fraction) > MAX_EXPOSED_FRACTION
    )
    num_changed_checks = selection.num_changed_checks + 1 if has_changed else 0
    if num_changed_checks < min(MIN_CHANGED_CHECKS << selection.num_restarts, MAX_CHANGED_CHECKS):
        return replace(selection, num_changed_checks=num_changed_checks), ""
    restarted = replace(
        selection,
        is_final=False,
        num_changed_checks=0,
        num_restarts=selection.num_restarts + 1,
        timings={},
        predicted_efficiency=None,
    )
    reason = (
        f"with {selection.algorithm} {timing.exposed_fraction:.1%} of a step is exposed, and no more "
        f"{before.exposed_fraction:.1%}"
    )
    if timing.exposed_fraction > before.exposed_fraction and selection.algorithm != candidates[-1]:
        now, retry_reason = _select_after_trial(replace(restarted, timings={selection.algorithm: timing}), candidates)
        return now, f"{reason}; {retry_reason}"
    return replace(restarted, algorithm=candidates[0]), f"{reason}: restarting the trials"


def _select_after_trial(selection: SelectionState, candidates: Sequence[str]) -> tuple[SelectionState, str]:
    """Decide what follows after an algorithm was tried."""
    current, timings, note = selection.algorithm, selection.timings, ""
    untried = candidates[1 + max(candidates.index(name) for name in timings) :]
    if untried and min(each.exposed_fraction for each in timings.values()) > MAX_EXPOSED_FRACTION:
        next_algorithm, fastest = untried[0], min(each.step_s for each in timings.values())
        predicted_s = predict_step_s(next_algorithm, timings)
        if predicted_s <= (1 - MIN_PREDICTED_GAIN) * fastest:
            predicted = compute_time_s(timings) / predicted_s
            retry_reason = (
                f"with {current} {timings[current].exposed_fraction:.1%} of a step is "
                f"exposed{_format_efficiencies(selection)}"
            )
            retry_reason += f"; {next_algorithm} is predicted {predicted:.2f}"
            return replace(selection, algorithm=next_algorithm, predicted_efficiency=predicted), retry_reason
        note = f"; {next_algorithm} promises no faster step"
    selected = select_best(candidates, timings)
    reason = f"{timings[selected].exposed_fraction:.1%} of a step is exposed"
    if timings[selected].exposed_fraction > MAX_EXPOSED_FRACTION and len(timings) > 1:
        reason = f"no other is faster by more than {MAX_SLOWDOWN_FOR_ACCURACY:.0%}, {reason}"
    return replace(
        selection, algorithm=selected, is_final=True, predicted_efficiency=None
    ), f"{reason}{_format_efficiencies(selection)}{note}"


def _format_efficiencies(selection: SelectionState) -> str:
    """Format the measured efficiencies for the event's reason."""
    listed = [f"{name} {value:.2f}" for name, value in compute_efficiencies(selection.timings).items()]
    if selection.predicted_efficiency is not None:
        listed[-1] += f" ({selection.predicted_efficiency:.2f} was predicted)"
    return f" (efficiency: {', '.join(listed)})"


def select_best(candidates: Sequence[str], timings: Mapping[str, StepTiming]) -> str:
    """Return, of the algorithms tried, the most accurate within the limit, else the fastest; or a more accurate one of
    about the same speed, since an algorithm may spend on arithmetic what it saves in communication."""
    ranked = [name for name in candidates if name in timings]
    within = [name for name in ranked if timings[name].exposed_fraction <= MAX_EXPOSED_FRACTION]
    preferred = within[0] if within else min(ranked, key=lambda name: timings[name].step_s)
    return next(
        name for name in ranked if timings[name].step_s <= (1 + MAX_SLOWDOWN_FOR_ACCURACY) * timings[preferred].step_s
    )


def compute_time_s(timings: Mapping[str, StepTiming]) -> float:
    """Return the seconds of a step without exposed communication, as far as they are known."""
    return min(each.step_s - each.exposed_s for each in timings.values())


def compute_efficiencies(timings: Mapping[str, StepTiming]) -> dict[str, float]:
    """Return, for each algorithm tried, the step time without exposed communication over the step time."""
    compute_s = compute_time_s(timings)
    return {name: compute_s / each.step_s if each.step_s > 0 else 1.0 for name, each in timings.items()}


def predict_step_s(name: str, timings: Mapping[str, StepTiming]) -> float:
    """Predict the seconds of a step with an algorithm. From two measured ones by linear extrapolation in bytes, which
    includes latency and arithmetic. From one on the assumption that communication starts with backward and never
    pauses: an upper bound of what fewer bytes gain."""
    (bytes_fraction, last), *others = sorted(
        ((BYTES_FRACTION_BY_ALGORITHM[each], timings[each]) for each in timings), key=lambda pair: pair[0]
    )
    if others:
        larger_fraction, before = others[0]
        slope = (before.step_s - last.step_s) / (larger_fraction - bytes_fraction)
        return max(compute_time_s(timings), last.step_s - slope * (bytes_fraction - BYTES_FRACTION_BY_ALGORITHM[name]))
    comm_s = BYTES_FRACTION_BY_ALGORITHM[name] / bytes_fraction * (last.exposed_s + last.backward_s)
    return last.step_s - last.exposed_s + max(0.0, comm_s - last.backward_s)


def predict_lossy_gain(timing: StepTiming) -> tuple[str, float]:
    """Predict what `determinism: off` would gain over fp32: the most accurate algorithm that may stay within the limit,
    else the one with the fewest bytes; and its efficiency at best."""
    compute_s = timing.step_s - timing.exposed_s
    algorithm, efficiency = "all-reduce", 1.0 - timing.exposed_fraction
    for name in ("bf16", "int8"):
        if efficiency >= 1 - MAX_EXPOSED_FRACTION:
            break
        algorithm, efficiency = name, compute_s / predict_step_s(name, {"all-reduce": timing})
    return algorithm, efficiency
