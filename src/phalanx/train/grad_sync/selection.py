"""Which strategy `grad_sync: {algorithm: auto}` takes next, from what steps took: functions over values.

The most accurate strategy that leaves at most LIMIT of a step exposed: time in which gradients travel and nothing is
computed. Strategies are tried one after the other, the most accurate first, as long as that is missed and fewer bytes
promise a faster step; if none reaches it, the fastest is taken. Where a more accurate one is hardly slower, it is
that. Then the share is watched, and when it has changed for long enough strategies are tried again. The clock and the
workers' agreement are `autoselect.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.train.grad_sync.compression.int8 import INT8_BYTES_FRACTION

MAX_EXPOSED_FRACTION = 0.05
"""Share of a step that may be exposed."""
MAX_SLOWDOWN_FOR_ACCURACY = 0.03
"""A more accurate strategy may be so much slower than the one that would be taken."""
MIN_PREDICTED_GAIN = 0.02
"""By so much of a step a strategy must promise to be faster to be tried."""
MIN_FRACTION_CHANGE = 0.05
"""A share that is so far from what it was is another one."""
MIN_CHANGED_CHECKS = 2
"""Looks in a row that must find another share before strategies are tried again; doubled each time, so that a network
that goes up and down does not keep a run trying."""
MAX_CHANGED_CHECKS = 64
BYTES_FRACTION_BY_ALGORITHM = {"all-reduce": 1.0, "bf16": 0.5, "int8": INT8_BYTES_FRACTION}
"""What a strategy sends, as a share of fp32."""


@dataclass(frozen=True)
class StepTiming:
    """What a step takes with a strategy, in seconds: all of it, the part of it that is exposed, and the backward beside
    which gradients travel."""

    step_s: float
    exposed_s: float
    backward_s: float

    @property
    def exposed_fraction(self) -> float:
        """Of the step, exposed."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True)
class SelectionState:
    """How far the choice is; part of every checkpoint. `algorithm` sums gradients among `num_replicas` replicas (0:
    nothing
    was decided yet); `seen` are strategies that were tried, `is_final` says that one of them was taken. `foretold` is
    the efficiency that it was tried for. `num_changed_checks` counts looks that found another share, `num_restarts` how
    often strategies were tried anew."""

    algorithm: str = ""
    num_replicas: int = 0
    timings: Mapping[str, StepTiming] = field(default_factory=dict)
    is_final: bool = False
    predicted_efficiency: float | None = None
    num_changed_checks: int = 0
    num_restarts: int = 0

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "SelectionState":
        """As a checkpoint's meta has it (`asdict`)."""
        return cls(
            **{**meta, "timings": {name: StepTiming(**timing) for name, timing in meta.get("timings", {}).items()}}
        )


def resume_selection(selection: SelectionState, candidates: Sequence[str], num_replicas: int) -> SelectionState:
    """The choice of a run that goes on among so many replicas: what another number of them saw counts no more."""
    if selection.num_replicas == num_replicas and selection.algorithm in candidates:
        return selection
    return SelectionState(candidates[0], num_replicas)


def update_selection(
    selection: SelectionState, candidates: Sequence[str], timing: StepTiming
) -> tuple[SelectionState, str]:
    """The choice after a look at the present strategy, and why: empty where nothing was decided."""
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
    return replace(restarted, algorithm=candidates[0]), f"{reason}: trying anew"


def _select_after_trial(selection: SelectionState, candidates: Sequence[str]) -> tuple[SelectionState, str]:
    """What comes after a strategy was tried."""
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
    """What was measured, for people."""
    listed = [f"{name} {value:.2f}" for name, value in compute_efficiencies(selection.timings).items()]
    if selection.predicted_efficiency is not None:
        listed[-1] += f" ({selection.predicted_efficiency:.2f} was predicted)"
    return f" (efficiency: {', '.join(listed)})"


def select_best(candidates: Sequence[str], timings: Mapping[str, StepTiming]) -> str:
    """Of those that were tried the most accurate within the limit, else the fastest; or a more accurate one that is
    about as fast: what a strategy saves in waiting it may spend on arithmetic."""
    ranked = [name for name in candidates if name in timings]
    within = [name for name in ranked if timings[name].exposed_fraction <= MAX_EXPOSED_FRACTION]
    preferred = within[0] if within else min(ranked, key=lambda name: timings[name].step_s)
    return next(
        name for name in ranked if timings[name].step_s <= (1 + MAX_SLOWDOWN_FOR_ACCURACY) * timings[preferred].step_s
    )


def compute_time_s(timings: Mapping[str, StepTiming]) -> float:
    """Seconds of a step without its exchange, as far as they are known."""
    return min(each.step_s - each.exposed_s for each in timings.values())


def compute_efficiencies(timings: Mapping[str, StepTiming]) -> dict[str, float]:
    """The step without exchange over the step, of each strategy that was tried."""
    compute_s = compute_time_s(timings)
    return {name: compute_s / each.step_s if each.step_s > 0 else 1.0 for name, each in timings.items()}


def predict_step_s(name: str, timings: Mapping[str, StepTiming]) -> float:
    """Seconds of a step with strategy `name`. From two others by the line through them: what latency and arithmetic
    cost is in it. From one as if gradients travelled from the beginning of backward on, without pause: the most that
    fewer bytes can bring."""
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
    """What `determinism: off` would offer to a run that sends fp32: the most accurate strategy that may stay within the
    limit, else the one with the fewest bytes; and the efficiency that it could have at best."""
    compute_s = timing.step_s - timing.exposed_s
    algorithm, efficiency = "all-reduce", 1.0 - timing.exposed_fraction
    for name in ("bf16", "int8"):
        if efficiency >= 1 - MAX_EXPOSED_FRACTION:
            break
        algorithm, efficiency = name, compute_s / predict_step_s(name, {"all-reduce": timing})
    return algorithm, efficiency
