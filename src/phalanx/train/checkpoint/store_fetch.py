"""Fetch checkpoints from a store into the run's directory, before they are restored from disk.

The first worker of each of N nodes reads every N-th block, and the nodes exchange them over the process group, so that
each byte is read from the store once. Nodes that see the same directory write the blocks that they read into it.
"""

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash

from phalanx.errors import UsageError, describe_os_error
from phalanx.run import Run
from phalanx.run.cache import cache_root
from phalanx.storage.cache import localize, lock_download
from phalanx.storage.errors import NotFound
from phalanx.storage.run_objects import CHECKPOINTS_NAME
from phalanx.storage.store import write_at
from phalanx.storage.url import StoreUrl
from phalanx.train.checkpoint.checkpoint_store import (
    PARALLEL_BLOCKS,
    Block,
    CheckpointStore,
    StoredCheckpoint,
    parse_stored,
    select_stored_step,
)
from phalanx.train.checkpoint.durable import discard_directory, make_temporary_path
from phalanx.train.checkpoint.format import (
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    CheckpointManifest,
    CorruptCheckpointError,
    format_checkpoint_name,
)
from phalanx.train.checkpoint.shard_file import as_bytes
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_gather_json, broadcast_json_from_rank_zero, gather_node_map

logger = logging.getLogger(__name__)

_MARKER_NAME = ".marker"
RejectedFile = tuple[str, str, str]
"""A checkpoint's location, the file's name, and the reason."""


def read_ahead(blocks: Sequence[Block], read: Callable[[Block], bytes]) -> Generator[Callable[[], bytes], None, None]:
    """Read blocks, several at once; yield the function that returns each, or raises its error, in their order."""
    with ThreadPoolExecutor(PARALLEL_BLOCKS, thread_name_prefix="store") as pool:
        reads: list[Future[bytes]] = [pool.submit(read, block) for block in blocks[:PARALLEL_BLOCKS]]
        try:
            for i in range(len(blocks)):
                yield reads[i].result
                reads[i] = Future()  # frees its bytes
                if len(reads) < len(blocks):
                    reads.append(pool.submit(read, blocks[len(reads)]))
        finally:
            for each in reads:
                each.cancel()


class StoreSource:
    """The checkpoints that a run has in its store, for a restore on all workers. Every worker makes the same calls.

    `newest` is the newest whole step, -1 if there is none. `problem` says why they could not be listed, else ""."""

    def __init__(self, run: Run, dist_env: DistEnv, url: str):
        self._run, self._dist_env, self._checkpoints = run, dist_env, CheckpointStore(url)
        steps: list[int] = []
        report = _make_report()
        if dist_env.is_rank_zero:
            with _reporting(report, url):
                listed = self._checkpoints.steps()
                newest = next(filter(self._checkpoints.is_whole, listed), -1)
                steps = [step for step in listed if step <= newest]
        self._steps, self.problem = broadcast_json_from_rank_zero(dist_env, (steps, report["error"]))
        self.newest: int = self._steps[0] if self._steps else -1

    def next_above(self, step: int) -> int | None:
        """Return the newest step that was not tried yet, if it is above `step`."""
        return self._steps.pop(0) if self._steps and self._steps[0] > step else None

    def fetch(self, step: int) -> list[RejectedFile] | None:
        """Fetch the checkpoint of a step into the run's directory. Return the bad files; None if the checkpoint is not
        whole. Raises OSError on every worker if the store or the disk of one of them fails."""
        dist_env, final = self._dist_env, self._run.checkpoints / format_checkpoint_name(step)
        nodes = gather_node_map(dist_env)
        node, is_leader = nodes.node_of_rank[dist_env.rank], nodes.is_node_leader(dist_env.rank)
        shared_dir = make_temporary_path(final, "fetch0")
        url = self._checkpoints.step_url(step)
        header = _make_report() | {"objects": None, "token": secrets.token_hex(8)}
        if dist_env.is_rank_zero:
            with _reporting(header, url), contextlib.suppress(NotFound):
                objects = self._checkpoints.read(step).objects
                header["objects"] = {name: content.decode() for name, content in objects.items()}
            _make_empty(shared_dir)
            with contextlib.suppress(OSError):
                (shared_dir / _MARKER_NAME).write_text(header["token"])
        header = broadcast_json_from_rank_zero(dist_env, header)
        if header["error"]:
            raise OSError(header["errno"], header["error"], str(url))
        if header["objects"] is None:
            return [tuple(each) for each in header["bad"]] or None
        seen = all_gather_json(dist_env, not is_leader or _read_marker(shared_dir) == header["token"])
        leaders = [nodes.ranks_on(each)[0] for each in range(nodes.num_nodes)]
        exchanged = not all(seen)
        group = dist.new_group(leaders) if exchanged else None  # every worker calls it
        report = _make_report()
        path = make_temporary_path(final, f"fetch{node}") if exchanged else shared_dir
        if is_leader:
            objects = {name: text.encode() for name, text in header["objects"].items()}
            if exchanged and node:
                _make_empty(path)
            self._transfer(parse_stored(url, objects), path, node, leaders, group, report)
        gathered = all_gather_json(dist_env, report)
        failed = next((each for each in gathered if each["error"]), None)
        bad = [tuple(file) for each in gathered for file in each["bad"]]
        if is_leader and (exchanged or dist_env.is_rank_zero):
            _finish(path, final, good=not failed and not bad)
        all_gather_json(dist_env, None)  # after this every worker sees the files
        if group is not None and is_leader:
            dist.destroy_process_group(group)
        if failed:
            raise OSError(failed["errno"], failed["error"], str(url))
        return bad

    def _transfer(
        self,
        checkpoint: StoredCheckpoint,
        path: Path,
        node: int,
        leaders: Sequence[int],
        group: dist.ProcessGroup | None,
        report: dict[str, Any],
    ) -> None:
        """Read this node's blocks; with a `group`, exchange them. The receivers wait for a fixed number of bytes, so
        what cannot be read is sent as zeros, and the last byte says whether a block is good. All stop at the same one.
        The parameters are those of one fetch."""
        files: dict[str, int] = {}
        with _reporting(report, path):
            for name, file in checkpoint.manifest.files.items():
                files[name] = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.truncate(files[name], file.bytes)
            for name in (MANIFEST_NAME, MANIFEST_HASH_NAME):
                (path / name).write_bytes(checkpoint.objects[name])
        count = len(leaders)
        reads = read_ahead(checkpoint.blocks[node::count], lambda block: self._checkpoints.read_block(block.name))
        for i, block in enumerate(checkpoint.blocks):
            owner, data = i % count, cast("bytes | memoryview | None", None)
            if owner == node:
                read = next(reads)
                with _reporting(report, checkpoint.url):
                    data = read()
            elif group is None:
                continue
            if group is not None:
                message = torch.zeros(block.stop - block.start + 1, dtype=torch.uint8)
                if data is not None:
                    message[:-1], message[-1] = torch.frombuffer(bytearray(data), dtype=torch.uint8), 1
                dist.broadcast(message, leaders[owner], group)
                data = as_bytes(message).data[:-1] if message[-1] else None
            if data is None:
                break
            if not report["error"]:
                with _reporting(report, path):
                    write_at(files[block.file], memoryview(data), block.start)
        reads.close()
        for fd in files.values():
            os.close(fd)


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # what cannot be written to it is reported
        path.mkdir(parents=True)


