"""Predicted against measured: a part and a cause are named only where the step is off by more than two timings are."""

from pathlib import Path

import pytest

from make_run import healthy
from phalanx.observe.history import read_history
from phalanx.observe.prediction_error import largest_prediction_error


@pytest.mark.parametrize(("predicted_s", "named"), [(0.392, False), (0.36, True), (0.44, True)])
def test_a_cause_is_named_only_for_an_error_of_five_percent(tmp_path: Path, predicted_s: float, named: bool) -> None:
    """The steps take 0.4 s; 0.356 s of them are computing, 0.024 s the optimizer, 0.02 s what is not predicted."""
    steps = read_history(healthy(tmp_path / "run", total=60) / "events.jsonl").steps
    plan = {"predicted_breakdown_s": {"computing": predicted_s - 0.024, "grad_sync": 0.0, "optimizer": 0.024}}
    error = largest_prediction_error(steps, plan)
    assert (error is not None) == named
    assert error is None or error.component in ("computing", "the rest")
