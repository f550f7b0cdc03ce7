"""Training loops of the user's own: `phalanx.session` keeps every promise of a run, however the script is started."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import session_script
from phalanx.app.supervise import supervise_script
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.agent.hang_detection import MIN_SILENCE_S
from phalanx.recipe.yaml_loader import parse_yaml, to_yaml
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted, HangDetected, RunWarning, StepDone, WorkerFailure
from phalanx.train.checkpoint import list_checkpoints
from phalanx.train.inference import load_trained_model
from phalanx.train.map_dataset import MapDatasetSource, fingerprint_dataset
from phalanx.train.ops.random_draws import derive_seed, seed_everything
from read_trackers import read_tensorboard
from train_harness import (
    HarnessRun,
    TrainHarness,
    Values,
    plan_fault,
    send_signal_at_step,
    wait_until,
    write_faults,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ("language", "vision")
STEPS = 12
RECIPE: Values = {
    "name": "own",
    "batch": {"global_size": 12},
    "steps": STEPS,
    "optimizer": {"max_grad_norm": None, "schedule": {"warmup_steps": 0, "decay": "constant"}},
    "checkpoint": {"every": 4},
    "fault_tolerance": {"max_restarts": 5},
    "precision": "fp32",
    "callbacks": ["faults:Faults"],
    "num_threads": 1,
}
SLOW = plan_fault(1, "slow", delay=0.03, attempt=None)
"""Steps so slow that a checkpoint is written, and the agent hears of each, before the next but one is done."""
REFERENCES: dict[object, HarnessRun] = {}


@pytest.fixture(scope="module")
def scripts(lab: TrainHarness) -> Path:
    """A folder with the loop of the tests, and both examples shortened to a few steps on a few threads."""
    shutil.copy(session_script.__file__, lab.folder)
    (lab.folder / "session_script.yaml").write_text(to_yaml(RECIPE, flow=False))
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / "own-loop" / f"{name}.py", lab.folder)
        recipe = parse_yaml((ROOT / "examples" / "own-loop" / f"{name}.yaml").read_text(), "recipe.yaml")[0]
        recipe |= {"steps": STEPS, "num_threads": 1, "callbacks": ["faults:Faults"], "checkpoint": {"every": 4}}
        recipe["optimizer"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
        (lab.folder / f"{name}.yaml").write_text(to_yaml(recipe, flow=False))
    return lab.folder


def ours(
    lab: TrainHarness,
    arguments: Sequence[str] = (),
    nproc: int = 1,
    run: Run | None = None,
    *,
    script: str = "session_script",
    faults: Sequence[Values] = (),
    show: Callable[[Event], None] = lambda event: None,
    force: bool = False,
) -> HarnessRun:
    """Run a script under our agent, as `phalanx train SCRIPT` does."""
    run = run or lab.new_run()
    write_faults(run, faults)
    with lab.environment():
        path = lab.folder / f"{script}.py"
        given = TrainArguments(path, arguments, run.path, nproc, force)
        outcome = supervise_script(given, run, nproc, lab.fork_server, show)
    return HarnessRun(run, int(outcome.code), outcome.message)


def undisturbed(lab: TrainHarness, *arguments: str, nproc: int = 1, script: str = "session_script") -> HarnessRun:
    """The same without any fault, run once."""
    key = (arguments, nproc, script)
    if key not in REFERENCES:
        REFERENCES[key] = ours(lab, arguments, nproc, script=script)
    return REFERENCES[key]


def log(ended: HarnessRun) -> str:
    """What the workers printed."""
    return "".join(path.read_text() for path in sorted(ended.run.logs.iterdir()))


def plain_losses(steps: int = STEPS) -> list[float]:
    """The same loop in plain PyTorch: one process, whole batches, in the run's order and from its initial weights."""
    seed_everything(derive_seed(0, "init"), torch.device("cpu"))
    model, samples = session_script.Model(), session_script.Samples()
    optimizer, data = session_script.adamw(model), MapDatasetSource(samples, fingerprint_dataset(samples), 0)
    losses = []
    for step in range(steps):
        batch = data.read_training(12 * step, 12)[""][:].value
        loss = session_script.loss_sum(model, batch) / 12
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------------ the same numbers


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
    ended = ours(lab, ["right", *overrides], nproc)
    assert ended.code == ExitCode.DONE, (ended.message, log(ended))
    assert ended.losses == pytest.approx(plain_losses(), rel=1e-5)


