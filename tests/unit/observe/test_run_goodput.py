"""What became of the devices of a run, in seconds x devices: that it sums up, and who is to blame for what."""

from pathlib import Path

import pytest

from make_run import Maker, healthy, troubled
from phalanx.observe.goodput import DeviceTime, compute_device_time
from phalanx.observe.history import read_history
from phalanx.observe.summary import build_summary
from phalanx.observe.text_report import describe_failure_cost, duration_rows, goodput_rows
from phalanx.run import Run
from phalanx.run.event_types import RecipeResolved, WorkerFailure


def ledger(run: Path) -> DeviceTime:
    return compute_device_time(read_history(run / "events.jsonl"))


def begin(folder: Path) -> Maker:
    """A run of 20 steps after its first 10."""
    return Maker(folder / "run", total=20, seconds=1.0).start().steps(1, 10)


def finish(maker: Maker, from_step: int) -> DeviceTime:
    """Another attempt to the end; the device time of the run."""
    maker.start(from_step=from_step).steps(from_step + 1, 20).end()
    return ledger(maker.path)


def killed(path: Path, world: int = 1) -> Path:
    """Killed behind step 47, noticed half a second later, back after three more seconds, at step 40."""
    maker = Maker(path, total=60, seconds=1.0, world=world, split={"data_wait": 0.25, "forward": 0.75}).start()
    maker.steps(1, 47)
    maker.t += 0.5
    maker.event(WorkerFailure, rank=world - 1)
    maker.t += 3.0
    maker.start(from_step=40).steps(41, 60).end()
    return path


@pytest.mark.parametrize("make", [healthy, troubled, killed])
def test_the_shares_sum_to_the_allocation(make: object, tmp_path: Path) -> None:
    found = ledger(make(tmp_path / "run"))  # type: ignore[operator]
    parts = found.productive_s + found.blocked_s + found.wasted_s + found.unavailable_s
    assert parts == pytest.approx(found.allocated_s, rel=1e-9)
    assert min(found.productive_s, found.blocked_s, found.wasted_s, found.unavailable_s) >= 0


def test_ettr_is_productive_wall_time_over_wall_time(tmp_path: Path) -> None:
    run = Run(killed(tmp_path / "run", world=4))
    found = build_summary(run, read_history(run.events)).to_json()
    assert found["ettr"]["value"] == pytest.approx(found["durations"]["productive_s"] / found["durations"]["wall_s"])
    assert found["ettr"]["definition"].startswith("effective training time ratio")


def test_a_fault_is_charged_with_what_it_cost(tmp_path: Path) -> None:
    found = ledger(killed(tmp_path / "run"))
    (loss,) = found.failure_costs
    assert loss.description == "rank 0: SIGKILL"
    assert loss.detection_s == pytest.approx(0.5)
    assert loss.unavailable_s == pytest.approx(3.5) == found.unavailable_s
    assert loss.wasted_s == pytest.approx(7.0, rel=0.1)
    assert loss.wasted_s == found.wasted_s
    assert loss.startup_s == pytest.approx(1.2)


def test_every_worker_counts(tmp_path: Path) -> None:
    alone, four = (ledger(killed(tmp_path / str(world), world)) for world in (1, 4))
    assert four.allocated_s == pytest.approx(4 * alone.allocated_s)
    assert four.failure_costs[0].total_s == pytest.approx(4 * alone.failure_costs[0].total_s)
    assert four.goodput_share == pytest.approx(alone.goodput_share)


