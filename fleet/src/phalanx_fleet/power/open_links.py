"""Choose how nodes are reached for power control: a simulated fleet, helpers, or the devices of this machine."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from phalanx.errors import UsageError
from phalanx_fleet.power.control import PowerFleet, make_writer_name, power_state_dir
from phalanx_fleet.power.devices import CapDevice, CapError, open_cap_devices
from phalanx_fleet.power.fake_fleet import open_fake_links
from phalanx_fleet.power.links import (
    HelperLinks,
    LocalLinks,
    NodeLinks,
    ask_nodes,
    connect_by_command,
    connect_to_socket,
    expand_command,
    is_listening,
)
from phalanx_fleet.power.messages import NodeRequest
from phalanx_fleet.power.node_keeper import NodeKeeper, RecordStore
from phalanx_fleet.power_settings import CapDeviceSettings

KEEPER_START_TIMEOUT_S = 30.0
"""A start of Python, and of the driver's library."""
OpenDevices = Callable[[CapDeviceSettings], Sequence[CapDevice]]


def open_links(
    fleet: PowerFleet, is_fake: bool, is_read_only: bool = True, open_devices: OpenDevices = open_cap_devices
) -> NodeLinks:
    """Return the way to the nodes: their helpers, the devices of this machine, or a fake fleet.

    Raises:
        UsageError: This machine is no node of the fleet, has no device that can be capped, or has another guard.
    """
    if is_fake:
        return open_fake_links(fleet.tree.nodes, fleet.settings.dead_time_s, fleet.settings.averaging_s)
    here, names, reach = os.uname().nodename, {node.name for node in fleet.tree.nodes}, fleet.settings.helper
    own = {here: partial(connect_to_socket, reach.socket)} if here in names and is_listening(reach.socket) else {}
    if reach.command is not None:
        if wrong := sorted(name for name in names if name.startswith("-")):  # it would be an option of the command
            raise UsageError(f"{wrong[0]}: a node that is reached by a command cannot begin with -")
        others = {name: partial(connect_by_command, expand_command(reach.command, name)) for name in names}
        return HelperLinks({**others, **own})
    if here not in names:
        raise UsageError(
            f"{here}: this machine is no node of {fleet.file.name}. Set power.helper.command to reach the helpers of "
            "other nodes, run it on a node, or try it with --fake"
        )
    if own:
        return HelperLinks(own)
    try:
        devices = open_devices(fleet.settings.devices)
        if is_read_only:
            return LocalLinks({here: NodeKeeper(here, devices, RecordStore(record_path(fleet)), is_read_only=True)})
    except CapError as error:
        raise UsageError(f"{here}: {error}. Try it without devices: --fake") from None
    return _start_keeper(fleet, here)


def record_path(fleet: PowerFleet) -> Path:
    """Return the record of this machine where it has no helper."""
    return power_state_dir(fleet) / f"{os.uname().nodename}.json"


def _start_keeper(fleet: PowerFleet, node: str) -> HelperLinks:
    """Start a process that holds the devices: it ends leases also when this one is killed."""
    words = [sys.executable, "-m", "phalanx", "power", "keep-node", str(fleet.path.absolute())]
    links = HelperLinks({node: partial(connect_by_command, words)})
    if not ask_nodes(links, {node: NodeRequest(1, 0, make_writer_name())}, KEEPER_START_TIMEOUT_S):
        links.close()
        reason = links.problems.get(node, "the process that holds the devices does not answer")
        raise UsageError(f"{node}: {reason}")
    return links
