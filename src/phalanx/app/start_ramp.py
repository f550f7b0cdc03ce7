"""Space the starts of jobs so that the power of a site rises no faster than its `max_ramp`."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from phalanx.app.plan_cluster import CLUSTER_VARIABLE, NamedFleet, find_missing_file, load_named_fleet
from phalanx.errors import UsageError
from phalanx.fleet.power.stagger import estimate_start_step, plan_starts
from phalanx.fleet.power.start_slots import StartSlots
from phalanx.fleet.power_tree import BudgetLevel, PowerTree
from phalanx.jobs.agent.leader_state import StartDelay
from phalanx.run.private_files import state_root

FindDelay = Callable[[Sequence[str]], StartDelay]


def open_start_ramp(gpus_per_node: int, environment: Mapping[str, str] = os.environ) -> FindDelay:
    """Return what takes a slot for a start on nodes of these names and says how long to wait for it: not at all unless
    PHALANX_CLUSTER is a fleet file with a `max_ramp`.

    Raises:
        RecipeError: Something is wrong in the fleet file.
    """
    if (missing := find_missing_file(environment.get(CLUSTER_VARIABLE, ""))) is not None:
        return lambda nodes: StartDelay(0.0, f"{CLUSTER_VARIABLE}: {missing} is not there; starting without max_ramp")
    fleet = find_ramped_fleet(environment)
    if fleet is None:
        return lambda nodes: StartDelay()
    folder, shared = state_root(environment) / "power" / fleet.file.name, fleet.file.power.start_slots
    folder = folder if shared is None else fleet.path.parent / Path(shared).expanduser()
    return lambda nodes: _take_slots(fleet.tree, folder, nodes, gpus_per_node)


def find_ramped_fleet(environment: Mapping[str, str] = os.environ) -> NamedFleet | None:
    """Return the fleet of PHALANX_CLUSTER; None unless it is a fleet file with a `max_ramp`. Raises RecipeError like
    `open_start_ramp`."""
    text = environment.get(CLUSTER_VARIABLE)
    fleet = load_named_fleet(text) if text else None
    if fleet is None or all(level.max_ramp_w_per_s is None for level in fleet.tree.levels):
        return None
    return fleet


def _take_slots(tree: PowerTree, folder: Path, nodes: Sequence[str], gpus_per_node: int) -> StartDelay:
    """Take a slot at each site that has some of the nodes. A job that cannot take one starts at once."""
    delays = [StartDelay()]
    for site, step_w in find_start_steps(tree, nodes, gpus_per_node).items():
        duration_s = plan_starts([step_w, 0.0], site.max_ramp_w_per_s)[1]
        slots = StartSlots(folder / f"starts-{quote(site.name, safe='')}.json")
        try:
            wait_s = slots.take(duration_s)
        except UsageError as error:
            return StartDelay(0.0, f"{error}; starting without regard to max_ramp of site {site.name}")
        delays.append(StartDelay(wait_s, f"starting in {wait_s:.1f} s: max_ramp of site {site.name}"))
    longest = max(delays, key=lambda delay: delay.seconds)
    return longest if longest.seconds > 0 else StartDelay()


def find_start_steps(tree: PowerTree, nodes: Sequence[str], gpus_per_node: int) -> dict[BudgetLevel, float]:
    """Return the watts by which a job on these nodes raises the power of each site with a `max_ramp`. Nodes that the
    tree does not have count nothing."""
    steps_w: dict[BudgetLevel, float] = {}
    names = {node.name for node in tree.nodes}
    # a host name may have the domain, where the fleet file has none
    counts = Counter(name if name in names else name.partition(".")[0] for name in nodes)
    for index, node in enumerate(tree.nodes):
        if counts[node.name] and (site := tree.find_site(index)).max_ramp_w_per_s is not None:
            step_w = estimate_start_step(node.power, min(gpus_per_node, node.power.num_devices))
            steps_w[site] = steps_w.get(site, 0.0) + counts[node.name] * step_w
    return steps_w
