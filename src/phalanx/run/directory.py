"""Where everything of a run lies, and its small JSON files. Knows names and formats, not meanings."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from phalanx.errors import DataError, UsageError, describe_os_error
from phalanx.safe_files import check_links, open_regular, parse_json, read_json
from phalanx.std_streams import word_of

RESULT_FORMAT = 1
NUMBER_KEYS = frozenset(
    {"trainable_parameters", "flops_per_sample", "units_per_sample", "predicted_step_s", "calibrated_step_s"}
    | {"activation_bytes_per_sample", "bytes_per_sample", "frozen_parameters", "num_restarts"}
    | {"physical_cores", "device_count", "threads_per_worker", "steps"}
)
TEXT_KEYS = frozenset(
    {"unit", "data_summary", "flops_rule", "device", "device_name", "data_sheet_source", "host", "status", "digest"}
)
MAPPING_KEYS = frozenset(
    {"origins", "measured_matmul_tflops", "data_sheet_tflops", "predicted_breakdown_s", "session", "git", "mixture"}
)
LIST_KEYS = frozenset({"auto_choices"})
AUTO_CHOICE_KEYS = frozenset({"key", "value", "reason"})
"""Types of the values in the small JSON files of a run (plan.json, cluster.json, result.json), by key."""
_HEADER_BYTES = 1 << 16
"""Bytes of a file by which an earlier output is recognised."""
_FSYNC_UNSUPPORTED_ERRNOS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
_LOST_AND_FOUND = "lost+found"
"""What a file system has in it before anyone has written there."""


class _PathOf:
    """The path of a file or directory of a run, by its name."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run: "Run", owner: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class Run:
    """A run directory. Making this value creates nothing; `create` does. Of a URL it is a local copy without weights,
    which is brought up to date."""

    path: Path
    recipe = _PathOf("recipe.yaml")
    """The recipe as it was given, overrides applied."""
    resolved = _PathOf("resolved.yaml")
    """The recipe with every `auto` replaced: what really runs."""
    plan = _PathOf("plan.json")
    cluster = _PathOf("cluster.json")
    leader = _PathOf("leader.json")
    environment = _PathOf("environment.json")
    events = _PathOf("events.jsonl")
    logs = _PathOf("logs")
    checkpoints = _PathOf("checkpoints")
    evaluating = _PathOf("checkpoints/evaluating.json")
    """The step of the checkpoint that `evaluation.tasks` reads, which stays meanwhile."""
    store = _PathOf("store.json")
    """The file of a local scratch directory that says which URL is the run."""
    telemetry = _PathOf("telemetry")
    """Directory of the nodes' telemetry: NODE.jsonl of each (`telemetry_minutes`)."""
    trackers = _PathOf("trackers")
    """Directory of what was sent to experiment trackers: NAME.json of each."""
    tensorboard = _PathOf("tensorboard")
    reference = _PathOf("reference.safetensors")
    """Log-probabilities that a loss compares with: of the model before the first step, or of a stored teacher."""
    result = _PathOf("result.json")
    tokenizer = _PathOf("tokenizer.json")
    """The tokenizer.json of a model that needs one."""
    companions = _PathOf("huggingface")
    """The other files of the directory from which the tokenizer comes."""
    report = _PathOf("report.html")

    def __post_init__(self) -> None:
        path: Any = self.path
        if isinstance(path, str) and "://" in path:  # by name: storage is a layer above this one
            path = import_module("phalanx.storage.run_objects").mirror_run(path)
        object.__setattr__(self, "path", Path(path))

    @classmethod
    def open_existing(cls, path: Path | str) -> "Run":
        """The run at a path or URL; UsageError when there is none, DataError where a link leads out of it."""
        run = cls(path)  # type: ignore[arg-type]
        if not run.has_started():
            for above in run.path.absolute().parents[:2]:
                inner = cls(above).checkpoints in (run.path.absolute(), run.path.absolute().parent)
                if inner and cls(above).has_started():
                    raise UsageError(f"{path}: is inside the run {above}; give that")
            if run.path.is_file():
                raise UsageError(
                    f"{path}: is a file; expected a run directory, such as runs/NAME, as `phalanx train` makes it"
                )
            raise UsageError(
                f"{path}: no run here (it has neither resolved.yaml nor events nor checkpoints); `phalanx train RECIPE "
                f"--run {word_of(path)}` makes one"
            )
        check_links(run.path)
        return run

    @property
    def store_url(self) -> str | None:
        """The URL of a run that is kept in an object store; this directory is then one node's scratch of it."""
        url = (self.read_json(self.store) or {}).get("url")
        return url if isinstance(url, str) else None

    @property
    def location(self) -> str:
        """The URL of the run, or the path of its directory."""
        return self.store_url or str(self.path)

    @property
    def absolute_location(self) -> str:
        """`location` for processes in other directories."""
        return self.store_url or str(self.path.absolute())

    def create(self) -> None:
        """Make the directory, its folders and its event log, if missing. DataError where a link leads out of it."""
        check_links(self.path)
        for folder in (self.path, self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        self.events.touch()

    def has_started(self) -> bool:
        """Whether there are traces of a run: its recipe, events or checkpoints. Any of them may be lost."""
        events = self.events.is_file() and self.events.stat().st_size > 0 and _is_event_log(self.events)
        return self.resolved.is_file() or events or self.has_checkpoint()

    def has_checkpoint(self) -> bool:
        """Whether the run has its weights in a checkpoint of its own, good or not."""
        return self.store_has_checkpoint() or any(self.checkpoints.glob("step-*/MANIFEST.json"))

    def store_has_checkpoint(self) -> bool:
        """Whether there was a checkpoint at the run's URL when this directory was last brought up to date."""
        return bool((self.read_json(self.store) or {}).get("has_checkpoint"))

    def find_foreign_file(self) -> str | None:
        """A file of the user's in the directory; None when the directory is new, empty, or a run. A `recipe.yaml` alone
        makes no run: it is how users call their own recipes."""
        if not self.path.is_dir():
            return None
        created = self.logs.is_dir() and self.checkpoints.is_dir() and _is_event_log(self.events)
        resumed = self.resolved.is_file() and (self.logs.is_dir() or self.checkpoints.is_dir())
        if created or resumed or self.has_checkpoint() or self.store.is_file():
            return None
        own = {folder for folder in (self.logs, self.checkpoints) if folder.is_dir() and not any(folder.iterdir())}
        others = sorted(each.name for each in self.path.iterdir() if each not in own and each.name != _LOST_AND_FOUND)
        return others[0] if others else None

    def read_json(self, path: Path) -> dict[str, Any] | None:
        """One of the run's JSON files, or None when it was not written yet. DataError when it is not JSON."""
        try:
            return read_json(path, follow_links=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list_steps_in_evaluation(self) -> list[int]:
        """The step of the checkpoint that `evaluation.tasks` reads, if any."""
        step = self.read_json_or_empty(self.evaluating).get("step")
        return [step] if isinstance(step, int) else []

    def describe_damage(self) -> list[str]:
        """Return one sentence for each optional file of the run that is damaged."""
        found = []
        for path in (self.plan, self.cluster, self.environment, self.result, self.checkpoints / "best.json"):
            try:
                self.read_json(path)
            except DataError as error:
                found.append(f"{error}; the run continues without it")
        return found

    def read_json_or_empty(self, path: Path) -> dict[str, Any]:
        """The same for an optional file: empty where it is missing or damaged, and without values of a wrong type."""
        try:
            return drop_malformed(self.read_json(path) or {})
        except DataError:
            return {}


def describe_unfinished(run: Run) -> str | None:
    """A sentence when the result of a run does not say that it is done, whatever its command's exit code was."""
    try:
        status = (run.read_json(run.result) or {}).get("status")
    except DataError as error:
        return str(error)
    status_text = "there is no result" if status is None else f"its result says {status!r}"
    return None if status == "done" else f"the command left with exit code 0, but {run.path} is not done: {status_text}"


def check_run_path(path: Path) -> None:
    """UsageError when a run cannot be kept at `path`, as far as that shows without writing: a run has a folder of its
    own, in which nothing else is overwritten. DataError where a link leads out of it."""
    nearest_parent = next(candidate for candidate in (path.absolute(), *path.absolute().parents) if candidate.exists())
    if not nearest_parent.is_dir():
        raise UsageError(f"{path}: cannot create a run here: {nearest_parent} is a file; choose another --run")
    if not os.access(nearest_parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot create a run here: {nearest_parent} is not writable; choose another --run")
    if (foreign_file := Run(path).find_foreign_file()) is not None:
        raise UsageError(
            f"{path}: cannot create a run here: the folder is not a run and holds other files, such as "
            f"{foreign_file}; choose another --run, for instance {path / 'run'}"
        )
    check_links(path)


def check_output_path(option: str, path: Path, markers: Sequence[str]) -> None:
    """UsageError when a file cannot be written to `path`: there is no such folder, or a file is there already that is
    not an earlier output of this kind. One of `markers` stands near the beginning of each of those."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.absolute().parent}; create it, or choose another")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; expected a file")
    if path.exists() and not path.is_file():  # a device or pipe
        return
    is_new = not path.exists()
    try:
        open(path, "ab").close()
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {describe_os_error(error)}; choose another") from None
    if is_new:
        path.unlink()
        return
    with open(path, "rb") as file:
        head = file.read(_HEADER_BYTES)
    if head and not any(mark.encode() in head for mark in markers):
        raise UsageError(f"{option} {path}: exists and was not written by this command; remove it or choose another")


def _is_event_log(path: Path) -> bool:
    """Whether a file is empty or begins with an event."""
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            line = file.readline(_HEADER_BYTES)
        return not line or parse_json(line.decode()).keys() >= {"kind", "time"}
    except (OSError, ValueError, AttributeError, DataError):
        return False


def fsync_if_supported(fd: int) -> None:
    """fsync, where the file system has it for such a file: some have it for none, or not for folders."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _FSYNC_UNSUPPORTED_ERRNOS:
            raise


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        fsync_if_supported(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync_if_supported(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file so that readers see all of it or the old one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # a full disk names no file
            error.filename = str(path)
        raise


def write_output(path: Path, text: str) -> None:
    """Write a file that an option of a command names: `write_atomic`, but a device, a pipe or a link such as
    /dev/stdout is written to, and not replaced."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_atomic(path, text)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def drop_malformed(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a small JSON file of a run says, without what is not of its kind: it may be damaged."""
    return {key: each for key, each in value.items() if _has_expected_type(key, each)}


def _has_expected_type(key: str, value: Any) -> bool:
    if key in NUMBER_KEYS:
        return value is None or (is_number(value) and 0 <= value < 1e30)
    if key in TEXT_KEYS:
        return value is None or isinstance(value, str)
    if key in LIST_KEYS:
        return isinstance(value, list) and all(
            isinstance(each, dict) and each.keys() >= AUTO_CHOICE_KEYS for each in value
        )
    if key.endswith("_tflops"):
        return isinstance(value, dict) and all(is_number(each) and 0 <= each < 1e30 for each in value.values())
    if key == "session":
        return isinstance(value, dict) and isinstance(value.get("optimizer"), str)
    return isinstance(value, dict) if key in MAPPING_KEYS else True


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
