"""Bringing hot copies back: workers that start agree on the newest copy that is whole among their nodes, and read it.

Every worker verifies some of the parts that its node has, byte by byte, and tells the others what is good. A part that
a node needs and lacks comes from one that has it, over the process group, and is then kept there as well. Copies of
another history (`run/hot.py`) are left alone by name; a copy is read as a checkpoint is, under any layout.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
import torch.distributed as dist

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.hot import base_of, counts, cut, hot_folder, is_private, open_folder, read_history
from phalanx.train.checkpoint import CorruptError, Loaded, list_checkpoints, step_of
from phalanx.train.checkpoint.load import files_of
from phalanx.train.checkpoint.parts import (
    Part,
    copy_name,
    list_copies,
    list_parts,
    merge_parts,
    put_part,
    rank_of,
    read_part,
)
from phalanx.train.checkpoint.staging import as_bytes
from phalanx.train.hot import clear_copies
from phalanx.train.nodes import Nodes, exchanged, nodes_of, said_by_leader
from phalanx.train.optimizers import Optimizer
from phalanx.train.parallel.divided import Divided
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.restoring import OnReject, Rejected, TakeOver, report_rejected
from phalanx.train.state import load_wanted, wanted_of

MESSAGE = 16 << 20
"""Bytes that are sent at once."""
Copy = tuple[int, str]
"""Step and token."""


@dataclass(frozen=True)
class Found:
    """What all workers found good: for each copy the ranks whose parts there are, and the workers that have read each.
    `mine` are those that this one has read."""

    nodes: Nodes
    parts: Mapping[Copy, Mapping[int, Sequence[int]]]
    mine: Mapping[Copy, Mapping[int, Part]]


@dataclass(frozen=True)
class Recalled:
    """A copy that was read. `fetched` bytes came from other nodes, over all workers."""

    loaded: Loaded
    fetched: int


def find_copies(
    run: Run, place: Place, on_reject: OnReject, environment: Mapping[str, str] = os.environ
) -> Found | None:
    """The parts that may be gone on from, verified; None when no hot copy was ever begun. Every worker calls it. A bad
    one is removed and told to `on_reject`, on every worker alike."""
    said = None
    if place.leads:
        newest = max((step_of(path) for path in list_checkpoints(run.checkpoints)), default=0)
        lines, saved = read_history(run)
        said = {"lines": lines if saved <= newest else [], "newest": newest}
    said = said_by_leader(place, said)
    if not said["lines"]:
        return None
    nodes, folder = nodes_of(place, environment), hot_folder(run, environment)
    copies = [(folder / copy_name(*copy), copy) for copy in list_copies(folder)] if _ours(folder) else []
    mine: dict[Copy, dict[int, Part]] = {}
    bad: list[tuple[str, str, str]] = []
    beside = nodes.beside(place.rank)
    records = [
        (step, token, record)
        for path, (step, token) in copies
        if step > said["newest"] and counts(said["lines"], token, step)
        for record in list_parts(path)
        # By name and not by number in the list: another worker may be removing a bad one.
        if rank_of(record) % len(beside) == beside.index(place.rank)
    ]
    for step, token, path in records:
        try:
            part = read_part(path)
        except CorruptError as error:
            bad.append((str(path.parent), error.file.name, error.reason))
            path.unlink(missing_ok=True)
            continue
        mine.setdefault((step, token), {})[part.rank] = part
    good = [[step, token, sorted(parts)] for (step, token), parts in mine.items()]
    parts: dict[Copy, dict[int, list[int]]] = {}
    for rank, theirs in enumerate(exchanged(place, {"good": good, "bad": bad})):
        for directory, file, reason in theirs["bad"]:
            on_reject(Path(directory), file, reason)
        for step, token, ranks in theirs["good"]:
            for owner in ranks:
                parts.setdefault((step, token), {}).setdefault(owner, []).append(rank)
    return Found(nodes, parts, mine)


def recall(
    run: Run,
    found: Found,
    place: Place,
    divided: Divided,
    optimizer: Optimizer,
    scale: LossScale,
    on_reject: OnReject,
    environment: Mapping[str, str] = os.environ,
) -> Recalled | None:
    """Load the newest of the copies that is whole into the model, optimizer and scale; None when there is none. Every
    worker calls it. Nothing changes before every worker has read its part."""
    if not found.parts:
        return None
    folder, bad = Path(), list[Rejected]()
    try:
        folder = open_folder(run, environment)
    except (OSError, UsageError) as error:
        bad = [(str(base_of(environment)), "", f"no place on a node for what it lacks: {error}")]
    if _rejected(place, bad, on_reject):
        return None
    for copy in sorted(found.parts, reverse=True):
        parts = _told(found, place, copy)
        beside = set(found.nodes.beside(place.rank))
        here = {owner for owner, readers in found.parts[copy].items() if beside & set(readers)}
        try:
            manifest = merge_parts(list(parts.values()), here)
        except ValueError:  # some of it was on nodes that are gone; all workers have the same parts before them
            continue
        path = folder / copy_name(*copy)
        wanted = wanted_of(divided, path, manifest)
        files = files_of(manifest, wanted.everything)
        lacking = [owner for owner, part in parts.items() if owner not in here and part.file in files]
        fetched = _fetch(found, place, copy, path, parts, lacking)
        take_over: TakeOver | None = None
        bad = []
        try:
            take_over = load_wanted(wanted, divided, optimizer, scale, path, manifest)
        except CorruptError as error:
            bad = [(str(path), error.file.name, error.reason)]
        if not _rejected(place, bad, on_reject):
            assert take_over is not None
            take_over()
            return Recalled(Loaded(path, manifest, {}), fetched)
    return None


def go_on_from(
    run: Run, place: Place, step: int, kept: Path | None, environment: Mapping[str, str] = os.environ
) -> None:
    """The run goes on from this step, by a hot copy where one is `kept`: later ones belong to no history any more, and
    all others here are removed. Every worker calls it."""
    if place.leads:
        cut(run, step)
    folder = hot_folder(run, environment)
    if place.local_rank == 0 and _ours(folder):
        clear_copies(folder, () if kept is None else (kept.name,))


def _rejected(place: Place, bad: list[Rejected], on_reject: OnReject) -> bool:
    """Whether any worker found something bad, which is reported on all of them."""
    said = [{"bad": each} for each in exchanged(place, bad)]
    report_rejected(said, on_reject)
    return any(each["bad"] for each in said)


def _ours(folder: Path | None) -> TypeGuard[Path]:
    """Whether there is a folder for hot copies that nobody else can have written to."""
    return folder is not None and is_private(folder)


def _told(found: Found, place: Place, copy: Copy) -> dict[int, Part]:
    """All parts of a copy by rank; each is told by the first worker that has read it."""
    mine = found.mine.get(copy, {})
    first = [owner for owner, readers in found.parts[copy].items() if readers[0] == place.rank]
    said = exchanged(place, [mine[owner].model_dump(mode="json") for owner in first])
    parts = [Part.model_validate(part) for theirs in said for part in theirs]
    return {part.rank: part for part in sorted(parts, key=lambda part: part.rank)}


def _fetch(
    found: Found, place: Place, copy: Copy, path: Path, parts: Mapping[int, Part], lacking: Sequence[int]
) -> int:
    """Bring to each node the parts that its workers need and lack; their bytes, on all nodes together. All workers go
    through the transfers in one order, so none waits for one that waits for it."""
    needs = exchanged(place, list(lacking))
    fetched = 0
    for node in range(found.nodes.count):
        ranks = found.nodes.ranks(node)
        for owner in sorted({owner for rank in ranks for owner in needs[rank]}):
            readers, part = found.parts[copy][owner], parts[owner]
            source = readers[node % len(readers)]
            fetched += part.files[part.file].bytes
            if place.rank == source:
                _send(path / part.file, part, ranks[0])
            elif place.rank == ranks[0]:
                _receive(path, part, source)
    if fetched:
        exchanged(place, None)  # what the first worker of a node received is there for the others
    return fetched


def _send(file: Path, part: Part, target: int) -> None:
    """Who waits for it gets as many bytes in any case: what can no longer be read here is zeros, which the receiver
    finds damaged."""
    with contextlib.ExitStack() as stack:
        content = None
        with contextlib.suppress(OSError):
            content = stack.enter_context(open(file, "rb"))
        for size in _messages(part):
            read = b""
            if content is not None:
                try:
                    read = content.read(size)
                except OSError:
                    content = None
            dist.send(torch.frombuffer(bytearray(read.ljust(size, b"\0")), dtype=torch.uint8), target)


def _receive(copy: Path, part: Part, source: int) -> None:
    """What the disk has no room for is found missing when it is read."""
    with contextlib.ExitStack() as stack:
        content = None
        with contextlib.suppress(OSError):
            copy.mkdir(mode=0o700, exist_ok=True)
            content = stack.enter_context(open(copy / part.file, "wb"))
        for size in _messages(part):
            message = torch.empty(size, dtype=torch.uint8)
            dist.recv(message, source)
            if content is not None:
                try:
                    content.write(as_bytes(message).data)
                except OSError:
                    content = None
    with contextlib.suppress(OSError):
        put_part(copy, part)


def _messages(part: Part) -> Iterator[int]:
    """The sizes of the messages by which its file travels."""
    left = part.files[part.file].bytes
    while left:
        yield min(left, MESSAGE)
        left -= min(left, MESSAGE)
