"""Print values of a setting that were simulated, and the best of them."""

import math

from phalanx.app.simulate import SimulatedVariant, spread_over_seeds
from phalanx.app.simulation_differences import format_difference
from phalanx.app.simulation_figures import FigureRow, list_rows
from phalanx.app.simulation_search import SettingSearch
from phalanx.formatting import format_plural
from phalanx.text_table import Column, format_table

SHOWN_FIGURES = ("productive", "ETTR", "stops of jobs", "wait, mean", "completion, mean")


def format_search(search: SettingSearch) -> list[str]:
    """Return lines: a table of the values, the best, and those that differ from it by noise only."""
    number, figures = len(search.file.results), {row.title: row for row in list_rows(search.file)}
    rows = [figures[title] for title in SHOWN_FIGURES]
    write = figures[search.goal.title].write
    head = (
        f"{search.goal.title}, {search.file.settings.days:g} days, {format_plural(number, 'seed')}; less that of the "
        "best: mean (95 % for all intervals together)"
    )
    table = [["as in the file", "", *_list_cells(rows, search.file)]]
    for each in search.values:
        to_best = "best" if each is search.best else format_difference(each.to_best, write)
        table.append([each.text, to_best, *_list_cells(rows, each.variant)])
    columns = [Column(search.key), Column("LESS THE BEST"), *(Column(title) for title in SHOWN_FIGURES)]
    return [head, *format_table(columns, table), _describe_best(search, number)]


def _describe_best(search: SettingSearch, num_seeds: int) -> str:
    best = f"best: {search.key}={search.best.text}"
    if num_seeds < 2:
        return f"{best}, with one seed, which may be chance: add --seeds 20"
    if search.ties:
        ties = ", ".join(each.text for each in search.ties)
        return f"{best}; the difference to {ties} is noise with these seeds: more --seeds narrow the intervals"
    return f"{best}; all others are worse by more than noise"


def search_to_json(search: SettingSearch) -> dict[str, object]:
    """Return the values with the mean of the goal, and the best."""
    return {
        "key": search.key,
        "goal": search.goal.title,
        "best": search.best.text,
        "ties": [each.text for each in search.ties],
        "mean_as_in_the_file": _without_nan(search.goal.average(search.file)),
        "values": [
            {
                "value": each.text,
                "mean": search.goal.average(each.variant),
                "less_best": {
                    "mean": each.to_best.mean,
                    "low": _without_nan(each.to_best.low),
                    "high": _without_nan(each.to_best.high),
                },
            }
            for each in search.values
        ],
    }


def _without_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _list_cells(rows: list[FigureRow], variant: SimulatedVariant) -> list[str]:
    means = [spread_over_seeds(variant, row.read).mean for row in rows]
    return ["-" if math.isnan(mean) else row.write(mean) for row, mean in zip(rows, means, strict=True)]
