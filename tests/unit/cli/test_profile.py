"""What `phalanx profile` prints of what the trial returns."""

from dataclasses import asdict

from phalanx.cli.profile import _format_trace
from phalanx.train.profiler import ProfileResult


def test_a_profile_is_printed_by_phase_kind_and_operation() -> None:
    result = ProfileResult(5, 0.4, {"forward": 0.1, "grad_sync": 0.3}, {"matmul": 0.2}, [("aten::mm", 0.2, 7)])
    lines = _format_trace(asdict(result), 20).splitlines()
    assert lines[0].startswith("5 steps of 400.00 ms")
    assert [line[:13] for line in lines if "75.0%" in line] == ["gradient sync"]
    assert any(line.startswith("aten::mm") for line in lines)
