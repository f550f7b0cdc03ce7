"""Rehearse the response to lost cooling on a simulated fleet: `phalanx thermal rehearse`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.fleet.fake_cooling import COOLANT_C, FakeCooledFleet, FakeSavingJob
from phalanx.fleet.nodes_file import find_racks_of_nodes, load_nodes_file
from phalanx.fleet.power.devices import CapLimits
from phalanx.fleet.power.fake_fleet import FakeCapDevice, FakeClock, FakeNode
from phalanx.fleet.thermal.cooling_faults import CooledNodes, FaultDetector
from phalanx.fleet.thermal.flow_loss import CoolingFault
from phalanx.fleet.thermal.response import CoolingResponder, ResponseEvent

FAULT_S = 10.0
END_S = 120.0
READ_INTERVAL_STEPS = 5
STEP_S = 0.2
"""Of the guard: what is due; each fifth step it reads."""


@dataclass(frozen=True)
class Rehearsal:
    """What a guard did after a fault at 0 s, and how hot the nodes of the rack became."""

    rack: str
    events: Sequence[ResponseEvent]
    """Their times are from the fault on."""
    peaks_c: Mapping[str, float]
    limit_c: float
    saved_at_s: float | None
    """When the job had saved; None if it has not."""


def rehearse_response(nodes: Path, fault: CoolingFault, save_s: float | None) -> Rehearsal:
    """Break the cooling of the first rack of a nodes file, of which the nodes run one job, in a simulation.

    Args:
        nodes: The nodes file; nothing in it is opened.
        fault: A leak, or lost flow.
        save_s: Seconds that the job needs to save; None without a job.
    """
    file = load_nodes_file(nodes)
    racks, settings = find_racks_of_nodes(file), file.cooling_response
    if not racks:
        raise UsageError(f"{nodes}: no node has a rack; add `rack: NAME` to the nodes")
    clock, rack = FakeClock(), next(iter(racks.values()))
    watts = settings.device_power
    limits = CapLimits(0.2 * watts, watts, watts)
    fleet = FakeCooledFleet(
        {
            name: FakeNode(name, [FakeCapDevice(name, clock, limits, lambda t: watts, 0.0, 0.0)], clock)
            for name in racks
        },
        racks,
        clock,
        settings.heat_j_per_k,
        settings.usual_c - COOLANT_C,
        settings.limit_c,
    )
    concerned = tuple(name for name in racks if racks[name] == rack)
    if save_s is not None:
        fleet.jobs = [FakeSavingJob("job", concerned, save_s)]
    detector = FaultDetector(CooledNodes(racks), settings.min_flow_share)
    responder = CoolingResponder(fleet, clock, fleet.find_device, may_act=True)
    events: list[ResponseEvent] = []
    for step in range(1, round(END_S / STEP_S) + 1):
        if step == round(FAULT_S / STEP_S) + 1:
            _break_cooling(fleet, rack, fault)
        fleet.run_until(step * STEP_S)
        if step % READ_INTERVAL_STEPS == 0:
            events += responder.respond(detector.find_faults(fleet.read_racks(), fleet.read_margins(), clock.now))
        events += responder.power_off_due()
    saved = next((job.saved_at for job in fleet.jobs if job.saved_at is not None), None)
    return Rehearsal(
        rack,
        [ResponseEvent(each.time_s - FAULT_S, each.action, each.target, each.text, each.problem) for each in events],
        {name: fleet.peaks_c[name] for name in concerned},
        settings.limit_c,
        None if saved is None else saved - FAULT_S,
    )


def _break_cooling(fleet: FakeCooledFleet, rack: str, fault: CoolingFault) -> None:
    if fault is CoolingFault.LEAK:
        fleet.leaks.add(rack)
    else:
        fleet.flow_share[rack] = 0.0
