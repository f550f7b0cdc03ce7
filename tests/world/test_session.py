"""Training loops of the user's own: `phalanx.session` trains as the plain loop does, and names mistakes."""

import re
from pathlib import Path

import pytest
import torch

import session_script
from phalanx.errors import ExitCode, UsageError
from phalanx.run.event_types import RunWarning, StepDone
from phalanx.train.inference import load_trained_model
from session_runs import STEPS, read_logs, run_session, run_session_once, train_plain_loop, write_session_scripts
from train_harness import TrainHarness


@pytest.fixture(scope="module")
def scripts(lab: TrainHarness) -> Path:
    return write_session_scripts(lab)


@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [
        (1, []),
        (2, ["batch.micro_size=2"]),
        (2, ["parallelism.shard=2", "batch.micro_size=2"]),
        (2, ["parallelism.tensor=2", "batch.micro_size=4"]),
        pytest.param(2, ["parallelism.shard=2", "memory.activation_checkpointing=full"], marks=pytest.mark.slow),
        (4, ["parallelism.shard=2", "parallelism.tensor=2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_layout_gives_the_losses_of_the_plain_loop(
    lab: TrainHarness, scripts: Path, nproc: int, overrides: list[str]
) -> None:
    ended = run_session(lab, ["right", *overrides], nproc)
    assert ended.code == ExitCode.DONE, (ended.message, read_logs(ended))
    assert ended.losses == pytest.approx(train_plain_loop(), rel=1e-5)


def test_bf16_gives_almost_the_same(lab: TrainHarness, scripts: Path) -> None:
    ended = run_session(lab, ["right", "precision=bf16", "parallelism.shard=2"], 2)
    assert ended.code == ExitCode.DONE, (ended.message, read_logs(ended))
    assert ended.losses == pytest.approx(train_plain_loop(), rel=0.03)
    assert ended.losses != pytest.approx(train_plain_loop(), rel=1e-5)


def test_clip_and_schedule_are_the_recipes(lab: TrainHarness, scripts: Path) -> None:
    """The learning rate is the loop's, its course the recipe's."""
    rates = [
        event.lr for event in run_session(lab, ["right", "optimizer.schedule.warmup_steps=4"]).events_of_kind(StepDone)
    ]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.micro_size=2"],
        *(pytest.param([f"parallelism.{way}=2"], marks=pytest.mark.slow) for way in ("shard", "tensor")),
    ],
)
def test_evaluating_in_the_loop_changes_nothing(lab: TrainHarness, scripts: Path, overrides: list[str]) -> None:
    evaluating = run_session(lab, ["evaluates", *overrides], 2)
    assert evaluating.digest == run_session_once(lab, "dropout", *overrides, nproc=2).digest
    assert evaluating.result["steps"] == STEPS


def test_rates_count_tokens_and_the_plan_knows_the_loop(
    lab: TrainHarness, scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_session(lab, ["right"])
    assert {event.units for event in ended.events_of_kind(StepDone)} == {48}
    plan = ended.run.read_json(ended.run.plan) or {}
    assert (plan["unit"], plan["units_per_sample"]) == ("tokens", 4)
    assert plan["trainable_parameters"] == sum(p.numel() for p in session_script.Model().parameters())
    report = lab.call_command(capsys, "report", ended.run.path)
    assert report.returncode == 0, report.stderr
    for said in (
        "Model, 587 parameters",
        "Samples, 60 samples",
        "AdamW, lr 0.01",
        "12 samples = 48 tokens",
        "done: 12",
    ):
        assert said in report.stdout
    assert lab.call_command(capsys, "report", ended.run.path, "--html", ended.run.report).returncode == 0
    with pytest.raises(UsageError, match="was trained by a loop of its own, and only that script can build the model"):
        load_trained_model(ended.run, None, False, torch.device("cpu"))


def test_replicas_have_the_same_bits_on_any_number_of_workers(lab: TrainHarness, scripts: Path) -> None:
    arguments = ["dropout", "determinism=elastic", "batch.micro_size=2"]
    assert len({run_session(lab, arguments, nproc).digest for nproc in (1, 3)}) == 1


def test_a_run_that_is_done_stays_as_it_is_and_goes_on_when_steps_are_raised(lab: TrainHarness, scripts: Path) -> None:
    done = run_session(lab, ["dropout"])
    assert run_session(lab, ["dropout"], 1, done.run).digest == done.digest
    longer = run_session(lab, ["dropout", "steps=16"], 1, done.run)
    assert longer.digest == run_session_once(lab, "dropout", "steps=16").digest
    assert any("steps 12 -> 16" in event.text for event in longer.events_of_kind(RunWarning))


def test_a_second_run_below_one_agent_is_refused(lab: TrainHarness, scripts: Path) -> None:
    ended = run_session(lab, ["folds"], 2)
    assert ended.code == ExitCode.USAGE
    assert "this script joins a second run, and `phalanx train SCRIPT` is one run" in str(ended.message)
    assert ended.result["digest"] == run_session_once(lab, "right", nproc=2).digest
    assert not Path("fold-1").exists()


# ---------------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    "no-backward": (64, "must call session.backward(loss_sum, terms) once for every batch"),
    "no-terms": (64, "over 0 terms: give its number of terms"),
    "mean-shape": (64, "expected the sum of the losses as a 0-d tensor"),
    "no-prepare": (64, "call session.prepare(build, make_optimizer) first"),
    "no-batches": (64, "must take its batches from session.micro_batches(dataset)"),
    "no-module": (64, "build() returned dict, expected an nn.Module"),
    "early-optimizer": (64, "the optimizer has 10 parameters that are not the model's"),
    "discord": (65, "the gradient synchronization in the recipe of worker 1 is not that of worker 0: join all"),
    "own-beginning": (78, "the initial state of worker 1 is not that of worker 0"),
    "loader": (64, "expected a map-style dataset"),
    "no-recipe": (78, "gone.yaml"),
    "scheduler": (64, "session.step: the loop has a scheduler for the learning rate"),
    "stranger": (64, "session_script.py: ended without training: it never reached `with phalanx.session(...)`"),
}


