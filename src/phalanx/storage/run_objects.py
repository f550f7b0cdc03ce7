"""The objects of a run that is kept at a URL, and the local run directory that they follow, or that follows them.

    URL/run.json                      written once, by the first start: which run this is
    URL/recipe.yaml, plan.json, ...   the small files of a run directory
    URL/events/<byte offset>.jsonl    events.jsonl, in segments of whole lines; logs/NAME and telemetry/NAME likewise
    URL/lease/...                     the process that trains the run: `lease.py`
    URL/checkpoints/step-000000060/   a checkpoint, which `train/checkpoint/checkpoint_store.py` reads and writes:
        rank-00000.json               the record of each rank, with the names of its file's blocks
        MANIFEST.xxh3
        MANIFEST.json                 written last: a step without it is not whole
    URL/blocks/<xxh3_128>             bytes of the ranks' files, named by their content

A store cannot append: what grows is written as segments, each named by the byte at which it begins.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from phalanx.errors import PhalanxError, UsageError
from phalanx.run.cache import cache_root
from phalanx.run.directory import Run, write_atomic, write_json
from phalanx.safe_files import parse_json, read_json
from phalanx.std_streams import word_of
from phalanx.storage.cache import lock_download
from phalanx.storage.errors import NotFound, ObjectExists
from phalanx.storage.lease import LeaseLostError
from phalanx.storage.store import PARALLEL_REQUESTS, PROBE_PREFIX, RANGE_BYTES, ObjectInfo, check_writable, open_store
from phalanx.storage.url import StoreUrl, is_url, parse_url

BLOCK_BYTES = 16 << 20
"""Bytes of a block, except the last of a file."""
BLOCKS_NAME, CHECKPOINTS_NAME = "blocks", "checkpoints"
MANIFEST_NAME = "MANIFEST.json"
CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d{9,})")
"""The name of a checkpoint, on disk as in a store: `format_checkpoint_name`."""


def format_checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


class StoredSteps:
    """The steps of which a run has checkpoints below its URL."""

    def __init__(self, url: StoreUrl):
        self.url, self.store = url, open_store(url)

    def step_url(self, step: int) -> StoreUrl:
        """The URL of a checkpoint."""
        return self.url / CHECKPOINTS_NAME / format_checkpoint_name(step)

    def steps(self) -> list[int]:
        """The steps of which there is anything, whole or not, newest first."""
        names, _ = self.store.list_names((self.url / CHECKPOINTS_NAME).key)
        matches = map(CHECKPOINT_NAME_PATTERN.fullmatch, names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint of a step has its manifest."""
        try:
            self.store.head((self.step_url(step) / MANIFEST_NAME).key)
        except NotFound:
            return False
        return True

    def whole_steps(self) -> Iterator[int]:
        """The steps of which the checkpoint is whole, newest first; each is looked at when it is asked for."""
        return filter(self.is_whole, self.steps())

    def read_newest_meta(self) -> tuple[int, Mapping[str, Any]] | None:
        """The step and `meta` of the newest whole checkpoint with a manifest that can be read; None for none."""
        for step in self.whole_steps():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged: a restore reports it
                content = self.store.read((self.step_url(step) / MANIFEST_NAME).key)
                return step, dict(parse_json(content.decode())["meta"])
        return None


def split_checkpoint_url(url: StoreUrl) -> tuple[StoreUrl, int | None]:
    """The URL of the run, or prefix, that a URL or its `checkpoints` names, and the step if it is a checkpoint's."""
    match = CHECKPOINT_NAME_PATTERN.fullmatch(url.name)
    if match and url.parent.name == CHECKPOINTS_NAME:
        return url.parent.parent, int(match[1])
    if url.name == CHECKPOINTS_NAME and not StoredSteps(url).steps() and StoredSteps(url.parent).steps():
        return url.parent, None
    return url, None


logger = logging.getLogger(__name__)

RUN_OBJECT = "run.json"
EVENTS_FILE = "events.jsonl"
SMALL_DIRECTORIES = ("huggingface", "trackers")
"""Directories of a run with small files."""
_LOCAL_FILES = frozenset({"store.json", "leader.json"})
"""Small files that concern one machine only."""
REFRESH_INTERVAL_S = 5.0
"""Seconds between two updates of a run that is followed."""
_MAX_SEGMENTS = 64
"""Segments after which they are merged into one: a run of days has thousands of objects, and not a hundred thousand."""


