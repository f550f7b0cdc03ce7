"""The schedule of local SGD: when workers synchronize which weights.

Either all weights at once, or fragments in turn, which lowers the peak bandwidth. Sums may be applied some steps after
they were sent, while workers continue with inner steps (Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncSchedule:
    """Each of `num_fragments` is sent every `sync_every` steps, at evenly spaced offsets, and applied `sync_delay`
    steps later, before the next fragment is sent. After `last_step`, the last of the run, all are applied, so that the
    run ends with the same weights everywhere. In the first `warmup_steps` steps all are sent and applied after each
    step: weights change fast then, and the updates of separate workers do not add up (post-local SGD: Lin et al. 2020,
    arXiv 1808.07217)."""

    sync_every: int
    last_step: int
    num_fragments: int = 1
    sync_delay: int = 0
    warmup_steps: int = 0

    @property
    def is_streaming(self) -> bool:
        """Whether some weights differ between workers after every step from `warmup_steps` to the last."""
        return self.num_fragments > 1 or self.sync_delay > 0

    def fragments_starting(self, step: int) -> list[int]:
        """Return the fragments that are sent after this step."""
        if step == self.last_step or 0 < step <= self.warmup_steps:
            return list(range(self.num_fragments))
        return [
            fragment
            for fragment in range(self.num_fragments)
            if step > 0 and step % self.sync_every == self._start_offset(fragment)
        ]

    def fragments_in_flight(self, step: int) -> list[int]:
        """Return the fragments that were sent by the end of this step and are not applied yet."""
        if step == self.last_step:
            return []
        start_steps = range(max(self.warmup_steps, step - self.sync_delay) + 1, step + 1)
        return (
            [fragment for each in start_steps for fragment in self.fragments_starting(each)] if self.sync_delay else []
        )

    def steps_in_sync(self, step: int) -> range:
        """Return the steps with evaluations and saves that are due after this step. If all weights are synchronized at
        once, these are the steps of the round that ends here."""
        if self.is_streaming or step <= self.warmup_steps:
            return range(step, step + 1)
        first_step = max(self.warmup_steps, (step - 1) // self.sync_every * self.sync_every) + 1
        return range(first_step, step + 1) if self.fragments_starting(step) else range(0)

    def _start_offset(self, fragment: int) -> int:
        """Return the offset within `sync_every` steps at which a fragment is sent."""
        return fragment * self.sync_every // self.num_fragments
