"""The live displays, driven by events and a clock of the test's own."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from made_events import made
from make_run import Maker, healthy, troubled
from phalanx.observe.progress import (
    LogProgressDisplay,
    RunFacts,
    RunProgress,
    TerminalProgressDisplay,
    describe_hang,
    describe_straggler,
    make_console,
    make_display,
    read_run_facts,
)
from phalanx.run import Event, Run, read_events
from phalanx.run.event_types import (
    AttemptStarted,
    EvaluationProgress,
    HangDetected,
    RunEnded,
    RunWarning,
    StepDone,
    StragglerDetected,
)
from settable_clock import SettableClock

FACTS = RunFacts("gpt", "tokens", 256, flops_per_sample=1e9, matmul_flops_per_worker=1e12)


def start(**fields: object) -> AttemptStarted:
    return made(AttemptStarted, **{"time": 0.0, "world_size": 2, "total_steps": 100, **fields})


def step(number: int, t: float, seconds: float = 0.5, **fields: object) -> StepDone:
    return made(StepDone, time=t, step=number, duration_s=seconds, **{"units": 2560, **fields})


def logged(events: Iterator[Event] | list[Event], every: float = 5.0) -> list[str]:
    clock, stream = SettableClock(), io.StringIO()
    display = LogProgressDisplay(stream, 100, FACTS, clock, every)
    for event in events:
        clock.now = event.time
        display.show_event(event)
    display.close()
    display.close()
    return stream.getvalue().splitlines()


def test_the_log_has_a_line_every_few_seconds_and_the_last_step() -> None:
    lines = logged([start(), *(step(n, n * 0.5) for n in range(1, 101))])
    steps = [line for line in lines if "step " in line and "/100" in line]
    assert len(steps) == 11
    assert "step   1/100" in steps[0]
    assert "step 100/100" in steps[-1]
    assert "ETA" not in steps[-1]


def test_a_step_line_has_loss_speed_share_and_eta() -> None:
    line = logged([start(), *(step(n, n * 0.5) for n in range(1, 30))], every=0.0)[-1]
    assert "loss 2.500" in line
    assert "5.12 k tokens/s" in line
    assert "MFU 1.0% (measured peak)" in line  # 20 samples/s x 1 GFLOP over 2 workers' 2 TFLOP/s
    assert "ETA 36 s" in line


def test_a_hang_tells_who_where_and_in_which_line_of_the_users_own_code() -> None:
    stack = """Thread 0x7e (most recent call first):
  File "/src/phalanx/data/feed.py", line 90 in _work

