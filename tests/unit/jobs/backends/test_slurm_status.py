"""What the engine makes of Slurm's words, recorded from 22.05, with no Slurm at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx.jobs.backends.slurm.backend import QUEUE_MAX_AGE_S, SlurmBackend
from phalanx.jobs.backends.slurm.batch_script import SlurmResult
from phalanx.jobs.backends.slurm.programs import (
    NODE_COLUMNS,
    QUEUE_COLUMNS,
    NodeSize,
    add_node_share,
    count_gpus,
    expand_hostlist,
    parse_live_status,
    parse_node_sizes,
    parse_nodes,
    parse_past_status,
    parse_queue,
    run_program,
)
from phalanx.jobs.spec import Job, JobState

RESULT = "code {code}\nattempt {attempt}\nnodes n1 n2\nended 1795331973\n"


def left_behind(exit_code: int, attempt: int) -> SlurmResult:
    return SlurmResult(exit_code, attempt, ("n1", "n2"), 1795331973.0)


def queued(
    state: str,
    command: str = "/x/batch.sh",
    id: str = "6",
    reason: str = "None",
    nodes: str = "n[1-2]",
    code: str = "0",
    restarts: int = 0,
) -> str:
    """A line of squeue. `code`: a status of wait(2)."""
    fields = {
        "JobId": id,
        "JobState": state,
        "Restarts": str(restarts),
        "ExitCode": code,
        "StartTime": "2026-11-22T07:06:39",
        "EndTime": "NONE",
        "Reason": reason,
        "NodeList": nodes,
        "Command": command,
    }
    return "".join(fields[name].ljust(width)[:width] for name, (_, width) in QUEUE_COLUMNS.items()) + "\n"


def fields_of(state: str, **more: Any) -> dict[str, str]:
    """The fields of a job in a line of squeue."""
    return parse_queue(queued(state, **more))["6"]


@pytest.mark.parametrize(
    ("state", "code", "result", "expected", "reason"),
    [
        ("RUNNING", "0", None, JobState.RUNNING, None),
        ("COMPLETING", "0", 0, JobState.RUNNING, "completing"),
        ("COMPLETED", "0", 0, JobState.DONE, "ended well"),
        ("FAILED", "23808", 93, JobState.FAILED, "ended with exit code 93"),
        ("FAILED", "19200", 75, JobState.INTERRUPTED, "ended with exit code 75"),
        ("FAILED", "512", None, JobState.FAILED, "Slurm calls it FAILED"),
        ("CANCELLED", "15", 75, JobState.CANCELLED, "was cancelled"),
        ("TIMEOUT", "0", 75, JobState.INTERRUPTED, "its time limit ended it; it ended with exit code 75"),
        ("TIMEOUT", "0", 143, JobState.INTERRUPTED, "its time limit ended it"),
        ("NODE_FAIL", "0", None, JobState.INTERRUPTED, "a node failed"),
        ("OUT_OF_MEMORY", "125", None, JobState.FAILED, "the memory that it asked for ran out"),
        ("PREEMPTED", "0", None, JobState.QUEUED, None),
    ],
)
def test_slurms_states_have_a_meaning(
    state: str, code: str, result: int | None, expected: JobState, reason: str | None
) -> None:
    left = None if result is None else left_behind(result, 0)
    status = parse_live_status("6", "gpt", fields_of(state, code=code), 5.0, left)
    assert (status.state, status.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Resources", "waits for nodes to become free"),
        ("BeginTime", "was queued again a moment ago"),
        ("ReqNodeNotAvail,_UnavailableNodes:n4", "nodes that it needs are out of service"),
        ("NewWord", "NewWord"),
    ],
)
def test_a_job_that_waits_says_why_in_words(reason: str, says: str) -> None:
    status = parse_live_status("6", "gpt", fields_of("PENDING", reason=reason, nodes=""), 5.0, None)
    assert status.state is JobState.QUEUED
    assert status.reason is not None
    assert says in status.reason
    assert (status.num_attempts, status.started_at, status.ended_at) == (0, None, None)


def test_a_job_that_is_queued_again_has_its_last_attempts_code() -> None:
    left = left_behind(75, 0)
    status = parse_live_status("6", "gpt", fields_of("PENDING", reason="BeginTime", restarts=1, nodes=""), 5.0, left)
    assert (status.state, status.exit_code, status.num_attempts, status.nodes) == (JobState.QUEUED, 75, 1, ("n1", "n2"))


def test_a_result_of_an_earlier_attempt_does_not_count() -> None:
    left = left_behind(75, 0)
    status = parse_live_status("6", "gpt", fields_of("FAILED", restarts=1, code="9"), 5.0, left)
    assert (status.state, status.exit_code, status.num_attempts) == (JobState.FAILED, 137, 2)


def test_what_slurm_has_forgotten_is_told_by_what_the_job_left() -> None:
    done = parse_past_status("6", "gpt", False, 5.0, left_behind(0, 2))
    assert (done.state, done.exit_code, done.num_attempts, done.nodes) == (JobState.DONE, 0, 3, ("n1", "n2"))
    assert parse_past_status("6", "gpt", True, 5.0, None).state is JobState.CANCELLED
    assert parse_past_status("6", "gpt", False, 5.0, None).state is JobState.INTERRUPTED


class Recorded:
    """Slurm's programs: answers by the beginning of the command, and what was asked."""

    def __init__(self, answers: dict[str, tuple[int, str, str]]):
        self.answers = {"sbatch --version": (0, "slurm-wlm 22.05.8\n", "")} | answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        line = " ".join(argv)
        self.asked.append(line)
        return next(
            (answer for start, answer in sorted(self.answers.items(), reverse=True) if line.startswith(start)),
            (0, "", ""),
        )


