"""The makers of synthetic runs and datasets from the unit tests; and a bound on memory: a length that is not true must
not be believed."""

import resource
from collections.abc import Iterator

import psutil
import pytest

ROOM = 2 << 30
"""Bytes of address space that a test may have beyond what is there: what it reads has kilobytes."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """MemoryError for who asks for gigabytes, also where they would never be touched."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
