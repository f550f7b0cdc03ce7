"""Power a node off through its management controller: Redfish's ComputerSystem.Reset."""

import os
from collections.abc import Mapping
from typing import Protocol

from phalanx.fleet.telemetry.redfish import RedfishOptions, open_redfish_client
from phalanx.fleet.telemetry.redfish_values import (
    SERVICE_ROOT,
    RedfishLayoutError,
    RedfishStatusError,
    RedfishUnreachableError,
    Resource,
    get_link,
    get_path,
    get_resource,
    list_member_paths,
    list_names,
)

RESET_ACTION = "#ComputerSystem.Reset"
RESET_TYPES = ("ForceOff", "PushPowerButton")
"""In this order; a graceful one takes as long as an operating system wants."""
RedfishErrors = (RedfishUnreachableError, RedfishStatusError, RedfishLayoutError)


class RedfishPostClient(Protocol):
    """Reads resources of a controller, and carries out actions."""

    def get(self, path: str) -> Resource:
        """Read a resource."""
        ...

    def post(self, path: str, body: Mapping[str, object]) -> None:
        """Carry out an action. Errors as of `get`."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class RedfishPowerSwitch:
    """The power of one node. The constructor finds the action and logs in, so that `power_off` is one request.

    Raises one of `RedfishErrors`.
    """

    def __init__(self, client: RedfishPostClient):
        self._client = client
        collection = get_link(client.get(SERVICE_ROOT), "Systems")
        paths = [] if collection is None else list_member_paths(client.get(collection))
        if len(paths) != 1:
            raise RedfishLayoutError(f"has {len(paths)} systems ({list_names(paths)}), so which one is the node?")
        action = get_resource(get_resource(client.get(paths[0]), "Actions"), RESET_ACTION)
        target = get_path(action.get("target"))
        allowed = action.get("ResetType@Redfish.AllowableValues")
        known = [each for each in RESET_TYPES if not isinstance(allowed, list) or each in allowed]
        if target is None or not known:
            raise RedfishLayoutError(f"its system cannot be powered off ({RESET_ACTION})")
        self._target, self._reset_type = target, known[0]

    def power_off(self) -> None:
        """Take the power away."""
        self._client.post(self._target, {"ResetType": self._reset_type})

    def close(self) -> None:
        """End the session."""
        self._client.close()


def open_power_switch(options: RedfishOptions, environment: Mapping[str, str] = os.environ) -> RedfishPowerSwitch:
    """Open the switch of the node that `options` names. Raises one of `RedfishErrors`, SourceUnavailableError without
    sushy, or UsageError for wrong credentials."""
    return RedfishPowerSwitch(open_redfish_client(options, environment))
