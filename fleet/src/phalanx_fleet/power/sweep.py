"""Measure how fast a running job is at several power caps, from the highest down.

The old caps come back when the sweep ends in any way: nodes restore them when their lease ends.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.errors import PhalanxError
from phalanx_fleet.power.links import NodeLinks
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.sweep_file import SweptCap

INTERVAL_S = 1.0
"""From one renewal of the leases to the next, and between samples of power and temperature."""
SLOPE_WINDOW_S = 15.0
ANSWER_TIMEOUT_S = 5.0
MIN_STEPS = 3
END_LEASE_S = 0.01


class SweepError(PhalanxError):
    """A node does not follow, or the job makes no steps."""


@dataclass(frozen=True)
class SweepTimes:
    """Seconds at each cap: at least `wait_s`, until temperatures rise or fall by less than `max_slope_k_per_s` or
    `max_wait_s` have passed; then `measure_s`, up to `max_measure_s` while there are too few steps."""

    wait_s: float = 10.0
    max_wait_s: float = 30.0
    measure_s: float = 30.0
    max_measure_s: float = 120.0
    max_slope_k_per_s: float = 0.05
    """A kelvin in 20 s; sensors of whole kelvins cannot show less within the window."""


StepReader = Callable[[], Sequence[float]]
"""Returns the durations of the steps since the last call, in seconds, without stalls of checkpoints."""


@dataclass
class SweptNodes:
    """The nodes of the job, with this process as their writer. `type_names`: node type by node."""

    links: NodeLinks
    type_names: Mapping[str, str]
    epoch: int
    writer: str
    lease_s: float
    now: Callable[[], float]
    sleep: Callable[[float], None]
    num_devices: Mapping[str, int]
    seq: int = 0
    sessions: dict[str, str] = field(default_factory=dict)

    def take_over(self) -> dict[str, NodeReport]:
        """Become the writer of all nodes. Raises SweepError."""
        self.seq += 1
        request = NodeRequest(self.seq, self.epoch, self.writer, takes_over=True)
        reports = self._ask(dict.fromkeys(self.type_names, request))
        self.sessions = {name: report.session for name, report in reports.items()}
        return reports

    def set_caps(self, cap_by_type: Mapping[str, float], lease_s: float | None = None) -> dict[str, NodeReport]:
        """Have all devices at a cap, or renew the leases of that. Raises SweepError where a node does not follow."""
        self.seq += 1
        requests = {}
        for name, type_name in self.type_names.items():
            caps = (cap_by_type[type_name],) * self.num_devices[name]
            requests[name] = NodeRequest(
                self.seq,
                self.epoch,
                self.writer,
                session=self.sessions[name],
                caps_w=caps,
                fallback_w=caps,
                lease_s=lease_s or self.lease_s,
                reverts=True,
            )
        return self._ask(requests)

    def _ask(self, requests: Mapping[str, NodeRequest]) -> dict[str, NodeReport]:
        for name, request in requests.items():
            self.links.send(name, request)
        reports: dict[str, NodeReport] = {}
        until = self.now() + ANSWER_TIMEOUT_S
        while len(reports) < len(requests):
            reports |= {each.node: each for each in self.links.receive() if each.seq == self.seq}
            if len(reports) < len(requests):
                if self.now() >= until:
                    missing = sorted(requests.keys() - reports.keys())
                    raise SweepError(f"{missing[0]}: does not answer; it restores its caps within {self.lease_s:g} s")
                self.sleep(INTERVAL_S / 20)
        for name, report in reports.items():
            if report.refusal:
                raise SweepError(f"{name}: {'; '.join((report.refusal, *report.problems))}")
        return reports


def sweep_caps(
    nodes: SweptNodes,
    caps_by_type: Mapping[str, Sequence[float]],
    times: SweepTimes,
    read_steps: StepReader,
) -> Generator[list[SweptCap], None, None]:
    """Hold one cap after another and measure; yield what was measured at each, by node type. The leases of the nodes
    end when this ends.

    Raises:
        SweepError: A node does not follow, or the job makes no steps.
    """
    cap_by_type: dict[str, float] = {}
    try:
        for index in range(min(map(len, caps_by_type.values()))):
            cap_by_type = {name: caps[index] for name, caps in caps_by_type.items()}
            yield _measure_cap(nodes, cap_by_type, times, read_steps)
    finally:
        with contextlib.suppress(SweepError):  # then the lease ends later
            if cap_by_type:
                nodes.set_caps(cap_by_type, END_LEASE_S)


def _measure_cap(
    nodes: SweptNodes, cap_by_type: Mapping[str, float], times: SweepTimes, read_steps: StepReader
) -> list[SweptCap]:
    began, temperatures = nodes.now(), list[tuple[float, dict[str, float]]]()
    while True:
        reports = nodes.set_caps(cap_by_type)
        temperatures.append((nodes.now(), _read_temperatures(reports)))
        slope = _find_slope(temperatures)
        waited_s = nodes.now() - began
        is_steady = None if slope is None else slope <= times.max_slope_k_per_s
        if waited_s >= times.max_wait_s or (waited_s >= times.wait_s and is_steady is not False):
            break
        nodes.sleep(INTERVAL_S)
    read_steps()
    began, durations, draws = nodes.now(), list[float](), dict[str, list[float]]()
    while True:
        nodes.sleep(INTERVAL_S)
        for name, report in nodes.set_caps(cap_by_type).items():
            known = [device.draw_w for device in report.devices if device.draw_w is not None]
            draws.setdefault(nodes.type_names[name], []).extend(known)
        durations += read_steps()
        waited_s = nodes.now() - began
        if waited_s >= times.measure_s and len(durations) >= MIN_STEPS:
            break
        if waited_s >= times.max_measure_s:
            raise SweepError(
                f"the job made {len(durations)} steps in {waited_s:.0f} s; a sweep needs {MIN_STEPS} at least"
            )
    return [
        SweptCap(
            node_type=name,
            cap_w=cap_w,
            rate=len(durations) / sum(durations),
            draw_w=float(np.mean(draws[name])) if draws.get(name) else None,
            most_draw_w=max(draws[name]) if draws.get(name) else None,
            is_steady=is_steady,
            num_steps=len(durations),
        )
        for name, cap_w in cap_by_type.items()
    ]


def _read_temperatures(reports: Mapping[str, NodeReport]) -> dict[str, float]:
    return {
        f"{name} {device.id}": device.temperature_c
        for name, report in reports.items()
        for device in report.devices
        if device.temperature_c is not None
    }


def _find_slope(samples: Sequence[tuple[float, Mapping[str, float]]]) -> float | None:
    """Return the greatest change of a device's temperature in kelvins a second, without its sign; None without
    temperatures, or before the window has passed."""
    newest = samples[-1][0]
    if newest - samples[0][0] < SLOPE_WINDOW_S * 0.6:
        return None if not samples[-1][1] else float("inf")
    recent = [each for each in samples if newest - each[0] <= SLOPE_WINDOW_S]
    slopes = []
    for key in recent[-1][1]:
        points = [(t, values[key]) for t, values in recent if key in values]
        if len(points) > 1:
            slopes.append(abs(float(np.polyfit([t - newest for t, _ in points], [v for _, v in points], 1)[0])))
    return max(slopes) if slopes else None
