"""A digest of the whole state of a run: two runs are bit-identical if their digests are equal.

The digest is XXH3-128, as 32 hexadecimal digits, over these bytes, all integers little-endian:

    for each tensor, sorted by name:
        u32  length of the name, then the name in UTF-8 (never empty)
        u8   length of the dtype's safetensors name, then the name ("F32", "BF16", ...)
        u32  number of dimensions, then each dimension of the global shape as u64
        the elements in C order, each in its width
    u32  0, which cannot be the length of a name
    u64  samples consumed

The tensors are the logical ones (parameters, buffers, `optimizer/...`, `scaler/...` and others in a checkpoint), so the
digest does not depend on parallelism, world size, or the files of a checkpoint. Constants of the optimizer (learning
rates, betas) are not tensors and are not part of it.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import xxhash

from phalanx.errors import DataError
from phalanx.train.checkpoint.format import MANIFEST_NAME, read_manifest
from phalanx.train.checkpoint.load import batch_by_bytes, load_tensors
from phalanx.train.checkpoint.shard_file import as_bytes
from phalanx.train.distributed.module_state import DTYPE_NAMES


def compute_digest(records: Iterable[tuple[str, torch.Tensor]], samples: int) -> str:
    """Return the digest of whole tensors by logical name, in any order and on any device."""
    return _digest_sorted(sorted(records, key=lambda record: record[0]), samples)


def digest_checkpoint(path: Path, max_bytes: int = 128 << 20) -> str:
    """Return the digest of the state in a checkpoint, which is verified while it is read. At most `max_bytes` bytes of
    tensors are in memory, or the largest tensor if it is larger. Raises CorruptCheckpointError, which names a bad
    file."""
    manifest = read_manifest(path)
    samples = manifest.meta.get("samples_consumed")
    if not isinstance(samples, int):
        raise DataError(f"{path / MANIFEST_NAME}: does not say how many samples were consumed (meta.samples)")

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for names in batch_by_bytes(sorted(manifest.tensors), lambda name: manifest.tensors[name].nbytes, max_bytes):
            yield from load_tensors(path, names, manifest=manifest).items()

    return _digest_sorted(stream(), samples)


def _digest_sorted(records: Iterable[tuple[str, torch.Tensor]], samples: int) -> str:
    """Same as `compute_digest`, for records that are sorted by name."""
    hasher = xxhash.xxh3_128()
    for name, tensor in records:
        text, dtype = name.encode(), DTYPE_NAMES[tensor.dtype].encode()
        hasher.update(struct.pack("<I", len(text)) + text + struct.pack("<B", len(dtype)) + dtype)
        hasher.update(struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *tensor.shape))
        hasher.update(as_bytes(tensor.detach().cpu().contiguous()).data)
    hasher.update(struct.pack("<IQ", 0, samples))
    return hasher.hexdigest()
