"""The stages of a pipeline: which of a model's segments each has."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.planner.model_profile import ModelProfile, ModelSegment
from phalanx.planner.scenario import Scenario


@dataclass(frozen=True, eq=False)
class StageSegments:
    """What one rank has of the model for one pipeline stage: segments, each so often. Stages with the same segments are
    one object."""

    segments: tuple[tuple[ModelSegment, int], ...]


def split_into_stages(scenario: Scenario) -> list[StageSegments]:
    """The stages of the pipeline, in order: blocks as evenly as they go, what stands before and after them with the
    first and the last."""
    return split_profile(
        scenario.profile, scenario.parallelism.pipeline * scenario.virtual_stages, scenario.parallelism.layers_per_stage
    )


def split_profile(
    profile: ModelProfile, num_stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[StageSegments]:
    """A model in `num_stages` stages, `layers_per_stage` blocks in each where it is given."""
    blocks: list[ModelSegment] = []
    first_segments: list[ModelSegment] = []
    last_segments: list[ModelSegment] = []
    for segment in profile.segments:
        if segment.is_block:
            blocks += [segment] * segment.repeats
        elif blocks:
            last_segments.append(segment)
        else:
            first_segments.append(segment)
    blocks_per_stage = layers_per_stage or balance_stages(len(blocks), num_stages)
    stages_found, first_block = [], 0
    distinct: dict[tuple[tuple[int, int], ...], StageSegments] = {}
    for index, count in enumerate(blocks_per_stage):
        stage_segments = [(each, 1) for each in first_segments] if index == 0 else []
        for block in blocks[first_block : first_block + count]:
            if stage_segments and stage_segments[-1][0] is block:
                stage_segments[-1] = (block, stage_segments[-1][1] + 1)
            else:
                stage_segments.append((block, 1))
        first_block += count
        if index == len(blocks_per_stage) - 1:
            stage_segments += [(each, 1) for each in last_segments]
        key = tuple((id(segment), repeats) for segment, repeats in stage_segments)
        stages_found.append(distinct.setdefault(key, StageSegments(tuple(stage_segments))))
    return stages_found


def balance_stages(num_blocks: int, num_stages: int) -> list[int]:
    """Divide `num_blocks` blocks over `num_stages` stages. The remainder goes to the middle stages: the ends do more
    than blocks."""
    blocks_each, remainder = divmod(num_blocks, num_stages)
    larger_stages = sorted(range(num_stages), key=lambda stage: (-min(stage, num_stages - 1 - stage), stage))[
        :remainder
    ]
    return [blocks_each + (stage in larger_stages) for stage in range(num_stages)]
