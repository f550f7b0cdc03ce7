"""The cluster that a fleet file describes to the planner: its nodes and its site."""

from pathlib import Path

from phalanx.cluster import load_cluster
from phalanx.cluster.spec import Cluster, Prices
from phalanx.errors import UsageError
from phalanx_fleet.fleet_file import load_fleet_file
from phalanx_fleet.power_tree import PowerTree, build_power_tree
from phalanx_fleet.simulate.site_hours import find_busy_pue
from phalanx_fleet.simulate.site_series import load_site_hours


def describe_cluster(path: Path, node_type: str | None = None) -> Cluster:
    """Return the nodes of one type of a fleet file as a cluster for `phalanx plan`.

    It has all nodes of the type, and what the section `simulate.site` states of PUE, price and carbon.

    Raises:
        RecipeError: the file is wrong.
        UsageError: the fleet has no nodes of the type, or several types and none is named.
    """
    fleet, locations = load_fleet_file(path)
    tree = build_power_tree(fleet, locations)
    type_name = _choose_type(tree, path, node_type)
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
    return base.model_copy(update={"name": f"{path.name} ({nodes} x {type_name})", "prices": Prices(**values)})


def _choose_type(tree: PowerTree, path: Path, wanted: str | None) -> str:
    names = sorted({node.type_name for node in tree.nodes})
    if not names:
        raise UsageError(f"{path}: the fleet has no nodes to plan for")
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        raise UsageError(f"{path}: expected a node type by --node-type, such as {names[0]}; it has {', '.join(names)}")
    return wanted
