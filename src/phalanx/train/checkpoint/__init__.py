"""Checkpoints: written asynchronously and atomically, verified on read, loadable under any parallelism.

`CheckpointSaver` writes one rank's shards. `find_newest_good` finds the newest checkpoint that passes verification.
`compute_digest` hashes the logical state: two runs with the same digest are bit-identical. The format is safetensors
and JSON, as described in `format.py`; nothing is pickled.
"""
