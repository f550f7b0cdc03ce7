"""Checkpoints: written asynchronously and atomically, verified on read, loadable under any parallelism.

`CheckpointSaver` writes one rank's shards. `find_newest_good` finds the newest checkpoint that passes verification.
`compute_digest` hashes the logical state: two runs with the same digest are bit-identical. The format is safetensors
and JSON, as described in `format.py`; nothing is pickled.
"""

from phalanx.train.checkpoint.digest import compute_digest, digest_checkpoint
from phalanx.train.checkpoint.durable import DurableDirectory, apply_retention, clean_checkpoint_dir, discard_directory
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import (
    CheckpointManifest,
    CorruptCheckpointError,
    format_checkpoint_name,
    list_checkpoints,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.load import find_newest_good, load_blocks, load_tensors, verify_checkpoint
from phalanx.train.checkpoint.save import CheckpointSaver, SaveInFlight, SavePhase, SaveStatus, assign_to_ranks
from phalanx.train.checkpoint.staging import TensorShard

__all__ = [
    "CheckpointManifest",
    "CheckpointSaver",
    "CorruptCheckpointError",
    "DurableDirectory",
    "SaveInFlight",
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