def test_bf16_gives_almost_the_same(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["right", "precision=bf16", "parallelism.shard=2"], 2)
    assert ended.code == ExitCode.DONE, (ended.message, log(ended))
    assert ended.losses == pytest.approx(plain_losses(), rel=0.03)
    assert ended.losses != pytest.approx(plain_losses(), rel=1e-5)


def test_clip_and_schedule_are_the_recipes(lab: TrainHarness, scripts: Path) -> None:
    """The learning rate is the loop's, its course the recipe's."""
    rates = [event.lr for event in ours(lab, ["right", "optimizer.schedule.warmup_steps=4"]).events_of_kind(StepDone)]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.micro_size=2"],
        *(pytest.param([f"parallelism.{way}=2"], marks=pytest.mark.slow) for way in ("shard", "tensor")),
    ],
)
def test_evaluating_in_the_loop_changes_nothing(lab: TrainHarness, scripts: Path, overrides: list[str]) -> None:
    evaluating = ours(lab, ["evaluates", *overrides], 2)
    assert evaluating.digest == undisturbed(lab, "dropout", *overrides, nproc=2).digest
    assert evaluating.result["steps"] == STEPS


def test_rates_count_tokens_and_the_plan_knows_the_loop(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["right"])
    assert {event.units for event in ended.events_of_kind(StepDone)} == {48}
    plan = ended.run.read_json(ended.run.plan) or {}
    assert (plan["unit"], plan["units_per_sample"]) == ("tokens", 4)
    assert plan["trainable_parameters"] == sum(p.numel() for p in session_script.Model().parameters())
    report = lab.command("report", ended.run.path)
    assert report.returncode == 0, report.stderr
    for said in (
        "Model, 587 parameters",
        "Samples, 60 samples",
        "AdamW, lr 0.01",
        "12 samples = 48 tokens",
        "done: 12",
    ):
        assert said in report.stdout
    assert lab.command("report", ended.run.path, "--html", ended.run.report).returncode == 0
    with pytest.raises(UsageError, match="was trained by a loop of its own, and only that script can build the model"):
        load_trained_model(ended.run, None, False, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------- never lost


@pytest.mark.parametrize(
    ("nproc", "ranks", "overrides"),
    [
        (1, None, []),
        (2, [1], []),
        pytest.param(2, None, ["batch.micro_size=2"], marks=pytest.mark.slow),
        pytest.param(2, [0], ["parallelism.shard=2"], marks=pytest.mark.slow),
        pytest.param(2, [1], ["parallelism.tensor=2"], marks=pytest.mark.slow),
        pytest.param(
            2,
            [1],
            ["local_sgd.method=diloco", "determinism=off", "local_sgd.sync_every=2", "local_sgd.warmup_steps=0"],
            marks=pytest.mark.slow,
            id="diloco",
        ),
    ],
)
def test_killed_at_any_step_it_ends_in_the_same_bits(
    lab: TrainHarness, scripts: Path, nproc: int, ranks: list[int] | None, overrides: list[str]
) -> None:
    arguments = ["dropout", *overrides]
    kills = [plan_fault(3, ranks=ranks), plan_fault(7, ranks=ranks, attempt=1), plan_fault(10, ranks=ranks, attempt=2)]
    ended = ours(lab, arguments, nproc, faults=[SLOW, *kills])
    assert ended.digest == undisturbed(lab, *arguments, nproc=nproc).digest
    starts = [event.start_step for event in ended.events_of_kind(AttemptStarted)]
    assert len(starts) == 4
    assert starts[-1] in (4, 8)  # the last checkpoint, or the one before where the disk was slow


@pytest.mark.slow
def test_a_loop_that_hangs_is_told_with_its_stack_and_started_again(lab: TrainHarness, scripts: Path) -> None:
    arguments = ["batch.micro_size=1"]
    ended = ours(lab, ["stuck", *arguments, "fault_tolerance.hang_timeout_s=7.5"], 2)
    assert ended.digest == undisturbed(lab, "right", *arguments, nproc=2).digest
    (hang,) = ended.events_of_kind(HangDetected)
    assert (hang.rank, hang.is_stopped) == (1, False)
    assert hang.silence_s < 2 * MIN_SILENCE_S
    assert "in work_between_steps" in hang.stack
    assert "session_script.py" in hang.stack
    (told,) = ended.events_of_kind(WorkerFailure)
    assert (told.rank, told.what) == (1, "hang")


@pytest.mark.slow
def test_a_loop_that_says_that_it_is_alive_is_let_be(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["thinks", "batch.micro_size=1", "fault_tolerance.hang_timeout_s=6"], 2)
    assert ended.digest == undisturbed(lab, "right", "batch.micro_size=1", nproc=2).digest
    assert ended.events_of_kind(HangDetected) == ended.events_of_kind(WorkerFailure) == []


def test_replicas_have_the_same_bits_on_any_number_of_workers(lab: TrainHarness, scripts: Path) -> None:
    arguments = ["dropout", "determinism=elastic", "batch.micro_size=2"]
    assert len({ours(lab, arguments, nproc).digest for nproc in (1, 3)}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_it_saves_and_goes_on_to_the_same_bits(
    lab: TrainHarness, scripts: Path, number: signal.Signals
) -> None:
    stopped = ours(lab, ["dropout"], 2, faults=[SLOW], show=send_signal_at_step(3, number))
    assert (stopped.code, stopped.message) == (ExitCode.UNFINISHED, None)
    assert 3 <= stopped.result["steps"] < STEPS
    assert stopped.result["status"] == "interrupted"
    assert ours(lab, ["dropout"], 2, stopped.run).digest == undisturbed(lab, "dropout", nproc=2).digest


def test_a_run_that_is_done_stays_as_it_is_and_goes_on_when_steps_are_raised(lab: TrainHarness, scripts: Path) -> None:
    done = ours(lab, ["dropout"])
    assert ours(lab, ["dropout"], 1, done.run).digest == done.digest
    longer = ours(lab, ["dropout", "steps=16"], 1, done.run)
    assert longer.digest == undisturbed(lab, "dropout", "steps=16").digest
    assert any("steps 12 -> 16" in event.text for event in longer.events_of_kind(RunWarning))


def test_a_loop_that_runs_out_of_memory_goes_on_with_smaller_micro_batches(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["hungry"])
    assert ended.code == ExitCode.DONE, (ended.message, log(ended))
    assert ended.losses == pytest.approx(plain_losses(), rel=1e-5)
    given = ours(lab, ["hungry", "batch.micro_size=12"])
    assert given.code == ExitCode.RECIPE
    assert "out of memory with micro-batches of 12; use batch.micro_size=6" in str(given.message)


@pytest.mark.parametrize("name", ["language", pytest.param("vision", marks=pytest.mark.slow)])
def test_an_example_learns_and_survives(lab: TrainHarness, scripts: Path, name: str) -> None:
    whole = undisturbed(lab, nproc=2, script=name)
    killed = ours(lab, [], 2, script=name, faults=[plan_fault(6, ranks=[1]), plan_fault(9, attempt=1)])
    assert killed.digest == whole.digest
    assert sum(whole.losses[-3:]) < 0.9 * sum(whole.losses[:3])


# -------------------------------------------------------------------------------------- started in other ways


def start_alone(lab: TrainHarness, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """`python WORDS`, in a folder of its own, without our agent."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **lab.variables()},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alone(lab: TrainHarness, folder: Path, *words: str, nproc: int = 1) -> "subprocess.CompletedProcess[str]":
    """The same to its end, under torchrun if there are several workers."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    with start_alone(lab, folder, *launcher, *words) as process:
        out, errors = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("language", signal.SIGTERM, ExitCode.UNFINISHED), ("vision", signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_example_alone_is_interrupted_and_finished(
    lab: TrainHarness, scripts: Path, name: str, number: signal.Signals, code: int
) -> None:
    folder = lab.runs / f"alone-{name}"
    run = Run(folder / "runs" / name)
    write_faults(run, [{**SLOW, "delay": 0.15}])
    script = str(lab.folder / f"{name}.py")
    with start_alone(lab, folder, script) as process:
        wait_until(lambda: process.poll() is not None or list_checkpoints(run.checkpoints), 60)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert ("not finished; run the same command again to resume" in said) == (code == ExitCode.UNFINISHED)
    write_faults(run, [])
    done = alone(lab, folder, script)
    ended, said = lab.from_command_line(run, done.returncode), done.stderr
    assert ended.digest == undisturbed(lab, script=name).digest, said
    assert ended.events_of_kind(AttemptStarted)[1].start_step >= 4
    assert said.count(f"digest   {ended.digest}") == 1
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_under_torchrun_is_the_same_run(lab: TrainHarness, scripts: Path, tmp_path: Path, name: str) -> None:
    done = alone(lab, tmp_path, str(lab.folder / f"{name}.py"), nproc=2)
    assert done.returncode == 0, done.stderr
    ended = lab.from_command_line(Run(tmp_path / "runs" / name), 0)
    assert ended.digest == undisturbed(lab, nproc=2, script=name).digest
    assert done.stderr.count("finished: 12 of 12 steps") == 1


def test_the_command_line_shows_a_script_like_a_recipe(lab: TrainHarness, scripts: Path) -> None:
    run = lab.new_run()
    overrides = ("steps=6", "trackers=[tensorboard]")
    done = lab.command(
        "train", lab.folder / "session_script.py", "right", *overrides, "--nproc-per-node", "2", "--run", run.path
    )
    assert done.returncode == 0, done.stderr
    for said in ("2 workers on cpu", "tokens/s", "finished: 6 of 6 steps", f"phalanx report {run.path}"):
        assert said in done.stderr
    assert [step for step, _ in read_tensorboard(run, "train/loss")] == [1, 2, 3, 4, 5, 6]


def test_two_runs_of_one_script_are_two_runs_and_none_is_given_to_it_again(
    lab: TrainHarness, scripts: Path, tmp_path: Path
) -> None:
    done = alone(lab, tmp_path, str(lab.folder / "session_script.py"), "same-fold")
    assert done.returncode == ExitCode.USAGE
    assert "runs/own: this script has joined this run before, and it is done" in done.stderr
    assert "Traceback" not in done.stderr
    first, second = (lab.from_command_line(Run(tmp_path / name), 0).digest for name in ("runs/own", "fold-1"))
    assert first == undisturbed(lab, "right").digest
    assert second == undisturbed(lab, "right", "seed=1").digest
    assert "0 models of runs before are there" in done.stderr  # a GPU has no room for both
    assert done.stderr.count(f"finished: {STEPS} of {STEPS} steps") == 2


def test_a_second_run_below_one_agent_is_refused(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["folds"], 2)
    assert ended.code == ExitCode.USAGE
    assert "this script joins a second run, and `phalanx train SCRIPT` is one run" in str(ended.message)
    assert ended.result["digest"] == undisturbed(lab, "right", nproc=2).digest
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
    ended = ours(lab, [how], 2)
    code, said = MISTAKES[how]
    assert ended.code == code, (ended.message, log(ended))
    assert said in str(ended.message)
    assert "Traceback" not in log(ended)
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
    ended = ours(lab, ["right", override], 2)
    assert ended.code == ExitCode.RECIPE, (ended.message, log(ended))
    assert said in str(ended.message)
    assert "Traceback" not in log(ended)
    assert not ended.run.resolved.exists()


def test_a_mistake_of_the_loops_own_shows_its_traceback_in_the_log(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["raises"], 2)
    assert ended.code == ExitCode.GAVE_UP
    assert "RuntimeError: a mistake in the loop" in str(ended.message)
    assert re.search(r"session_script.py\", line \d+, in main", log(ended))


def test_a_run_does_not_go_on_with_other_data_unless_forced(lab: TrainHarness, scripts: Path) -> None:
    run = ours(lab, ["right", "steps=4"]).run
    refused = ours(lab, ["other-data"], 1, run)
    assert refused.code == ExitCode.DATA
    assert "was trained on other data" in str(refused.message)
    assert "another run directory" in str(refused.message)
    forced = ours(lab, ["other-data"], 1, run, force=True)
    assert forced.code == ExitCode.DONE
    assert any("continues with other data" in event.text for event in forced.events_of_kind(RunWarning))


def test_a_run_does_not_go_on_with_another_optimizer(lab: TrainHarness, scripts: Path) -> None:
    run = ours(lab, ["right", "steps=4"]).run
    refused = ours(lab, ["sgd"], 1, run)
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
    ended = ours(lab, [how, "checkpoint.every=10"], 2)
    assert ended.code == ExitCode.USAGE
    assert str(ended.message).startswith("step 1: a checkpoint would not hold the state of all workers: ")
    assert told in str(ended.message)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exits", "sys.exit() was called before the run was done ("),
        ("vanishes", "with exit code 0, before the run was done"),
    ],
)
def test_a_loop_whose_worker_leaves_with_0_is_given_up_and_the_worker_named(
    lab: TrainHarness, scripts: Path, how: str, told: str
) -> None:
    ended = ours(lab, [how, "fault_tolerance.max_restarts=1"], 2)
    assert ended.code == ExitCode.GAVE_UP
    assert told in str(ended.message)
    assert (ended.result["status"], ended.result["digest"]) == ("failed", None)


def test_a_loop_alone_that_leaves_with_0_in_the_middle_does_not_end_with_0(
    lab: TrainHarness, scripts: Path, tmp_path: Path
) -> None:
    done = alone(lab, tmp_path, str(lab.folder / "session_script.py"), "exits")
    assert done.returncode == ExitCode.GAVE_UP
    assert "error: worker 0: sys.exit() was called before the run was done" in done.stderr
    assert "Traceback" not in done.stderr


NOTEBOOK = """
import os, signal, sys
sys.ps1 = "In : "  # as IPython and Python's prompt have it
import session_script, phalanx
from phalanx.errors import RecipeError
try:
    session_script.main("right", ["optimizer.lr=1"], "refused")
except RecipeError as error:
    print("refused:", error)
session_script.main("break", [], "cell")
print("behind the block")
step = session_script.loss_sum
def interrupted(model, batch):
    os.kill(os.getpid(), signal.SIGINT)
    return step(model, batch)
session_script.loss_sum = interrupted
try:
    session_script.main("right", [], "interrupted")
except KeyboardInterrupt:
    print("interrupted")
session_script.loss_sum = step
session_script.main("right", [], "interrupted")
print("done")
"""


def test_in_a_notebook_no_end_of_a_run_ends_the_process(lab: TrainHarness, scripts: Path, tmp_path: Path) -> None:
    done = alone(lab, tmp_path, "-c", f"import sys; sys.path.insert(0, {str(lab.folder)!r})\n{NOTEBOOK}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("refused: ")
    assert said[1:] == ["behind the block", "interrupted", "done"]


def test_a_script_may_leave_as_it_likes_after_its_run(lab: TrainHarness, scripts: Path) -> None:
    assert ours(lab, ["exits-after"]).code == ExitCode.DONE


def test_leaving_the_loop_early_saves_and_is_not_finished(lab: TrainHarness, scripts: Path) -> None:
    ended = ours(lab, ["break"])
    assert ended.code == ExitCode.UNFINISHED
    assert (ended.result["status"], ended.result["steps"]) == ("interrupted", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "missing.py: no such file; expected a recipe or a script that calls phalanx.session"),
        (["session_script.py", "--dry-run"], "--dry-run is for recipes"),
    ],
)
def test_a_script_that_cannot_be_run_is_told(lab: TrainHarness, scripts: Path, arguments: list[str], said: str) -> None:
    ended = lab.command("train", *arguments)
    assert ended.returncode == ExitCode.USAGE
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
