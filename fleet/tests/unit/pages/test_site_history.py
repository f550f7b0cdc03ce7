"""What a server records for the lines of 24 hours."""

from pathlib import Path

from phalanx_fleet.fleet_node import FleetNode, LatestReading
from phalanx_fleet.pages.site_history import SiteHistory
from phalanx_fleet.power.committed_power import LevelReading

NOW = 86_400.0 * 100


def node(name: str, time: float, draw_w: float | None = 500.0) -> FleetNode:
    return FleetNode(name, "healthy", None, None, LatestReading(time, 1.0, draw_w=draw_w, margin_k=12.0))


def test_readings_of_nodes_and_levels_are_there_after_a_restart_of_the_server(tmp_path: Path) -> None:
    levels = [LevelReading("rack r1", 900.0, 500.0, num_read=1), LevelReading("rack r2", 900.0)]
    for minute in range(0, 60, 10):
        history = SiteHistory(tmp_path / "history.db")
        now = NOW + 60 * minute
        nodes = [node("n1", now), node("late", now - 60), FleetNode("n3", "healthy", None, None, None)]
        history.record(nodes, levels, now)
        history.close()
    history.record([node("n1", NOW + 3600)], levels, NOW + 3600)
    assert {label: len(points) for label, points in history.level_lines.items()} == {"rack r1": 7, "rack r2": 0}
    day = history.read_node("n1", NOW + 3600)
    assert {name: len(points) for name, points in day.items()} == {"draw_w": 7, "device_draw_w": 0, "margin_k": 7}
    assert {point.mean for point in day["draw_w"]} == {500.0}
    assert not any(history.read_node("late", NOW + 3600).values())
    history.close()


def test_a_second_server_shows_what_the_first_one_records(tmp_path: Path) -> None:
    first, second = SiteHistory(tmp_path / "history.db"), SiteHistory(tmp_path / "history.db")
    first.record([node("n1", NOW)], [], NOW)
    second.record([node("n1", NOW)], [], NOW)
    assert second.problem.endswith("history.db: another process writes it")
    assert len(second.read_node("n1", NOW)["draw_w"]) == 1
    first.close()
    second.record([node("n1", NOW + 60)], [], NOW + 60)
    assert (second.problem, len(second.read_node("n1", NOW + 60)["draw_w"])) == ("", 2)
    second.close()


def test_a_damaged_file_is_a_problem_and_stays(tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"damaged" * 1000)
    history = SiteHistory(tmp_path / "history.db")
    history.record([node("n1", NOW)], [], NOW)
    assert history.problem.endswith("history.db: file is not a database; remove it if it is damaged")
    history.close()
