"""Every layout against one process in fp32: the same losses and gradient norms over 20 steps, and checkpoints that are
the same state under another layout. What is run stands in `helpers/parallelism_cases.py`."""

import json
from pathlib import Path

import pytest

import parallelism_cases
from parallelism_cases import LAYOUTS, Case, Layout
from phalanx.errors import ExitCode
from phalanx.jobs.agent.leader_agent import LeaderAgent
from phalanx.jobs.agent.recovery_policy import RecoveryPolicy
from phalanx.recipe import dump_recipe, load_recipe
from phalanx.recipe.schema import Parallelism as LayoutValues
from phalanx.run import Run
from phalanx.run.event_types import EvaluationDone, StepDone
from phalanx.run.process_messages import Command
from phalanx.train.checkpoint import digest_checkpoint, list_checkpoints
from train_harness import HarnessRun, TrainHarness

TOLERANCE = 1e-5
FEW = 2
"""Workers; of layouts with twice as many every ninth is tried in what `make test` can spare."""


def marks(layout: Layout, case: Case | None = None) -> list[pytest.MarkDecorator]:
    """What is left to `make test-all`: most layouts of many workers, and the further cases of all
    of these and of the pipeline's other schedules."""
    many = [other for other in LAYOUTS if other.workers > FEW]
    again = layout.workers > FEW or "pipeline_schedule" in layout.values
    further = again and case is not None and case is not layout.cases[0]
    left = layout in many and (layout not in many[::9] or layout.workers > 2 * FEW)
    return [pytest.mark.slow] if further or left else []


RUNS = [
    pytest.param(
        layout,
        case,
        id=f"{layout}-{case.name}",
        marks=marks(layout, case),
    )
    for layout in LAYOUTS
    for case in layout.cases
]


@pytest.fixture(scope="module", autouse=True)
def documents(lab: TrainHarness) -> None:
    """Many short documents, so that most samples hold several."""
    text = (lab.folder / "few.txt").read_text()
    lines = [json.dumps({"text": text[start : start + 11]}) for start in range(0, len(text), 11)]
    (lab.folder / "documents.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def trained(lab: TrainHarness) -> dict[str, HarnessRun]:
    """Runs of this file by name, each trained once."""
    return {}


def run_of(lab: TrainHarness, trained: dict[str, HarnessRun], layout: Layout, case: Case) -> HarnessRun:
    key = f"{layout}-{case.name}"
    if key not in trained:
        trained[key] = lab.train({**case.changes, "batch": layout.batch, "parallelism": layout.values}, layout.workers)
    assert trained[key].code == ExitCode.DONE, trained[key].message
    return trained[key]


def largest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_losses_and_gradient_norms_are_those_of_one_process(
    lab: TrainHarness, trained: dict[str, HarnessRun], layout: Layout, case: Case
) -> None:
    alone, ended = lab.train_reference(case.changes), run_of(lab, trained, layout, case)
    assert len(ended.losses) == parallelism_cases.STEPS
    assert largest(ended.losses, alone.losses) < TOLERANCE
    norms = [[event.grad_norm for event in run.events_of_kind(StepDone)] for run in (ended, alone)]
    assert largest(*norms) < TOLERANCE
    scores = [[event.loss for event in run.events_of_kind(EvaluationDone)] for run in (ended, alone)]
    assert largest(*scores) < TOLERANCE


@pytest.mark.parametrize("layout", [pytest.param(each, id=str(each), marks=marks(each)) for each in LAYOUTS])
def test_a_checkpoint_is_the_same_state_under_another_layout(
    lab: TrainHarness, trained: dict[str, HarnessRun], layout: Layout, tmp_path: Path
) -> None:
    ended = run_of(lab, trained, layout, layout.cases[0])
    again = Run(tmp_path / "again")
    again.create()
    target = Layout(layout.moved_to)
    resolved = load_recipe(ended.run.resolved).recipe
    recipe = resolved.model_copy(update={"parallelism": LayoutValues.model_validate(layout.moved_to)})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    payload = {"run": ended.run.path, "out": again.path, "recipe": tmp_path / "recipe.yaml", "folder": lab.folder}
    command = Command(function="resave:work", payload={name: str(path) for name, path in payload.items()})
    with (
        lab.environment(),
        LeaderAgent(again, lab.fork_server, lambda event: None, RecoveryPolicy(1)) as agent,
    ):
        outcome = agent.supervise(target.workers, command, 0)
    assert outcome.code == ExitCode.DONE, outcome.message
    (copy,) = list_checkpoints(again.checkpoints)
    assert digest_checkpoint(copy) == ended.digest


def test_the_table_in_the_docs_is_what_is_tested() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "parallelism.md"
    assert parallelism_cases.table() in page.read_text(encoding="utf-8")


def test_every_case_turns_on_what_it_is_for(lab: TrainHarness) -> None:
    norms = [event.grad_norm for event in lab.train_reference(parallelism_cases.FIRST.changes).events_of_kind(StepDone)]
    assert all(norm > parallelism_cases.FIRST.changes["optimizer"]["max_grad_norm"] for norm in norms)


def test_a_model_of_one_layer_is_cut_by_tensor_ranks_with_its_sequence_whole(lab: TrainHarness) -> None:
    """Nothing repeats in it, so there are no blocks between which hidden states could be cut."""
    changes = {**parallelism_cases.first(1).changes, "steps": 3}
    ended, alone = lab.train({**changes, "parallelism": {"tensor": 2}}, 2), lab.train_reference(changes)
    assert ended.code == ExitCode.DONE, ended.message
    assert largest(ended.losses, alone.losses) < TOLERANCE
