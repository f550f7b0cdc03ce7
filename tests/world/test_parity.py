"""The parity matrix: each parallelism against one process, with losses and gradient norms of 10 steps, and checkpoints
that are the same state under another parallelism. `helpers/parallelism_cases.py` lists the runs; `make parity` runs all
of them. `make test` runs its QUICK ones: one of each parallelism of two workers and one of four, each with the model
that the others have least; these cover all models, both precisions, dropout, and even and uneven batches. It moves
the checkpoints of four of them, and asks for each refused dimension with one model."""

import hashlib
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import parallelism_cases
import train_harness as harness_module
from parallelism_cases import CASES, MICRO_SIZE, MODELS, QUICK, QUICK_MOVED, STEPS, Case, Layout
from parity_inputs import write_parity_inputs
from phalanx.errors import ExitCode, RecipeError
from phalanx.jobs.agent.leader_agent import LeaderAgent
from phalanx.jobs.agent.leader_state import RecoveryPolicy
from phalanx.recipe import load_recipe
from phalanx.recipe.load import dump_recipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.event_types import EvaluationDone, StepDone
from phalanx.run.process_messages import Command
from phalanx.train.checkpoint.digest import digest_checkpoint
from phalanx.train.checkpoint.format import list_checkpoints
from train_harness import HarnessRun, TrainHarness

TOLERANCE = 1e-5
NOISE_FACTOR = 3.0
"""How much farther than two micro-batch sizes on one process, or than fp32, a parallelism in bf16 may be from it."""


def marks(case: Case, is_quick: bool) -> list[pytest.MarkDecorator]:
    """Keep the runs of one reference on one process of pytest, and leave most runs to `make parity`."""
    reference = hashlib.sha256(json.dumps(case.changes).encode()).hexdigest()[:8]
    group = pytest.mark.xdist_group(reference)
    return [group] if is_quick else [group, pytest.mark.slow]


RUNS = [pytest.param(case, id=str(case), marks=marks(case, case in QUICK)) for case in CASES]
MOVED_RUNS = [
    pytest.param(case, id=str(case), marks=marks(case, case.layout.values in QUICK_MOVED))
    for case in parallelism_cases.MOVED
]
QUICK_REFUSALS = {"expert": "hf Llama", "tensor": "hf Mixtral", "pipeline": "hf Mixtral", "context": "image classifier"}
REFUSALS = [
    pytest.param(name, dimension, marks=[] if QUICK_REFUSALS[dimension] == name else [pytest.mark.slow])
    for name, model in MODELS.items()
    for dimension in sorted(model.refused)
]


@pytest.fixture(scope="module", autouse=True)
def inputs(lab: TrainHarness) -> None:
    write_parity_inputs(lab.folder, (lab.folder / "few.txt").read_text())


