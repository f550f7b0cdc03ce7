"""Where the time of a step goes."""

import pytest
import torch
from small_train import Clock

from phalanx.train.timing import PARTS, CudaStopwatch, HostStopwatch, stopwatch


def test_parts_sum_to_the_whole_and_the_rest_is_other() -> None:
    clock = Clock()
    watch = HostStopwatch(clock)
    watch.start()
    for part, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 8.0), ("backward", 16.0)):
        clock.tick(seconds)
        watch.lap(part)
    clock.tick(32.0)
    seconds, parts = watch.stop()
    assert seconds == 63.0 == sum(parts.values())
    assert parts == {**dict.fromkeys(PARTS, 0.0), "data": 1.0, "forward": 10.0, "backward": 20.0, "other": 32.0}


def test_what_is_skipped_belongs_to_no_part_and_not_to_the_whole() -> None:
    clock = Clock()
    watch = HostStopwatch(clock)
    watch.start()
    clock.tick(1.0)
    watch.lap("forward")
    clock.tick(100.0)
    watch.skip()
    clock.tick(2.0)
    seconds, parts = watch.stop()
    assert (seconds, parts["forward"], parts["other"]) == (3.0, 1.0, 2.0)


def test_each_step_starts_from_zero() -> None:
    clock = Clock()
    watch = HostStopwatch(clock)
    for expected in (1.0, 2.0):
        watch.start()
        clock.tick(expected)
        watch.lap("forward")
        assert watch.stop() == (expected, {**dict.fromkeys(PARTS, 0.0), "forward": expected})


def test_a_part_that_nobody_knows_is_a_mistake() -> None:
    watch = HostStopwatch(Clock())
    watch.start()
    with pytest.raises(KeyError, match="forwards"):
        watch.lap("forwards")


def test_the_host_measures_for_a_cpu_and_events_for_a_gpu() -> None:
    assert isinstance(stopwatch(torch.device("cpu")), HostStopwatch)
    assert isinstance(stopwatch(torch.device("cuda")), CudaStopwatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_parts_sum_to_the_whole_without_what_is_skipped() -> None:
    watch = CudaStopwatch()
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
