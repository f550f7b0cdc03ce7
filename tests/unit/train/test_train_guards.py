"""What becomes of a step whose loss or gradient is not finite."""

from phalanx.train.guards import LIMIT, judge


def test_three_skipped_steps_in_a_row_lead_to_a_rollback() -> None:
    in_a_row, actions = 0, []
    for _ in range(LIMIT):
        action, in_a_row = judge(in_a_row, curable=False)
        actions.append(action)
    assert actions == ["skip", "skip", "rollback"]


def test_after_a_rollback_counting_starts_again() -> None:
    assert judge(LIMIT - 1, curable=False) == ("rollback", 0)


def test_an_overflow_that_a_lower_scale_mends_does_not_count() -> None:
    assert judge(LIMIT - 1, curable=True) == ("rescale", LIMIT - 1)
