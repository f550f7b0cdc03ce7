"""`phalanx chaos` as people type it: a run goes through random kills, and one that does not come through is told."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import WorkerFailure
from train_harness import HarnessRun, TrainHarness, Values, wait_until

LONG: Values = {
    "steps": 300,
    "evaluation": {"every": 200},
    "batch": {"global_size": 2, "micro_size": 1},
    "checkpoint": {"every": 10, "in_memory_every": "1%"},
    "fault_tolerance": {"max_restarts": 3},
    "callbacks": ["mischief:Mischief"],
}
MISCHIEF = """
import os
import subprocess
import time


class Mischief:
    def post_step(self, run, event):
        time.sleep(0.005)  # 300 steps are too short for ten faults on a fast machine
        do = os.environ.get("MISCHIEF")
        if do == "drift" and os.environ["PHALANX_ATTEMPT"] != "0":
            next(run.model.parameters()).data.add_(1e-3)
        if do == "leak" and event.step == 1:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
"""What a user's own code may do wrong: go on from a state that no checkpoint has, start what outlives the run."""


@pytest.fixture(scope="module")
def recipe(lab: TrainHarness) -> Path:
    (lab.folder / "mischief.py").write_text(MISCHIEF)
    return lab.recipe_file(LONG, "long")


@pytest.fixture(scope="module")
def calm(lab: TrainHarness, recipe: Path) -> HarnessRun:
    """The run without any fault, trained by our agent in this process."""
    ended = lab.train(LONG, 2)
    assert ended.code == ExitCode.DONE
    return ended


def places(lab: TrainHarness, temporary: Path) -> dict[str, str]:
    """Where temporary files go, and where torch keeps what it compiled, which is none of them."""
    return {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(lab.cache / "inductor")}


class Chaos:
    """The command, for this recipe."""

    def __init__(self, lab: TrainHarness, recipe: Path, folder: Path):
        self.lab, self.recipe, self.folder = lab, recipe, folder

    def __call__(self, *words: str | Path, **variables: str) -> tuple[int, dict[str, Any]]:
        """Exit code and answer. Nothing of the lab's is left when it is over, nor anything in the folder for temporary
        files."""
        temporary = self.folder / "tmp"
        temporary.mkdir()
        given = ("chaos", self.recipe, "--run", self.folder / "run", "--nproc-per-node", "2", "--json", *words)
        with self.lab.start(*given, variables={**places(self.lab, temporary), **variables}) as process:
            out, errors = process.communicate(timeout=280)
        assert "Traceback" not in errors
        assert self.lab.processes() == set()
        assert list(temporary.iterdir()) == []
        assert out, errors
        return process.returncode, json.loads(out)

    def refused(self, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """What the command says of something that it does not begin."""
        done = self.lab.command("chaos", self.recipe, "--run", self.folder / "run", *words)
        assert not (self.folder / "run").exists()
        return done


@pytest.fixture
def chaos(lab: TrainHarness, recipe: Path, tmp_path: Path) -> Chaos:
    return Chaos(lab, recipe, tmp_path)


def test_ten_random_kills_in_one_run_end_in_the_same_digest(
    lab: TrainHarness, chaos: Chaos, calm: HarnessRun, tmp_path: Path
) -> None:
    """The command's own undisturbed run has the digest of ours."""
    code, told = chaos("--faults", "10", "--kinds", "kill", "--seed", "7")
    assert told["reasons"] == []
    assert (code, told["passed"], told["digest"]) == (ExitCode.DONE, True, calm.digest)
    assert {fault["trigger"]["phase"] for fault in told["faults"]} == {"step", "save", "restart"}
    assert [fault["injected"]["attempt"] for fault in told["faults"]] == list(range(10))
    disturbed = lab.from_command_line(Run(tmp_path / "run" / "faulted"), code)
    assert [event.what for event in disturbed.events_of_kind(WorkerFailure)] == ["SIGKILL"] * 10
    assert disturbed.result["num_restarts"] == 10


@pytest.mark.slow
def test_storage_that_fails_in_steps_saves_and_restarts(chaos: Chaos, calm: HarnessRun) -> None:
    more = ("--kinds", "storage-outage,kill", "--faults", "8", "--seed", "4", "--baseline", calm.run.path)
    code, told = chaos(*more)
    assert told["reasons"] == []
    assert (code, told["digest"]) == (ExitCode.DONE, calm.digest)
    meant = {(fault["kind"], fault["trigger"]["phase"]) for fault in told["faults"]}
    assert {phase for kind, phase in meant if kind == "storage-outage"} == {"step", "save", "restart"}


@pytest.mark.slow
def test_every_kind_of_fault_on_one_machine(chaos: Chaos) -> None:
    code, told = chaos("steps=1500", "--faults", "20")
    assert told["reasons"] == []
    assert code == ExitCode.DONE
    assert len({fault["kind"] for fault in told["faults"]}) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "more"),
    [
        ("kill,agent,node-loss,partition", ("--faults", "5", "--nodes", "2", "--nproc-per-node", "1")),
        ("kill,agent,job-runner,queue-daemon", ("--faults", "6", "--queue")),
    ],
    ids=["nodes", "queue"],
)
def test_a_run_outlives_its_nodes_and_its_queue(
    chaos: Chaos, calm: HarnessRun, kinds: str, more: tuple[str, ...]
) -> None:
    code, told = chaos("--kinds", kinds, *more, "--baseline", calm.run.path)
    assert told["reasons"] == []
    assert code == ExitCode.DONE


