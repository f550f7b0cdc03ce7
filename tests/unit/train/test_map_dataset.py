"""A map-style dataset as the data of a run: order, structure, and a fingerprint that notices other data."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx.data.prefetch import Prefetcher, RankBatch
from phalanx.errors import UsageError
from phalanx.train.session import (
    MapDatasetSource,
    batch_to_device,
    check_map_dataset,
    fingerprint_dataset,
)

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


class Structured:
    """Samples that are built as `shape` says."""

    def __init__(self, shape: Any, size: int = 20):
        self.shape, self.size = shape, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.shape(index)


def batches(dataset: Any, rank: int = 0, world: int = 1, steps: int = 5, **how: Any) -> list[Any]:
    """The micro-batches of two samples that one rank gets of a global batch of four."""
    data = MapDatasetSource(dataset, "fingerprint", 0, **how)
    with Prefetcher(data, RankBatch(4, 2, rank, num_groups=world), samples_consumed=0) as feed:
        return [batch_to_device(micro, CPU) for _ in range(steps) for micro in next(feed)]


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    numbers = torch.cat(batches(Structured(torch.tensor), steps=10)).tolist()
    assert sorted(numbers[:20]) == sorted(numbers[20:]) == list(range(20))
    assert numbers[:20] != numbers[20:]


def test_ranks_share_the_batches_of_one() -> None:
    dataset = Structured(torch.tensor)
    alone = batches(dataset)
    assert torch.equal(torch.cat(alone[0::2]), torch.cat(batches(dataset, 0, 2)))
    assert torch.equal(torch.cat(alone[1::2]), torch.cat(batches(dataset, 1, 2)))


@pytest.mark.parametrize(
    "shape",
    [
        lambda i: torch.tensor([i, i]),
        lambda i: (torch.tensor([i]), i),
        lambda i: {"tokens": torch.tensor([i]), "rest": {"name": str(i), "number": float(i)}},
        lambda i: [np.array([i, 1.0]), [i, (i, i)]],
        lambda i: Pair(torch.tensor([i]), i),
        lambda i: {"0": torch.tensor(i), "1": i},
    ],
    ids=["tensor", "pair", "nested", "arrays", "named", "digits"],
)
def test_batches_are_what_a_data_loader_would_make(shape: Any) -> None:
    dataset = Structured(shape)
    order = [int(i) for i in torch.cat(batches(Structured(torch.tensor)))]
    expected = list(DataLoader(dataset, batch_size=2, sampler=order))  # type: ignore[arg-type]
    for ours, theirs in zip(batches(dataset), expected, strict=True):
        assert type(ours) is type(theirs)
        assert repr(ours) == repr(theirs)


def test_a_collate_function_of_the_loops_own_sees_the_samples() -> None:
    found = batches(Structured(lambda i: torch.ones(i)), collate=lambda samples: [len(s) for s in samples])
    assert sorted(size for batch in found for size in batch) == list(range(20))


def test_a_dataset_that_fails_fails_where_its_batch_is_taken() -> None:
    def broken(index: int) -> Tensor:
        raise OSError("no such image")

    with pytest.raises(OSError, match="no such image"):
        batches(Structured(broken))


def test_a_fingerprint_is_the_same_again() -> None:
    assert fingerprint_dataset(Structured(torch.tensor)) == fingerprint_dataset(Structured(torch.tensor))
    assert fingerprint_dataset(TensorDataset(torch.ones(3, 2))) == fingerprint_dataset(TensorDataset(torch.ones(3, 2)))


@pytest.mark.parametrize(
    "other",
    [
        Structured(torch.tensor, size=21),
        Structured(lambda i: torch.tensor(float(i))),
        Structured(lambda i: torch.tensor(i + (i == 19))),
        Structured(lambda i: (torch.tensor(i),)),
        Structured(str),
        TensorDataset(torch.arange(20)),
    ],
    ids=["length", "dtype", "last", "structure", "text", "class"],
)
def test_a_fingerprint_of_other_data_is_another(other: Any) -> None:
    assert fingerprint_dataset(other) != fingerprint_dataset(Structured(torch.tensor))


@pytest.mark.parametrize("first", [torch.zeros(2, dtype=torch.bfloat16), b"bytes", "text", {"a": [1, 2.0]}, None])
def test_anything_can_be_a_sample_of_a_fingerprint(first: Any) -> None:
    assert len(fingerprint_dataset(Structured(lambda i: first, size=1))) == 16


def test_an_empty_dataset_is_told() -> None:
    with pytest.raises(UsageError, match="the dataset is empty"):
        check_map_dataset(TensorDataset(torch.ones(0, 2)))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [DataLoader(TensorDataset(torch.ones(4))), Stream(), iter([1, 2])])
def test_what_is_no_map_style_dataset_is_told(dataset: Any) -> None:
    with pytest.raises(UsageError, match="expected a map-style dataset"):
        check_map_dataset(dataset)
