"""Whether the attempts at a run make progress: each should save a later step than those before it."""

from dataclasses import dataclass

from phalanx.jobs.agent.attempt import AttemptState


@dataclass(frozen=True)
class AttemptHistory:
    """The highest step that an attempt has saved, and the number of attempts since that saved none."""

    saved_step: int = 0
    num_without_progress: int = 0

    def after(self, attempt: AttemptState) -> "AttemptHistory":
        """Return the progress with this attempt."""
        saved_step, count = self.saved_step, self.num_without_progress
        if attempt.start_step is not None and attempt.start_step > saved_step:
            # an earlier attempt saved that, and was killed before it could report it
            saved_step, count = attempt.start_step, 0
        if attempt.saved_step > saved_step:
            return AttemptHistory(attempt.saved_step, 0)
        return AttemptHistory(saved_step, count + 1)
