"""Every step reaches a tracker exactly once with its final value, however run and tracker are interrupted."""

from pathlib import Path

import pytest

from fake_tracker import FakeHoldingTracker, FakeServer, FakeTracker, GrowingRun
from made_events import made
from phalanx.errors import UsageError
from phalanx.observe.trackers.feed import TrackerFeed, lock_feed
from phalanx.run.event_types import EvaluationDone, NonFiniteStep, TasksEvaluated, WorkerFailure


class FedRun(GrowingRun):
    """A run and the tracker that it is sent to."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.server = FakeServer()

    def feed(self, kind: type[FakeTracker] = FakeHoldingTracker) -> TrackerFeed:
        return TrackerFeed(self.run, "mlflow", kind(self.server))

    def sent_steps(self) -> list[int]:
        return [step for step, _ in self.server.values("train/loss")]


@pytest.fixture
def growing(tmp_path: Path) -> FedRun:
    return FedRun(tmp_path / "run")


def kill_and_resume(growing: GrowingRun) -> None:
    """20 steps with a checkpoint at 10, killed in step 18, and trained to the end by a second attempt."""
    growing.start().train(1, 10).save(10).train(11, 17).start(10).train(11, 20).save(20).end(20)


FINAL = [(step, step + (1000.0 if step > 10 else 0.0)) for step in range(1, 21)]


@pytest.mark.parametrize("kind", [FakeTracker, FakeHoldingTracker])
def test_each_step_of_a_killed_run_is_sent_once_with_its_final_value(growing: FedRun, kind: type[FakeTracker]) -> None:
    kill_and_resume(growing)
    growing.feed(kind).send_new()
    assert growing.server.values("train/loss") == FINAL


@pytest.mark.parametrize("kind", [FakeTracker, FakeHoldingTracker])
@pytest.mark.parametrize("every", [1, 3, 7])
def test_it_is_the_same_when_the_feed_itself_starts_again_at_any_event(
    growing: FedRun, kind: type[FakeTracker], every: int
) -> None:
    kill_and_resume(growing)
    lines = growing.run.events.read_text().splitlines(keepends=True)
    growing.run.events.write_text("")
    for start in range(0, len(lines), every):
        with open(growing.run.events, "a") as file:
            file.writelines(lines[start : start + every])
        growing.feed(kind).send_new()
    assert growing.server.values("train/loss") == FINAL
    assert len(set(growing.server.opened_ids)) == 1


@pytest.mark.parametrize("kind", [FakeTracker, FakeHoldingTracker])
def test_it_is_the_same_when_the_feed_dies_before_it_could_remember_what_it_sent(
    growing: FedRun, kind: type[FakeTracker]
) -> None:
    growing.start().train(1, 10).save(10)
    growing.feed(kind).send_new()
    remembered = (growing.run.trackers / "mlflow.json").read_text()
    growing.train(11, 20).save(20).end(20)
    growing.feed(kind).send_new()
    (growing.run.trackers / "mlflow.json").write_text(remembered)
    growing.feed(kind).send_new()
    assert growing.sent_steps() == list(range(1, 21))


def test_a_tracker_that_cannot_take_steps_back_gets_only_steps_behind_a_checkpoint(growing: FedRun) -> None:
    growing.start().train(1, 10).save(8)
    one = growing.feed()
    one.send_new()
    assert growing.sent_steps() == list(range(1, 9))
    assert one.rows.num_held == 2


@pytest.mark.parametrize("status", ["done", "failed"])
def test_the_end_of_a_run_makes_all_steps_final(growing: FedRun, status: str) -> None:
    growing.start().train(1, 5).end(5, status)
    growing.feed().send_new()
    assert growing.sent_steps() == [1, 2, 3, 4, 5]
    assert growing.server.tags["status"] == status


def test_steps_after_a_checkpoint_that_turns_out_damaged_are_not_sent_twice(growing: FedRun) -> None:
    growing.start().train(1, 11).save(10)
    one = growing.feed()
    one.send_new()
    growing.start(5)  # that of step 10 is damaged
    growing.train(6, 20).end(20)
    one.send_new()
    assert growing.sent_steps() == list(range(1, 21))


def test_a_rollback_supersedes_what_was_sent(growing: FedRun) -> None:
    growing.start().train(1, 8)
    one = growing.feed(FakeTracker)
    one.send_new()
    growing.add(made(NonFiniteStep, step=8, action="rollback")).train(5, 10)
    one.send_new()
    assert growing.sent_steps() == list(range(1, 11))


@pytest.mark.parametrize("kind", [FakeTracker, FakeHoldingTracker])
def test_an_evaluation_after_its_checkpoint_is_sent_once_also_when_a_restart_repeats_it(
    growing: FedRun, kind: type[FakeTracker]
) -> None:
    one = growing.feed(kind)
    growing.start().train(1, 4).save(4)
    one.send_new()
    growing.add(made(EvaluationDone, step=4, loss=2.0, metrics={"accuracy": 0.5}))
    one.send_new()
    growing.start(4).add(made(EvaluationDone, step=4, loss=2.0, metrics={"accuracy": 0.5})).train(5, 5)
    one.send_new()
    growing.end(5)
    one.send_new()
    assert growing.server.values("val/loss") == [(4, 2.0)]
    assert growing.server.values("val/accuracy") == [(4, 0.5)]


@pytest.mark.parametrize("kind", [FakeTracker, FakeHoldingTracker])
@pytest.mark.parametrize("every", [1, 4, 100])
def test_scores_of_tasks_that_come_late_are_sent_once_at_their_step(
    growing: FedRun, kind: type[FakeTracker], every: int
) -> None:
    scores = made(TasksEvaluated, step=4, metrics={"gsm8k/exact (strict)": 0.25, "gsm8k/ppl": None}, standard_errors={})
    growing.start().train(1, 4).save(4).train(5, 6).add(scores).train(7, 8).save(8).end(8)
    growing.add(made(TasksEvaluated, step=8))
    lines = growing.run.events.read_text().splitlines(keepends=True)
    growing.run.events.write_text("")
    for start in range(0, len(lines), every):
        with open(growing.run.events, "a") as file:
            file.writelines(lines[start : start + every])
        growing.feed(kind).send_new()
    assert growing.server.values("tasks/gsm8k/exact strict") == [(4, 0.25)]
    assert growing.server.values("tasks/gsm8k/acc") == [(8, 0.25)]
    assert [step for step, _ in growing.server.values("tasks/gsm8k/ppl")] == [4]
    assert growing.sent_steps() == list(range(1, 9))


def test_a_tracker_that_was_down_gets_everything_when_it_is_back(growing: FedRun) -> None:
    one = growing.feed()
    growing.start().train(1, 5)
    growing.server.is_down = True
    with pytest.raises(ConnectionError):
        one.send_new()
    growing.save(5).train(6, 10).end(10)
    growing.server.is_down = False
    one.send_new()
    assert growing.sent_steps() == list(range(1, 11))


def test_a_tracker_that_fails_while_it_takes_rows_gets_them_later(growing: FedRun) -> None:
    one = growing.feed()
    growing.start()
    one.send_new()
    growing.train(1, 1200).end(1200)
    growing.server.is_down = True
    with pytest.raises(ConnectionError):
        one.send_new()
    growing.server.is_down = False
    one.send_new()
    assert growing.sent_steps() == list(range(1, 1201))


def test_faults_and_restarts_are_tags(growing: FedRun) -> None:
    growing.start().train(1, 4).save(2).add(made(WorkerFailure, message="worker 1 was killed by SIGKILL")).start(2)
    growing.train(3, 5).end(5)
    growing.feed().send_new()
    assert growing.server.tags == {
        "status": "done",
        "restarts": "1",
        "faults": "1",
        "last_fault": "worker 1 was killed by SIGKILL",
    }


def test_a_run_keeps_its_id_when_its_directory_moves(growing: FedRun, tmp_path: Path) -> None:
    growing.start()
    growing.feed().send_new()
    growing.run.path.rename(tmp_path / "moved")
    moved = FedRun(tmp_path / "moved")
    moved.feed().send_new()
    assert growing.server.opened_ids == moved.server.opened_ids != []


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"id": "x", "sent_step": 1, "num_events": 1, "remote_id": ""}', '{"id": 3, "sent_step": 1e999}'],
)
def test_a_damaged_state_begins_a_new_one(growing: FedRun, content: str) -> None:
    growing.run.trackers.mkdir()
    (growing.run.trackers / "mlflow.json").write_text(content)
    growing.start().train(1, 3).end(3)
    growing.feed().send_new()
    assert growing.sent_steps() == [1, 2, 3]


def test_a_second_process_for_the_same_tracker_is_refused(growing: FedRun) -> None:
    with (
        lock_feed(growing.run, "mlflow"),
        pytest.raises(UsageError, match="another process sends this run to mlflow"),
        lock_feed(growing.run, "mlflow"),
    ):
        pass
