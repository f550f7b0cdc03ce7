"""A plugin of pytest (`-p computing`): tests compute on the emulated GPU as `hostgpu.py` says."""

from collections.abc import Iterator

import hostgpu
import pytest


@pytest.fixture(autouse=True)
def _on_the_host() -> Iterator[None]:
    hostgpu.plain_attention()
    with hostgpu.HostGpu():
        yield