def engine(folder: Path, answers: dict[str, tuple[int, str, str]], **environ: str) -> tuple[SlurmBackend, Recorded]:
    recorded = Recorded(answers)
    return SlurmBackend(recorded, folder / "state", environ), recorded


def test_without_sbatch_it_is_said_what_is_missing(tmp_path: Path) -> None:
    slurm, _ = engine(tmp_path, {"sbatch --version": (127, "", "sbatch: not found")})
    with pytest.raises(UsageError, match="sbatch is not installed here"):
        slurm.render(Job("a", ("true",), tmp_path))


def test_without_a_configuration_it_is_said_where_to_submit(tmp_path: Path) -> None:
    words = (
        "sbatch: error: fetch_config: DNS SRV lookup failed\nsbatch: fatal: Could not establish a configuration source"
    )
    slurm, _ = engine(tmp_path, {"sbatch --version": (1, "", words)})
    with pytest.raises(UsageError, match=r"no slurm\.conf on this machine; submit from a login node"):
        slurm.render(Job("a", ("true",), tmp_path))


def test_a_dry_run_writes_nothing_and_says_what_would_be_sent(tmp_path: Path) -> None:
    slurm, _ = engine(tmp_path, {}, TOKEN="swordfish")
    request = slurm.render(Job("a", ("true",), tmp_path, secrets=("TOKEN",)))
    assert list(tmp_path.iterdir()) == []
    assert request.commands[1] == ("sbatch", "--parsable", str(tmp_path / "state" / "a-1" / "batch.sh"))
    assert "swordfish" not in str(request)


def test_another_command_that_submits_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.slurm.batch_script.LOCK_TIMEOUT_S", 0.3)
    monkeypatch.setattr("phalanx.run.lock.LOCK_RETRY_INTERVAL_S", 0.05)
    slurm, recorded = engine(tmp_path, {})
    request = slurm.render(Job("a", ("true",), tmp_path))
    with slurm._dirs.hold_lock(), pytest.raises(UsageError, match="another command has been submitting there for 0 s"):
        slurm.submit(request)
    assert capsys.readouterr().err.startswith("waiting for another command, which is submitting to Slurm in ")
    assert not [line for line in recorded.asked if line.startswith("sbatch --parsable")]


def test_a_program_of_slurms_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.slurm.programs.COMMAND_TIMEOUT_S", 0.2)
    assert run_program(["sleep", "20"]) == (1, "", "sleep did not answer within 0 s")