def find_local_directory(url: str, kind: str) -> Path:
    """The run directory in this machine's cache for a run at a URL; what is known of its objects lies next to it.
    `kind`: `runs` of those that are trained here, `run-mirrors` of those that are read."""
    parsed = parse_url(url)
    return cache_root() / kind / xxhash.xxh3_64_hexdigest(str(parsed).encode()) / (parsed.name or parsed.bucket)


def make_local_directory(url: str, kind: str) -> Run:
    """`find_local_directory` with the file that says which run it is."""
    run = Run(find_local_directory(url, kind))
    run.path.mkdir(parents=True, exist_ok=True)
    if run.store_url is None:
        write_json(run.store, {"url": str(parse_url(url)), "has_checkpoint": False})
    return run


@dataclass
class SegmentedFile:
    """How far a file is in the store: its first `done` bytes, as segments from the byte `base` of what is there.
    `unmerged`: where its newest segments begin."""

    base: int = 0
    done: int = 0
    unmerged: list[int] = field(default_factory=list)


@dataclass
class _Known:
    """What is known of the objects of a run: its id, and by name the segments, and small files as they were last read
    (ETag) and written (time of change)."""

    run_id: str = ""
    directory_id: str = field(default_factory=lambda: secrets.token_hex(8))
    segments: dict[str, SegmentedFile] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    changed_at: dict[str, int] = field(default_factory=dict)


