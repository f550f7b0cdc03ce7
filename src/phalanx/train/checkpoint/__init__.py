"""Checkpoints: written asynchronously and atomically, verified on read, loadable under any parallelism. The format is
safetensors and JSON, as described in `format.py`; nothing is pickled."""
