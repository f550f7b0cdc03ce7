"""The building's controller of a plant, simulated: it verifies each request as if the adviser were wrong, drops it when
the heartbeat stops, and an operator takes over at any time. It is safe without the adviser.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from phalanx.fleet.thermal.cooling_tower import WATER_J_PER_KG_K
from phalanx.fleet.thermal.plant_settings import CoolingPlant
from phalanx.fleet.thermal.set_points import LOWEST_SUPPLY_C, MAX_STEP_K

MAX_REQUEST_AGE_S = 300.0
"""Age of the newest heartbeat from which a request is dropped. A plant answers in 5 to 15 minutes."""
STEP_INTERVAL_S = 3600.0
"""Within which the supply may rise by `MAX_STEP_K`."""

REFUSAL_NAMES = {
    "an operator": "an operator has taken over",
    "the last heartbeat": "no heartbeat",
    "a supply": "supply out of range",
    "a flow": "flow out of range",
    "a step": "step too large",
}
"""Names of refusals by how their text begins."""


@dataclass(frozen=True)
class SetPointRequest:
    """What an adviser asks a local controller for."""

    supply_c: float
    flow_share: float


def find_refusal(
    plant: CoolingPlant, request: SetPointRequest, current_c: float, heartbeat_age_s: float, is_operator_in_charge: bool
) -> str | None:
    """Return why a local controller refuses a request, or drops it; None if it may follow. `current_c`: the set point
    from which the supply may rise now."""
    if is_operator_in_charge:
        return "an operator has taken over"
    if not heartbeat_age_s <= MAX_REQUEST_AGE_S:  # also for a missing one, which is NaN
        return f"the last heartbeat is {heartbeat_age_s:.0f} s old, more than {MAX_REQUEST_AGE_S:.0f} s"
    if not LOWEST_SUPPLY_C <= request.supply_c <= plant.max_supply_c:
        return f"a supply of {request.supply_c:g} °C is not within {LOWEST_SUPPLY_C} to {plant.max_supply_c:g} °C"
    if not plant.min_flow_share <= request.flow_share <= 1:
        return f"a flow of {request.flow_share:.0%} is not within {plant.min_flow_share:.0%} to 100%"
    if request.supply_c - current_c > MAX_STEP_K:
        return f"a step from {current_c:g} to {request.supply_c:g} °C is more than {MAX_STEP_K} K"
    return None


@dataclass
class LocalController:
    """Holds a plant's supply and flow. Without a request that it may follow: the plant's own set point, and a flow that
    follows the load. `now` is seconds of its own clock."""

    plant: CoolingPlant
    is_operator_in_charge: bool = False
    supply_c: float = field(init=False)
    refusals: Counter[str] = field(default_factory=Counter)
    """How many times each refusal was given, by its name."""
    _request: SetPointRequest | None = None
    _heartbeat_at: float = -math.inf
    _rise_base: tuple[float, float] = field(init=False)
    """Time and set point from which rises are counted."""

    def __post_init__(self) -> None:
        self.supply_c = self.plant.supply_c
        self._rise_base = -math.inf, self.supply_c

    def receive(self, request: SetPointRequest) -> None:
        """Take a request; the next step verifies it."""
        self._request = request

    def drop(self) -> None:
        """Leave the request: the adviser has withdrawn it."""
        self._request = None

    def beat(self, now: float) -> None:
        """Take a heartbeat of the adviser."""
        self._heartbeat_at = now

    def step(self, now: float, it_w: float) -> tuple[SetPointRequest, str | None]:
        """Return what the plant is held at, and why a request is not followed. A request that is dropped has to be
        sent again."""
        begin, base_c = self._rise_base
        if now - begin >= STEP_INTERVAL_S or self.supply_c < base_c:
            self._rise_base = begin, base_c = now, self.supply_c
        refusal = None if self._request is not None else "no request"
        if self._request is not None:
            age_s = now - self._heartbeat_at
            refusal = find_refusal(self.plant, self._request, base_c, age_s, self.is_operator_in_charge)
            if refusal is not None:
                self.refusals[_name_refusal(refusal)] += 1
                self._request = None
        wanted = self._request or SetPointRequest(self.plant.supply_c, self._find_load_flow(it_w))
        self.supply_c = min(wanted.supply_c, base_c + MAX_STEP_K)  # its own set point is approached by steps, too
        return SetPointRequest(self.supply_c, max(wanted.flow_share, self._find_least_flow(it_w))), refusal

    def _find_load_flow(self, it_w: float) -> float:
        return min(1.0, max(self.plant.min_flow_share, it_w / self.plant.design_it))

    def _find_least_flow(self, it_w: float) -> float:
        """With which the coolant rises as much as racks bear. It is kept whatever is requested."""
        heat_w = it_w * self.plant.liquid_share
        full_w_per_k = self.plant.design_flows_kg_per_s[1] * WATER_J_PER_KG_K
        return min(1.0, heat_w / self.plant.max_rack_rise_k / full_w_per_k)


def _name_refusal(text: str) -> str:
    return next(name for begin, name in REFUSAL_NAMES.items() if text.startswith(begin))
