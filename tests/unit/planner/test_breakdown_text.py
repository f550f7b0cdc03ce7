"""The parts of a step as text: they sum to the step."""

import re

from phalanx.planner.step_time import BREAKDOWN_LABELS, StepBreakdown, format_breakdown


def test_a_breakdown_sums_to_the_whole_and_leaves_out_what_takes_nothing() -> None:
    text = format_breakdown(StepBreakdown(gemm=3.0, optimizer=0.9, pipeline_bubble=0.1), width=20)
    shares = [float(found[1]) for line in text.splitlines() if (found := re.search(r"([0-9.]+)%", line))]
    assert shares == [75.0, 2.5, 22.5, 100.0]
    assert len(text.splitlines()) == 4
    assert "75.0%  " + "#" * 15 in text


def test_every_part_has_words() -> None:
    assert set(BREAKDOWN_LABELS) == set(vars(StepBreakdown()))
