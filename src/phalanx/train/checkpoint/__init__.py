"""Checkpoints: saved lazily beside training, whole or not there, every byte verified when read, under any layout.

`Saver` writes what one rank holds, `newest_good` finds the newest good one, `digest` tells whether two runs are
the same run. The format is plain safetensors and JSON, described in `format.py`; nothing is ever pickled.
"""

from phalanx.train.checkpoint.digest import digest, digest_checkpoint
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import (
    CorruptError,
    Manifest,
    checkpoint_name,
    list_checkpoints,
    read_manifest,
    step_of,
)
from phalanx.train.checkpoint.load import Loaded, load_blocks, load_tensors, newest_good, verify
from phalanx.train.checkpoint.publish import clean, discard
from phalanx.train.checkpoint.retain import retain
from phalanx.train.checkpoint.save import Phase, Saver, SaveState, share_out
from phalanx.train.checkpoint.staging import Piece

__all__ = [
    "CorruptError",
    "Loaded",
    "Manifest",
    "Phase",
    "Piece",
    "SaveState",
    "Saver",
    "checkpoint_name",
    "clean",
    "digest",
    "digest_checkpoint",
    "discard",
    "export_huggingface",
    "list_checkpoints",
    "load_blocks",
    "load_tensors",
    "newest_good",
    "read_manifest",
    "retain",
    "share_out",
    "step_of",
    "verify",
]
