"""A map-style dataset as the data of a run: samples in the run's order, collated, and moved to a device.

The dataset defines its samples. Each must depend on its index only; `fingerprint_dataset` detects most violations.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import default_collate

from phalanx.data.order import ShuffleOrder
from phalanx.errors import UsageError
from phalanx.pytree import map_tensors

FINGERPRINT_SAMPLES = 8
"""Number of samples that a fingerprint includes."""

CollateFn = Callable[[list[Any]], Any]


class CollatedMicroBatch:
    """A collated batch of any type."""

    def __init__(self, value: Any):
        self.value = value
        self.nbytes = max(1, _count_bytes(value))


class StepSamples:
    """Samples of a step; a slice of it is a `CollatedMicroBatch`. The feed slices in its own thread, so collating
    happens there."""

    def __init__(self, samples: list[Any], collate: CollateFn):
        self._samples, self._collate = samples, collate

    def __getitem__(self, sample_range: slice) -> CollatedMicroBatch:
        return CollatedMicroBatch(self._collate(self._samples[sample_range]))


class MapDatasetSource:
    """The interface that a feed needs, for a map-style dataset (`len` and `[i]`): `read_training` returns samples in
    the order of the run."""

    has_images = False

    def __init__(self, dataset: Any, fingerprint: str, seed: int, collate: CollateFn = default_collate):
        self._dataset, self._collate = dataset, collate
        self._order = ShuffleOrder(len(dataset), 0, fingerprint, seed)

    def read_training(self, consumed: int, count: int) -> dict[str, Any]:
        """Return samples consumed .. consumed + count - 1 of the run."""
        indices = self._order.training_samples(np.arange(consumed, consumed + count))
        return {"": StepSamples([self._dataset[int(index)] for index in indices], self._collate)}


def batch_to_device(batch: Mapping[str, CollatedMicroBatch], device: torch.device) -> Any:
    """Return a feed's micro-batch as its collate function made it, with tensors on the device."""
    return map_tensors(batch[""].value, lambda tensor: tensor.to(device, non_blocking=True))


def check_map_dataset(dataset: Any) -> None:
    """Raise UsageError unless this is a map-style dataset with at least one sample."""
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        raise UsageError(
            f"session.micro_batches: found a {type(dataset).__name__}, expected a map-style dataset (len(dataset) and "
            "dataset[i]); order, batches and workers are Phalanx's"
        )
    if not len(dataset):
        raise UsageError("session.micro_batches: the dataset is empty")


def fingerprint_dataset(dataset: Any) -> str:
    """Return a fingerprint of a dataset: of its class, its length and some samples, evenly spaced."""
    size = len(dataset)
    digest = xxhash.xxh3_64(f"{type(dataset).__qualname__}/{size}".encode())
    for index in sorted({i * (size - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)}):
        _update_digest(digest, dataset[index])
    return digest.hexdigest()


def _update_digest(digest: xxhash.xxh3_64, value: Any) -> None:
    """Add a sample's structure and content to a digest; for other objects, only their class."""
    digest.update(f"/{type(value).__name__}".encode())
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):  # arrays, and images of PIL
        digest.update(f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(str(name).encode())
            _update_digest(digest, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _update_digest(digest, part)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, str | int | float):
        digest.update(str(value).encode())


def _count_bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_bytes, value))
    return int(getattr(value, "nbytes", 0))
