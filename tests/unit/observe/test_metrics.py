"""Speed, time split, MFU, ETA as pure functions: sums that must hold, and None where nothing was measured."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_events import made
from make_run import healthy
from phalanx.observe import metrics
from phalanx.observe.history import StepTable, build_history, read_history
from phalanx.run.event_types import StepDone, StepPhases

PHASES = [each.name for each in fields(StepPhases)]


def steps(seconds: list[float], tokens: float = 100.0, parts: list[dict[str, float]] | None = None) -> StepTable:
    return build_history(
        made(
            StepDone,
            time=float(index),
            step=index + 1,
            units=tokens,
            duration_s=value,
            breakdown_s=StepPhases(**(parts[index] if parts else {})),
        )
        for index, value in enumerate(seconds)
    ).steps


def test_throughput_has_the_median_of_steps_and_the_mean_over_all_time() -> None:
    pace = metrics.compute_throughput(steps([1.0, 1.0, 8.0]))
    assert pace is not None
    assert pace.median_per_s == 100.0
    assert pace.mean_per_s == 30.0


@pytest.mark.parametrize("seconds", [[], [0.0], [math.nan]])
def test_throughput_without_a_timed_step_is_none(seconds: list[float]) -> None:
    assert metrics.compute_throughput(steps(seconds)) is None


def test_the_parts_of_a_real_run_sum_to_the_mean_step(tmp_path: Path) -> None:
    run = read_history(healthy(tmp_path / "run") / "events.jsonl").steps
    split = metrics.mean_breakdown(run)
    assert split is not None
    assert sum(split.values()) == pytest.approx(run.step_s.mean(), rel=1e-12)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e3, allow_subnormal=False),
            st.dictionaries(
                st.sampled_from([each.name for each in fields(StepPhases)]), st.floats(-1, 1e3, allow_subnormal=False)
            ),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_parts_sum_to_the_step_whatever_the_engine_wrote(written: list[tuple[float, dict[str, float]]]) -> None:
    run = steps([seconds for seconds, _ in written], parts=[parts for _, parts in written])
    split = metrics.complete_breakdown(run)
    assert (split >= 0).all()
    assert split.sum(axis=1) == pytest.approx(run.step_s, rel=1e-9, abs=1e-9)


def test_time_that_the_engine_did_not_attribute_is_other() -> None:
    split = metrics.mean_breakdown(steps([1.0], parts=[{"forward": 0.4, "backward": 0.5}]))
    assert split is not None
    assert split["other"] == pytest.approx(0.1)


def test_shares_sum_to_one_and_are_none_without_time() -> None:
    split = metrics.mean_breakdown(steps([1.0, 2.0], parts=[{"data_wait": 0.5}, {"forward": 1.0}]))
    shares = metrics.breakdown_shares(split)
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(1.0)
    assert metrics.breakdown_shares(None) is None
    assert metrics.breakdown_shares(metrics.mean_breakdown(steps([0.0]))) is None


def test_the_course_of_the_split_has_few_points_and_keeps_the_mean() -> None:
    run = steps([1.0 + index % 3 for index in range(900)])
    at, parts = metrics.breakdown_over_time(run, buckets=100)
    assert len(at) == len(parts) == 100
    assert (at[0], at[-1]) == (1, 900)
    assert parts.sum(axis=1).mean() == pytest.approx(run.step_s.mean())


CLUSTER = {
    "device": "cpu",
    "count": 1,
    "measured_matmul_tflops": {"fp32": 0.1, "bf16": 0.4},
    "data_sheet_tflops": {"fp32": 0.2},
}
PLAN = {"flops_per_sample": 2e9, "units_per_sample": 256}


def test_mfu_is_the_flops_that_the_model_needs_over_what_all_workers_measured() -> None:
    available = metrics.measured_matmul_flops(CLUSTER, "bf16", world_size=2)
    assert available == pytest.approx(0.8e12)
    assert metrics.compute_mfu(metrics.model_flops_per_s(PLAN, 25_600.0), available) == pytest.approx(
        2e9 * 100 / 0.8e12
    )


def test_training_that_beats_a_measured_peak_has_an_mfu_of_one() -> None:
    assert [metrics.compute_mfu(rate, 1e12) for rate in (0.5e12, 2e12)] == [0.5, 1.0]


def test_the_data_sheet_counts_machines_on_cpus_and_devices_on_gpus() -> None:
    assert metrics.data_sheet_flops(CLUSTER, "fp32", world_size=4) == pytest.approx(0.2e12)
    assert metrics.data_sheet_flops(CLUSTER, "fp32", world_size=4, num_nodes=2) == pytest.approx(0.4e12)
    assert metrics.data_sheet_flops({**CLUSTER, "device": "cuda"}, "fp32", world_size=4) == pytest.approx(0.8e12)


def test_mfu_is_none_without_plan_cluster_precision_or_speed() -> None:
    available = metrics.measured_matmul_flops(CLUSTER, "bf16", 1)
    assert metrics.measured_matmul_flops(None, "bf16", 1) is None
    assert metrics.measured_matmul_flops(CLUSTER, "fp16", 1) is None
    assert metrics.data_sheet_flops({**CLUSTER, "data_sheet_tflops": None}, "fp32", 1) is None
    assert metrics.model_flops_per_s(None, 100.0) is None
    assert metrics.model_flops_per_s(PLAN, None) is None
    assert metrics.compute_mfu(None, available) is None
    assert metrics.compute_mfu(1e9, None) is None


def test_smoothing_keeps_length_level_and_both_ends_and_ignores_nan() -> None:
    values = np.full(1000, 3.0)
    values[500] = math.nan
    smoothed = metrics.smooth_series(values)
    assert len(smoothed) == 1000
    assert np.allclose(smoothed, 3.0)
    ramp = metrics.smooth_series(np.arange(100.0))
    assert np.allclose(ramp, np.arange(100.0))
    assert len(metrics.smooth_series(np.array([]))) == 0


def test_smoothing_does_not_spread_a_spike() -> None:
    values = 2.0 + 0.1 * np.sin(np.arange(5000.0))
    values[2500] = 900.0
    assert metrics.smooth_series(values).max() < 2.2


@pytest.mark.parametrize(("predicted_s", "named"), [(0.392, False), (0.36, True), (0.44, True)])
def test_a_part_is_named_only_for_a_prediction_error_of_five_percent(
    tmp_path: Path, predicted_s: float, named: bool
) -> None:
    """The steps take 0.4 s; 0.356 s of them are computing, 0.024 s the optimizer, 0.02 s what is not predicted."""
    run = read_history(healthy(tmp_path / "run", total=60) / "events.jsonl").steps
    plan = {"predicted_breakdown_s": {"computing": predicted_s - 0.024, "grad_sync": 0.0, "optimizer": 0.024}}
    error = metrics.largest_prediction_error(run, plan)
    assert (error is not None) == named
    assert error is None or error.component in ("computing", "the rest")
