"""Random histories under power control, and the guard's answer to a cut of the budget."""

from fleet_power import simulate_step
from fleet_power_histories import History


def test_the_committed_power_stays_within_the_budgets_in_random_histories() -> None:
    histories = [History(seed) for seed in range(12)]
    assert [violation for history in histories for violation in history.run()] == []
    assert sum(history.num_checks > 0 for history in histories) > 6


def test_a_cut_of_the_budget_is_answered_without_oscillation() -> None:
    seconds, reversals = simulate_step(dead_time_s=3.0)
    assert seconds < 10
    assert reversals < 2