class RunObjects:
    """Moves files between a local run directory and the objects of its URL. Not safe between threads."""

    def __init__(self, run: Run):
        assert run.store_url is not None
        self.url, self.run = parse_url(run.store_url), run
        if self.url.scheme in ("hf", "http", "https"):
            raise UsageError(f"{self.url}: a run cannot be there; expected an s3://, gs:// or az:// URL")
        self.store = open_store(self.url)
        self._known_path = run.path.parent / "objects.json"
        self._known = _Known()
        with contextlib.suppress(FileNotFoundError):
            values = read_json(self._known_path)
            values["segments"] = {name: SegmentedFile(**each) for name, each in values["segments"].items()}
            self._known = _Known(**values)

    @property
    def directory_id(self) -> str:
        """An id of the local directory, which other machines do not have."""
        return self._known.directory_id

    def begin(self) -> None:
        """Find out which run is at the URL, and make it one where there is none. UsageError where it may not be written
        or holds something else."""
        check_writable(self.url)
        run_id = self._read_run_id()
        if run_id is None:
            names, objects = self.store.list_names(self.url.key)
            found = [self._name_of(each) for each in objects if not self._name_of(each).startswith(PROBE_PREFIX)]
            # a directory may be empty
            found += [name for name in names if self.url.scheme != "file" or self._list(name)]
            if found:
                raise UsageError(
                    f"{self.url}: cannot create a run here: it is not a run and holds other objects, such as "
                    f"{found[0]}; choose another --run, for instance {self.url / 'run'}"
                )
            with contextlib.suppress(ObjectExists):
                content = json.dumps({"id": secrets.token_hex(8)}).encode()
                self.store.write((self.url / RUN_OBJECT).key, content, if_absent=True)
            run_id = self._read_run_id()
        self._forget_other_run(run_id or "")

    def check_run(self) -> None:
        """Raise UsageError where the URL has no run."""
        run_id = self._read_run_id()
        if run_id is None and not self.store.list_objects((self.url / "resolved.yaml").key):
            if (run_url := split_checkpoint_url(self.url)[0]) != self.url:
                raise UsageError(f"{self.url}: is inside the run {run_url}; give that")
            raise UsageError(
                f"{self.url}: no run here (it has no {RUN_OBJECT}); `phalanx train RECIPE --run "
                f"{word_of(str(self.url))}` makes one"
            )
        self._forget_other_run(run_id or "")

    def download(self, events: bool = True, logs: bool = False) -> None:
        """Bring the small files and, as wanted, events, logs and telemetry of the local directory up to date."""
        names, objects = self.store.list_names(self.url.key)
        for directory in SMALL_DIRECTORIES:
            objects += self._list(directory) if directory in names else []
        self._download_small({self._name_of(each): each for each in objects})
        has_checkpoint = next(StoredSteps(self.url).whole_steps(), None) is not None
        write_json(self.run.store, {"url": str(self.url), "has_checkpoint": has_checkpoint})
        grown = [name for name, wanted in (("events", events), ("logs", logs), ("telemetry", logs)) if wanted]
        for directory in (name for name in grown if name in names):
            files: dict[str, list[tuple[int, ObjectInfo]]] = {}
            for each in self._list(directory):
                name, offset = _parse_segment(self._name_of(each))
                files.setdefault(name, []).append((offset, each))
            for name, segments in files.items():
                self._download_segments(name, segments)
        self._save()

    def upload_logs(self, is_last: bool = False) -> None:
        """Write what is new in the logs and the telemetry of this node. `is_last`: also a line that is not whole."""
        for directory in (self.run.logs, self.run.telemetry):
            for path in sorted(directory.glob("*")):
                if not path.name.startswith("."):
                    self._upload_new(f"{directory.name}/{path.name}", is_last)

    def upload(self, is_last: bool = False) -> None:
        """Write the new events, and the small files that changed. LeaseLostError where another process wrote events."""
        self._upload_new(EVENTS_FILE, is_last)
        paths = {str(path.relative_to(self.run.path)): path for path in self._find_small_files()}
        if is_last:
            paths |= {f"tensorboard/{path.name}": path for path in self.run.tensorboard.glob("*") if path.is_file()}
        for name, path in paths.items():
            with contextlib.suppress(FileNotFoundError):  # removed since
                changed_at = path.stat().st_mtime_ns
                if self._known.changed_at.get(name) != changed_at:
                    self.store.write((self.url / name).key, path.read_bytes())
                    self._known.changed_at[name] = changed_at
        removed = [name for name in self._known.changed_at if not (self.run.path / name).exists()]
        self.store.delete([(self.url / name).key for name in removed])
        for name in removed:
            del self._known.changed_at[name]
        self._save()

    def _read_run_id(self) -> str | None:
        try:
            return str(json.loads(self.store.read((self.url / RUN_OBJECT).key))["id"])
        except NotFound:
            return None

    def _forget_other_run(self, run_id: str) -> None:
        """Empty the local directory where it is of another run, which was at the URL before."""
        if self._known.run_id not in ("", run_id):
            shutil.rmtree(self.run.path)
            make_local_directory(str(self.url), self.run.path.parent.parent.name)
            self._known = _Known(directory_id=self._known.directory_id)
        self._known.run_id = run_id
        self._save()

    def _save(self) -> None:
        write_json(self._known_path, asdict(self._known))

    def _list(self, name: str) -> list[ObjectInfo]:
        return self.store.list_objects((self.url / name).key)

    def _name_of(self, info: ObjectInfo) -> str:
        return self.url.relative(info.key)

    def _find_small_files(self) -> Iterator[Path]:
        directories = [self.run.path / name for name in SMALL_DIRECTORIES]
        for path in (path for each in (self.run.path, *directories) for path in sorted(each.glob("*"))):
            if path.is_file() and _is_small(str(path.relative_to(self.run.path))):
                yield path

    def _download_small(self, objects: dict[str, ObjectInfo]) -> None:
        wanted = {name: info for name, info in objects.items() if _is_small(name) or name == EVENTS_FILE}
        changed = {name: info for name, info in wanted.items() if self._known.etags.get(name) != info.etag}
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            contents = pool.map(lambda info: self.store.read(info.key), changed.values())
            for name, content in zip(changed, contents, strict=True):
                path = self.run.path / name
                path.parent.mkdir(exist_ok=True)
                if not path.is_file() or path.read_bytes() != content:
                    write_atomic(path, content)
                self._known.changed_at[name] = path.stat().st_mtime_ns
                self._known.etags[name] = changed[name].etag
        for name in self._known.etags.keys() - wanted.keys():
            (self.run.path / name).unlink(missing_ok=True)
            del self._known.etags[name]
            self._known.changed_at.pop(name, None)

    def _download_segments(self, name: str, segments: list[tuple[int, ObjectInfo]]) -> None:
        """Append to a file what the store has beyond it. What it has itself beyond the store is lost where another
        machine continued."""
        file = self._known.segments.setdefault(name, SegmentedFile())
        end = max(offset + info.size for offset, info in segments) - file.base
        if end <= file.done:
            return
        missing = sorted(each for each in segments if each[0] + each[1].size - file.base > file.done)
        path = self.run.path / name
        path.parent.mkdir(exist_ok=True)
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool, open(path, "ab") as output:
            output.truncate(file.done)
            contents = pool.map(lambda each: self._read_segment(each[1]), missing)
            for (offset, _), content in zip(missing, contents, strict=True):
                start = file.done + file.base - offset
                if content is None or start < 0:  # merged since it was listed: the next download gets it
                    break
                output.write(content[start:])
                file.done += len(content[start:])
        file.unmerged = []

    def _read_segment(self, info: ObjectInfo) -> bytes | None:
        with contextlib.suppress(NotFound):
            return self.store.read(info.key)
        return None

    def _upload_new(self, name: str, is_last: bool) -> None:
        file = self._known.segments.get(name)
        if file is None:
            file = SegmentedFile(base=0 if name == EVENTS_FILE else self._find_end(name))
            self._known.segments[name] = file
        with contextlib.suppress(FileNotFoundError), open(self.run.path / name, "rb") as source:
            while data := _read_lines(source.fileno(), file.done, is_last):
                self._write_segment(name, file, data)
                if len(file.unmerged) >= _MAX_SEGMENTS:
                    self._merge(name, file, source.fileno())
                self._save()
                if not is_last:
                    return

    def _write_segment(self, name: str, file: SegmentedFile, data: bytes) -> None:
        key = self._segment_key(name, file.base + file.done)
        try:
            self.store.write(key, data, if_absent=True)
        except ObjectExists:
            if self.store.read(key) != data:  # else the answer to an earlier try was lost
                if name == EVENTS_FILE:
                    raise LeaseLostError(
                        f"{self.url}: another process has written events of this run; this one stops"
                    ) from None
                file.base, file.unmerged = self._find_end(name) - file.done, []
                return self._write_segment(name, file, data)
        file.unmerged.append(file.done)
        file.done += len(data)
        return None

    def _merge(self, name: str, file: SegmentedFile, fd: int) -> None:
        """Write one segment over the first of many, then delete the others. A reader skips what it has already."""
        first, *others = file.unmerged
        if file.done - first <= RANGE_BYTES:
            self.store.write(self._segment_key(name, file.base + first), os.pread(fd, file.done - first, first))
            self.store.delete([self._segment_key(name, file.base + offset) for offset in others])
        file.unmerged = []

    def _find_end(self, name: str) -> int:
        segments = [(_parse_segment(self._name_of(each))[1], each.size) for each in self._list(name)]
        return max((offset + size for offset, size in segments), default=0)

    def _segment_key(self, name: str, offset: int) -> str:
        part = f"events/{offset:016d}.jsonl" if name == EVENTS_FILE else f"{name}/{offset:016d}"
        return (self.url / part).key


