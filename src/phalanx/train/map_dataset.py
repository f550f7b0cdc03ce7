"""A map-style dataset as the data of a run: its samples in the run's order, collated, and moved to a device.

What a sample is stays the dataset's business; that it depends on its index only is asked of it, and
`fingerprint_dataset` notices most that do not.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import default_collate

from phalanx.data.order import ShuffleOrder
from phalanx.errors import UsageError

FINGERPRINT_SAMPLES = 8
"""Samples whose content a fingerprint depends on."""

CollateFn = Callable[[list[Any]], Any]


class CollatedMicroBatch:
    """A collated batch, whatever it is made of."""

    def __init__(self, value: Any):
        self.value = value
        self.nbytes = max(1, _count_bytes(value))


class StepSamples:
    """Samples of a step; a slice of it is a `CollatedMicroBatch`. A feed cuts in its own thread, so collating is done
    there."""

    def __init__(self, samples: list[Any], collate: CollateFn):
        self._samples, self._collate = samples, collate

    def __getitem__(self, sample_range: slice) -> CollatedMicroBatch:
        return CollatedMicroBatch(self._collate(self._samples[sample_range]))


class MapDatasetSource:
    """What a feed needs of a map-style dataset (`len` and `[i]`): `read_training` gives samples in the order of a
    run."""

    def __init__(self, dataset: Any, fingerprint: str, seed: int, collate: CollateFn = default_collate):
        self._dataset, self._collate = dataset, collate
        self._order = ShuffleOrder(len(dataset), 0, fingerprint, seed)

    def read_training(self, consumed: int, count: int) -> dict[str, Any]:
        """Samples number consumed .. consumed + count - 1 of the run."""
        indices = self._order.training_samples(np.arange(consumed, consumed + count))
        return {"": StepSamples([self._dataset[int(index)] for index in indices], self._collate)}


def batch_to_device(batch: Mapping[str, CollatedMicroBatch], device: torch.device) -> Any:
    """The micro-batch of a feed as its collate function made it, its tensors on the device."""
    return _to_device(batch[""].value, device)


def check_map_dataset(dataset: Any) -> None:
    """UsageError when this is not a map-style dataset with at least one sample."""
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        raise UsageError(
            f"session.micro_batches: found a {type(dataset).__name__}, expected a map-style dataset (len(dataset) and "
            "dataset[i]); order, batches and workers are Phalanx's"
        )
    if not len(dataset):
        raise UsageError("session.micro_batches: the dataset is empty")


def fingerprint_dataset(dataset: Any) -> str:
    """A fingerprint of a dataset: of its class, its length and the content of a few samples from first to last."""
    size = len(dataset)
    digest = xxhash.xxh3_64(f"{type(dataset).__qualname__}/{size}".encode())
    for index in sorted({i * (size - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)}):
        _update_digest(digest, dataset[index])
    return digest.hexdigest()


def _update_digest(digest: xxhash.xxh3_64, value: Any) -> None:
    """Let a digest depend on a sample's structure and content; of what has no content of its own, on its class."""
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


def _to_device(value: Any, device: torch.device) -> Any:
    return map_tensors_in(value, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors_in(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or what holds tensors in mappings, lists and tuples, with each tensor changed; all else stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: map_tensors_in(part, change) for name, part in value.items()}
        if type(value) is dict or not hasattr(value, "__setitem__"):
            return changed
        # A class of its own, such as the outputs of Hugging Face's models, keeps what else it has.
        copied: Any = copy.copy(value)
        for name, part in changed.items():
            copied[name] = part
        return copied
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map_tensors_in(part, change) for part in value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors_in(part, change) for part in value)
    return value


def _count_bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_bytes, value))
    return int(getattr(value, "nbytes", 0))
