"""Where the checkpoints of a run lie below its URL; `train/checkpoint/checkpoint_store.py` reads and writes them.

URL/checkpoints/step-000000060/rank-00000.json      the record of each rank, with the names of its file's blocks
                               MANIFEST.xxh3
                               MANIFEST.json        written last: a step without it is not whole
URL/blocks/<xxh3_128>                               bytes of the ranks' files, named by their content
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from phalanx.safe_files import parse_json
from phalanx.storage.errors import NotFound
from phalanx.storage.store import open_store
from phalanx.storage.url import StoreUrl

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
            with suppress(ValueError, KeyError, TypeError):  # damaged: a restore reports it
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
