"""Advice as requests to a simulated plant, hour by hour: the adviser knows only the hour before, and the plant's local
controller verifies each request.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from phalanx.fleet.thermal.device_series import HOUR_S, Values
from phalanx.fleet.thermal.local_controller import LocalController, SetPointRequest
from phalanx.fleet.thermal.plant import PlantControls
from phalanx.fleet.thermal.plant_settings import CoolingPlant
from phalanx.fleet.thermal.set_points import MAX_STEP_K, SetPointAdvice, compare_with_fixed, tabulate_site_power


@dataclass(frozen=True)
class LoopOutages:
    """Hours in which the adviser is silent, and in which an operator has taken over."""

    silent_hours: Set[int] = frozenset()
    operator_hours: Set[int] = frozenset()


@dataclass(frozen=True)
class ClosedLoopResult:
    """A year of requests: what the plant did, against its fixed set point."""

    advice: SetPointAdvice
    num_requests: int
    num_local_hours: int
    """Hours in which the controller held its own set point."""
    refusals: Mapping[str, int] = field(default_factory=dict)


def run_closed_loop(
    plant: CoolingPlant, it_w: Values, dry_bulb_c: Values, wet_bulb_c: Values, outages: LoopOutages | None = None
) -> ClosedLoopResult:
    """Request a supply and a flow each hour for what was measured in the hour before."""
    outages = outages or LoopOutages()
    table = tabulate_site_power(plant, it_w, dry_bulb_c, wet_bulb_c)
    controller = LocalController(plant)
    held = np.empty((len(it_w), 2))
    num_requests = num_local = 0
    for hour in range(len(it_w)):
        now = hour * HOUR_S
        controller.is_operator_in_charge = hour in outages.operator_hours
        if hour > 0 and hour not in outages.silent_hours:
            controller.receive(SetPointRequest(*table.choose(hour - 1, controller.supply_c + MAX_STEP_K)))
            controller.beat(now)
            num_requests += 1
        followed, refusal = controller.step(now, float(it_w[hour]))
        num_local += refusal is not None
        held[hour] = followed.supply_c, followed.flow_share
    controls = PlantControls(held[:, 0].copy(), held[:, 1].copy())
    advice = compare_with_fixed(plant, it_w, dry_bulb_c, wet_bulb_c, controls)
    return ClosedLoopResult(advice, num_requests, num_local, dict(controller.refusals))
