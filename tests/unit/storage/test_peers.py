"""Objects that nodes copy from each other: from the owner alone, and the store where the owner cannot give one."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.storage.peers import ObjectPeers
from phalanx.storage.url import StoreUrl, parse_url

DATASET = parse_url("s3://bucket/set")
OBJECTS = [DATASET / f"shard-{number}" for number in range(8)]


def make_object(directory: Path, url: StoreUrl) -> None:
    (directory / url.name).write_bytes(url.name.encode() * 100_000)


def lose_object(directory: Path, url: StoreUrl) -> None:
    raise OSError("the store does not answer")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[ObjectPeers]:
    """Node 0, which has the dataset in a directory."""
    peers = ObjectPeers(b"secret", make_object)
    peers.add_directory(str(DATASET), tmp_path)
    yield peers
    peers.close()


def copied(address: tuple[str, int], folder: Path, secret: bytes = b"secret") -> dict[str, bytes]:
    """What node 1 gets of all objects."""
    peers = ObjectPeers(secret, lose_object)
    peers.connect([address, ("127.0.0.1", 9)], 1)
    found = {url.name: folder / f"copy-{url.name}" for url in OBJECTS if peers.copy(url, folder / f"copy-{url.name}")}
    return {name: path.read_bytes() for name, path in found.items()}


def test_objects_of_another_owner_are_copied_from_it_and_own_ones_are_not(owner: ObjectPeers, tmp_path: Path) -> None:
    found = copied(owner.listen("127.0.0.1"), tmp_path)
    assert 0 < len(found) < len(OBJECTS)
    assert found == {name: name.encode() * 100_000 for name in found}


def test_nothing_is_given_to_a_stranger(owner: ObjectPeers, tmp_path: Path) -> None:
    assert copied(owner.listen("127.0.0.1"), tmp_path, b"another secret") == {}


def test_what_the_owner_cannot_read_is_left_to_the_store(tmp_path: Path) -> None:
    owner = ObjectPeers(b"secret", lose_object)
    owner.add_directory(str(DATASET), tmp_path)
    assert copied(owner.listen("127.0.0.1"), tmp_path) == {}
    owner.close()


def test_what_a_lost_owner_had_is_left_to_the_store(owner: ObjectPeers, tmp_path: Path) -> None:
    address = owner.listen("127.0.0.1")
    owner.close()
    assert copied(address, tmp_path) == {}


def test_an_owner_waits_until_it_has_opened_the_dataset(tmp_path: Path) -> None:
    owner = ObjectPeers(b"secret", make_object)
    address = owner.listen("127.0.0.1")
    opening = threading.Timer(0.2, owner.add_directory, (str(DATASET), tmp_path))
    opening.start()
    assert copied(address, tmp_path)
    opening.join()
    owner.close()
