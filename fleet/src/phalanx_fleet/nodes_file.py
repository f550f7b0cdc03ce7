"""The nodes file: which nodes a fleet has where no backend lists them, and where their readings come from."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.errors import RecipeError
from phalanx.recipe.field_types import NUMBER_NOT_BOOL
from phalanx.recipe.validation_errors import join_problems, read_user_mapping, validate_value
from phalanx.recipe.yaml_loader import location_of_key
from phalanx_fleet.telemetry.modbus import ModbusEntry
from phalanx_fleet.telemetry.mqtt import MqttOptions
from phalanx_fleet.telemetry.redfish import RedfishOptions
from phalanx_fleet.telemetry.redfish_cdu import RedfishCduOptions


class CduEntry(StrictModel):
    """A coolant distribution unit. Without `redfish` and `modbus` it is read from the bus, by its object id."""

    id: str
    """The building's object id; any name where there is no bus."""
    racks: tuple[str, ...] = ()
    """Location ids of the racks that it supplies."""
    redfish: RedfishCduOptions | None = None
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
    redfish: RedfishOptions | None = None
    """The management controller of this node."""


class CoolingResponseSettings(StrictModel):
    """Limits of what is usual."""

    min_flow_share: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.2
    """Of its usual flow, below which a rack or CDU has lost it."""


class NodesFile(StrictModel):
    """A fleet."""

    nodes: list[NodesFileEntry]
    """Nodes, in the order in which they are shown."""
    mqtt: MqttOptions | None = None
    """The bus with the racks."""
    cdus: tuple[CduEntry, ...] = ()
    """Coolant distribution units."""
    cooling_response: CoolingResponseSettings = CoolingResponseSettings()
    """What `phalanx thermal guard` knows of the nodes."""


def load_nodes_file(path: Path) -> NodesFile:
    """Load the nodes file at `path`. Raises RecipeError with a line for each problem: file, line, key, the value found
    and the value expected."""
    value, locations = read_user_mapping(path, "`nodes:` with a list")
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
