"""What becomes of a step whose loss or gradient is not finite."""

from phalanx.train.step_callbacks import MAX_NONFINITE_IN_A_ROW, choose_nonfinite_action


def test_three_skipped_steps_in_a_row_lead_to_a_rollback() -> None:
    in_a_row, actions = 0, []
    for _ in range(MAX_NONFINITE_IN_A_ROW):
        action, in_a_row = choose_nonfinite_action(in_a_row, is_fp16_overflow=False)
        actions.append(action)
    assert actions == ["skip", "skip", "rollback"]


def test_after_a_rollback_counting_starts_again() -> None:
    assert choose_nonfinite_action(MAX_NONFINITE_IN_A_ROW - 1, is_fp16_overflow=False) == ("rollback", 0)


def test_an_overflow_that_a_lower_scale_mends_does_not_count() -> None:
    assert choose_nonfinite_action(MAX_NONFINITE_IN_A_ROW - 1, is_fp16_overflow=True) == (
        "rescale",
        MAX_NONFINITE_IN_A_ROW - 1,
    )
