"""The directory that the operators of a site share, with the states of nodes."""

import stat
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.run.private_files import state_root
from phalanx_fleet.fleet_file import FleetFile, load_fleet_file
from phalanx_fleet.node_states import NodeStates

NODE_STATES_FILE = "nodes.db"


def node_states_path(fleet: Path | None, file: FleetFile | None = None) -> Path:
    """Return the path of the table of nodes: in `state_dir` of the fleet file at a path, which is read without `file`;
    without either this user's own. Raises UsageError for a directory that a group cannot share, and RecipeError for
    what is wrong in the file."""
    if fleet is not None and file is None:
        file, _ = load_fleet_file(fleet)
    if fleet is None or file is None or file.state_dir is None:
        return state_root() / NODE_STATES_FILE
    found = fleet.parent / file.state_dir
    mode = found.stat().st_mode if found.is_dir() else stat.S_IWOTH
    if mode & stat.S_IWOTH or mode & (stat.S_IWGRP | stat.S_ISGID) == stat.S_IWGRP:
        raise UsageError(
            f"{fleet}: state_dir: {found}: expected a directory that the operators' group may write, and no one else: "
            f"`install -d -g GROUP -m 2770 {found}`"
        )
    return found / NODE_STATES_FILE


def open_node_states(fleet: Path | None = None) -> NodeStates:
    """Open the table of nodes. Arguments and errors as of node_states_path."""
    return NodeStates(node_states_path(fleet))
