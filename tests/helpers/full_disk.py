"""A disk without room, for this process."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(limit: int = 0) -> Iterator[None]:
    """Files of this process cannot grow beyond a number of bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