def mirror_run(location: str | Path, logs: bool = False) -> Path:
    """The path of a run directory as it is; of a URL the path of a local directory with the run's small files and
    events, and with its logs and telemetry if `logs`, as they are now. UsageError where the URL has no run."""
    if not is_url(location):
        return Path(location)
    run = make_local_directory(str(location), "run-mirrors")
    with lock_download(run.path.parent / "lock", location):
        objects = RunObjects(run)
        objects.check_run()
        objects.download(logs=logs)
    return run.path


def follow_run(location: str | Path) -> Path:
    """`mirror_run` with logs, of a run that may begin later; a thread updates it until this process ends."""

    def update() -> None:
        while True:
            time.sleep(REFRESH_INTERVAL_S)
            _try_to_mirror(location)

    if not is_url(location):
        return Path(location)
    _try_to_mirror(location)
    threading.Thread(target=update, name="run-mirror", daemon=True).start()
    return find_local_directory(str(location), "run-mirrors")


def _try_to_mirror(location: str | Path) -> None:
    try:
        mirror_run(location, logs=True)
    except (PhalanxError, OSError) as error:
        logger.info("%s: %s", location, error)


def _is_small(name: str) -> bool:
    directory, _, base = name.rpartition("/")
    is_described = base.endswith((".json", ".yaml", ".safetensors")) and base not in _LOCAL_FILES | {RUN_OBJECT}
    return not base.startswith(".") and (directory in SMALL_DIRECTORIES or (not directory and is_described))


def _parse_segment(name: str) -> tuple[str, int]:
    """The file of a segment, and the byte at which it begins."""
    file, _, offset = (name.removesuffix(".jsonl") if name.startswith("events/") else name).rpartition("/")
    return EVENTS_FILE if file == "events" else file, int(offset) if offset.isdecimal() else 0


def _read_lines(fd: int, start: int, is_last: bool) -> bytes:
    data = os.pread(fd, RANGE_BYTES, start)
    return data if is_last or len(data) == RANGE_BYTES else data[: data.rfind(b"\n") + 1]
