"""Checkpoints: saved lazily beside training, whole or not there, every byte verified when read, under any layout.

`CheckpointSaver` writes what one rank holds, `find_newest_good` finds the newest good one, `digest` tells whether two
runs are the same run. The format is plain safetensors and JSON, described in `format.py`; nothing is ever pickled.
"""

from phalanx.train.checkpoint.commit import clean_checkpoint_dir, discard_directory
from phalanx.train.checkpoint.digest import compute_digest, digest_checkpoint
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import (
    CheckpointManifest,
    CorruptCheckpointError,
    format_checkpoint_name,
    list_checkpoints,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.load import (
    LoadedCheckpoint,
    find_newest_good,
    load_blocks,
    load_tensors,
    verify_checkpoint,
)
from phalanx.train.checkpoint.retention import apply_retention
from phalanx.train.checkpoint.save import CheckpointSaver, SavePhase, SaveStatus, assign_to_ranks
from phalanx.train.checkpoint.staging import TensorShard

__all__ = [
    "CheckpointManifest",
    "CheckpointSaver",
    "CorruptCheckpointError",
    "LoadedCheckpoint",
    "SavePhase",
    "SaveStatus",
    "TensorShard",
    "apply_retention",
    "assign_to_ranks",
    "clean_checkpoint_dir",
    "compute_digest",
    "digest_checkpoint",
    "discard_directory",
    "export_huggingface",
    "find_newest_good",
    "format_checkpoint_name",
    "list_checkpoints",
    "load_blocks",
    "load_tensors",
    "parse_step",
    "read_manifest",
    "verify_checkpoint",
]
