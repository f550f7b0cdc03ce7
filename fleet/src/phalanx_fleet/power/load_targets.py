"""Load targets: a lower budget of a level for a time, from a file. Of several for a level the latest one
wins; without an end it holds until it is replaced."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from phalanx.cluster.spec import StrictModel
from phalanx.errors import PhalanxError, RecipeError
from phalanx.recipe.validation_errors import read_user_mapping, validate_value
from phalanx.recipe.yaml_loader import location_of_key
from phalanx_fleet.power_settings import Power
from phalanx_fleet.power_tree import PowerTree, describe_missing


@dataclass(frozen=True)
class LoadTarget:
    """A limit of a level, such as `feed a`, from `start_s` to `end_s`, in unix seconds.

    `end_s`: None until it is replaced.
    """

    level: str
    limit_w: float
    start_s: float
    end_s: float | None = None

    def is_active(self, unix_time_s: float) -> bool:
        """Whether it holds at a time."""
        return self.start_s <= unix_time_s and (self.end_s is None or unix_time_s < self.end_s)


class LoadTargetEntry(StrictModel):
    """A limit of a level, such as `feed a`, from `start` to `end`, with their time zones."""

    level: str
    limit: Power
    start: datetime
    end: datetime | None = None


class LoadTargetsFile(StrictModel):
    """Targets; of several for a level at a time, the last one in the file wins."""

    targets: list[LoadTargetEntry]


def load_targets_file(path: Path, tree: PowerTree) -> Sequence[LoadTarget]:
    """Load the targets of a fleet. Raises RecipeError for what is wrong in the file."""
    value, locations = read_user_mapping(path, "`targets:`")
    entries = validate_value(value, locations, LoadTargetsFile).targets
    labels = [level.label for level in tree.levels]
    targets = []
    for index, entry in enumerate(entries):
        where = f"{location_of_key(locations, ('targets', index))}: targets.{index}"
        if entry.level not in labels:
            raise RecipeError(f"{where}.level: {describe_missing('level', entry.level, labels)}")
        if entry.start.tzinfo is None or (entry.end is not None and entry.end.tzinfo is None):
            raise RecipeError(f"{where}: expected a time with its zone, such as 2026-11-28T10:00:00Z")
        end_s = None if entry.end is None else entry.end.timestamp()
        if entry.end is not None and entry.end <= entry.start:
            raise RecipeError(f"{where}.end: {entry.end} is not after its start, {entry.start}")
        targets.append(LoadTarget(entry.level, entry.limit, entry.start.timestamp(), end_s))
    return targets


class TargetsFileSource:
    """The targets of a file, which is read again when it changes. While it is wrong or gone, those of before hold.

    `problem`: what is wrong with it now. Raises RecipeError for what is wrong in it at first.
    """

    def __init__(self, path: Path, tree: PowerTree):
        self._path, self._tree = path, tree
        self._stamp = _read_stamp(path)
        self._targets = load_targets_file(path, tree)
        self.problem: str | None = None
        self._problems: list[str] = []

    def __iter__(self) -> Iterator[LoadTarget]:
        """Iterate over the targets in the order of the file."""
        if (stamp := _read_stamp(self._path)) != self._stamp:
            self._stamp, self.problem = stamp, None
            try:
                self._targets = load_targets_file(self._path, self._tree)
            except (PhalanxError, OSError) as error:
                self.problem = f"{error}; the load targets of before hold"
                self._problems.append(self.problem)
        return iter(self._targets)

    def list_problems(self) -> list[str]:
        """Return what was wrong with the file since the last call."""
        problems, self._problems = self._problems, []
        return problems


def _read_stamp(path: Path) -> tuple[int, ...] | None:
    """Return what changes with the content of a file; None where there is none that can be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def find_active_budgets(tree: PowerTree, targets: Iterable[LoadTarget], unix_time_s: float) -> list[float | None]:
    """Return the budget of each level at a time: never more than the fleet file has."""
    active = {target.level: target for target in targets if target.is_active(unix_time_s)}
    budgets: list[float | None] = []
    for level in tree.levels:
        target = active.get(level.label)
        limits = [each for each in (level.budget_w, None if target is None else target.limit_w) if each is not None]
        budgets.append(min(limits, default=None))
    return budgets
