"""Find checkpoints of a run, and corrupt one."""

import contextlib
import os
import random
import re
from collections.abc import Collection
from pathlib import Path

CHECKPOINT_NAME_PATTERN = re.compile(r"step-\d+")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints, newest first."""
    return sorted((path for path in folder.iterdir() if CHECKPOINT_NAME_PATTERN.fullmatch(path.name)), reverse=True)


def list_intact_checkpoints(folder: Path, damaged: Collection[tuple[str, int]]) -> list[Path]:
    """Return the checkpoints, newest first, that are not among the `damaged` identities."""
    found = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(FileNotFoundError):  # an old one that was just removed
            if checkpoint_identity(path) not in damaged:
                found.append(path)
    return found


def checkpoint_identity(checkpoint: Path) -> tuple[str, int]:
    """A checkpoint, and not another one that got its name later."""
    return checkpoint.name, checkpoint.stat().st_ino


def flip_bit(checkpoint: Path, rng: random.Random) -> Path:
    """Flip a bit somewhere in a checkpoint; returns the file."""
    file = rng.choice(sorted(checkpoint.iterdir()))
    at = rng.randrange(file.stat().st_size)
    fd = os.open(file, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ (1 << rng.randrange(8))]), at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return file
