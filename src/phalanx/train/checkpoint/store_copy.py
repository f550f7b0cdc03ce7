"""Copy, verify and remove checkpoints in a store, outside of a run."""

import threading
from pathlib import Path

import xxhash

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.cache import cache_root
from phalanx.run.lock import lock_download
from phalanx.storage.cache import localize
from phalanx.storage.stored_checkpoints import CHECKPOINTS_NAME, split_checkpoint_url
from phalanx.storage.url import StoreUrl
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, KnownBlocks
from phalanx.train.checkpoint.format import (
    CheckpointManifest,
    CorruptCheckpointError,
    format_checkpoint_name,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.store_fetch import StoreSource, read_ahead
from phalanx.train.checkpoint.upload import finish_upload, is_uploaded, upload_file
from phalanx.train.distributed.environment import DistEnv


def select_stored_step(url: StoreUrl, step: int | None) -> tuple[CheckpointStore, int]:
    """The store of a run's URL, and the step: as given, else that of a checkpoint's URL, else the newest. Raises
    UsageError unless this checkpoint is whole."""
    run_url, own_step = split_checkpoint_url(url)
    checkpoints, asked = CheckpointStore(run_url), own_step if step is None else step
    whole = list(checkpoints.whole_steps())
    if not whole:
        raise UsageError(f"{url}: no checkpoint here; name the URL of a run or of a checkpoint")
    if asked is not None and asked not in whole:
        raise UsageError(f"{run_url}: no checkpoint of step {asked}; there are {', '.join(map(str, sorted(whole)))}")
    return checkpoints, whole[0] if asked is None else asked


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
        if path.is_dir() and is_uploaded(checkpoints, path):
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


def upload_checkpoint(directory: Path, to: StoreUrl) -> StoreUrl:
    """Write a checkpoint below the URL of a run or prefix; blocks that are there are not written again."""
    checkpoints, manifest = CheckpointStore(to), read_manifest(directory)
    if not is_uploaded(checkpoints, directory):
        for name in sorted(manifest.files):
            upload_file(checkpoints, directory, manifest, name, KnownBlocks(set(), 0.0), threading.Event())
        finish_upload(checkpoints, directory, manifest)
    return checkpoints.step_url(parse_step(directory))


def remove_stored(url: StoreUrl, step: int | None = None) -> StoreUrl:
    """Remove a checkpoint from a store, and the blocks that no other one has; return its URL."""
    checkpoints, step = select_stored_step(url, step)
    unused = {block.name for block in checkpoints.read(step).blocks}
    for other in checkpoints.whole_steps():
        if other != step:
            unused.difference_update(block.name for block in checkpoints.read(other).blocks)
    checkpoints.remove([step])
    checkpoints.store.delete([checkpoints.block_url(name).key for name in sorted(unused)])
    return checkpoints.step_url(step)