def test_a_folder_that_was_taken_meanwhile_is_left_alone(tmp_path: Path) -> None:
    slurm, _ = engine(tmp_path, {"sbatch --parsable": (0, "6\n", "")})
    first = slurm.render(Job("a", ("true",), tmp_path))
    taken = tmp_path / "state" / "a-1"
    taken.mkdir(parents=True)
    with pytest.raises(UsageError, match="submit it once more"):
        slurm.submit(first)
    assert taken.exists()
    assert slurm.submit(slurm.render(first.job)) == "6"
    assert (tmp_path / "state" / "a-2" / "id").read_text() == "6\n"


def test_a_secret_that_is_not_set_is_missed_before_anything_is_written(tmp_path: Path) -> None:
    slurm, _ = engine(tmp_path, {})
    with pytest.raises(UsageError, match="its secret TOKEN is not in your environment"):
        slurm.submit(slurm.render(Job("a", ("true",), tmp_path, secrets=("TOKEN",))))
    assert list(tmp_path.iterdir()) == []


def test_a_container_needs_pyxis(tmp_path: Path) -> None:
    job = Job("a", ("true",), tmp_path, backend_options={"container-image": "x"})
    slurm, _ = engine(tmp_path, {"srun --help": (0, "  --container  Path to OCI container bundle\n", "")})
    with pytest.raises(UsageError, match="needs pyxis"):
        slurm.render(job)
    slurm, _ = engine(tmp_path, {"srun --help": (0, "  --container-image=IMAGE  [pyxis]\n", "")})
    slurm.render(job)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    slurm, _ = engine(tmp_path, {})
    with pytest.raises(UsageError, match="is not there"):
        slurm.submit(slurm.render(Job("a", ("true",), tmp_path / "missing")))


def submitted(tmp_path: Path, answers: dict[str, tuple[int, str, str]]) -> tuple[SlurmBackend, Recorded, Path]:
    """An engine with a job, number 6, in its folder."""
    slurm, recorded = engine(tmp_path, {"sbatch --parsable": (0, "6;here\n", ""), **answers})
    assert slurm.submit(slurm.render(Job("a", ("true",), tmp_path))) == "6"
    recorded.asked.clear()
    return slurm, recorded, tmp_path / "state" / "a-1"


def mine(tmp_path: Path, state: str, **more: str) -> dict[str, tuple[int, str, str]]:
    """What squeue says of the job of `submitted`."""
    line = queued(state, str(tmp_path / "state" / "a-1" / "batch.sh"), **more)  # type: ignore[arg-type]
    return {"squeue": (0, line, ""), "squeue --jobs=6": (0, "n4\n", "")}


def test_what_slurm_refuses_leaves_nothing(tmp_path: Path) -> None:
    error = (1, "", "sbatch: error: Batch job submission failed: Invalid qos specification\n")
    slurm, _ = engine(tmp_path, {"sbatch --parsable": error})
    with pytest.raises(UsageError, match="job a: Batch job submission failed: Invalid qos specification"):
        slurm.submit(slurm.render(Job("a", ("true",), tmp_path)))
    assert list((tmp_path / "state").glob("a-*")) == []


def test_an_unfit_node_is_added_to_those_that_are_avoided_and_the_job_goes_on(tmp_path: Path) -> None:
    answers = mine(tmp_path, "PENDING", reason="job requeued in held state", nodes="")
    slurm, recorded, folder = submitted(tmp_path, answers)
    (folder / "unfit").write_text("n2\nn3\n")
    assert slurm.resume("6")
    assert recorded.asked[-2:] == ["scontrol update JobId=6 ExcNodeList=n4,n2,n3", "scontrol release 6"]
    assert not (folder / "unfit").exists()


