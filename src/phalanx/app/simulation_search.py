"""Find the best value of a setting of a fleet by simulation, and say which values differ from it by noise only."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.app.simulate import SimulatedVariant, read_percent, simulate_variants
from phalanx.errors import UsageError
from phalanx.fleet.simulate.fleet_simulation import SimulationResult
from phalanx.fleet.simulate.paired_difference import PairedDifference, compare_paired

MAX_OPTIONS = 50


@dataclass(frozen=True)
class GoalFigure:
    """The figure of a goal. It should be large, or small."""

    title: str
    read: Callable[[SimulationResult], float]
    is_smallest_best: bool = False

    def average(self, variant: SimulatedVariant) -> float:
        """Return the mean over seeds; NaN if a seed has none."""
        return sum(map(self.read, variant.results)) / len(variant.results)


SEARCH_GOALS: dict[str, GoalFigure] = {
    "productive": GoalFigure("productive", lambda result: result.shares.get("productive", math.nan)),
    "ettr": GoalFigure("ETTR", lambda result: result.ettr),
    "wait": GoalFigure("wait, mean", lambda result: result.wait_mean_s, is_smallest_best=True),
    "completion": GoalFigure("completion, mean", lambda result: result.completion_mean_s, is_smallest_best=True),
}
"""`productive`: share of all device time, spares included."""


@dataclass(frozen=True)
class SearchedValue:
    """A value of the setting, and the figure of the goal less that of the best value."""

    text: str
    variant: SimulatedVariant
    to_best: PairedDifference


@dataclass(frozen=True)
class SettingSearch:
    """Values of a setting in the order given, and the best of them for the goal."""

    goal: GoalFigure
    key: str
    file: SimulatedVariant
    """The fleet file as it is."""
    values: list[SearchedValue]
    best: SearchedValue

    @property
    def ties(self) -> list[SearchedValue]:
        """Values that these seeds cannot tell from the best."""
        return [each for each in self.values if each is not self.best and each.to_best.is_noise]


def search_setting(
    path: Path, search: str, replay: Path | None, seeds: int | None, goal_name: str = "productive"
) -> SettingSearch:
    """Simulate a fleet file with each value of a setting, such as "spares=0,1%,2%,4%", with the same seeds.

    Raises UsageError for a search without two values, and what `simulate_variants` raises.

    `goal_name` is a key of SEARCH_GOALS.
    """
    key, texts = _split_search(search)
    file, *variants = simulate_variants(path, [shlex.quote(f"{key}={text}") for text in texts], replay, seeds)
    goal = SEARCH_GOALS[goal_name]
    means = [goal.average(variant) for variant in variants]
    if missing := [text for text, mean in zip(texts, means, strict=True) if math.isnan(mean)]:
        raise UsageError(f"--search {search}: no {goal.title} with {missing[0]}; simulate more days")
    best = means.index(min(means) if goal.is_smallest_best else max(means))
    figures = [[goal.read(result) for result in variant.results] for variant in variants]
    values = [
        SearchedValue(text, variant, compare_paired(figures[best], each, len(figures) - 1))
        for text, variant, each in zip(texts, variants, figures, strict=True)
    ]
    return SettingSearch(goal, key, file, values, values[best])


def _split_search(search: str) -> tuple[str, list[str]]:
    key, _, values = search.partition("=")
    texts = list(dict.fromkeys(read_percent(key, text) for each in values.split(",") if (text := each.strip())))
    if not key.strip() or len(texts) < 2 or len(texts) > MAX_OPTIONS:
        raise UsageError(
            f"--search {search}: expected KEY=VALUE,VALUE,... with 2 to {MAX_OPTIONS} values, such as spares=0,1%,2%,4%"
        )
    return key.strip(), texts
