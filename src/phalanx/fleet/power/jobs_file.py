"""The jobs file of power control: which nodes a job has, and what a sweep of it measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from phalanx.cluster.spec import Figure, StrictModel
from phalanx.errors import DataError, RecipeError
from phalanx.fleet.fleet_file import expand_names
from phalanx.fleet.power.allocation import PoweredJob
from phalanx.fleet.power.speed_curve import SpeedCurve, SweepPoint
from phalanx.fleet.power.sweep_file import load_sweep
from phalanx.fleet.power_tree import NodePower, PowerTree
from phalanx.fleet.power_units import Power
from phalanx.recipe.user_text import read_user_text
from phalanx.recipe.validation_errors import describe_value, suggest_nearest, validate_value
from phalanx.recipe.yaml_loader import location_of_key, parse_yaml

JOB_REGEX = r"^(local|slurm|kubernetes|ray):.+$"
CAP_TOLERANCE_W = 1.0
"""Devices round caps to a watt or less."""


class SweepEntry(StrictModel):
    """A cap, and what the job did there: steps or tokens a second, and the mean power of a device."""

    cap: Power
    rate: Figure
    draw: Power


class PoweredJobEntry(StrictModel):
    """A job on all devices of its nodes. `sweep`: by node type."""

    nodes: str
    """Names, with ranges such as n[01-04], k[1-2]-[1-4] or n1,n[3-4]."""
    priority: int = Field(0, ge=-(10**6), le=10**6)
    """A job of a higher one is slowed down later."""
    job: str | None = Field(None, pattern=JOB_REGEX)
    """Backend and id of the job, such as local:7: it can be paused when caps do not reach a load target."""
    sweep: dict[str, list[SweepEntry]] = Field(default_factory=dict)
    run: Path | None = None
    """Directory of a run with a stored sweep, relative to this file's; instead of `sweep`."""


class PowerJobsFile(StrictModel):
    """Jobs by name."""

    jobs: dict[str, PoweredJobEntry]


def load_jobs_file(path: Path, tree: PowerTree) -> Sequence[PoweredJob]:
    """Load the jobs of a fleet. Raises RecipeError for what is wrong in the file."""
    value, locations = parse_yaml(read_user_text(path), str(path))
    if not isinstance(value, dict):
        raise RecipeError(f"{location_of_key(locations, ())}: found {describe_value(value)}, expected `jobs:`")
    file = validate_value(value, locations, PowerJobsFile)
    indices = {node.name: index for index, node in enumerate(tree.nodes)}
    owners: dict[str, str] = {}
    jobs = []
    for name, entry in file.jobs.items():
        where = location_of_key(locations, ("jobs", name))
        try:
            names = expand_names(entry.nodes)
            curves = _fit_curves(entry, path.parent)
        except (ValueError, DataError) as error:
            raise RecipeError(f"{where}: jobs.{name}: {error}") from None
        for node in names:
            if node not in indices:
                raise RecipeError(f"{where}: jobs.{name}: {node}: no such node{suggest_nearest(node, [*indices])}")
            if node in owners:
                raise RecipeError(f"{where}: jobs.{name}: {node} is of job {owners[node]}, too")
            owners[node] = name
        types = {tree.nodes[indices[node]].type_name: tree.nodes[indices[node]].power for node in names}
        if problem := _find_curve_problem(curves, types):
            raise RecipeError(f"{where}: jobs.{name}: {problem}")
        devices = {indices[node]: tuple(range(tree.nodes[indices[node]].power.num_devices)) for node in names}
        jobs.append(PoweredJob(name, devices, curves, entry.priority, entry.job))
    return jobs


def _find_curve_problem(curves: Mapping[str, SpeedCurve], types: Mapping[str, NodePower]) -> str:
    """Return what is wrong with the node types and caps of a sweep; empty if nothing is."""
    for name, curve in curves.items():
        if name not in types:
            return f"sweep: {name}: no node type of its nodes; they are {', '.join(types)}"
        low_w, high_w = types[name].device_min_cap_w or 0.0, types[name].device_max_w
        for cap_w in (curve.caps_w[0], curve.caps_w[-1]):
            if not low_w - CAP_TOLERANCE_W <= cap_w <= high_w + CAP_TOLERANCE_W:
                return f"sweep: {name}: a device takes caps from {low_w:g} to {high_w:g} W, not {cap_w:g} W"
    return ""


def _fit_curves(entry: PoweredJobEntry, folder: Path) -> dict[str, SpeedCurve]:
    if entry.run is not None:
        if entry.sweep:
            raise DataError("expected one of `sweep` and `run`")
        return load_sweep(folder / entry.run).fit_curves()
    return {
        name: SpeedCurve.fit([SweepPoint(point.cap, point.rate, point.draw) for point in points])
        for name, points in entry.sweep.items()
    }