@pytest.mark.slow
def test_a_state_that_restarts_do_not_bring_back_makes_it_fail(chaos: Chaos, calm: HarnessRun) -> None:
    more = ("--faults", "1", "--kinds", "kill", "--baseline", calm.run.path)
    code, told = chaos(*more, MISCHIEF="drift")
    assert (code, told["passed"]) == (1, False)
    said, stored = told["reasons"]
    assert said.startswith("the digest is ")
    assert said.endswith(f"and {calm.digest} without faults")
    assert stored.startswith("the digest of the last checkpoint is ")


@pytest.mark.slow
def test_a_process_that_outlives_the_run_makes_it_fail(chaos: Chaos, calm: HarnessRun) -> None:
    """A killed agent cannot sweep up behind its workers. What is left is told, and ended after all."""
    more = ("--faults", "1", "--kinds", "agent", "--baseline", calm.run.path)
    code, told = chaos(*more, MISCHIEF="leak")
    assert code == 1
    assert told["digest"] == calm.digest
    assert {reason.partition(" still runs: ")[2] for reason in told["reasons"]} == {"sleep 600"}


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_leaves_nothing(
    lab: TrainHarness, recipe: Path, calm: HarnessRun, tmp_path: Path
) -> None:
    where, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    given = ("chaos", recipe, "--run", where, "--nproc-per-node", "2", "--baseline", calm.run.path, "--kinds", "hang")
    with lab.start(*given, variables=places(lab, temporary)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "fault 1 of 10" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    assert process.returncode == ExitCode.UNFINISHED
    assert errors == "error: interrupted\n"
    wait_until(lambda: lab.processes() == set(), 5, "everything to end")
    assert sorted(tmp_path.iterdir()) == [temporary]
    assert list(temporary.iterdir()) == []


def test_a_run_of_other_workers_is_nothing_to_compare_with(chaos: Chaos, calm: HarnessRun) -> None:
    done = chaos.refused("--nproc-per-node", "1", "--baseline", calm.run.path, "--kinds", "kill")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == f"error: --baseline {calm.run.path}: its world size is not 1, on which the digest depends\n"


@pytest.mark.slow
def test_a_run_that_fails_by_itself_ends_it_with_its_own_code_and_words(chaos: Chaos) -> None:
    done = chaos.refused("callbacks=[mischief:Missing]", "--nproc-per-node", "2")
    assert done.returncode == ExitCode.RECIPE
    assert done.stderr.startswith("error: the run fails without faults: ")
    assert "Missing" in done.stderr
