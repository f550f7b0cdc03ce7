"""Layouts of a run as arrays, one element a layout, so that a search predicts thousands at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from phalanx.planner.pipeline import PipelineSchedule
from phalanx.planner.scenario import Scenario
from phalanx.recipe.schema import Parallelism

CHECKPOINTING_MODES = ("none", "selective", "full")
PIPELINE_SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)


@dataclass(frozen=True)
class Layouts:
    """What a search may choose, as integers: each field an array with one element a layout."""

    replicate: np.ndarray
    shard: np.ndarray
    tensor: np.ndarray
    pipeline: np.ndarray
    context: np.ndarray
    expert: np.ndarray
    micro_size: np.ndarray
    checkpointing: np.ndarray
    """Index into `CHECKPOINTING_MODES`."""
    schedule: np.ndarray
    """Index into `PIPELINE_SCHEDULES`."""
    virtual_stages: np.ndarray
    zero_level: np.ndarray
    """What data-parallel ranks divide; see `Scenario.zero_level`."""

    def __len__(self) -> int:
        return len(self.replicate)

    def take(self, rows: Any) -> "Layouts":
        """The layouts at `rows`: indices, a mask or a slice."""
        return Layouts(**{name: column[rows] for name, column in vars(self).items()})

    def unique_rows(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """One row for each distinct combination of these fields, and for every layout the index of its own."""
        _, rows, inverse = np.unique(
            np.stack([getattr(self, name) for name in names]), axis=1, return_index=True, return_inverse=True
        )
        return rows, inverse.reshape(-1)


LAYOUT_FIELDS = tuple(field.name for field in fields(Layouts))
_PARALLELISM_FIELDS = ("replicate", "shard", "tensor", "pipeline", "context", "expert")


def layout_of(scenario: Scenario) -> Layouts:
    """The one layout of a scenario."""
    parallelism = scenario.parallelism
    known_mode = scenario.checkpointing in CHECKPOINTING_MODES
    values = {
        **{name: getattr(parallelism, name) for name in _PARALLELISM_FIELDS},
        "micro_size": scenario.micro_size,
        "checkpointing": CHECKPOINTING_MODES.index(scenario.checkpointing) if known_mode else 0,
        "schedule": PIPELINE_SCHEDULES.index(parallelism.pipeline_schedule),
        "virtual_stages": scenario.virtual_stages,
        "zero_level": scenario.zero_level,
    }
    return Layouts(**{name: np.array([value]) for name, value in values.items()})


def to_scenarios(base_scenario: Scenario, layouts: Layouts, rows: Sequence[int]) -> list[Scenario]:
    """The layouts at `rows` as scenarios, which have everything else from `base_scenario`."""
    scenarios = []
    for row in rows:
        value = {name: int(getattr(layouts, name)[row]) for name in LAYOUT_FIELDS}
        parallelism = Parallelism(
            **{name: value[name] for name in _PARALLELISM_FIELDS},
            pipeline_schedule=PIPELINE_SCHEDULES[value["schedule"]],
            layers_per_stage=base_scenario.parallelism.layers_per_stage,
            async_tp=base_scenario.parallelism.async_tp,
        )
        scenarios.append(
            replace(
                base_scenario,
                parallelism=parallelism,
                micro_size=value["micro_size"],
                checkpointing=CHECKPOINTING_MODES[value["checkpointing"]],
                zero_level=value["zero_level"],
                virtual_stages=value["virtual_stages"],
            )
        )
    return scenarios
