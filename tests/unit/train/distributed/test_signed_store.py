"""The store where workers of several nodes meet: what was written without the key is never believed."""

import pytest
from torch.distributed import DistError, HashStore, PrefixStore  # type: ignore[attr-defined]

from phalanx.train.distributed.store import MAX_VALUE_BYTES, SignedStore


def test_what_one_says_another_with_the_key_reads() -> None:
    beneath = HashStore()
    SignedStore(beneath, b"key").set("a", b"value")
    assert SignedStore(beneath, b"key").get("a") == b"value"


@pytest.mark.parametrize("said", [b"", b"value", b"x" * 32 + b"value", b"x" * (MAX_VALUE_BYTES + 1)])
def test_what_was_written_without_the_key_is_an_error(said: bytes) -> None:
    beneath = HashStore()
    beneath.set("a", said)
    with pytest.raises(DistError, match="was not written by a worker of this run"):
        SignedStore(beneath, b"key").get("a")


def test_a_value_moved_to_another_name_is_an_error() -> None:
    """Or the address of one worker could be given for another's."""
    beneath = HashStore()
    SignedStore(beneath, b"key").set("rank 0", b"address")
    beneath.set("rank 1", beneath.get("rank 0"))
    with pytest.raises(DistError):
        SignedStore(beneath, b"key").get("rank 1")


def test_torch_reads_signed_values_through_a_part_of_the_store() -> None:
    beneath = HashStore()
    store = SignedStore(beneath, b"key")
    part = PrefixStore("attempt1", store)
    part.set("a", "value")
    assert part.get("a") == b"value"
    beneath.set("attempt1/a", "a stranger's address")
    with pytest.raises(DistError):
        part.get("a")


def test_a_value_is_swapped_only_by_who_knows_the_key() -> None:
    beneath = HashStore()
    store = SignedStore(beneath, b"key")
    store.set("a", "1")
    assert store.compare_set("a", "1", "2") == b"2"
    beneath.set("a", "3")
    with pytest.raises(DistError):
        store.compare_set("a", "2", "4")
