"""Which strategy `grad_sync: {algorithm: auto}` takes next, from what steps took: functions over values.

The most accurate strategy that leaves at most LIMIT of a step exposed: time in which gradients travel and nothing is
computed. Strategies are tried one after the other, the most accurate first, as long as that is missed and fewer bytes
promise a faster step; if none reaches it, the fastest is taken. Where a more accurate one is hardly slower, it is
that. Then the share is watched, and when it has changed for long enough strategies are tried again. The clock and the
workers' agreement are `exchange_watch.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.train.exchange.int8 import SHARE

LIMIT = 0.05
"""Share of a step that may be exposed."""
TIE = 0.03
"""A more accurate strategy may be so much slower than the one that would be taken."""
GAIN = 0.02
"""By so much of a step a strategy must promise to be faster to be tried."""
CHANGED = 0.05
"""A share that is so far from what it was is another one."""
DOUBTS = 2
"""Looks in a row that must find another share before strategies are tried again; doubled each time, so that a network
that goes up and down does not keep a run trying."""
MOST_DOUBTS = 64
BYTES = {"all-reduce": 1.0, "bf16": 0.5, "int8": SHARE}
"""What a strategy sends, as a share of fp32."""


@dataclass(frozen=True)
class Seen:
    """What a step takes with a strategy, in seconds: all of it, the part of it that is exposed, and the backward beside
    which gradients travel."""

    seconds: float
    exposed: float
    backward: float

    @property
    def share(self) -> float:
        """Of the step, exposed."""
        return self.exposed / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """How far the choice is; part of every checkpoint. `strategy` sums gradients among `world` replicas (0: nothing
    was decided yet); `seen` are strategies that were tried, `settled` says that one of them was taken. `foretold` is
    the efficiency that it was tried for. `doubts` counts looks that found another share, `again` how often strategies
    were tried anew."""

    strategy: str = ""
    world: int = 0
    seen: Mapping[str, Seen] = field(default_factory=dict)
    settled: bool = False
    foretold: float | None = None
    doubts: int = 0
    again: int = 0

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "Choice":
        """As a checkpoint's meta has it (`asdict`)."""
        return cls(**{**meta, "seen": {name: Seen(**seen) for name, seen in meta.get("seen", {}).items()}})


def begun(choice: Choice, candidates: Sequence[str], world: int) -> Choice:
    """The choice of a run that goes on among so many replicas: what another number of them saw counts no more."""
    if choice.world == world and choice.strategy in candidates:
        return choice
    return Choice(candidates[0], world)


def decided(choice: Choice, candidates: Sequence[str], seen: Seen) -> tuple[Choice, str]:
    """The choice after a look at the present strategy, and why: empty where nothing was decided."""
    if not choice.settled:
        return _tried(replace(choice, seen={**choice.seen, choice.strategy: seen}), candidates)
    before = choice.seen[choice.strategy]
    other = abs(seen.share - before.share) > CHANGED and max(seen.share, before.share) > LIMIT
    doubts = choice.doubts + 1 if other else 0
    if doubts < min(DOUBTS << choice.again, MOST_DOUBTS):
        return replace(choice, doubts=doubts), ""
    anew = replace(choice, settled=False, doubts=0, again=choice.again + 1, seen={}, foretold=None)
    why = f"with {choice.strategy} {seen.share:.1%} of a step is exposed, and no more {before.share:.1%}"
    if seen.share > before.share and choice.strategy != candidates[-1]:
        now, then = _tried(replace(anew, seen={choice.strategy: seen}), candidates)
        return now, f"{why}; {then}"
    return replace(anew, strategy=candidates[0]), f"{why}: trying anew"


def _tried(choice: Choice, candidates: Sequence[str]) -> tuple[Choice, str]:
    """What comes after a strategy was tried."""
    current, seen, besides = choice.strategy, choice.seen, ""
    untried = candidates[1 + max(candidates.index(name) for name in seen) :]
    if untried and min(each.share for each in seen.values()) > LIMIT:
        following, fastest = untried[0], min(each.seconds for each in seen.values())
        seconds = foretold(following, seen)
        if seconds <= (1 - GAIN) * fastest:
            promise = computing(seen) / seconds
            why = f"with {current} {seen[current].share:.1%} of a step is exposed{_results(choice)}"
            why += f"; {following} is predicted {promise:.2f}"
            return replace(choice, strategy=following, foretold=promise), why
        besides = f"; {following} promises no faster step"
    chosen = best(candidates, seen)
    reason = f"{seen[chosen].share:.1%} of a step is exposed"
    if seen[chosen].share > LIMIT and len(seen) > 1:
        reason = f"no other is faster by more than {TIE:.0%}, {reason}"
    return replace(choice, strategy=chosen, settled=True, foretold=None), f"{reason}{_results(choice)}{besides}"


def _results(choice: Choice) -> str:
    """What was measured, for people."""
    listed = [f"{name} {value:.2f}" for name, value in efficiencies(choice.seen).items()]
    if choice.foretold is not None:
        listed[-1] += f" ({choice.foretold:.2f} was predicted)"
    return f" (efficiency: {', '.join(listed)})"


def best(candidates: Sequence[str], seen: Mapping[str, Seen]) -> str:
    """Of those that were tried the most accurate within the limit, else the fastest; or a more accurate one that is
    about as fast: what a strategy saves in waiting it may spend on arithmetic."""
    ranked = [name for name in candidates if name in seen]
    within = [name for name in ranked if seen[name].share <= LIMIT]
    wanted = within[0] if within else min(ranked, key=lambda name: seen[name].seconds)
    return next(name for name in ranked if seen[name].seconds <= (1 + TIE) * seen[wanted].seconds)


def computing(seen: Mapping[str, Seen]) -> float:
    """Seconds of a step without its exchange, as far as they are known."""
    return min(each.seconds - each.exposed for each in seen.values())


def efficiencies(seen: Mapping[str, Seen]) -> dict[str, float]:
    """The step without exchange over the step, of each strategy that was tried."""
    alone = computing(seen)
    return {name: alone / each.seconds if each.seconds > 0 else 1.0 for name, each in seen.items()}


def foretold(name: str, seen: Mapping[str, Seen]) -> float:
    """Seconds of a step with strategy `name`. From two others by the line through them: what latency and arithmetic
    cost is in it. From one as if gradients travelled from the beginning of backward on, without pause: the most that
    fewer bytes can bring."""
    (share, last), *others = sorted(((BYTES[each], seen[each]) for each in seen), key=lambda pair: pair[0])
    if others:
        wider, before = others[0]
        slope = (before.seconds - last.seconds) / (wider - share)
        return max(computing(seen), last.seconds - slope * (share - BYTES[name]))
    travelling = BYTES[name] / share * (last.exposed + last.backward)
    return last.seconds - last.exposed + max(0.0, travelling - last.backward)


def gain_of_no(seen: Seen) -> tuple[str, float]:
    """What `determinism: off` would offer to a run that sends fp32: the most accurate strategy that may stay within the
    limit, else the one with the fewest bytes; and the efficiency that it could have at best."""
    alone = seen.seconds - seen.exposed
    found, efficiency = "all-reduce", 1.0 - seen.share
    for name in ("bf16", "int8"):
        if efficiency >= 1 - LIMIT:
            break
        found, efficiency = name, alone / foretold(name, {"all-reduce": seen})
    return found, efficiency
