"""The nodes file: which nodes a fleet has where no backend lists them, and where their readings come from."""

from pathlib import Path

from pydantic import Field, ValidationError

from phalanx.cluster.spec import StrictModel
from phalanx.errors import RecipeError
from phalanx.fleet.telemetry.rack_points import REPUBLISH_INTERVAL_S
from phalanx.recipe.load import read_user_text
from phalanx.recipe.validation_errors import describe_validation_error, describe_value, join_problems
from phalanx.recipe.yaml_loader import location_of_key, parse_yaml


class RedfishEntry(StrictModel):
    """A node's management controller: RedfishOptions."""

    url: str
    chassis: str = ""
    interval_s: float = Field(10.0, gt=0)
    timeout_s: float = Field(20.0, gt=0)
    verify_tls: bool = True
    ca_file: Path | None = None
    credentials_file: Path | None = None


class MqttEntry(StrictModel):
    """The building's bus: MqttOptions."""

    url: str
    republish_interval_s: float = Field(REPUBLISH_INTERVAL_S, gt=0)
    verify_tls: bool = True
    ca_file: Path | None = None
    credentials_file: Path | None = None


class NodesFileEntry(StrictModel):
    """A node, and what can be asked about it."""

    name: str
    """Name of the node, as the backend has it."""
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


def load_nodes_file(path: Path) -> NodesFile:
    """Load the nodes file at `path`. Raises RecipeError with a line for each problem: file, line, key, the value found
    and the value expected."""
    value, locations = parse_yaml(read_user_text(path), str(path))
    if not isinstance(value, dict):
        raise RecipeError(
            f"{location_of_key(locations, ())}: found {describe_value(value)}, expected `nodes:` with a list"
        )
    try:
        found = NodesFile.model_validate(value)
    except ValidationError as error:
        raise describe_validation_error(error, value, locations, NodesFile) from None
    names = [node.name for node in found.nodes]
    if problems := [
        f"{location_of_key(locations, ('nodes', index, 'name'))}: nodes.{index}.name: {name} appears twice"
        for index, name in enumerate(names)
        if name in names[:index]
    ]:
        raise join_problems(problems)
    return found
