"""Load targets: a lower budget of a level for a time, from a file. The latest one wins; without an end it holds until
it is removed."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from phalanx.cluster.spec import StrictModel
from phalanx.errors import RecipeError
from phalanx.fleet.power_tree import PowerTree
from phalanx.fleet.power_units import Power
from phalanx.recipe.load import read_user_text
from phalanx.recipe.validation_errors import describe_validation_error, describe_value, suggest_nearest
from phalanx.recipe.yaml_loader import location_of_key, parse_yaml


class LoadTarget(StrictModel):
    """A limit of a level, such as `feed a`, from `start` to `end`, with their time zones."""

    level: str
    limit: Power
    start: datetime
    end: datetime | None = None


class LoadTargetsFile(StrictModel):
    """Targets; of several for a level at a time, the last one in the file wins."""

    targets: list[LoadTarget]


def load_targets_file(path: Path, tree: PowerTree) -> Sequence[LoadTarget]:
    """Load the targets of a fleet. Raises RecipeError for what is wrong in the file."""
    value, locations = parse_yaml(read_user_text(path), str(path))
    if not isinstance(value, dict):
        raise RecipeError(f"{location_of_key(locations, ())}: found {describe_value(value)}, expected `targets:`")
    try:
        targets = LoadTargetsFile.model_validate(value).targets
    except ValidationError as error:
        raise describe_validation_error(error, value, locations, LoadTargetsFile) from None
    labels = [level.label for level in tree.levels]
    for index, target in enumerate(targets):
        where = f"{location_of_key(locations, ('targets', index))}: targets.{index}"
        if target.level not in labels:
            raise RecipeError(f"{where}.level: {target.level}: no such level{suggest_nearest(target.level, labels)}")
        if target.start.tzinfo is None or (target.end is not None and target.end.tzinfo is None):
            raise RecipeError(f"{where}: expected a time with its zone, such as 2026-11-28T10:00:00Z")
    return targets


def find_active_budgets(tree: PowerTree, targets: Sequence[LoadTarget], unix_time_s: float) -> list[float | None]:
    """Return the budget of each level at a time: never more than the fleet file has."""
    budgets = {level.label: level.budget_w for level in tree.levels}
    limits: dict[str, float] = {}
    for target in targets:
        if target.start.timestamp() <= unix_time_s and (target.end is None or unix_time_s < target.end.timestamp()):
            limits[target.level] = target.limit
    for label, limit_w in limits.items():
        budget_w = budgets[label]
        budgets[label] = limit_w if budget_w is None else min(limit_w, budget_w)
    return [budgets[level.label] for level in tree.levels]
