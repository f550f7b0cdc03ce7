"""Jobs as values: what no engine could take is refused before anything is rendered."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.backends.base import Backend, SubmitRequest
from phalanx.jobs.spec import Job, JobState, JobStatus, make_array, select_array_members, state_from_exit_code


def job(**more: Any) -> Job:
    return Job(**{"name": "a-job", "command": ("true",), "working_dir": Path("/work"), **more})


@pytest.mark.parametrize("name", ["", "-x", "a b", "a;rm", "$(x)", "a/b", "a\nb", "x" * 64, "ä"])
def test_a_name_with_shell_characters_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="job name"):
        job(name=name)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"command": ()}, "no command"),
        ({"command": ("a\0b",)}, "no command"),
        ({"working_dir": Path("here")}, "must be absolute"),
        ({"num_nodes": 0}, "num_nodes = 0"),
        ({"gpus_per_node": -1}, "gpus_per_node = -1"),
        ({"cpus_per_node": 0}, "cpus_per_node = 0"),
        ({"time_limit_s": 0.0}, "time limit"),
        ({"time_limit_s": float("nan")}, "time limit"),
        ({"warning_s": -1.0}, "warning"),
        ({"environment": {"A B": "1"}}, "'A B' is no name"),
        ({"secrets": ("x=y",)}, "'x=y' is no name"),
        ({"environment": {"K": "1"}, "secrets": ("K",)}, "K is given as a value and as a secret"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        job(**more)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, JobState.DONE),
        (75, JobState.INTERRUPTED),
        (77, JobState.INTERRUPTED),
        (93, JobState.FAILED),
        (1, JobState.FAILED),
    ],
)
def test_exit_codes_as_states(code: int, state: JobState) -> None:
    assert state_from_exit_code(code) is state
    assert state.is_final
    assert ExitCode.UNFINISHED == 75


class Recording(Backend):
    """An engine that takes some jobs and refuses others."""

    name = "recording"

    def __init__(self, refused: str = "", stubborn: str = "", wrong: str = ""):
        self.refused, self.stubborn, self.wrong = refused, stubborn, wrong
        self.said: list[str] = []

    def render(self, job: Job) -> SubmitRequest:
        if job.name == self.wrong:
            raise UsageError(f"{job.name} can never run")
        return SubmitRequest(self.name, job)

    def submit(self, request: SubmitRequest) -> str:
        if request.job.name == self.refused:
            raise UsageError("there is no room")
        self.said.append(f"submit {request.job.name}")
        return request.job.name

    def cancel(self, job: str) -> None:
        if job == self.stubborn:
            raise UsageError("the engine does not answer")
        self.said.append(f"cancel {job}")


def jobs(count: int = 3) -> tuple[Job, ...]:
    each = [Job("x", ("run",), Path("/"), run_dir=Path(f"/runs/{index}")) for index in range(count)]
    return make_array("sweep", each)


def submit(engine: Any) -> list[str]:
    return engine.submit_array(engine.render_array(jobs()))


def test_members_are_called_by_their_index() -> None:
    assert [(job.name, job.array_name) for job in jobs(2)] == [("sweep.0", "sweep"), ("sweep.1", "sweep")]


def test_two_members_that_would_train_in_one_run_are_refused() -> None:
    twins = [Job("x", ("run",), Path("/"), run_dir=Path(f"/runs/{name}")) for name in "aba"]
    with pytest.raises(UsageError, match="members 0 and 2 would both train in /runs/a"):
        make_array("sweep", twins)


def test_nothing_is_sent_when_one_can_never_run() -> None:
    engine = Recording(wrong="sweep.2")
    with pytest.raises(UsageError, match=r"sweep\.2 can never run"):
        submit(engine)
    assert engine.said == []


def test_when_one_is_refused_those_before_it_are_cancelled_and_it_is_told() -> None:
    engine = Recording(refused="sweep.2")
    with pytest.raises(UsageError) as refused:
        submit(engine)
    assert str(refused.value) == "member 2 could not be submitted: there is no room; those before it were cancelled"
    assert engine.said == ["submit sweep.0", "submit sweep.1", "cancel sweep.0", "cancel sweep.1"]


def test_a_member_that_could_not_be_cancelled_is_named() -> None:
    engine = Recording(refused="sweep.2", stubborn="sweep.0")
    with pytest.raises(UsageError, match=r"sweep\.0 could not be cancelled"):
        submit(engine)
    assert engine.said[-1] == "cancel sweep.1"


def test_members_are_found_by_the_arrays_name_or_by_its_id() -> None:
    named = [("12_0", "sweep.0"), ("12_1", "sweep.1"), ("12", "sweep"), ("3", "sweep.x"), ("121_0", "other.0")]
    statuses = [JobStatus(ident, name, JobState.QUEUED) for ident, name in named]
    for word in ("sweep", "12"):
        assert [status.id for status in select_array_members(statuses, word)] == ["12_0", "12_1"]
    assert select_array_members(statuses, "swee") == []
