"""Disks and mounts, on machines that are made of text files."""

from pathlib import Path

import pytest

from phalanx.cluster.disks import Disk, discover_disks, find_mount

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 27 0:40 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw
31 27 0:41 / /scratch/my\\040data rw - tmpfs tmpfs rw
32 27 0:42 / /old rw - nfs4 server:/old rw
33 27 253:0 / /old rw - xfs /dev/mapper/vg-data rw
34 27 0:43 / /mine rw - fuse.sshfs me@there: rw
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with an NVMe disk, a rotating one behind a volume, and block devices that are no disks."""
    files = {
        "proc/self/mountinfo": MOUNTS,
        "sys/block/nvme0n1/size": "3907029168",
        "sys/block/nvme0n1/queue/rotational": "0",
        "sys/block/nvme0n1/device/model": "SAMSUNG MZQL2  ",
        "sys/block/nvme0n1/nvme0n1p2/size": "1000",
        "sys/block/dm-0/size": "2048",
        "sys/block/dm-0/queue/rotational": "1",
        "sys/block/loop0/size": "100",
        "sys/block/sr0/size": "100",
        "sys/block/nbd0/size": "0",
        "dev/dm-0": "",
        "dev/mapper/none": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "dev/mapper/vg-data").symlink_to(tmp_path / "dev/dm-0")
    return tmp_path


NVME = Disk("nvme0n1", 3907029168 * 512, False, "SAMSUNG MZQL2")


def test_disks_have_size_kind_and_model(root: Path) -> None:
    assert discover_disks(root) == (Disk("dm-0", 2048 * 512, True), NVME)


def test_a_machine_without_disks_has_none(tmp_path: Path) -> None:
    assert discover_disks(tmp_path) == ()


def test_a_folder_lies_on_the_disk_of_its_partition(root: Path) -> None:
    mount = find_mount(Path("/home/me"), root)
    assert mount is not None
    assert (mount.mount_point, mount.file_system, mount.disk, mount.is_shared) == ("/", "ext4", NVME, False)


def test_the_deepest_mount_counts(root: Path) -> None:
    mount = find_mount(Path("/scratch/runs"), root)
    assert mount is not None
    assert (mount.file_system, mount.is_shared, mount.disk) == ("lustre", True, None)


def test_names_that_only_begin_alike_are_other_folders(root: Path) -> None:
    mount = find_mount(Path("/scratchy"), root)
    assert mount is not None
    assert mount.mount_point == "/"


def test_spaces_are_read_as_mount_tables_write_them(root: Path) -> None:
    mount = find_mount(Path("/scratch/my data/x"), root)
    assert mount is not None
    assert mount.file_system == "tmpfs"


def test_the_last_mount_on_a_point_hides_the_others(root: Path) -> None:
    mount = find_mount(Path("/old"), root)
    assert mount is not None
    assert (mount.file_system, mount.disk) == ("xfs", Disk("dm-0", 2048 * 512, True))


def test_a_file_system_in_user_space_is_believed_to_be_shared(root: Path) -> None:
    mount = find_mount(Path("/mine"), root)
    assert mount is not None
    assert mount.is_shared


def test_without_a_mount_table_nothing_is_known(tmp_path: Path) -> None:
    assert find_mount(Path("/home"), tmp_path) is None
