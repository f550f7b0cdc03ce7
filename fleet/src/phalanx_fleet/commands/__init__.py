"""The commands that this package adds to `phalanx`, by the entry point `phalanx.commands`."""

COMMANDS = {
    "nodes": ("phalanx_fleet.commands.nodes:app", "Show, drain and test nodes."),
    "power": ("phalanx_fleet.commands.power:app", "Hold the budgets of sites, feeds, rows and racks by power caps."),
    "thermal": ("phalanx_fleet.commands.thermal:app", "Find nodes that run hot; guard cooling."),
    "simulate": (
        "phalanx_fleet.commands.simulate:simulate",
        "Simulate months of a fleet, and answer what-if questions.",
    ),
}
"""Every command, its module, and its line in `phalanx --help`."""
