"""Mounts, on machines that are made of text files."""

from pathlib import Path

import pytest

from phalanx.cluster.system_files import is_memory_backed

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 27 0:40 / /scratch rw - tmpfs tmpfs rw
31 27 0:41 / /scratch/my\\040data rw - lustre 10.0.0.1@o2ib:/fs rw
32 27 0:42 / /old rw - tmpfs tmpfs rw
33 27 253:0 / /old rw - xfs /dev/mapper/vg-data rw
"""


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/home/me", False),
        ("/scratch/runs", True),
        ("/scratchy", False),  # another directory
        ("/scratch/my data/x", False),  # the deepest mount
        ("/old", False),  # the last mount hides the one before
    ],
)
def test_the_mount_of_a_directory_decides(tmp_path: Path, directory: str, expected: bool) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    assert is_memory_backed(Path(directory), tmp_path) is expected


def test_without_a_mount_table_nothing_is_known(tmp_path: Path) -> None:
    assert not is_memory_backed(Path("/home"), tmp_path)