Current thread 0x7f (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 10 in linear
  File "/home/me/model.py", line 42 in forward
  File "/home/me/train.py", line 7 in main"""
    event = made(HangDetected, rank=1, host="n7", step=30, silence_s=6.2, stack=stack)
    assert describe_hang(event) == (
        "hang: rank 1 on n7 has sent no heartbeat for 6.2 s, step 30, phase: forward; "
        'File "/home/me/model.py", line 42 in forward'
    )
    still = describe_hang(replace(event, is_stopped=True, stack=None))
    assert still == "hang: rank 1 on n7 has been stopped (SIGSTOP) for 6.2 s, step 30, phase: forward"


def test_each_event_that_is_not_a_step_has_its_line(tmp_path: Path) -> None:
    text = "\n".join(logged(read_events(troubled(tmp_path / "run") / "events.jsonl")))
    for words in (
        "2 workers on cpu, 300 steps",
        "attempt 1: 2 workers on cpu, resuming at step 50 of 300",
        "evaluation at step 50: validation loss 2.",
        "saved checkpoint at step 50 (39.0 MB",
        "checkpoint rejected: checkpoints/step-000000100/rank-00001.safetensors",
        "checkpoint at step 300 failed: no space left",
        "non-finite step 212: non-finite loss, rollback (3 skipped so far)",
        "failure: worker 1 was killed by SIGKILL",
        "warning: the micro-batch",
        "finished: 300 of 300 steps",
    ):
        assert words in text


def test_the_last_step_is_logged_before_an_early_end() -> None:
    lines = logged([start(), step(1, 0.5), step(2, 1.0), made(RunEnded, time=1.1, status="interrupted", step=2)])
    assert "step   2/100" in lines[-2]
    assert "interrupted: 2 of 100 steps" in lines[-1]


def test_speed_is_over_a_sliding_window() -> None:
    tally = RunProgress(100, FACTS)
    for n in range(1, 21):
        tally.add_event(step(n, n * 1.0, seconds=1.0))
    assert tally.units_per_s == pytest.approx(2560.0)
    for n in range(21, 60):
        tally.add_event(step(n, 20 + (n - 20) * 0.5, seconds=0.5))
    assert tally.units_per_s == pytest.approx(5120.0)
    assert tally.step_seconds == pytest.approx(0.5)


def test_a_new_attempt_starts_its_pace_afresh() -> None:
    tally = RunProgress(100, FACTS)
    for n in range(1, 11):
        tally.add_event(step(n, n * 1.0, seconds=1.0))
    tally.add_event(start(attempt=1, start_step=5))
    assert tally.step == 5
    assert tally.units_per_s is None
    assert tally.eta_s is None


def test_nothing_is_shown_of_what_was_not_measured() -> None:
    tally = RunProgress(10, RunFacts())
    tally.add_event(step(1, 1.0, loss=None))
    assert tally.mfu is None
    display = LogProgressDisplay(io.StringIO(), 10, RunFacts(), SettableClock())
    display.show_event(step(1, 1.0, loss=None, grad_norm=None, seconds=0.0))


def test_a_long_evaluation_shows_how_far_it_is() -> None:
    slow = made(EvaluationProgress, time=2.0, step=50, num_samples_done=250, num_samples=1000)
    assert "evaluating after step 50: 250 of 1,000 samples" in logged([start(), slow])[-1]


def terminal(every: float = 0.25) -> tuple[TerminalProgressDisplay, SettableClock, io.StringIO]:
    clock, stream = SettableClock(), io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    return TerminalProgressDisplay(stream, 100, FACTS, clock, every, console), clock, stream


def test_the_terminal_is_drawn_at_most_four_times_a_second() -> None:
    display, clock, stream = terminal()
    display.show_event(start(total_steps=5000))
    before = stream.getvalue()
    for n in range(1, 3001):
        clock.now = n * 0.001
        display.show_event(step(n, n * 0.001, seconds=0.001))
    assert 10 <= stream.getvalue().count("loss 2.500") - before.count("loss 2.500") <= 14
    display.close()


def test_the_terminal_shows_every_event_above_its_bar(tmp_path: Path) -> None:
    display, clock, stream = terminal(every=0.0)
    for event in read_events(troubled(tmp_path / "run") / "events.jsonl"):
        clock.now = event.time
        display.show_event(event)
    display.close()
    shown = stream.getvalue()
    for words in ("step 300/300  loss 1.3", "tokens/s", "evaluation at step 50", "saved checkpoint at step 50"):
        assert words in shown


def test_warnings_stay_above_the_lines_and_the_cursor_comes_back() -> None:
    display, _, stream = terminal()
    display.show_event(start())
    display.show_event(made(RunWarning, text="[bold]disk is slow"))
    display.show_event(made(RunEnded, step=0))
    display.close()
    display.show_event(step(1, 3.0))
    assert "warning: [bold]disk is slow" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_lines_in_place_and_a_pipe_gets_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(Terminal(), 10, FACTS, SettableClock()), TerminalProgressDisplay)
    assert isinstance(make_display(io.StringIO(), 10, FACTS, SettableClock()), LogProgressDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal(), 10, FACTS, SettableClock()), LogProgressDisplay)


class Gone(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_went_away_does_not_stop_the_run() -> None:
    console = make_console(Gone(), force_terminal=True)
    log, lines = (
        LogProgressDisplay(Gone(), 10, FACTS, SettableClock(), 0.0),
        TerminalProgressDisplay(Gone(), 10, FACTS, SettableClock(), 0.0, console),
    )
    for display in (log, lines):
        display.show_event(start())
        for n in range(1, 4):
            display.show_event(step(n, float(n)))
        display.close()


def test_facts_come_from_the_run_directory(tmp_path: Path) -> None:
    facts = read_run_facts(Run(healthy(tmp_path / "run", total=5)))
    assert (facts.name, facts.unit, facts.units_per_sample) == ("gpt-python", "tokens", 256)
    assert facts.matmul_flops_per_worker == pytest.approx(0.374e12)
    bare = Maker(tmp_path / "bare", total=5)
    for name in ("plan.json", "cluster.json"):
        (bare.path / name).unlink()
    assert read_run_facts(Run(bare.path)).matmul_flops_per_worker is None


def test_a_straggler_is_told_with_what_it_costs() -> None:
    event = made(StragglerDetected, rank=3, host="n7", slowdown=1.5, wait_s_per_step=0.12, wait_fraction=0.3)
    assert describe_straggler(event) == (
        "straggler: rank 3 on n7 takes 1.50x as long as its peers, which wait 120 ms/step for it (30% of the time)"
    )
