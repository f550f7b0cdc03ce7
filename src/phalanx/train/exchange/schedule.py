"""When workers that train apart tell each other how far they have moved.

All weights at once, or in fragments by turns, so that the network is asked for little at a time; and what was told may
arrive some steps later, while workers go on (Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Each of `fragments` leaves every so many steps, one after the other at equal distances, and lands `delay` steps
    later, before the next leaves. After the `last` step of a run all land, so that it ends with the same weights
    everywhere. Before that, in the first `start` steps, all leave and land after each: weights change fast then, and
    what workers learn apart does not add up (post-local SGD: Lin et al. 2020, arXiv 1808.07217)."""

    every: int
    last: int
    fragments: int = 1
    delay: int = 0
    start: int = 0

    @property
    def streams(self) -> bool:
        """Whether some weights differ between workers after every step from `start` to the last."""
        return self.fragments > 1 or self.delay > 0

    def leaving(self, step: int) -> list[int]:
        """Fragments of which workers tell each other after this step."""
        if step == self.last or 0 < step <= self.start:
            return list(range(self.fragments))
        return [number for number in range(self.fragments) if step > 0 and step % self.every == self._turn(number)]

    def flying(self, step: int) -> list[int]:
        """Fragments that have left by the end of this step and have not landed."""
        if step == self.last:
            return []
        left = range(max(self.start, step - self.delay) + 1, step + 1)
        return [number for each in left for number in self.leaving(each)] if self.delay else []

    def since(self, step: int) -> range:
        """The steps of which evaluations and saves are done after this one: where workers meet with all weights at
        once, those of the round that ends."""
        if self.streams or step <= self.start:
            return range(step, step + 1)
        begun = max(self.start, (step - 1) // self.every * self.every) + 1
        return range(begun, step + 1) if self.leaving(step) else range(0)

    def _turn(self, number: int) -> int:
        """At which step of `every` a fragment leaves."""
        return number * self.every // self.fragments
