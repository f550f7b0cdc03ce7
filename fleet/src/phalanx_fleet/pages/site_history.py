"""What the server records for the lines of 24 hours: the readings of nodes and of power levels, while it runs."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import DataError
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.pages.node_history import DAY_S, MINUTE_S, TEN_MINUTES_S, HistoryPoint, HistoryWriter, read_history
from phalanx_fleet.power.levels import LevelReading

logger = logging.getLogger(__name__)
NODE_VALUES = ("draw_w", "device_draw_w", "margin_k")
"""Values of a reading that are recorded."""


class SiteHistory:
    """The file at `path`. One server writes it; others of the same user show what is there.

    Attributes:
        problem: Why nothing is recorded, in words.
        level_lines: Draw of each level in the last day, by its label.
    """

    def __init__(self, path: Path):
        self._path, self.problem = path, ""
        self._writer: HistoryWriter | None = None
        self._minute = -1.0
        self.level_lines: Mapping[str, Sequence[HistoryPoint]] = {}

    def record(self, nodes: Sequence[FleetNode], levels: Sequence[LevelReading], now: float) -> None:
        """Write what is read and not late. Call it from one thread."""
        values = {
            (node.name, name): value
            for node in nodes
            if node.reading is not None and not node.reading.is_late(now)
            for name in NODE_VALUES
            if (value := getattr(node.reading, name)) is not None
        }
        values |= {(each.label, "draw_w"): each.draw_w for each in levels if each.num_read and not each.node}
        problem = ""
        try:
            self._writer = self._writer or HistoryWriter(self._path)
            self._writer.write(now, values)
            if now // MINUTE_S != self._minute:
                self._minute, keys = now // MINUTE_S, [(each.label, "draw_w") for each in levels if not each.node]
                lines = read_history(self._path, keys, now - DAY_S, now, TEN_MINUTES_S)
                self.level_lines = {label: points for (label, _), points in lines.items()}
        except (OSError, DataError) as error:
            problem = f"nothing is recorded for the lines of 24 hours: {error}"
            if problem != self.problem:
                logger.warning(problem)
            self.close()
        self.problem = problem

    def read_node(self, name: str, now: float) -> dict[str, list[HistoryPoint]]:
        """Return the last day of a node, by the name of the value. DataError for a file that is damaged."""
        found = read_history(self._path, [(name, each) for each in NODE_VALUES], now - DAY_S, now, MINUTE_S)
        return {each: points for (_, each), points in found.items()}

    def close(self) -> None:
        """Let another server write."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
