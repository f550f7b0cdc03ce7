"""What a job does to keep the limits of its site: it starts so late that power rises no faster than `max_ramp`, and its
evaluations and saves take turns with those of other jobs by `max_swing`."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from phalanx.app.plan_cluster import CLUSTER_VARIABLE, NamedFleet, find_missing_file, load_named_fleet
from phalanx.errors import UsageError
from phalanx.fleet.power.stagger import estimate_start_step, plan_starts
from phalanx.fleet.power.start_slots import StartSlots
from phalanx.fleet.power_tree import BudgetLevel, PowerTree
from phalanx.jobs.agent.leader_state import StartTerms
from phalanx.run import Run
from phalanx.run.private_files import state_root
from phalanx.run.stall_slots import SwingShare, write_swing_shares

FindTerms = Callable[[Sequence[str]], StartTerms]


def open_site_limits(
    gpus_per_node: int, run: Run | None = None, environment: Mapping[str, str] = os.environ
) -> FindTerms:
    """Return what takes a slot for a start on nodes of these names, and gives the workers of a run what they need to
    take turns: nothing unless PHALANX_CLUSTER is a fleet file with a `max_ramp` or `max_swing`.

    Raises:
        RecipeError: Something is wrong in the fleet file.
    """
    if (missing := find_missing_file(environment.get(CLUSTER_VARIABLE, ""))) is not None:
        text = f"{CLUSTER_VARIABLE}: {missing} is not there; training without max_ramp and max_swing"
        return lambda nodes: StartTerms(0.0, text)
    fleet = _load_fleet(environment)
    if fleet is None:
        return lambda nodes: StartTerms()
    folder, shared = state_root(environment) / "power" / fleet.file.name, fleet.file.power.slots
    folder = folder if shared is None else (fleet.path.parent / Path(shared).expanduser()).absolute()

    def find_terms(nodes: Sequence[str]) -> StartTerms:
        steps_w = find_power_steps(fleet.tree, nodes, gpus_per_node)
        shares = [] if run is None else _find_shares(steps_w, folder, f"{nodes[0]}:{run.path.absolute()}")
        return replace(_take_slots(steps_w, folder), environment=write_swing_shares(shares))

    return find_terms


def has_ramp(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether PHALANX_CLUSTER is a fleet file with a `max_ramp`. Raises RecipeError like `open_site_limits`."""
    fleet = _load_fleet(environment)
    return fleet is not None and any(level.max_ramp_w_per_s is not None for level in fleet.tree.levels)


def _load_fleet(environment: Mapping[str, str]) -> NamedFleet | None:
    text = environment.get(CLUSTER_VARIABLE)
    return load_named_fleet(text) if text else None


def _take_slots(steps_w: Mapping[BudgetLevel, float], folder: Path) -> StartTerms:
    """Take a slot at each site with a `max_ramp`. A job that cannot take one starts at once."""
    terms = [StartTerms()]
    for site, step_w in steps_w.items():
        if site.max_ramp_w_per_s is None:
            continue
        duration_s = plan_starts([step_w, 0.0], site.max_ramp_w_per_s)[1]
        try:
            wait_s = StartSlots(_find_path(folder, "starts", site)).take(duration_s)
        except UsageError as error:
            return StartTerms(0.0, f"{error}; starting without regard to max_ramp of site {site.name}")
        terms.append(StartTerms(wait_s, f"starting in {wait_s:.1f} s: max_ramp of site {site.name}"))
    longest = max(terms, key=lambda each: each.seconds)
    return longest if longest.seconds > 0 else StartTerms()


def _find_shares(steps_w: Mapping[BudgetLevel, float], folder: Path, holder: str) -> list[SwingShare]:
    """Return the share of a job at each site with a `max_swing`: a stall lowers power by no more than a start adds."""
    return [
        SwingShare(site.name, str(_find_path(folder, "stalls", site)), holder, step_w, site.max_swing_w)
        for site, step_w in steps_w.items()
        if site.max_swing_w is not None
    ]


def _find_path(folder: Path, what: str, site: BudgetLevel) -> Path:
    return folder / f"{what}-{quote(site.name, safe='')}.json"


def find_power_steps(tree: PowerTree, nodes: Sequence[str], gpus_per_node: int) -> dict[BudgetLevel, float]:
    """Return the watts by which a job on these nodes raises the power of each site. Nodes that the tree does not have
    count nothing."""
    steps_w: dict[BudgetLevel, float] = {}
    names = {node.name for node in tree.nodes}
    # a host name may have the domain, where the fleet file has none
    counts = Counter(name if name in names else name.partition(".")[0] for name in nodes)
    for index, node in enumerate(tree.nodes):
        if counts[node.name]:
            step_w = estimate_start_step(node.power, min(gpus_per_node, node.power.num_devices))
            site = tree.find_site(index)
            steps_w[site] = steps_w.get(site, 0.0) + counts[node.name] * step_w
    return steps_w
