"""The nodes file: which nodes a fleet has where no backend lists them, and where their readings come from."""

from pathlib import Path

from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.errors import RecipeError
from phalanx.fleet.telemetry.modbus_map import ModbusEntry
from phalanx.fleet.telemetry.rack_points import REPUBLISH_INTERVAL_S
from phalanx.fleet.thermal.response_settings import CoolingResponseSettings
from phalanx.recipe.user_text import read_user_text
from phalanx.recipe.validation_errors import describe_value, join_problems, validate_value
from phalanx.recipe.yaml_loader import location_of_key, parse_yaml


class ControllerEntry(StrictModel):
    """How a management controller is read."""

    url: str
    interval_s: float = Field(10.0, gt=0, le=1e6)
    timeout_s: float = Field(20.0, gt=0, le=3600)
    verify_tls: bool = True
    ca_file: Path | None = None
    credentials_file: Path | None = None


class RedfishEntry(ControllerEntry):
    """A node's management controller: RedfishOptions."""

    chassis: str = ""


class CduRedfishEntry(ControllerEntry):
    """A CDU's management controller: RedfishCduOptions."""

    cdu: str = ""


class MqttEntry(StrictModel):
    """The building's bus: MqttOptions."""

    url: str
    republish_interval_s: float = Field(REPUBLISH_INTERVAL_S, gt=0, le=1e6)
    verify_tls: bool = True
    ca_file: Path | None = None
    credentials_file: Path | None = None


class CduEntry(StrictModel):
    """A coolant distribution unit. Without `redfish` and `modbus` it is read from the bus, by its object id."""

    id: str
    """The building's object id; any name where there is no bus."""
    racks: tuple[str, ...] = ()
    """Location ids of the racks that it supplies."""
    redfish: CduRedfishEntry | None = None
    modbus: ModbusEntry | None = None

    @model_validator(mode="after")
    def check_sources(self) -> "CduEntry":
        """Refuse two sources."""
        if self.redfish is not None and self.modbus is not None:
            raise ValueError("found redfish and modbus, expected one of them")
        return self


class NodesFileEntry(StrictModel):
    """A node, and what can be asked about it."""

    name: str
    """Name of the node, as the backend has it."""
    rack: str | None = None
    """Location id of its rack, as the building has it: a leak or a lost flow there is this node's."""
    prometheus: str | None = None
    """URL of a metrics endpoint with the accelerators of this node, such as http://n1:9400/metrics of dcgm-exporter."""
    redfish: RedfishEntry | None = None
    """The management controller of this node."""


class NodesFile(StrictModel):
    """A fleet."""

    nodes: list[NodesFileEntry]
    """Nodes, in the order in which they are shown."""
    mqtt: MqttEntry | None = None
    """The bus with the racks."""
    cdus: tuple[CduEntry, ...] = ()
    """Coolant distribution units."""
    cooling_response: CoolingResponseSettings = CoolingResponseSettings()
    """What `phalanx thermal guard` knows of the nodes."""


def load_nodes_file(path: Path) -> NodesFile:
    """Load the nodes file at `path`. Raises RecipeError with a line for each problem: file, line, key, the value found
    and the value expected."""
    value, locations = parse_yaml(read_user_text(path), str(path))
    if not isinstance(value, dict):
        raise RecipeError(
            f"{location_of_key(locations, ())}: found {describe_value(value)}, expected `nodes:` with a list"
        )
    found = validate_value(value, locations, NodesFile)
    ids = {"nodes": ("name", [each.name for each in found.nodes]), "cdus": ("id", [each.id for each in found.cdus])}
    if problems := [
        f"{location_of_key(locations, (key, index, column))}: {key}.{index}.{column}: {name} appears twice"
        for key, (column, names) in ids.items()
        for index, name in enumerate(names)
        if name in names[:index]
    ]:
        raise join_problems(problems)
    if (
        bus_cdu := next((each.id for each in found.cdus if not (each.redfish or each.modbus)), None)
    ) and not found.mqtt:
        raise RecipeError(
            f"{location_of_key(locations, ('cdus',))}: cdus: {bus_cdu} has neither modbus nor redfish, and there is no "
            "mqtt to read it from"
        )
    return found


def find_racks_of_nodes(file: NodesFile) -> dict[str, str]:
    """Return the rack of each node that has one."""
    return {node.name: node.rack for node in file.nodes if node.rack is not None}
