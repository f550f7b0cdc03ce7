"""The plan as values that the command prints."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.app.plan import memory_by_part, plan, rank_candidates
from phalanx.autoconfig.plan import RunPlan
from phalanx.cli.plan_output import format_explanation

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt-python.yaml"


@pytest.fixture
def run_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    return plan(EXAMPLE, "h100:8")


def test_candidates_are_ranked_and_the_others_say_what_costs_more(run_plan: RunPlan) -> None:
    first, *others = rank_candidates(run_plan, 3)
    assert (first.candidate, first.slowdown_reason) == (run_plan.best, "")
    assert len(others) == 2
    assert all(each.slowdown_reason for each in others)


def test_the_parts_of_memory_sum_to_the_total_on_every_pipeline_rank(run_plan: RunPlan) -> None:
    later_rank = replace(run_plan, footprint=replace(run_plan.footprint, pipeline_rank=1))
    assert sum(memory_by_part(later_rank).values()) == pytest.approx(run_plan.footprint.total)
    assert format_explanation(later_rank) == format_explanation(run_plan)
