"""Print simulated variants of a fleet next to each other."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from phalanx.app.simulate import SimulatedVariant
from phalanx.app.simulation_differences import describe_differences, list_differences
from phalanx.app.simulation_figures import compare_variants
from phalanx.text_table import Column, format_table


def format_variants(variants: Sequence[SimulatedVariant]) -> list[str]:
    """Return lines: a table with a row for each figure, and what exceeds its budget."""
    table = compare_variants(variants)
    columns = [Column("FIGURE"), *(Column(each) for each in table.columns)]
    return [table.head, *format_table(columns, table.rows), *table.notes, *table.problems]


def format_differences(variants: Sequence[SimulatedVariant]) -> list[str]:
    """Return lines: a table with the differences of variants to the file as it is; none without variants."""
    table = describe_differences(variants)
    if table is None:
        return []
    columns = [Column("FIGURE"), *(Column(each) for each in table.columns)]
    return ["", table.head, *format_table(columns, table.rows), *table.notes]


def variants_to_json(variants: Sequence[SimulatedVariant]) -> list[dict[str, object]]:
    """Return all results by variant and seed, and differences to the first variant by figure; NaN becomes null."""
    found = list_differences(variants)
    return [
        {
            "variant": variant.label,
            "nodes": variant.num_nodes,
            "devices": variant.num_devices,
            "days": variant.settings.days,
            "policy": variant.settings.policy,
            "seeds": [_without_nan(asdict(replace(result, hours=None))) for result in variant.results],
            "exceeded_budgets": [
                {"level": each.level.label, "claim_w": each.claim_w, "budget_w": each.level.budget_w}
                for each in variant.exceeded
            ],
            "differences": {}
            if index == 0
            else {each.row.title.strip(): _without_nan(asdict(each.differences[index - 1])) for each in found},
        }
        for index, variant in enumerate(variants)
    ]


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items() if key != "hours"}
    return None if isinstance(value, float) and not math.isfinite(value) else value
