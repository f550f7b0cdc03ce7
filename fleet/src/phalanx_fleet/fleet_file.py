"""The fleet file: sites, feeds, rows, racks and nodes, and the power that each of them may draw.

A name with a range, such as `r[01-10]`, is an entry for each of these names. Powers are written with their unit.
"""

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from phalanx.cluster.spec import StrictModel
from phalanx.errors import RecipeError, UsageError
from phalanx.recipe.overrides import apply_overrides
from phalanx.recipe.validation_errors import describe_value, read_user_mapping, suggest_nearest, validate_value
from phalanx.recipe.yaml_loader import SourceLocations
from phalanx.run.private_files import state_root
from phalanx_fleet.node_states import NodeStates
from phalanx_fleet.power_settings import Power, PowerSettings
from phalanx_fleet.simulation_settings import REPLAY_CLASS, SimulationSettings
from phalanx_fleet.thermal.plant_settings import CoolingPlant

NAME_PATTERN = re.compile(r"(?:[\w.-]|\[[0-9,-]+\])+")
NAME_PART_PATTERN = re.compile(r"\[([0-9,-]+)\]|[^\[]+")
COMMA_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
FLEET_NAME_REGEX = r"^\w[\w .-]{0,99}$"
ENTRY_SECTIONS = (
    *((name,) for name in ("sites", "feeds", "rows", "racks", "node_types")),
    *(("simulate", name) for name in ("jobs", "failures", "batches")),
)
"""Mappings in which the user chooses the keys."""
EntryT = TypeVar("EntryT")
NODE_STATES_FILE = "nodes.db"


class NodeTypeEntry(StrictModel):
    """Nodes of one kind. What is left out is the catalogue's."""

    node: str
    """Node of the catalogue, such as dgx-h100; `docs/reference/cluster-file.md` lists them."""
    power: Power | None = None
    """Most power of the whole node."""
    idle: Power | None = None
    """Power of the whole node without a job."""
    device_power: Power | None = None
    """Most power of one accelerator."""
    device_idle: Power | None = None
    device_min_cap: Power | None = None
    """Lowest power cap that an accelerator takes."""


class SiteEntry(StrictModel):
    """A site."""

    budget: Power | None = None


class FeedEntry(StrictModel):
    """A feed of a site, or behind another feed."""

    site: str | None = None
    feed: str | None = None
    budget: Power | None = None


class RowEntry(StrictModel):
    """A row of racks behind a feed."""

    feed: str
    budget: Power | None = None


class RackEntry(StrictModel):
    """A rack with equal nodes."""

    row: str
    budget: Power | None = None
    node_type: str
    nodes: int = Field(1, ge=0, le=1000)
    """Nodes in the rack, called RACK-1, RACK-2 and so on."""
    names: str | None = None
    """Names of the nodes of all racks of this entry, rack by rack, such as n[001-040], or n[01-10],m[01-10]."""


class FleetFile(StrictModel):
    """A fleet. A level without a budget may draw what its parts need."""

    name: Annotated[str, Field(pattern=FLEET_NAME_REGEX)] = "fleet"
    """Also the name of the folder of its state."""
    sites: dict[str, SiteEntry]
    feeds: dict[str, FeedEntry]
    rows: dict[str, RowEntry]
    racks: dict[str, RackEntry]
    node_types: dict[str, NodeTypeEntry]
    state_dir: Path | None = None
    """Directory of the states of nodes that all operators of the site may write, relative to this file. Without it each
    user has their own."""
    simulate: SimulationSettings | None = None
    """What `phalanx simulate` needs."""
    cooling: CoolingPlant | None = None
    """The cooling plant of the fleet's sites."""
    power: PowerSettings = PowerSettings()
    """How budgets are held by `phalanx power`."""


def load_fleet_file(path: Path, overrides: Sequence[str] = ()) -> tuple[FleetFile, SourceLocations]:
    """Load the fleet file at `path` with overrides such as simulate.spares=0.02, and where its keys are. Raises
    RecipeError with a line for each problem: file, line, key, the value found and the value expected."""
    value, locations = read_user_mapping(path, "a mapping with sites, feeds, rows, racks and node_types")
    for override in overrides:
        _check_entry(value, override)
        apply_overrides(value, locations, [override])
    return validate_value(value, locations, FleetFile), locations


def _check_entry(value: object, override: str) -> None:
    """Raise RecipeError for an override below a named entry that is not there: a misspelled name would make a second
    one, which changes nothing."""
    parts = override.partition("=")[0].strip().split(".")
    for section in ENTRY_SECTIONS:
        depth = len(section)
        if tuple(parts[:depth]) != section or len(parts) < depth + 2:
            continue
        entries = value
        for part in section:
            entries = entries.get(part) if isinstance(entries, dict) else None
        known = [str(name) for name in entries] if isinstance(entries, dict) else []
        name = parts[depth]
        if name not in known and (section[-1], name) != ("jobs", REPLAY_CLASS):
            raise RecipeError(
                f"override {override}: {'.'.join(section)}: {name} is not in the file; there are "
                f"{', '.join(known) or 'none'}{suggest_nearest(name, known)}"
            )


def expand_names(text: str) -> list[str]:
    """Return the names that names with ranges stand for, as Slurm writes them: r[1,08-10] is r1, r08, r09 and r10,
    r[1-2]-[1-4],gpu7 is r1-1 to r2-4 and gpu7. ValueError for anything else than names of letters, digits, `_`, `.` and
    `-` with ranges."""
    return [name for each in COMMA_BETWEEN_NAMES.split(text) for name in _expand_name(each)]


def _expand_name(text: str) -> list[str]:
    if NAME_PATTERN.fullmatch(text) is None:
        raise ValueError(
            "expected a name, or one with a range such as r[01-10] or r[01-10]-[1-4], or several with commas between "
            f"them, found {describe_value(text)}"
        )
    names = [""]
    for part in NAME_PART_PATTERN.finditer(text):
        endings = [part[0]] if part[1] is None else _expand_range(part[1])
        names = [name + ending for name in names for ending in endings]
    return names


def _expand_range(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"expected a range such as [01-10], found [{text}]")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def expand_entries(entries: Mapping[str, EntryT]) -> dict[str, tuple[str, EntryT]]:
    """Return the key and the entry by each name that a key stands for. ValueError for a name that is there twice."""
    expanded: dict[str, tuple[str, EntryT]] = {}
    for key, entry in entries.items():
        for name in expand_names(key):
            if name in expanded:
                raise ValueError(f"{name} is there twice")
            expanded[name] = key, entry
    return expanded


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
