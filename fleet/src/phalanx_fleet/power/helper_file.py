"""The file of a node's helper: users that may order, which devices within which caps, and where its state is."""

import grp
import os
import pwd
from pathlib import Path
from typing import Literal

from pydantic import Field

from phalanx.cluster.spec import StrictModel
from phalanx.errors import UsageError
from phalanx.recipe.validation_errors import read_user_mapping, validate_value
from phalanx.run.private_files import check_owner
from phalanx_fleet.power_settings import DEFAULT_SOCKET, CapDeviceSettings


class AllowedPeers(StrictModel):
    """Users and groups of this machine that may order caps. root always may."""

    users: list[str] = Field(default_factory=list)
    groups: list[str] = Field(default_factory=list)


class HelperFile(StrictModel):
    """Settings of a helper."""

    allow: AllowedPeers
    devices: CapDeviceSettings = CapDeviceSettings()
    node: str = Field(default_factory=lambda: os.uname().nodename)
    """Name of this node in the fleet file; without it the name of this machine."""
    socket: Path = DEFAULT_SOCKET
    state: Path = Path("/var/lib/phalanx/power")
    """Folder of the record and the audit log."""
    without_record: Literal["lowest", "keep"] = "lowest"
    """Caps of the devices when there is no record: the lowest, since it may be lost; or as they are, for the first
    start on a node with jobs."""


def load_helper_file(path: Path) -> HelperFile:
    """Load a helper's file. Raises RecipeError for what is wrong in it, UsageError where other users may change it."""
    check_owner(path, "the file of the power helper")
    value, locations = read_user_mapping(path, "`allow:`")
    file = validate_value(value, locations, HelperFile)
    PeerList(file.allow)
    return file


def _find_id(kind: str, name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid if kind == "user" else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):  # ValueError: a name with a zero byte
        raise UsageError(f"allow: this machine has no {kind} {name!r}") from None


class PeerList:
    """Which processes may order: by the user and groups that the kernel reports for the other end of a socket.

    Raises UsageError for a user or group that this machine does not have.
    """

    def __init__(self, allow: AllowedPeers):
        self._uids = {0, *(_find_id("user", name) for name in allow.users)}
        self._gids = {_find_id("group", name) for name in allow.groups}

    def find_refusal(self, uid: int, gid: int) -> str:
        """Return why a process may not order; empty if it may. A user directory on the network is asked only
        about users that are allowed neither by their number nor by their main group."""
        if uid in self._uids or gid in self._gids:
            return ""
        try:
            name = pwd.getpwuid(uid).pw_name
            groups = set(os.getgrouplist(name, gid)) if self._gids else set()
        except KeyError:
            name, groups = str(uid), set()
        if groups & self._gids:
            return ""
        return f"user {name} may not use this helper; add the user or a group to `allow` in its file"
