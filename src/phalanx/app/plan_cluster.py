"""The cluster that a fleet file describes to the planner: its nodes, the power cap that its budgets leave, its site."""

from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster import load_cluster
from phalanx.cluster.spec import Cluster, Prices
from phalanx.errors import DataError, UsageError
from phalanx.fleet.fleet_file import FleetFile, load_fleet_file
from phalanx.fleet.power.allocation import NodeCaps, allocate_caps
from phalanx.fleet.power.claims import describe_excesses, list_budgets
from phalanx.fleet.power.guard import group_by_rack
from phalanx.fleet.power.sweep_file import FILE_NAME, load_sweep
from phalanx.fleet.power_tree import PowerTree, build_power_tree
from phalanx.fleet.simulate.site_hours import find_busy_pue
from phalanx.fleet.simulate.site_series import load_site_hours
from phalanx.planner.energy import SweptSpeeds
from phalanx.recipe.user_text import read_user_text
from phalanx.recipe.yaml_loader import parse_yaml

CLUSTER_VARIABLE = "PHALANX_CLUSTER"
"""A cluster by name or file, as for `phalanx plan --cluster`: its prices are kept with runs."""
FILE_SUFFIXES = (".yaml", ".yml")
FLEET_KEY = "racks"
"""Key that each fleet file has, and no cluster file."""


@dataclass(frozen=True)
class FleetCluster:
    """The nodes of one type of a fleet file, as a cluster."""

    cluster: Cluster
    node_type: str


def find_fleet_cluster(text: str, folder: Path | None = None) -> FleetCluster | None:
    """Return the cluster of a fleet file, FLEET.yaml, or FLEET.yaml:TYPE for the nodes of one type; None where `text`
    names no fleet file.

    It has all nodes of the type, the one power cap that all devices may have within the budgets while all are busy, and
    what the section `simulate.site` states of PUE, price and carbon.
    """
    path, node_type = _split_type(text, folder or Path())
    if not _is_fleet_file(path):
        return None
    fleet, locations = load_fleet_file(path)
    tree = build_power_tree(fleet, locations)
    chosen = _choose_type(tree, path, node_type)
    return FleetCluster(_describe_cluster(fleet, tree, path, chosen), chosen)


@dataclass(frozen=True)
class PlanTarget:
    """What a run is planned for. `cluster`: a value or a name, None for this machine; `swept`: what a sweep of the run
    has measured under power caps."""

    cluster: str | Cluster | None
    swept: SweptSpeeds | None = None


def find_plan_target(name: str | None, recipe_name: str, run: Path | None = None) -> PlanTarget:
    """Return the cluster of a name or file, and for a fleet file what the sweep of `run` has measured on its nodes; by
    default that of the recipe's run directory, if it has one.

    Raises:
        UsageError: `run` is given, and the cluster is of no fleet file.
        DataError: `run` has no sweep, or a damaged one, or none of this type of nodes.
    """
    fleet = None if name is None else find_fleet_cluster(name, Path.cwd())
    if fleet is None:
        if run is not None:
            raise UsageError(f"--run {run}: its sweep is for the node types of a fleet file; give one by --cluster")
        return PlanTarget(name)
    default = Path("runs") / recipe_name
    if run is None and not (default / FILE_NAME).exists():
        return PlanTarget(fleet.cluster)
    curves = load_sweep(run or default).fit_curves()
    if (curve := curves.get(fleet.node_type)) is not None:
        return PlanTarget(fleet.cluster, SweptSpeeds(str(run or default), curve.caps_w, curve.speeds))
    if run is not None:
        raise DataError(f"{run}: its sweep is of nodes of type {', '.join(curves)}, not {fleet.node_type}")
    return PlanTarget(fleet.cluster)


def compute_common_cap(tree: PowerTree, type_name: str, margin: float) -> float | None:
    """Return the power cap that all devices of a node type may have within the budgets, with every device busy; None
    where they need none. UsageError where the lowest caps are above the budgets."""
    limits = [
        NodeCaps(node.power.device_min_cap_w or 0.0, node.power.device_max_w, node.power.num_devices)
        for node in tree.nodes
    ]
    found = allocate_caps(tree, limits, group_by_rack(tree), list_budgets(tree), margin, 0.0)
    if not found.is_within:
        raise UsageError(
            "the budgets do not bear all nodes of the fleet while they are busy, even at the lowest caps: "
            f"{describe_excesses(tree, found.caps_w, margin)}. Raise these budgets or remove nodes"
        )
    of_type = [index for index, node in enumerate(tree.nodes) if node.type_name == type_name]
    cap_w = min(cap for index in of_type for cap in found.caps_w[index])
    return None if cap_w >= tree.nodes[of_type[0]].power.device_max_w * (1 - 1e-6) else cap_w


def _split_type(text: str, folder: Path) -> tuple[Path, str | None]:
    """Return file and node type of FLEET.yaml or FLEET.yaml:TYPE."""
    name, _, node_type = text.strip().rpartition(":")
    is_typed = name.lower().endswith(FILE_SUFFIXES)
    return folder / Path(name if is_typed else text.strip()).expanduser(), node_type if is_typed else None


def _is_fleet_file(path: Path) -> bool:
    if path.suffix.lower() not in FILE_SUFFIXES or not path.is_file():
        return False
    value, _ = parse_yaml(read_user_text(path), str(path))
    return isinstance(value, dict) and FLEET_KEY in value


def _choose_type(tree: PowerTree, path: Path, wanted: str | None) -> str:
    names = sorted({node.type_name for node in tree.nodes})
    if not names:
        raise UsageError(f"{path}: the fleet has no nodes to plan for")
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        raise UsageError(f"{path}: expected a node type, such as {path}:{names[0]}; it has {', '.join(names)}")
    return wanted


def _describe_cluster(fleet: FleetFile, tree: PowerTree, path: Path, type_name: str) -> Cluster:
    nodes = sum(node.type_name == type_name for node in tree.nodes)
    base = load_cluster(f"{fleet.node_types[type_name].node}:{nodes}")
    values: dict[str, object] = {}
    if fleet.simulate is not None:
        site = fleet.simulate.site
        has_plant = site.plant is not None or fleet.cooling is not None
        changes = {} if has_plant else {"weather": None}
        hours = load_site_hours(site.model_copy(update=changes), fleet.cooling, path.parent)
        names = {"pue": "pue", "kwh": "price_per_kwh", "currency": "currency", "carbon_g_per_kwh": "carbon_g_per_kwh"}
        values = {key: getattr(site, name) for key, name in names.items() if name in site.model_fields_set}
        values |= {
            key: float(series.columns.mean())
            for key, series in (("kwh", hours.price), ("carbon_g_per_kwh", hours.carbon))
            if series is not None
        }
        full_w = sum(node.power.max_w for node in tree.nodes) / site.conversion_efficiency
        if (pue := find_busy_pue(hours, full_w)) is not None:
            values["pue"] = pue
    try:
        cap_w = compute_common_cap(tree, type_name, fleet.power.margin)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    if cap_w is not None:
        values["power_cap_w"] = cap_w
    return base.model_copy(update={"name": f"{path.name} ({nodes} x {type_name})", "prices": Prices(**values)})
