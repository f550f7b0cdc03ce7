"""Load targets from a file: what wins, and what holds while it is wrong."""

from collections.abc import Iterable
from pathlib import Path

from phalanx_fleet.power.load_targets import LoadTarget, TargetsFileSource, find_active_budgets
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

TEN = 1_795_860_000.0  # 2026-11-28T10:00:00Z
POWER = NodePower(2, 700.0, 70.0, 500.0, 250.0, 200.0)
TREE = PowerTree(
    (
        BudgetLevel("site", "s", 9000.0),
        BudgetLevel("feed", "main-a", 6000.0, 0),
        BudgetLevel("feed", "main-b", None, 0),
        BudgetLevel("rack", "k", None, 1),
    ),
    tuple(PoweredNode(f"n{i}", "h", POWER, 3) for i in range(3)),
)


def budgets_at(targets: Iterable[LoadTarget], seconds: float) -> dict[str, float | None]:
    found = find_active_budgets(TREE, targets, TEN + seconds)
    return dict(zip(("site", "a", "b", "rack"), found, strict=True))


def test_a_target_never_raises_a_budget() -> None:
    assert budgets_at([LoadTarget("feed main-a", 7000.0, TEN)], 0)["a"] == 6000.0


def test_the_latest_target_wins_while_it_holds() -> None:
    targets = [LoadTarget("feed main-a", 4000.0, TEN), LoadTarget("feed main-a", 5000.0, TEN, TEN + 3600)]
    assert [budgets_at(targets, s)["a"] for s in (-1, 0, 3600, 1e9)] == [6000.0, 5000.0, 4000.0, 4000.0]


def test_a_file_of_targets_is_read_again_and_those_of_before_hold_while_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"

    def write(limit: str) -> None:
        (tmp_path / "new").write_text(
            f"targets: [{{level: feed main-a, limit: {limit}, start: '2026-11-28T10:00:00Z'}}]"
        )
        (tmp_path / "new").replace(file)

    write("3 kW")
    live = TargetsFileSource(file, TREE)
    assert budgets_at(live, 1)["a"] == 3000.0
    write("4 kW")
    assert budgets_at(live, 1)["a"] == 4000.0
    assert live.list_problems() == []
    write("4 kWh")
    assert (budgets_at(live, 1)["a"], budgets_at(live, 2)["a"]) == (4000.0, 4000.0)
    (problem,) = live.list_problems()
    assert 'targets.0.limit: found "4 kWh", expected a power' in problem
    assert problem.endswith("; the load targets of before hold")
    file.unlink()
    assert budgets_at(live, 1)["a"] == 4000.0
    assert ["there is no such file" in text for text in live.list_problems()] == [True]
    write("5 kW")
    assert budgets_at(live, 1)["a"] == 5000.0
    assert live.list_problems() == []
