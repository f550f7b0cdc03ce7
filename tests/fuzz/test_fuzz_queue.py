"""The queue's file with bits flipped: every row is what was submitted, or refused in a sentence."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from mutations import hand
from phalanx.errors import UsageError
from phalanx.jobs.local_queue.database import JobDatabase
from phalanx.jobs.local_queue.job_record import JobRecord
from phalanx.jobs.local_queue.policy import Resources
from phalanx.jobs.spec import Job

FLIPS = 300


def submitted(row: JobRecord) -> tuple[Job, str, Resources, int]:
    """What the one who submitted it asked for."""
    return row.job, row.name, row.resources, row.priority


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "queue"
    store = JobDatabase(folder)
    for number in range(4):
        job = Job(
            f"job-{number}", ("python", "train.py", f"lr={number}"), Path("/data/mine"), environment={"A": "b" * 20}
        )
        store.add(job, Resources(number, 2), max_queued=10)
    store.close()
    with sqlite3.connect(folder / "queue.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return folder


def test_a_flipped_bit_runs_no_other_command(queue: Path, tmp_path: Path) -> None:
    store = JobDatabase(queue)
    right = {row.id: submitted(row) for row in store.list_jobs()}
    store.close()
    content = (queue / "queue.db").read_bytes()
    rng, refused = hand("queue"), 0
    for _ in range(FLIPS):
        bad = bytearray(content)
        # half of them where the rows' texts lie, at the ends of pages
        at = rng.randrange(len(bad)) if rng.random() < 0.5 else bad.rfind(b"train.py", 0, rng.randrange(len(bad))) + 3
        bad[at] ^= 1 << rng.randrange(8)
        folder = tmp_path / "queue"
        folder.mkdir(mode=0o700)
        (folder / "queue.db").write_bytes(bad)
        try:
            store = JobDatabase(folder)
            try:
                for row in store.list_jobs():
                    assert submitted(row) == right.get(row.id, submitted(row))
                    assert row.id in right or row.name not in {name for _, name, _, _ in right.values()}
            finally:
                store.close()
        except UsageError:
            refused += 1
        shutil.rmtree(folder)
    assert refused > FLIPS // 10


def test_a_row_of_other_bytes_is_refused_with_its_number(queue: Path, tmp_path: Path) -> None:
    shutil.copytree(queue, tmp_path / "queue")
    os.chmod(tmp_path / "queue", 0o700)
    with sqlite3.connect(tmp_path / "queue" / "queue.db") as db:
        db.execute("UPDATE jobs SET spec = replace(spec, 'lr=2', 'lr=7')")
    db.close()
    store = JobDatabase(tmp_path / "queue")
    with pytest.raises(UsageError, match="job 3 is not as Phalanx wrote it"):
        store.list_jobs()
    store.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE jobs RENAME COLUMN began TO begun", "not a queue of Phalanx .its table has no began"),
        ("UPDATE jobs SET attempts = 'many' WHERE id = 2", "job 2 is not as Phalanx wrote it .attempts is 'many'"),
        ("UPDATE jobs SET started = x'00ff' WHERE id = 2", "job 2 is not as Phalanx wrote it .started is "),
    ],
)
def test_a_queue_of_other_columns_or_kinds_is_refused(queue: Path, tmp_path: Path, change: str, said: str) -> None:
    shutil.copytree(queue, tmp_path / "queue")
    os.chmod(tmp_path / "queue", 0o700)
    with sqlite3.connect(tmp_path / "queue" / "queue.db") as db:
        db.execute(change)
    db.close()
    with pytest.raises(UsageError, match=said):
        JobDatabase(tmp_path / "queue").list_jobs()


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_queue_whose_file_is_lost_does_not_start_over_beside_the_folders_of_its_jobs(
    queue: Path, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "queue"
    shutil.copytree(queue, folder)
    for name in ("queue.db", "queue.db-wal", "queue.db-shm"):
        (folder / name).unlink(missing_ok=True)
    if how == "emptied":
        (folder / "queue.db").touch(mode=0o600)
    with pytest.raises(
        UsageError, match=r"queue.db: is empty or was removed, and .*jobs has the folders of 4 jobs; put"
    ):
        JobDatabase(folder)
    assert len(list((folder / "jobs").iterdir())) == 4