@pytest.fixture(autouse=True)
def _no_model_args(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base recipe of the tests has arguments for our transformer, and data for it."""
    base = {**harness_module.BASE_RECIPE, "model": {}, "data": {}}
    monkeypatch.setattr(harness_module, "BASE_RECIPE", base)


@pytest.fixture(scope="module")
def trained(lab: TrainHarness) -> dict[str, HarnessRun]:
    """Runs of this file by name, each trained once."""
    return {}


def run_of(lab: TrainHarness, trained: dict[str, HarnessRun], case: Case) -> HarnessRun:
    if str(case) not in trained:
        trained[str(case)] = lab.train({**case.changes, "parallelism": case.layout.values}, case.layout.workers)
    ended = trained[str(case)]
    assert ended.code == ExitCode.DONE, ended.message
    return ended


def relative_differences(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]


def curves_of(ended: HarnessRun) -> list[list[float]]:
    """Losses and gradient norms of all steps, and losses of evaluations."""
    norms = [event.grad_norm for event in ended.events_of_kind(StepDone)]
    return [ended.losses, norms, [event.loss for event in ended.events_of_kind(EvaluationDone)]]


def largest_difference(ours: HarnessRun, theirs: HarnessRun) -> float:
    """Return the largest relative difference of a loss or norm."""
    curves = zip(curves_of(ours), curves_of(theirs), strict=True)
    return max(max(relative_differences(*pair)) for pair in curves)


def mean_loss_difference(ours: HarnessRun, theirs: HarnessRun) -> float:
    return statistics.mean(ours.relative_differences(theirs))


@pytest.mark.parametrize("case", RUNS)
def test_losses_and_gradient_norms_are_those_of_one_process(
    lab: TrainHarness, trained: dict[str, HarnessRun], case: Case
) -> None:
    alone, ended = lab.train_reference(case.changes), run_of(lab, trained, case)
    assert len(ended.losses) == STEPS
    if case.precision == "fp32":
        assert largest_difference(ended, alone) < TOLERANCE
        return
    small, large = (lab.train_reference(case.changes_with_micro_size(size)) for size in (MICRO_SIZE, 2 * MICRO_SIZE))
    difference, noise = mean_loss_difference(ended, alone), mean_loss_difference(small, large)
    if difference >= NOISE_FACTOR * noise:  # a CPU with products in bf16 rounds alike in both micro-batch sizes
        fp32 = lab.train_reference(replace(case, precision="fp32").changes)
        noise = mean_loss_difference(fp32, alone)
    assert difference < NOISE_FACTOR * noise


@pytest.mark.parametrize(("model", "dimension"), REFUSALS)
def test_a_parallelism_that_a_model_cannot_have_is_refused_before_the_first_step(
    lab: TrainHarness, model: str, dimension: str
) -> None:
    values = {"shard": 2, "expert": 2} if dimension == "expert" else {dimension: 2}
    case = Case(Layout(values), model, "fp32", 0.0, "adamw", "plain", "even")
    run = lab.new_run()
    with pytest.raises(RecipeError, match=f"parallelism.{dimension}"):
        lab.train({**case.changes, "parallelism": values}, 2, run)
    assert not run.events.exists()


@pytest.mark.parametrize("case", MOVED_RUNS)
def test_a_checkpoint_is_the_same_state_under_another_parallelism(
    lab: TrainHarness, trained: dict[str, HarnessRun], case: Case, tmp_path: Path
) -> None:
    ended, moved_to = run_of(lab, trained, case), case.layout.moved_to
    again = Run(tmp_path / "again")
    again.create()
    resolved = load_recipe(ended.run.resolved).recipe
    recipe = resolved.model_copy(update={"parallelism": Parallelism.model_validate(moved_to)})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    payload = {"run": ended.run.path, "out": again.path, "recipe": tmp_path / "recipe.yaml", "folder": lab.folder}
    command = Command(function="resave:work", payload={name: str(path) for name, path in payload.items()})
    with (
        lab.environment(),
        LeaderAgent(again, lab.fork_server, lambda event: None, RecoveryPolicy(1)) as agent,
    ):
        outcome = agent.supervise(Layout(moved_to).workers, command, 0)
    assert outcome.code == ExitCode.DONE, outcome.message
    (copy,) = list_checkpoints(again.checkpoints)
    assert digest_checkpoint(copy) == ended.digest


def test_the_table_in_the_docs_is_what_is_tested() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "parallelism.md"
    assert parallelism_cases.table() in page.read_text(encoding="utf-8")


def test_the_matrix_clips_gradients(lab: TrainHarness) -> None:
    changes = CASES[0].changes
    norms = [event.grad_norm for event in lab.train_reference(changes).events_of_kind(StepDone)]
    assert all(norm > changes["optimizer"]["max_grad_norm"] for norm in norms)


def test_a_model_of_one_layer_is_cut_by_tensor_ranks_with_its_sequence_whole(lab: TrainHarness) -> None:
    """Nothing repeats in it, so there are no blocks between which hidden states could be cut."""
    changes = {**CASES[0].changes, "model": {"args": {"layers": 1, "hidden_size": 32, "num_heads": 4}}, "steps": 3}
    ended, alone = lab.train({**changes, "parallelism": {"tensor": 2}}, 2), lab.train_reference(changes)
    assert ended.code == ExitCode.DONE, ended.message
    assert largest_difference(ended, alone) < TOLERANCE
