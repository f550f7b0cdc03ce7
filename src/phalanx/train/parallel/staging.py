"""A model as pipeline stages on the workers of a layout: cut up, each stage divided further, and run by a schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.recipe.pipelines import stages_of
from phalanx.recipe.schema import Parallelism
from phalanx.train.checkpoint.format import EXTRA
from phalanx.train.objective import Scoring, Sums
from phalanx.train.parallel.cuts import Cut
from phalanx.train.parallel.divided import Divided, Tie
from phalanx.train.parallel.mesh import Mesh, group_of_stages
from phalanx.train.parallel.parallelize import Choices, Outline, divide_part, outline
from phalanx.train.parallel.pipeline import Pipeline, check_micro_batches, owners
from phalanx.train.parallel.stages import Division, Stage, cut, cut_points, divide, keepers
from phalanx.train.parallel.survey import survey
from phalanx.train.place import Place
from phalanx.train.savable import extra_modules
from phalanx.train.tasks import TensorBatch


def cut_up(model: nn.Module, scoring: Scoring, batch: TensorBatch, layout: Parallelism, found: Outline) -> Division:
    """Where the model is cut into stages. RecipeError when it cannot be cut so."""
    count = stages_of(layout)
    owners(layout.pipeline_schedule, count, layout.pipeline)
    if len(found.blocks) < count:
        raise RecipeError(
            f"parallelism.pipeline: {count} stages ({layout.pipeline_schedule} on {layout.pipeline} ranks) need as "
            f"many blocks, and the model has {len(found.blocks)}"
        )
    seen = survey(model, found.blocks, _flat(scoring), batch)
    inside = {
        name: tuple(n for n in sorted(seen.needs[i]) if n.startswith(f"{name}.")) for i, name in enumerate(found.blocks)
    }
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # Work goes with parameters: those of a block, and after the last those that only the loss needs (the head).
    weights = [float(sum(sizes[name] for name in names)) for names in inside.values()]
    after = float(sum(sizes[name] for name in seen.needs[-1].difference(*inside.values())))
    bounds = cut_points(len(found.blocks), count, weights, after=after, counts=layout.layers_per_stage)
    return divide(seen, bounds)


class Staged:
    """This worker's pipeline under the face of an objective: a list of micro-batches for a step, one for a score."""

    def __init__(self, pipeline: Pipeline, scoring: Scoring):
        self.pipeline = pipeline
        self.scoring = scoring

    @property
    def training(self) -> bool:
        return next(iter(self.pipeline.stages.values())).training

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of all stages."""
        for stage in self.pipeline.stages.values():
            stage.train(mode)

    def modules(self) -> Iterator[nn.Module]:
        """Of all stages that are here."""
        return (module for stage in self.pipeline.stages.values() for module in stage.modules())

    def step(self, batches: Sequence[TensorBatch]) -> list[tuple[Tensor, Tensor | int]] | None:
        """Forward and backward: loss and terms of each micro-batch on ranks that have the last stage."""
        results = self.pipeline.step(batches)
        return None if results is None else [(result[0], result[1]) for result in results]

    def __call__(self, batch: TensorBatch, metrics: bool) -> Sums:
        names: list[str] = []

        def flat(model: nn.Module, batch: TensorBatch) -> tuple[Any, ...]:
            sums = self.scoring(model, batch, metrics)
            names[:] = [name for name, _, _ in sums]
            return tuple(value for _, total, terms in sums for value in (total, terms))

        results = self.pipeline.evaluate([batch], flat)
        if results is None:
            return []
        (values,) = results
        return list(zip(names, values[::2], values[1::2], strict=True))


def divide_stages(
    model: nn.Module,
    scoring: Scoring,
    batch: TensorBatch,
    mesh: Mesh,
    place: Place,
    choices: Choices,
    micro_batches: int,
    seed: Callable[[int, int], None],
    scale: Callable[[], float] | None,
) -> tuple[Divided, Staged]:
    """This worker's stages of `model`, divided as the layout says, and the pipeline that runs them. The model's
    parameters go over to the stages; nothing else should hold it afterwards. `micro_batches` are those of a step in one
    part of the batch. RecipeError when model, layout and schedule do not fit."""
    layout = mesh.layout
    assert mesh.pipeline is not None
    found = outline(model, layout, choices)
    division = cut_up(model, scoring, batch, layout, found)
    check_micro_batches(layout.pipeline_schedule, micro_batches, division.stages, layout.pipeline)
    places = owners(layout.pipeline_schedule, division.stages, layout.pipeline)
    mine = [stage for stage, owner in enumerate(places) if owner == mesh.at["pipeline"]]
    tied = _ties(division, places, mesh, place)
    kept_by = keepers(model, division)
    parts = cut(model, division, mine)
    stages: dict[int, Stage] = {}
    cuts: dict[str, tuple[Cut, ...]] = {}
    partial: set[str] = set()
    for index in mine:
        stages[index] = stage = Stage(parts[index], division, index, _flat(scoring), seed=seed)
        if mesh.fsdp is None:
            _join_ties(stage.model, [stages[earlier].model for earlier in mine if earlier < index])
        more, some, vocabulary = divide_part(stage.model, stage, mesh, choices, found)
        cuts, partial = cuts | more, partial | some
        if scoring.head is not None and vocabulary is not None:
            scoring.head = scoring.head.over(vocabulary)
    need_one_keeper(division, mine, [stage.model for stage in stages.values()])
    foreign = _foreign(kept_by, mine, [stage.model for stage in stages.values()])
    divided = Divided(mesh, tuple(stage.model for stage in stages.values()), cuts, frozenset(partial), tied, foreign)
    pipeline = Pipeline(
        stages,
        division.stages,
        schedule=layout.pipeline_schedule,
        group=mesh.pipeline,
        device=place.device,
        scale=scale,
    )
    return divided, Staged(pipeline, scoring)


def _flat(scoring: Scoring) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    """The scoring of a step as a pipeline wants it: (sum of losses, number of terms)."""

    def objective(model: nn.Module, batch: TensorBatch) -> tuple[Tensor, Tensor | int]:
        ((_, total, terms),) = scoring(model, batch)
        return total, terms

    return objective


def _ties(division: Division, places: Sequence[int], mesh: Mesh, place: Place) -> dict[str, Tie]:
    """Parameters that stages on several ranks hold. Every rank makes all groups."""
    found: dict[str, Tie] = {}
    for members in sorted({tuple(sorted({places[stage] for stage in tie.stages})) for tie in division.ties}):
        names = [t.name for t in division.ties if tuple(sorted({places[stage] for stage in t.stages})) == members]
        if len(members) == 1:
            if mesh.fsdp is not None:
                raise RecipeError(
                    f"parallelism.pipeline: {names[0]} is shared (tied) by two stages of one rank, which cannot both "
                    "be sharded; use another schedule, or untie it"
                )
            continue
        group = group_of_stages(mesh, place, members)
        if mesh.at["pipeline"] in members:
            found |= {name: Tie(group, mesh.at["pipeline"] == members[0]) for name in names}
    return found


def _join_ties(model: nn.Module, others: Sequence[nn.Module]) -> None:
    """Have a stage use the very parameters that an earlier stage of this rank shares with it."""
    known = {name: parameter for other in others for name, parameter in other.named_parameters()}
    for name, parameter in list(model.named_parameters()):
        if name in known and known[name] is not parameter:
            for module in model.modules():
                for attribute, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                    if value is parameter:
                        setattr(module, attribute, known[name])


def _foreign(kept_by: Mapping[str, int], mine: Sequence[int], models: Sequence[nn.Module]) -> frozenset[str]:
    """Buffers and extra state that stages on other ranks save."""
    names = {name for model in models for name, _ in model.named_buffers()}
    names |= {EXTRA + name for model in models for name in extra_modules(model)}
    return frozenset(name for name in names if kept_by[name] not in mine)


def need_one_keeper(division: Division, mine: Sequence[int], models: Sequence[nn.Module]) -> None:
    """RecipeError for a buffer that forwards change and that several stages of this rank have: each would have another
    under one name."""
    for name in sorted(division.survey.changed):
        having = [stage for stage, model in zip(mine, models, strict=True) if name in dict(model.named_buffers())]
        if len(having) > 1:
            raise RecipeError(
                f"parallelism.pipeline_schedule: forwards change {name}, of which stages {having[0]} and {having[1]} "
                "of one rank would each have their own; use a schedule with one stage a rank, such as 1f1b"
            )
