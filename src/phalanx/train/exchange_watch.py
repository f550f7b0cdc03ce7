"""Watches how much of a step the exchange of gradients leaves exposed, and has `grad_sync.algorithm: auto` act on it.

It takes the seconds that every step tells anyway. Workers agree on them once when a strategy has had its first steps,
and then every so many; what follows from them (`exchange/choice.py`) is alike on all. What counts as exposed is what
the worker waits that comes last: others wait for that worker besides, which no exchange can help. Where there is
nothing to choose, it tells once what is exposed and what `determinism: off` might gain.
"""

import statistics
from collections.abc import Mapping

from phalanx.recipe import Recipe
from phalanx.recipe.exchanges import candidates
from phalanx.run.event_types import GradSyncSelected
from phalanx.train.exchange import GradientExchange
from phalanx.train.exchange.choice import LIMIT, Choice, Seen, begun, decided, efficiencies, gain_of_no
from phalanx.train.gradients import Gradients, exchange_of
from phalanx.train.interval import Tell, largest
from phalanx.train.place import Place
from phalanx.train.state import Progress

UNUSUAL = 2
"""First steps with a strategy, which make connections and take memory."""
ENOUGH = 8
"""Steps that tell what a strategy takes."""
AGAIN = 50
"""Steps from one look to the next when the choice is made."""


class ExchangeWatch:
    """One worker's. Every worker makes it and calls it at the same steps. `backwards` are this worker's micro-batches
    of a step: gradients travel beside the last only."""

    def __init__(
        self,
        recipe: Recipe,
        place: Place,
        gradients: Gradients,
        backwards: int,
        progress: Progress,
        tell: Tell,
    ):
        self._recipe, self._place, self._progress, self._tell = recipe, place, progress, tell
        self._exchange = exchange_of(gradients)
        self._backwards = backwards
        self._candidates = candidates(recipe, place.device.type)
        self._steps: list[Seen] = []
        self._wait = UNUSUAL
        if len(self._candidates) > 1 and self._exchange is not None:
            self._take(begun(progress.exchange, self._candidates, self._exchange.world))

    def note(self, seconds: float, parts: Mapping[str, float]) -> None:
        """A step was done in so many seconds."""
        if self._exchange is None or self._exchange.world == 1:
            return
        if self._wait:
            self._wait -= 1
            return
        backward = parts["backward"] / self._backwards
        self._steps.append(Seen(seconds - parts["checkpoint"], parts["exchange"], backward))

    def look(self) -> None:
        """Between two steps: decide if it is time. All workers then sum by the same strategy from the next step on."""
        exchange = self._exchange
        if exchange is None or len(self._steps) < ENOUGH:
            return
        settled = self._progress.exchange.settled
        if settled and len(self._steps) < AGAIN:
            return
        if len(self._candidates) == 1 and settled:  # it was told
            self._steps.clear()
            return
        seen = self._agreed()
        if len(self._candidates) == 1:
            self._tell_fixed(exchange, seen)
            return
        before = self._progress.exchange
        after, why = decided(before, self._candidates, seen)
        self._take(after)
        if why:
            tried = {**before.seen, before.strategy: seen}
            self._say(before.strategy, why, seen, tried, after.foretold)

    def _agreed(self) -> Seen:
        """What the steps since the last look took, alike on all workers."""
        median = [
            statistics.median(values)
            for values in zip(*((each.seconds, -each.exposed, each.backward) for each in self._steps), strict=True)
        ]
        self._steps.clear()
        seconds, exposed, backward = largest(self._place, median)
        return Seen(seconds, -exposed, backward)

    def _take(self, choice: Choice) -> None:
        """Go on with this choice."""
        assert self._exchange is not None
        if choice.strategy != self._progress.exchange.strategy:
            self._wait, self._steps = UNUSUAL, []
        self._progress.exchange = choice
        self._exchange.switch(choice.strategy)

    def _say(self, before: str, why: str, seen: Seen, tried: Mapping[str, Seen], foretold: float | None) -> None:
        now = self._progress.exchange
        self._tell(
            GradSyncSelected(
                step=self._progress.step,
                selected=now.strategy,
                previous=before,
                reason=why,
                exposed_fraction=seen.share,
                efficiency_by_choice=efficiencies(tried),
                predicted_efficiency=foretold,
                is_final=now.settled,
            )
        )

    def _tell_fixed(self, exchange: GradientExchange, seen: Seen) -> None:
        """Nothing is chosen: say once in a run what that costs."""
        exact, strategy = self._recipe.determinism, self._candidates[0]
        name = "fixed tree" if exact == "elastic" else strategy
        self._progress.exchange = Choice(name, exchange.world, {name: seen}, settled=True)
        why = f"{seen.share:.1%} of a step is exposed (efficiency {1 - seen.share:.2f})"
        foretold = None
        if exact != "off" and seen.share > LIMIT:
            other, foretold = gain_of_no(seen)
            why += f"; determinism: off would allow {other}, with an efficiency of {foretold:.2f} at best"
        self._say(name, why, seen, {name: seen}, foretold)