def test_wall_time_and_device_time_have_one_definition_of_productive_and_of_a_stall(tmp_path: Path) -> None:
    """Two saves of a second each, of which the second is after the last step; evaluations; half a second of data."""
    maker = Maker(tmp_path / "run", total=20, seconds=1.0, split={"data_wait": 0.25, "forward": 0.75}).start()
    for step in range(1, 21):
        maker.step(step)
        if step % 10 == 0:
            maker.eval(step)
            maker.checkpoint(step, stall=1.0)
    maker.end()
    history = read_history(tmp_path / "run" / "events.jsonl")
    found, summary = compute_device_time(history), build_summary(Run(tmp_path / "run"), history)
    assert summary.durations.productive_s == pytest.approx(found.productive_s)
    assert found.checkpoint_stall_s == pytest.approx(2.0, abs=0.1) == summary.checkpoints.total_stall_s
    assert summary.breakdown_s is not None
    assert summary.checkpoints.step_stall_s == pytest.approx(20 * summary.breakdown_s["checkpoint_stall"])
    assert found.productive_s == pytest.approx(summary.durations.training_s - found.data_wait_s - 1.0 + 1.2, abs=0.1)


def test_resolving_before_the_first_attempt_is_startup_in_wall_time_and_goodput(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=20, seconds=1.0, world=2)
    before = maker.t
    maker.t += 55.0
    maker.event(RecipeResolved, duration_s=55.0, load_s=3.0, trace_s=10.0, trials_s=40.0)
    maker.t += 5.0
    maker.start().steps(1, 20).end()
    history = read_history(tmp_path / "run" / "events.jsonl")
    found, summary = compute_device_time(history), build_summary(Run(tmp_path / "run"), history)
    assert summary.durations.wall_s == pytest.approx(maker.t - before) == found.allocated_s / 2
    assert found.startup_s / 2 == pytest.approx(61.2, abs=0.1) == summary.durations.startup_s
    parts = dict(duration_rows(summary))["breakdown"]
    assert "startup 1 min 01 s (loading torch 3.0 s, trace 10 s, trials 40 s, preparing data 2.0 s)" in parts


def test_nothing_is_held_between_a_proper_end_and_the_next_start(tmp_path: Path) -> None:
    maker = begin(tmp_path)
    maker.end("interrupted", 10)
    maker.t += 3600
    found = finish(maker, 10)
    assert found.allocated_s < 60
    assert found.failure_costs == ()


def test_an_attempt_that_left_no_word_is_charged_with_the_time_until_the_next(tmp_path: Path) -> None:
    maker = begin(tmp_path)
    maker.t += 100
    (loss,) = finish(maker, 5).failure_costs
    assert loss.description == "no end was written"
    assert loss.unavailable_s == pytest.approx(100)


def test_an_attempt_that_a_fault_stopped_is_charged_although_its_end_was_written(tmp_path: Path) -> None:
    maker = begin(tmp_path)
    maker.t += 2.0
    maker.event(WorkerFailure, cause="fork_server_died")
    maker.t += 0.5
    maker.end("interrupted", 10)
    maker.t += 3600
    found = finish(maker, 5)
    (loss,) = found.failure_costs
    assert (loss.description, loss.detection_s) == ("rank 0: fork server died", pytest.approx(2.0))
    assert loss.wasted_s == found.wasted_s > 4.0
    assert loss.unavailable_s == pytest.approx(2.5) == found.unavailable_s
    assert found.allocated_s < 60


def test_a_stop_in_order_after_a_fault_that_was_got_over_costs_nothing(tmp_path: Path) -> None:
    maker = begin(tmp_path)
    maker.event(WorkerFailure).start(from_step=10).steps(11, 15).end("interrupted", 15)
    assert [loss.description for loss in finish(maker, 15).failure_costs] == ["rank 0: SIGKILL"]


def test_a_run_without_events_has_no_goodput(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    assert ledger(tmp_path).goodput_share is None
    assert goodput_rows(DeviceTime()) == []


def test_the_report_tells_goodput_and_each_loss(tmp_path: Path) -> None:
    found = ledger(killed(tmp_path / "run"))
    facts = goodput_rows(found)
    assert [name for name, _ in facts] == ["goodput", "failure cost"]
    assert "wasted" in facts[0][1]
    assert describe_failure_cost(found.failure_costs[0]) in facts[1][1]
    assert "detected after 500 ms" in facts[1][1]