@pytest.mark.parametrize("look", ["poll", "jobs", "logs"])
def test_who_looks_at_a_held_job_changes_nothing_and_learns_how_it_goes_on(tmp_path: Path, look: str) -> None:
    answers = mine(tmp_path, "PENDING", reason="job requeued in held state", nodes="")
    slurm, recorded, folder = submitted(tmp_path, answers)
    (folder / "unfit").write_text("n2\nn3\n")
    found = {"poll": lambda: [slurm.poll("6")], "jobs": slurm.list_jobs, "logs": lambda: list(slurm.read_logs("6"))}[
        look
    ]()
    assert [line for line in recorded.asked if not line.startswith("squeue --me")] == []
    assert (folder / "unfit").exists()
    for each in found:
        assert each.reason == (
            "is held because of unfit nodes (n2, n3): `phalanx jobs resume 6 --on slurm` continues it on other nodes"
        )


def test_releasing_waits_until_the_script_is_gone(tmp_path: Path) -> None:
    slurm, recorded, folder = submitted(tmp_path, mine(tmp_path, "RUNNING"))
    (folder / "unfit").write_text("n2\n")
    assert not slurm.release("6")
    assert not [line for line in recorded.asked if "update" in line]
    assert (folder / "unfit").exists()


def test_releasing_that_fails_is_told_and_can_be_tried_again(tmp_path: Path) -> None:
    answers = {
        **mine(tmp_path, "PENDING", nodes=""),
        "scontrol update": (1, "", "slurm_update error: Access/permission denied\n"),
    }
    slurm, _, folder = submitted(tmp_path, answers)
    (folder / "unfit").write_text("n2\n")
    with pytest.raises(UsageError, match="job 6: slurm_update error: Access/permission denied"):
        slurm.release("6")
    assert (folder / "unfit").exists()


def test_pausing_holds_a_job_first_and_has_its_script_pass_the_signal_on(tmp_path: Path) -> None:
    slurm, recorded, folder = submitted(tmp_path, mine(tmp_path, "RUNNING"))
    with pytest.raises(UsageError, match="starts just now; pause it again"):
        slurm.pause("6", "for power")  # its script does not handle signals yet
    assert not [line for line in recorded.asked if not line.startswith("squeue")]
    (folder / "token.0").touch()
    slurm.pause("6", "for power")
    assert recorded.asked[-2:] == ["scontrol uhold 6", "scancel --batch --signal=USR1 6"]
    assert slurm.poll("6").state is JobState.RUNNING  # until it has saved
    recorded.answers |= mine(tmp_path, "PENDING", reason="JobHeldUser", nodes="")
    slurm = SlurmBackend(recorded, tmp_path / "state")
    assert (slurm.poll("6").state, slurm.poll("6").reason) == (JobState.QUEUED, "paused: for power")
    assert slurm.resume("6")
    assert recorded.asked[-1] == "scontrol release 6"
    assert slurm.poll("6").reason == "is held; `scontrol release` continues it"
    assert not slurm.resume("6")


def test_a_job_that_waits_is_held_and_one_that_ended_cannot_be_paused(tmp_path: Path) -> None:
    slurm, recorded, folder = submitted(tmp_path, mine(tmp_path, "PENDING", nodes=""))
    slurm.pause("6", "for power")
    assert recorded.asked[-1] == "scontrol uhold 6"
    recorded.answers["squeue"] = (0, "", "")
    (folder / "result").write_text(RESULT.format(code=0, attempt=0))
    with pytest.raises(UsageError, match="is done: there is nothing to pause"):
        slurm.pause("6", "again")
    assert not slurm.resume("6")


def test_a_pause_that_slurm_refuses_leaves_no_trace(tmp_path: Path) -> None:
    refusal = (1, "", "slurm_suspend error: Access/permission denied\n")
    slurm, _, _ = submitted(tmp_path, {**mine(tmp_path, "PENDING", nodes=""), "scontrol uhold": refusal})
    with pytest.raises(UsageError, match="job 6: slurm_suspend error: Access"):
        slurm.pause("6", "for power")
    assert not slurm.resume("6")


