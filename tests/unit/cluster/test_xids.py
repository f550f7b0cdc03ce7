"""The table of Xid errors."""

import pytest

from phalanx.cluster.health.checks.kernel_log import XidAction, find_xid


@pytest.mark.parametrize(
    ("number", "action", "is_unfit"),
    [
        (13, XidAction.APPLICATION, False),
        (31, XidAction.APPLICATION, False),
        (45, XidAction.NONE, False),
        (63, XidAction.NONE, False),
        (94, XidAction.APPLICATION, False),
        (48, XidAction.RESET, True),
        (95, XidAction.RESET, True),
        (119, XidAction.RESET, True),
        (79, XidAction.DRAIN, True),
    ],
)
def test_each_number_has_what_the_catalog_asks_for(number: int, action: XidAction, is_unfit: bool) -> None:
    entry = find_xid(number)
    assert entry is not None
    assert (entry.action, entry.makes_unfit) == (action, is_unfit)


def test_memory_that_gets_worse_is_watched() -> None:
    watched = {number for number in range(1000) if (entry := find_xid(number)) is not None and entry.is_watched}
    assert watched == {63, 92, 94, 121, 157}


def test_an_unused_number_has_no_entry() -> None:
    assert find_xid(1) is None
