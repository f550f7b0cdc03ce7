"""The tree as power control counts it, where what is capped are not the accelerators. Pure."""

from dataclasses import replace

from phalanx.errors import RecipeError
from phalanx.fleet.node_control_settings import CapDeviceSettings
from phalanx.fleet.power_tree import NodePower, PowerTree


def count_capped_devices(tree: PowerTree, settings: CapDeviceSettings) -> PowerTree:
    """Return the tree with the devices that are capped: a whole node for redfish, CPU packages for rapl. Raises
    RecipeError for a range of caps that such a device does not have."""
    if settings.kind in ("redfish", "rapl"):
        nodes = tuple(replace(node, power=_split_power(node.power, settings)) for node in tree.nodes)
        tree = replace(tree, nodes=nodes)
    for node in tree.nodes:
        low_w, high_w = node.power.device_min_cap_w or 0.0, node.power.device_max_w
        for key, cap_w in (("min_cap", settings.min_cap), ("max_cap", settings.max_cap)):
            if cap_w is not None and not low_w <= cap_w <= high_w:
                raise RecipeError(
                    f"power.devices.{key}: {cap_w:g} W; a device of {node.type_name} takes caps from {low_w:g} to "
                    f"{high_w:g} W"
                )
    return tree


def _split_power(power: NodePower, settings: CapDeviceSettings) -> NodePower:
    if settings.kind == "redfish":
        return NodePower(1, power.max_w, power.idle_w, 0.0, 0.0, settings.min_cap)
    count, device_w = settings.packages, settings.package_power
    if count is None or device_w is None:
        raise RecipeError("power.devices: rapl needs `packages`, of a node, and `package_power`, the most of each")
    rest_w = power.max_w - count * device_w
    if rest_w < 0:
        raise RecipeError(f"power.devices: {count} packages of {device_w:g} W do not fit into {power.max_w:g} W")
    return NodePower(count, device_w, 0.0, rest_w, min(power.idle_w, rest_w), settings.min_cap)