def test_a_running_job_that_gets_no_signal_is_not_held_for_its_next_requeue(tmp_path: Path) -> None:
    slurm, recorded, folder = submitted(
        tmp_path,
        {**mine(tmp_path, "RUNNING"), "scancel": (1, "", "scancel: error: Unable to contact slurmctld")},
    )
    (folder / "token.0").touch()
    with pytest.raises(UsageError, match="Unable to contact"):
        slurm.pause("6", "for power")
    assert recorded.asked[-1] == "scontrol release 6"
    assert not (folder / "paused.json").exists()


def test_a_paused_job_with_an_unfit_node_is_not_released_before_it_is_resumed(tmp_path: Path) -> None:
    slurm, recorded, folder = submitted(tmp_path, mine(tmp_path, "PENDING", reason="JobHeldUser", nodes=""))
    (folder / "unfit").write_text("n2\n")
    slurm.pause("6", "for power")
    assert not slurm.release("6")
    assert slurm.poll("6").reason == "paused: for power"
    assert slurm.resume("6")
    assert recorded.asked[-2:] == ["scontrol update JobId=6 ExcNodeList=n4,n2", "scontrol release 6"]


def test_a_number_that_another_job_has_now_is_not_taken_for_ours(tmp_path: Path) -> None:
    slurm, _, folder = submitted(tmp_path, {"squeue": (0, queued("RUNNING", "/x/batch.sh"), "")})
    (folder / "result").write_text(RESULT.format(code=0, attempt=0))
    assert slurm.poll("6").state is JobState.DONE


def test_cancelling_marks_the_job_first_and_leaves_one_that_is_over(tmp_path: Path) -> None:
    slurm, recorded, folder = submitted(tmp_path, mine(tmp_path, "RUNNING"))
    slurm.cancel("6")
    assert recorded.asked[-1] == "scancel 6"
    assert (folder / "cancelled").exists()
    other = tmp_path / "other"
    other.mkdir()
    slurm, recorded, folder = submitted(other, {"squeue": (0, "", "")})
    slurm.cancel("6")
    assert "scancel 6" not in recorded.asked


def test_a_job_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    slurm, _ = engine(tmp_path, {})
    for ask in (slurm.poll, slurm.cancel, lambda id: list(slurm.read_logs(id))):
        with pytest.raises(UsageError, match="7: slurm has no such job"):
            ask("7")
    assert slurm.list_jobs() == []


