"""Where the checkpoints of a run lie below its URL; `train/checkpoint/checkpoint_store.py` reads and writes them.

URL/checkpoints/step-000000060/rank-00000.json      the record of each rank, with the names of its file's blocks
                               MANIFEST.xxh3
                               MANIFEST.json        written last: a step without it is not whole
URL/blocks/<xxh3_128>                               bytes of the ranks' files, named by their content
"""

import re

from phalanx.storage.errors import NotFound
from phalanx.storage.store import open_store
from phalanx.storage.url import StoreUrl

BLOCK_BYTES = 16 << 20
"""Bytes of a block, except the last of a file."""
BLOCKS_NAME, CHECKPOINTS_NAME = "blocks", "checkpoints"
STORED_MANIFEST_NAME = "MANIFEST.json"
_STEP_NAME = re.compile(r"step-(\d{9,})")


def list_stored_steps(url: StoreUrl) -> list[int]:
    """The steps of which there is anything below a run's URL, newest first, whole or not."""
    names, _ = open_store(url).list_names((url / CHECKPOINTS_NAME).key)
    return sorted((int(match[1]) for name in names if (match := _STEP_NAME.fullmatch(name))), reverse=True)


def is_stored_whole(url: StoreUrl, step: int) -> bool:
    """Whether the checkpoint of a step is whole: has its manifest."""
    try:
        open_store(url).head((url / CHECKPOINTS_NAME / f"step-{step:09d}" / STORED_MANIFEST_NAME).key)
    except NotFound:
        return False
    return True


def find_newest_stored_step(url: StoreUrl) -> int | None:
    """The newest step below a run's URL of which the checkpoint is whole; None if there is none."""
    return next((step for step in list_stored_steps(url) if is_stored_whole(url, step)), None)