@pytest.mark.parametrize("how", MISTAKES)
def test_a_mistake_is_told_in_a_line(lab: TrainHarness, scripts: Path, how: str) -> None:
    ended = run_session(lab, [how], 2)
    code, said = MISTAKES[how]
    assert ended.code == code, (ended.message, read_logs(ended))
    assert said in str(ended.message)
    assert "Traceback" not in read_logs(ended)
    assert (ended.result["status"], ended.result["digest"]) == ("failed", None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallelism.pipeline=2", "parallelism.pipeline: a training loop of your own cannot be divided so"),
        ("parallelism.shard=4", "parallelism: takes 4 workers (shard 4), but the run has 2"),
        ("optimizer.lr=3", "optimizer.lr: has no effect in a training loop of your own"),
        ("batch.global_size=9", "batch.global_size: 9 samples cannot be divided among 2 workers"),
    ],
)
def test_a_recipe_that_a_loop_cannot_have_is_told(lab: TrainHarness, scripts: Path, override: str, said: str) -> None:
    ended = run_session(lab, ["right", override], 2)
    assert ended.code == ExitCode.RECIPE, (ended.message, read_logs(ended))
    assert said in str(ended.message)
    assert "Traceback" not in read_logs(ended)
    assert not ended.run.resolved.exists()


def test_a_mistake_of_the_loops_own_shows_its_traceback_in_the_log(lab: TrainHarness, scripts: Path) -> None:
    ended = run_session(lab, ["raises"], 2)
    assert ended.code == ExitCode.GAVE_UP
    assert "RuntimeError: a mistake in the loop" in str(ended.message)
    assert re.search(r"session_script.py\", line \d+, in main", read_logs(ended))


def test_a_run_does_not_go_on_with_other_data_unless_forced(lab: TrainHarness, scripts: Path) -> None:
    run = run_session(lab, ["right", "steps=4"]).run
    refused = run_session(lab, ["other-data"], 1, run)
    assert refused.code == ExitCode.DATA
    assert "was trained on other data" in str(refused.message)
    assert "another run directory" in str(refused.message)
    forced = run_session(lab, ["other-data"], 1, run, force=True)
    assert forced.code == ExitCode.DONE
    assert any("continues with other data" in event.text for event in forced.events_of_kind(RunWarning))


def test_a_run_does_not_go_on_with_another_optimizer(lab: TrainHarness, scripts: Path) -> None:
    run = run_session(lab, ["right", "steps=4"]).run
    refused = run_session(lab, ["sgd"], 1, run)
    assert refused.code == ExitCode.USAGE
    assert "was trained with AdamW, and the loop now makes SGD" in str(refused.message)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("own-shapes", "/seen is float32[1, 3] on worker 0 and float32[2, 3] on worker 1; let the"),
        ("own-entries", "no worker would save head.bias, and one worker alone holds "),
    ],
)
def test_state_that_differs_between_workers_ends_the_run_in_its_first_step(
    lab: TrainHarness, scripts: Path, how: str, told: str
) -> None:
    ended = run_session(lab, [how, "checkpoint.every=10"], 2)
    assert ended.code == ExitCode.USAGE
    assert str(ended.message).startswith("step 1: a checkpoint would not hold the state of all workers: ")
    assert told in str(ended.message)


def test_a_script_may_leave_as_it_likes_after_its_run(lab: TrainHarness, scripts: Path) -> None:
    assert run_session(lab, ["exits-after"]).code == ExitCode.DONE


def test_leaving_the_loop_early_saves_and_is_not_finished(lab: TrainHarness, scripts: Path) -> None:
    ended = run_session(lab, ["break"])
    assert ended.code == ExitCode.UNFINISHED
    assert (ended.result["status"], ended.result["steps"]) == ("interrupted", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "missing.py: no such file; expected a recipe or a script that calls phalanx.session"),
        (["session_script.py", "--dry-run"], "--dry-run is for recipes"),
    ],
)
def test_a_script_that_cannot_be_run_is_told(
    lab: TrainHarness, scripts: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = lab.call_command(capsys, "train", *arguments)
    assert ended.returncode == ExitCode.USAGE
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
