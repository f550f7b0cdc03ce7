"""A stand-in for a node's management controller: Redfish resources, with faults."""

from dataclasses import dataclass, field
from typing import Any

from phalanx_fleet.telemetry.service_reading import (
    AccessError,
    RefusalError,
    ServiceError,
)
from settable_clock import SettableClock

CHASSIS = "/redfish/v1/Chassis/1"


def link(path: str) -> dict[str, Any]:
    return {"@odata.id": path}


@dataclass
class FakeBmc:
    """One controller. A request takes `request_s`, by which it sets the clock forward.

    Faults: `is_down` (no answer), `is_refused` (the session is over and the password is another), `failing` (paths that
    are answered with an error), `values` (other readings, null included, by name: power, inlet, cpu, fan).
    """

    clock: SettableClock
    is_modern: bool = True
    request_s: float = 0.0
    is_down: bool = False
    is_refused: bool = False
    is_open: bool = True
    failing: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Other resources, which replace those of these paths."""
    requests: list[str] = field(default_factory=list)

    def get(self, path: str) -> dict[str, Any]:
        self.requests.append(path)
        if self.is_down:
            raise ServiceError("connection refused")
        if self.is_refused:
            raise AccessError("refuses the credentials")
        resource = {**self._resources(), **self.more}.get(path)
        self.clock.now += self.request_s
        if resource is None or path in self.failing:
            raise RefusalError(f"answers with status 500 to {path}")
        return dict(resource)

    def close(self) -> None:
        self.is_open = False

    def _resources(self) -> dict[str, Any]:
        defaults = {"power": 800.0, "inlet": 24.5, "cpu": 61, "fan": 8200}
        watts, inlet, cpu, fan = (self.values.get(name, value) for name, value in defaults.items())
        kinds = ("EnvironmentMetrics", "ThermalSubsystem") if self.is_modern else ("Power", "Thermal")
        chassis = {"Id": "1", **{kind: link(f"{CHASSIS}/{kind}") for kind in kinds}}
        found = {
            "/redfish/v1/": {"Chassis": link("/redfish/v1/Chassis")},
            "/redfish/v1/Chassis": {"Members": [link(CHASSIS)]},
            CHASSIS: chassis,
        }
        if self.is_modern:
            metrics = f"{CHASSIS}/ThermalSubsystem/ThermalMetrics"
            return found | {
                f"{CHASSIS}/EnvironmentMetrics": {
                    "PowerWatts": {"Reading": watts},
                    "FanSpeedsPercent": [{"Reading": 55.0}, {"Reading": 0 if fan == 0 else 54.0}],
                },
                f"{CHASSIS}/ThermalSubsystem": {"ThermalMetrics": link(metrics)},
                metrics: {
                    "TemperatureSummaryCelsius": {"Intake": {"Reading": inlet}},
                    "TemperatureReadingsCelsius": [
                        {"Reading": 58.0, "PhysicalContext": "CPU"},
                        {"Reading": cpu, "PhysicalContext": "CPU"},
                    ],
                },
            }
        state = {"Status": {"State": "Enabled", "Health": "OK"}}
        return found | {
            f"{CHASSIS}/Power": {"PowerControl": [{"PowerConsumedWatts": watts}, {"PowerConsumedWatts": 90}]},
            f"{CHASSIS}/Thermal": {
                "Temperatures": [
                    {"ReadingCelsius": inlet, "PhysicalContext": "Intake", **state},
                    {"ReadingCelsius": cpu, "PhysicalContext": "CPU", **state},
                    {"ReadingCelsius": 99, "PhysicalContext": "CPU", "Status": {"State": "Absent"}},
                ],
                "Fans": [
                    {"Reading": fan, "ReadingUnits": "RPM", **state},
                    {"Reading": None, "Status": {"State": "Absent"}},
                ],
            },
        }
