"""Folders whose content is believed or run: those of others, and those that others may write, are refused."""

import os
from pathlib import Path

import pytest

from full_disk import full_disk
from phalanx.errors import UsageError
from phalanx.jobs.local_queue.database import JobDatabase
from phalanx.run.cache import cache_root
from phalanx.run.private_files import check_owner

NOBODY = 65534


def test_an_own_folder_and_one_that_is_not_there_are_fine(tmp_path: Path) -> None:
    check_owner(tmp_path, "the folder")
    check_owner(tmp_path / "none", "the folder")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_may_write_is_refused_with_what_to_type(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=rf"other users may write to the folder; `chmod go-w {tmp_path}`"):
        check_owner(tmp_path, "the folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(UsageError, match=r"the folder belongs to another user \(nobody\)"):
        check_owner(tmp_path, "the folder")


def test_a_queue_where_others_may_write_is_not_opened(tmp_path: Path) -> None:
    """Its jobs are run: a folder of one's own in a shared place, such as /tmp, is what may be named."""
    tmp_path.chmod(0o1777)
    with pytest.raises(UsageError, match="other users may write to the queue"):
        JobDatabase(tmp_path / "queue")
    tmp_path.chmod(0o700)
    JobDatabase(tmp_path / "queue").close()
    (tmp_path / "queue" / "queue.db").chmod(0o666)
    with pytest.raises(UsageError, match="other users may write to the queue"):
        JobDatabase(tmp_path / "queue")


def test_a_cache_where_others_may_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="other users may write to the cache"):
        cache_root({"PHALANX_CACHE_DIR": str(tmp_path)})


def test_a_full_disk_is_no_reason_to_move_a_table_away(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(UsageError, match=r"queue.db: the queue cannot be opened \(disk"):
        JobDatabase(tmp_path)
