"""Where the time of a step goes."""

import pytest
import torch

from phalanx.train.step_timer import STEP_PHASES, GpuStepTimer, HostStepTimer
from small_train import Clock


def test_parts_sum_to_the_whole_and_the_rest_is_other() -> None:
    clock = Clock()
    watch = HostStepTimer(clock)
    watch.start()
    for part, seconds in (
        ("data_wait", 1.0),
        ("forward", 2.0),
        ("backward", 4.0),
        ("forward", 8.0),
        ("backward", 16.0),
    ):
        clock.tick(seconds)
        watch.lap(part)
    clock.tick(32.0)
    seconds, parts = watch.stop()
    assert seconds == 63.0 == sum(parts.values())
    assert parts == {
        **dict.fromkeys(STEP_PHASES, 0.0),
        "data_wait": 1.0,
        "forward": 10.0,
        "backward": 20.0,
        "other": 32.0,
    }


def test_what_is_skipped_belongs_to_no_part_and_not_to_the_whole() -> None:
    clock = Clock()
    watch = HostStepTimer(clock)
    watch.start()
    clock.tick(1.0)
    watch.lap("forward")
    clock.tick(100.0)
    watch.skip()
    clock.tick(2.0)
    seconds, parts = watch.stop()
    assert (seconds, parts["forward"], parts["other"]) == (3.0, 1.0, 2.0)


class Gpu:
    """A GPU whose work takes the seconds that are put into its queue, and which has done as much as is said."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0
        self.waited = 0

    def event(self) -> "Gpu.Event":
        return Gpu.Event(self)

    class Event:
        def __init__(self, gpu: "Gpu"):
            self._gpu, self.at = gpu, 0.0

        def record(self) -> None:
            self.at = self._gpu.queued

        def query(self) -> bool:
            return self.at <= self._gpu.done

        def synchronize(self) -> None:
            self._gpu.waited += 1
            self._gpu.done = max(self._gpu.done, self.at)

        def elapsed_time(self, end_event: "Gpu.Event") -> float:
            assert self.query()
            assert end_event.query()
            return 1000 * (end_event.at - self.at)


def test_on_a_gpu_what_is_not_done_yet_goes_to_the_next_step_and_nobody_waits() -> None:
    gpu = Gpu()
    watch = GpuStepTimer(gpu.event)
    steps = []
    for _ in range(3):
        watch.start()
        for part, seconds in (("forward", 2.0), ("backward", 4.0), ("grad_sync", 0.0)):
            gpu.queued += seconds
            watch.lap(part)
        gpu.done = gpu.queued  # host and GPU meet
        gpu.queued += 1.0
        watch.lap("optimizer")
        steps.append(watch.stop())
    assert gpu.waited == 0
    assert [seconds for seconds, _ in steps] == [6.0, 7.0, 7.0]
    assert [parts["optimizer"] for _, parts in steps] == [0.0, 1.0, 1.0]


def test_on_a_gpu_what_is_skipped_is_left_out_also_a_step_later() -> None:
    gpu = Gpu()
    watch = GpuStepTimer(gpu.event)
    watch.start()
    for again in range(2):
        gpu.queued += 2.0
        watch.lap("forward")
        gpu.done = gpu.queued
        assert watch.stop()[0] == 2.0, again
        gpu.queued += 100.0
        watch.skip()


def test_on_a_gpu_it_waits_when_nothing_can_be_read_otherwise() -> None:
    gpu = Gpu()
    watch = GpuStepTimer(gpu.event)
    watch.start()
    gpu.queued += 2.0
    watch.lap("forward")
    assert watch.stop()[0] == 2.0
    assert gpu.waited == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_parts_sum_to_the_whole_without_what_is_skipped() -> None:
    watch = GpuStepTimer()
    matrix = torch.ones(2000, 2000, device="cuda")
    watch.start()
    _ = matrix @ matrix
    watch.lap("forward")
    for _ in range(50):
        _ = matrix @ matrix
    watch.skip()
    seconds, parts = watch.stop()
    assert seconds == pytest.approx(sum(parts.values()))
    assert 0 < parts["forward"] <= seconds
