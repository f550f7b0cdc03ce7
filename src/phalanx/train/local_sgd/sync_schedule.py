"""When workers that train apart tell each other how far they have moved.

All weights at once, or in fragments by turns, so that the network is asked for little at a time; and what was told may
arrive some steps later, while workers go on (Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncSchedule:
    """Each of `num_fragments` leaves every so many steps, one after the other at equal distances, and lands
    `sync_delay` steps
    later, before the next leaves. After the `last_step` step of a run all land, so that it ends with the same weights
    everywhere. Before that, in the first `warmup_steps` steps, all leave and land after each: weights change fast then,
    and what workers learn apart does not add up (post-local SGD: Lin et al. 2020, arXiv 1808.07217)."""

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
        """Fragments of which workers tell each other after this step."""
        if step == self.last_step or 0 < step <= self.warmup_steps:
            return list(range(self.num_fragments))
        return [
            fragment
            for fragment in range(self.num_fragments)
            if step > 0 and step % self.sync_every == self._start_offset(fragment)
        ]

    def fragments_in_flight(self, step: int) -> list[int]:
        """Fragments that have left by the end of this step and have not landed."""
        if step == self.last_step:
            return []
        start_steps = range(max(self.warmup_steps, step - self.sync_delay) + 1, step + 1)
        return (
            [fragment for each in start_steps for fragment in self.fragments_starting(each)] if self.sync_delay else []
        )

    def steps_in_sync(self, step: int) -> range:
        """The steps of which evaluations and saves are done after this one: where workers meet with all weights at
        once, those of the round that ends."""
        if self.is_streaming or step <= self.warmup_steps:
            return range(step, step + 1)
        first_step = max(self.warmup_steps, (step - 1) // self.sync_every * self.sync_every) + 1
        return range(first_step, step + 1) if self.fragments_starting(step) else range(0)

    def _start_offset(self, fragment: int) -> int:
        """At which step of `sync_every` a fragment leaves."""
        return fragment * self.sync_every // self.num_fragments
