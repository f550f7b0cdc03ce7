"""How long the local queue waits between starts, so that the power of a site rises no faster than its `max_ramp`."""

import os
from collections.abc import Mapping

from phalanx.app.plan_cluster import CLUSTER_VARIABLE, load_fleet_tree
from phalanx.fleet.power.stagger import estimate_start_step, plan_starts
from phalanx.fleet.power_tree import PowerTree


def find_start_gap(num_gpus: int, environment: Mapping[str, str] = os.environ, node: str | None = None) -> float:
    """Return for how many seconds after its start a job with `num_gpus` of a node delays the next one of the queue
    there; 0 unless PHALANX_CLUSTER is a fleet file with `max_ramp` at the site of this machine, or of `node`.

    Raises:
        RecipeError: Something is wrong in the fleet file.
    """
    text = environment.get(CLUSTER_VARIABLE)
    tree = load_fleet_tree(text) if text else None
    return 0.0 if tree is None else compute_start_gap(tree, node or os.uname().nodename, num_gpus)


def compute_start_gap(tree: PowerTree, node: str, num_gpus: int) -> float:
    """Return the seconds of a job on a node of a tree. Queues do not know of each other: each has the part of the ramp
    that its node has of the rise of all nodes of the site."""
    index = next((index for index, each in enumerate(tree.nodes) if each.name == node), None)
    if index is None:
        return 0.0
    site, power = tree.find_site(index), tree.nodes[index].power
    rises_w = [each.power.max_w - each.power.idle_w for i, each in enumerate(tree.nodes) if tree.find_site(i) == site]
    if site.max_ramp_w_per_s is None:
        return 0.0
    ramp_w_per_s = site.max_ramp_w_per_s * (power.max_w - power.idle_w) / sum(rises_w)
    return plan_starts([estimate_start_step(power, min(num_gpus, power.num_devices)), 0.0], ramp_w_per_s)[1]
