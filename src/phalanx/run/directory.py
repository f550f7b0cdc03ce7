"""Where everything of a run lies, and its small JSON files. Knows names and formats, not meanings."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.bounded import read_json
from phalanx.errors import DataError, UsageError

RESULT_FORMAT = 1


@dataclass(frozen=True)
class Run:
    """A run directory. Making this value creates nothing; `create` does."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @classmethod
    def existing(cls, path: Path | str) -> "Run":
        """The run at `path`; UsageError when there is none."""
        run = cls(Path(path))
        if not run.resolved.is_file():
            raise UsageError(
                f"{path}: no run here (it has no resolved.yaml); `phalanx train RECIPE --run {path}` makes one"
            )
        return run

    @property
    def recipe(self) -> Path:
        """The recipe as it was given, overrides applied."""
        return self.path / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """The recipe with every `auto` replaced: what really runs."""
        return self.path / "resolved.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json of a model that needs one."""
        return self.path / "tokenizer.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def create(self) -> None:
        """Make the directory and its folders; what is there already stays."""
        for folder in (self.path, self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    def read_json(self, path: Path) -> dict[str, Any] | None:
        """One of the run's JSON files, or None when it was not written yet. DataError when it is not JSON."""
        try:
            return read_json(path, follow=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def damaged(self) -> list[str]:
        """In words, which of the small files that a run can do without are not what was written."""
        found = []
        for path in (self.plan, self.cluster, self.environment, self.result, self.checkpoints / "best.json"):
            try:
                self.read_json(path)
            except DataError as error:
                found.append(f"{error}; the run goes on without it")
        return found

    def read_lossy(self, path: Path) -> dict[str, Any]:
        """The same for a file that a run can do without: empty where it is missing or damaged."""
        try:
            return self.read_json(path) or {}
        except DataError:
            return {}


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that readers see all of it or the old one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_whole` of indented JSON."""
    write_whole(path, json.dumps(value, indent=2) + "\n")
