"""Redfish resources of a CDU, as DMTF's schemas have them: secondary connectors, pumps, leak detectors."""

from typing import Any

CDU = "/redfish/v1/ThermalEquipment/CDUs/1"


def link(path: str) -> dict[str, Any]:
    return {"@odata.id": path}


def make_cdu(num_connectors: int = 1) -> dict[str, dict[str, Any]]:
    """The resources by their path."""
    connectors: dict[str, dict[str, Any]] = {
        f"{CDU}/SecondaryCoolantConnectors/{number}": {
            "Id": str(number),
            "SupplyTemperatureCelsius": {"Reading": 32.5 + number},
            "ReturnTemperatureCelsius": {"Reading": 42.0 + number},
            "FlowLitersPerMinute": {"Reading": 180.0},
            "DeltaPressurekPa": {"Reading": 95.0 - number},
            "SupplyTemperatureControlCelsius": {"SetPoint": 32.0, "AllowableMin": 18.0, "AllowableMax": 45.0},
            "Status": {"State": "Enabled"},
        }
        for number in range(num_connectors)
    }
    pumps: dict[str, dict[str, Any]] = {
        f"{CDU}/Pumps/{number}": {"Id": number, "PumpSpeedPercent": {"Reading": 61.0}} for number in (1, 2)
    }
    detectors: dict[str, dict[str, Any]] = {
        f"{CDU}/LeakDetection/LeakDetectors/{name}": {"DetectorState": "OK", "Status": {"State": "Enabled"}}
        for name in ("Floor", "Manifold")
    }
    collections: dict[str, dict[str, Any]] = {
        f"{CDU}/SecondaryCoolantConnectors": connectors,
        f"{CDU}/Pumps": pumps,
        f"{CDU}/LeakDetection/LeakDetectors": detectors,
    }
    return {
        "/redfish/v1/": {"Id": "RootService", "ThermalEquipment": link("/redfish/v1/ThermalEquipment")},
        "/redfish/v1/ThermalEquipment": {"CDUs": link("/redfish/v1/ThermalEquipment/CDUs")},
        "/redfish/v1/ThermalEquipment/CDUs": {"Members": [link(CDU)]},
        CDU: {
            "Id": "1",
            "Name": "CDU row 3",
            "EquipmentType": "CDU",
            "SecondaryCoolantConnectors": link(f"{CDU}/SecondaryCoolantConnectors"),
            "Pumps": link(f"{CDU}/Pumps"),
            "LeakDetection": link(f"{CDU}/LeakDetection"),
            "EnvironmentMetrics": link(f"{CDU}/EnvironmentMetrics"),
        },
        f"{CDU}/EnvironmentMetrics": {"PowerWatts": {"Reading": 3400.0}},
        f"{CDU}/LeakDetection": {"LeakDetectors": link(f"{CDU}/LeakDetection/LeakDetectors")},
        **{path: {"Members": [link(each) for each in members]} for path, members in collections.items()},
        **connectors,
        **pumps,
        **detectors,
    }