def test_a_line_of_squeue_is_read_by_columns() -> None:
    fields = parse_queue(
        queued("FAILED", "/a folder/é/batch.sh", "6_1", reason="job requeued in held state", code="768")
        + queued("RUNNING", "/x/batch.sh", "7", code="9")
    )
    assert fields["6_1"] == {
        "JobId": "6_1",
        "JobState": "FAILED",
        "Restarts": "0",
        "ExitCode": "3:0",
        "StartTime": "2026-11-22T07:06:39",
        "Reason": "job_requeued_in_held_state",
        "NodeList": "n[1-2]",
        "Command": "/a folder/é/batch.sh",
    }
    assert fields["7"]["ExitCode"] == "0:9"
    assert "Reason" not in fields["7"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-2]", ("n1", "n2")),
        ("n[08-10,21],login-1", ("n08", "n09", "n10", "n21", "login-1")),
        ("r[1-2]n[0-1]", ("r1n0", "r1n1", "r2n0", "r2n1")),
        ("gpu[1-2]-ib,x", ("gpu1-ib", "gpu2-ib", "x")),
        ("n1,m[1-2,4-", ("n1",)),  # cut by squeue
    ],
)
def test_abbreviated_names_of_nodes_are_written_out(text: str, names: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == names


class Timed(Recorded):
    """Slurm's programs, with a clock that a test sets."""

    now = 100.0

    def asked_queue(self) -> int:
        """How often squeue was asked since the last call."""
        count = sum(line.startswith("squeue") for line in self.asked)
        assert count == len(self.asked)
        self.asked.clear()
        return count


def many_submitted(tmp_path: Path, count: int) -> tuple[SlurmBackend, Timed, list[str]]:
    """An engine with jobs that Slurm knows as running, and their ids."""
    recorded = Timed({})
    slurm = SlurmBackend(recorded, tmp_path / "state", {}, clock=lambda: recorded.now)
    lines = ""
    for number in range(count):
        recorded.answers |= {"sbatch --parsable": (0, f"{number}\n", ""), "squeue": (0, lines, "")}
        slurm.submit(slurm.render(Job(f"job{number}", ("true",), tmp_path)))
        lines += queued("RUNNING", f"{tmp_path}/state/job{number}-1/batch.sh", str(number))
    recorded.answers["squeue"] = (0, lines, "")
    recorded.asked.clear()
    return slurm, recorded, [str(number) for number in range(count)]


def test_slurm_is_asked_once_for_all_jobs_and_again_after_five_seconds(tmp_path: Path) -> None:
    slurm, recorded, ids = many_submitted(tmp_path, 20)
    for _ in range(60):  # a minute of a follower that looks once a second
        for id in ids:
            assert slurm.poll(id).state is JobState.RUNNING
            assert not slurm.release(id)
        assert len(slurm.list_jobs()) == len(ids)
        recorded.now += 1.0
    assert recorded.asked_queue() == 60 / QUEUE_MAX_AGE_S


def test_a_job_that_was_submitted_since_slurm_was_asked_is_asked_for(tmp_path: Path) -> None:
    slurm, recorded, _ = many_submitted(tmp_path, 1)
    slurm.poll("0")
    assert recorded.asked_queue() == 1
    other = SlurmBackend(recorded, tmp_path / "state", {})
    recorded.answers["sbatch --parsable"] = (0, "77\n", "")
    other.submit(other.render(Job("other", ("true",), tmp_path)))
    recorded.asked.clear()
    recorded.answers["squeue"] = (0, queued("RUNNING", f"{tmp_path}/state/other-1/batch.sh", "77"), "")
    assert slurm.poll("77").state is JobState.RUNNING
    assert slurm.poll("0").state is JobState.INTERRUPTED  # Slurm no longer knows it
    assert recorded.asked_queue() == 1


def test_what_changes_a_job_asks_at_once_and_so_does_the_next_poll(tmp_path: Path) -> None:
    slurm, recorded, _ = many_submitted(tmp_path, 1)
    slurm.poll("0")
    recorded.answers["scancel"] = (0, "", "")
    slurm.cancel("0")
    assert [line.split()[0] for line in recorded.asked] == ["squeue", "squeue", "scancel"]
    recorded.asked.clear()
    recorded.answers["squeue"] = (0, "", "")
    assert slurm.poll("0").state is JobState.CANCELLED
    assert recorded.asked_queue() == 1


def test_a_user_of_whose_jobs_slurm_knows_none_still_sees_what_became_of_them(tmp_path: Path) -> None:
    slurm, recorded, _ = many_submitted(tmp_path, 1)
    recorded.answers["squeue"] = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    (tmp_path / "state" / "job0-1" / "result").write_text(RESULT.format(code=0, attempt=0))
    assert [status.state for status in slurm.list_jobs()] == [JobState.DONE]


def test_a_controller_that_does_not_answer_is_asked_no_more_often(tmp_path: Path) -> None:
    slurm, recorded, _ = many_submitted(tmp_path, 1)
    recorded.answers["squeue"] = (1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
    for _ in range(10):
        with pytest.raises(UsageError, match=r"slurm does not answer: .*Unable to contact slurm controller"):
            slurm.poll("0")
        recorded.now += 1.0
    assert recorded.asked_queue() == 10 / QUEUE_MAX_AGE_S


def line(name: str, state: str = "idle", gres: str = "gpu:2", user: str = "Unknown", reason: str = "none") -> str:
    """A line as sinfo prints it."""
    values = {"name": name, "host": name, "state": state, "gres": gres, "user": user, "reason": reason}
    return "".join(values[column].ljust(width) for column, (_, width) in NODE_COLUMNS.items())


@pytest.mark.parametrize(
    ("state", "service"),
    [
        ("idle", NodeService.OPEN),
        ("idle~", NodeService.OPEN),  # powered down until a job needs it
        ("mixed", NodeService.OPEN),
        ("allocated", NodeService.OPEN),
        ("completing", NodeService.OPEN),
        ("drained", NodeService.DRAINED),
        ("drained*", NodeService.DRAINED),
        ("draining", NodeService.DRAINED),
        ("failing", NodeService.DRAINED),
        ("idle*", NodeService.DOWN),
        ("down*", NodeService.DOWN),
        ("unknown", NodeService.DOWN),
        ("powering_down", NodeService.DOWN),
    ],
)
def test_each_state_says_whether_jobs_start_there(state: str, service: NodeService) -> None:
    (node,) = parse_nodes(line("n1", state), "")
    assert (node.state, node.service) == (state, service)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0),
        ("gpu:2", 2),
        ("gpu", 1),
        ("gpu:h100:8(S:0-1)", 8),
        ("nic:4,gpu:a100:4(S:0),gpu:v100:2", 6),
        ("gpu:h100:8(S:0,3-5),nic:2", 8),
    ],
)
def test_gpus_are_counted_in_generic_resources(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


def test_a_node_of_two_partitions_is_one_node_with_the_jobs_of_all_users() -> None:
    nodes = parse_nodes("\n".join([line("n1"), line("n1"), line("n2")]), "7 n[1-2]\n8_1 n2\n")
    assert [(node.name, node.jobs) for node in nodes] == [("n1", ("7",)), ("n2", ("7", "8_1"))]


def test_a_reason_names_the_user_that_gave_it() -> None:
    (node,) = parse_nodes(line("n1", "drained", user="ada(1000)", reason="fan is loud, x=1"), "")
    assert node.reason == "fan is loud, x=1 (ada)"


@pytest.mark.parametrize("text", ["Invalid user id", "Access/permission denied"])
def test_a_user_without_the_right_is_told_what_is_needed(tmp_path: Path, text: str) -> None:
    def refuse(argv: Sequence[str]) -> tuple[int, str, str]:
        return 1, "", f"slurm_update error: {text}\n"

    with pytest.raises(UsageError, match=r"n1: Slurm refuses it to your user; it takes root, .*adminlevel=admin"):
        SlurmBackend(refuse, tmp_path).drain_node("n1", "hot", "ada")


H100 = "192 2063838 gpu:h100:8(S:0-1)\n"
SMALL = "4 15000 gpu:1\n"


def job(gpus: int = 0, **fields: object) -> Job:
    return Job("a", ("true",), Path("/"), gpus_per_node=gpus, **fields)  # type: ignore[arg-type]


def test_sizes_are_read_and_other_lines_left_out() -> None:
    text = H100 + SMALL + "64+ 1 (null)\nslurm 23.11.4\n96 500000 gpu:a100:4,gpu:mig:2,shard:8\n"
    sizes = [NodeSize(192, 2063838, 8), NodeSize(4, 15000, 1), NodeSize(64, 1, 0), NodeSize(96, 500000, 6)]
    assert parse_node_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "fields", "cpus", "mib"),
    [
        (H100, {"gpus": 8}, 192, 2063838),
        (H100, {"gpus": 2}, 48, 515959),
        (H100 + SMALL, {"gpus": 1}, 4, 15000),
        (H100 + SMALL, {"gpus": 4}, 96, 1031919),
        (H100, {}, 4, None),
        (H100, {"workers_per_node": 4}, 16, None),
        ("1 1 (null)\n", {"workers_per_node": 4}, 1, None),
        ("64 1 gpu:4\n", {"gpus": 4}, 64, None),
        (H100, {"backend_options": {"exclusive": "yes"}}, 192, None),
        ("", {"gpus": 8}, 32, None),
        (H100, {"gpus": 8, "cpus_per_node": 7, "memory_bytes": 2**30}, 7, 1024),
    ],
)
def test_a_job_has_the_share_of_a_node_that_its_gpus_are(
    text: str, fields: dict[str, object], cpus: int, mib: int | None
) -> None:
    shared = add_node_share(job(**fields), parse_node_sizes(text))  # type: ignore[arg-type]
    assert (shared.cpus_per_node, shared.memory_bytes) == (cpus, None if mib is None else mib * 2**20)