def _read_marker(path: Path) -> str:
    try:
        return (path / _MARKER_NAME).read_text()
    except OSError:
        return ""


def _finish(path: Path, final: Path, good: bool) -> None:
    """Rename a fetched checkpoint to its name, or remove what there is of it."""
    with contextlib.suppress(OSError):  # two nodes may share a directory although one did not see it; one is enough
        if not good:
            shutil.rmtree(path, ignore_errors=True)
            return
        (path / _MARKER_NAME).unlink(missing_ok=True)
        if final.exists():  # it was damaged
            discard_directory(final)
        os.rename(path, final)


def _make_report() -> dict[str, Any]:
    """What `_reporting` adds to. It is sent as JSON."""
    return {"bad": [], "error": "", "errno": errno.EIO}


@contextlib.contextmanager
def _reporting(report: dict[str, Any], where: object) -> Iterator[None]:
    """Record an error of this worker, to be raised on all of them."""
    try:
        yield
    except CorruptCheckpointError as error:
        report["bad"].append((str(where), error.file.name, error.reason))
    except UsageError as error:
        report["error"] = str(error)
    except OSError as error:
        report["error"], report["errno"] = describe_os_error(error), error.errno or errno.EIO


def localize_checkpoint(url: StoreUrl, step: int | None = None) -> Path:
    """Return the node-local copy of the checkpoint that `select_stored_step` finds. Raises CorruptCheckpointError if a
    record or block of it is damaged."""
    checkpoints, step = select_stored_step(url, step)
    step_url = checkpoints.step_url(step)
    if any(each.key.endswith(".safetensors") for each in checkpoints.store.list_objects(step_url.key)):
        return localize(str(step_url))  # a directory that another tool copied
    run = Run(cache_root() / CHECKPOINTS_NAME / xxhash.xxh3_64_hexdigest(str(checkpoints.url).encode()))
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    path = run.checkpoints / format_checkpoint_name(step)
    with lock_download(run.path / "lock", url):
        if path.is_dir() and checkpoints.holds(path):
            return path
        bad = StoreSource(run, DistEnv(), str(checkpoints.url)).fetch(step)
    if bad:
        raise CorruptCheckpointError(step_url / bad[0][1], bad[0][2])
    return path


def verify_stored(url: StoreUrl, step: int | None = None) -> tuple[StoreUrl, CheckpointManifest]:
    """Read every block of a checkpoint in a store and verify it. Raises CorruptCheckpointError for a bad one."""
    checkpoints, step = select_stored_step(url, step)
    checkpoint = checkpoints.read(step)
    for read in read_ahead(checkpoint.blocks, lambda block: checkpoints.read_block(block.name)):
        read()
    return checkpoint.url, checkpoint.manifest
