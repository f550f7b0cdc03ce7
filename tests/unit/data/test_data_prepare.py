"""Preparing: the same bytes from any number of workers, whole or not there, and going on after an interruption."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import phalanx.data.prepare
from phalanx.data import DatasetPart, prepare_part, prepare_plan, verify_dataset
from phalanx.data.prepare import prepare_stream
from phalanx.data.prepare_plan import PrepareProgress, copy_piece
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError, UsageError
from phalanx.recipe.data_schema import DataConfig, DataSource
from small_data import all_tokens, contents, manifest_of, prepare, write_texts

SOURCE = Path(prepare_plan.__file__).parents[2]


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 10 kB, so that small sources have several."""
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 10_000)


@pytest.fixture
def texts(tmp_path):
    files = {f"{number:02d}.txt": f"file {number}\n" * (100 * (number % 5)) for number in range(20)}
    return write_texts(tmp_path / "texts", {**files, "large.txt": "a long line of text\n" * 5000})


def test_the_result_does_not_depend_on_the_number_of_workers(texts, tmp_path, small_pieces):
    outs = [prepare(texts, tmp_path / f"out{n}", {"text": "*.txt"}, num_workers=n) for n in (1, 2, 3)]
    assert contents(outs[0]) == contents(outs[1]) == contents(outs[2])
    assert len(manifest_of(outs[0])["shards"]) > 5
    assert all_tokens(outs[0]).tobytes().replace(b"\0", b"") == b"".join(
        path.read_bytes() for path in sorted(texts.iterdir())
    )


def test_parts_in_any_order_and_at_once_make_the_same_dataset(texts, tmp_path, small_pieces):
    whole = prepare(texts, tmp_path / "whole", {"text": "*.txt"})
    source, out = DataSource(text="*.txt"), tmp_path / "parts"

    def prepare_one(index: int) -> bool:
        return prepare_part(source, DataConfig(), texts, out, DatasetPart(index, 4), num_workers=1)

    assert not prepare_one(2)
    assert not prepare_one(2)  # a task that is started again
    with ThreadPoolExecutor() as pool:
        assert any(pool.map(prepare_one, (0, 1, 3)))
    assert contents(out) == contents(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "whole", "parts"}


def test_parts_of_changed_files_are_begun_anew(texts, tmp_path, small_pieces):
    source, out = DataSource(text="*.txt"), tmp_path / "parts"
    prepare_part(source, DataConfig(), texts, out, DatasetPart(0, 2), num_workers=1)
    (texts / "01.txt").write_text("other text\n")
    for index in range(2):
        prepare_part(source, DataConfig(), texts, out, DatasetPart(index, 2), num_workers=1)
    assert contents(out) == contents(prepare(texts, tmp_path / "whole", {"text": "*.txt"}))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_another_node_gives_meanwhile_is_not_prepared(texts, tmp_path, small_pieces, num_workers):
    whole, out = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    prepare_stream(DataSource(text="*.txt"), DataConfig(), texts, whole, [])
    inodes: dict[str, int] = {}
    partial = tmp_path / "out.partial"

    def give_pieces(_: PrepareProgress) -> None:
        for number in range(6, 9) if not inodes else ():
            copy_piece(partial, number, lambda name, target: bool(shutil.copy(whole / name, target)))
        inodes.update({path.name: path.stat().st_ino for path in partial.glob("shard-0000[678].bin")})

    prepare(texts, out, {"text": "*.txt"}, num_workers=num_workers, report_progress=give_pieces)
    assert {**contents(whole), **contents(out)} == contents(whole)
    assert {name: (out / name).stat().st_ino for name in inodes} == inodes
    assert len(inodes) == 3


def test_the_fingerprint_is_that_of_the_contents_wherever_they_lie(texts, tmp_path):
    shutil.copytree(texts, tmp_path / "elsewhere")
    first = prepare(texts, tmp_path / "out1", {"text": "*.txt"})
    second = prepare(tmp_path / "elsewhere", tmp_path / "out2", {"text": "**/*.txt"})
    assert contents(first) == contents(second)
    (tmp_path / "elsewhere" / "03.txt").write_text("another")
    third = prepare(tmp_path / "elsewhere", tmp_path / "out3", {"text": "*.txt"})
    assert manifest_of(third)["fingerprint"] != manifest_of(first)["fingerprint"]


class Interrupted(Exception):
    pass


def interrupt_at(done):
    def progress(now: PrepareProgress):
        if now.bytes_done >= done:
            raise Interrupted

    return progress


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_leaves_nothing_half_made(tmp_path, workers, small_pieces):
    (tmp_path / "a.jsonl").write_text(20_000 * '{"text": "some"}\n' + '{"other": "words"}\n')
    with pytest.raises(RecipeError, match=r"a\.jsonl"):
        prepare(tmp_path, tmp_path / "out", {"jsonl": "a.jsonl"}, num_workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_after_an_interruption_finished_shards_are_kept(texts, tmp_path, small_pieces, workers):
    source = {"text": "*.txt"}
    with pytest.raises(Interrupted):
        prepare(texts, tmp_path / "out", source, num_workers=workers, report_progress=interrupt_at(60_000))
    assert not (tmp_path / "out").exists()
    done = [path.with_suffix(".bin") for path in (tmp_path / "out.partial").glob("*.done")]
    finished = {path: path.stat().st_mtime_ns for path in done}
    assert finished
    seen = []
    out = prepare(texts, tmp_path / "out", source, num_workers=1, report_progress=seen.append)
    assert all((out / path.name).stat().st_mtime_ns == time for path, time in finished.items())
    assert contents(out) == contents(prepare(texts, tmp_path / "fresh", source))
    assert seen[-1].bytes_done == seen[-1].bytes_total
    assert seen[-1].count == all_tokens(out).size


def test_a_source_that_changed_meanwhile_is_begun_anew(texts, tmp_path, small_pieces):
    with pytest.raises(Interrupted):
        prepare(texts, tmp_path / "out", {"text": "*.txt"}, report_progress=interrupt_at(60_000))
    (texts / "00.txt").write_text("something new")
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"})
    assert contents(out) == contents(prepare(texts, tmp_path / "fresh", {"text": "*.txt"}))


KILLED = """
import sys
from pathlib import Path
from phalanx.data import prepare_plan as pieces, prepare_source
from phalanx.recipe import data_schema

def tell(now):
    print(now.bytes_done, flush=True)

if __name__ == "__main__":
    pieces.MIN_PIECE_BYTES = 10_000
    source = data_schema.DataSource(text="*.txt")
    folder, out = map(Path, sys.argv[1:])
    prepare_source(source, data_schema.DataConfig(), folder, out, num_workers=2, report_progress=tell)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_preparation_leaves_no_process_and_can_be_finished(texts, tmp_path, small_pieces, how):
    (tmp_path / "script.py").write_text(KILLED)
    for number in range(100):
        (texts / f"more{number}.txt").write_text("more text\n" * 1000)
    command = [sys.executable, tmp_path / "script.py", texts, tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    for _ in range(8):
        process.stdout.readline()
    workers = psutil.Process(process.pid).children()
    process.send_signal(how)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial").glob("*.done"))
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"}, num_workers=2)
    assert contents(out) == contents(prepare(texts, tmp_path / "fresh", {"text": "*.txt"}))


def test_workers_do_not_import_torch(texts, tmp_path):
    code = "import sys, phalanx.data.prepare, phalanx.data, phalanx.cli.data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_worker_keeps_its_kind_and_its_words(tmp_path, small_pieces, workers):
    write_texts(tmp_path, {f"{number}.jsonl": '{"text": "x"}\n' * 1000 for number in range(4)})
    write_texts(tmp_path, {"3.jsonl": "oops\n" * 3000})
    with pytest.raises(DataError, match=r"3\.jsonl, line (1|1501): not JSON"):
        prepare(tmp_path, tmp_path / "out", {"jsonl": "*.jsonl"}, num_workers=workers)
    assert not (tmp_path / "out").exists()


def test_a_source_without_any_text_is_refused(tmp_path):
    write_texts(tmp_path, {"a.txt": "", "b.txt": ""})
    with pytest.raises(RecipeError, match=r"2 file\(s\) found contain no text"):
        prepare(tmp_path, tmp_path / "out", {"text": "*.txt"})


def test_a_place_that_is_taken_is_refused(texts, tmp_path):
    with pytest.raises(UsageError, match="exists and is not a dataset"):
        prepare(texts, texts, {"text": "*.txt"})


def test_a_folder_of_the_users_is_not_used_as_working_folder(texts, tmp_path):
    mine = tmp_path / "out.partial" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep this")
    with pytest.raises(UsageError, match=r"out\.partial: .* holds other files; choose another place than .*out"):
        prepare(texts, tmp_path / "out", {"text": "*.txt"})
    assert mine.read_text() == "keep this"


def test_a_place_that_cannot_be_written_is_named(texts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"out: cannot be written: Not a directory"):
        prepare(texts, tmp_path / "file" / "out", {"text": "*.txt"})


def test_progress_counts_bytes_and_tokens(texts, tmp_path, small_pieces):
    seen = []
    clock = iter(range(10_000))
    out = prepare(
        texts, tmp_path / "out", {"text": "*.txt"}, report_progress=seen.append, clock=lambda: float(next(clock))
    )
    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(path.stat().st_size for path in texts.iterdir())
    assert seen[-1].count == all_tokens(out).size
    assert [now.elapsed_s for now in seen] == sorted(now.elapsed_s for now in seen)


def test_memory_does_not_grow_with_the_source(tmp_path):
    """A source of 120 MB in one file, in a process that may have 60 MB more than it needs for nothing at all."""
    with open(tmp_path / "large.txt", "wb") as file:
        for number in range(120):
            file.write(
                b"%08d and some text to fill a line of 64 bytes, newline incl.......\n" % number * (1_000_000 // 68)
            )
    code = f"""
import resource
from pathlib import Path
from phalanx.data import prepare_source
from phalanx.recipe import data_schema
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source, data = data_schema.DataSource(text="large.txt"), data_schema.DataConfig()
prepare_source(source, data, Path({str(tmp_path)!r}), Path({str(tmp_path / "out")!r}), num_workers=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert int(run.stdout) * 1024 < 60 << 20


def test_two_at_once_make_one_dataset_and_only_that_is_left(texts, tmp_path, small_pieces):
    outs = []
    threads = [
        threading.Thread(target=lambda: outs.append(prepare(texts, tmp_path / "out", {"text": "*.txt"})))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outs == [tmp_path / "out"] * 4
    verify_dataset(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "out"}
    assert {path.suffix for path in outs[0].iterdir()} == {".json", ".bin", ".idx"}


def test_without_locks_two_at_once_make_one_dataset(texts, tmp_path, small_pieces, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    expected = prepare(texts, tmp_path / "expected", {"text": "*.txt"})
    monkeypatch.setattr(fcntl, "flock", refuse)
    notes, out = [], tmp_path / "out"

    def another(now: PrepareProgress):
        if now.note:
            notes.append(now.note)
        elif not out.exists():  # one that began later and is faster
            prepare(texts, out, {"text": "*.txt"}, num_workers=1)

    assert contents(prepare(texts, out, {"text": "*.txt"}, num_workers=1, report_progress=another)) == contents(
        expected
    )
    assert "the file system has no locks" in notes[0]
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "expected", "out"}
    assert out.stat().st_mode == expected.stat().st_mode


def test_a_file_system_that_syncs_no_folders_is_as_good(texts, tmp_path, monkeypatch):
    real = os.fsync

    def files_only(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    verify_dataset(prepare(texts, tmp_path / "out", {"text": "*.txt"}))


def test_nobody_else_begins_while_a_worker_of_a_killed_process_lives(texts, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with open(partial / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        orphan = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),))
    waiting = threading.Event()
    notes = []

    def progress(now: PrepareProgress):
        notes.append(now.note)
        waiting.set()

    thread = threading.Thread(
        target=prepare, args=(texts, tmp_path / "out", {"text": "*.txt"}), kwargs={"report_progress": progress}
    )
    thread.start()
    assert waiting.wait(10)
    assert "waiting for another process, which is preparing" in notes[0]
    assert not (tmp_path / "out").exists()
    orphan.communicate()
    thread.join()
    verify_dataset(tmp_path / "out")


def stop_workers(done):
    """A progress callback that stops the workers that begin from now on once, when so many bytes are done."""
    struck, others = [], set(psutil.Process().children())

    def progress(now: PrepareProgress):
        if now.bytes_done >= done and not struck:
            for child in set(psutil.Process().children()) - others:
                child.suspend()
                struck.append(child.pid)

    return progress


def test_workers_that_say_nothing_are_not_waited_for_without_end_and_what_is_finished_is_kept(
    texts, tmp_path, small_pieces, monkeypatch
):
    monkeypatch.setattr(phalanx.data.prepare, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(phalanx.data.prepare, "SILENCE_TIMEOUT_S", 0.3)
    others = set(psutil.Process().children())
    with pytest.raises(PhalanxError, match="have reported nothing for 0 s: they hang") as caught:
        prepare(texts, tmp_path / "out", {"text": "*.txt"}, num_workers=2, report_progress=stop_workers(1))
    assert caught.value.code is ExitCode.UNFINISHED
    assert (tmp_path / "out.partial").is_dir()
    assert set(psutil.Process().children()) <= others


def test_a_worker_that_cannot_write_says_so(texts, tmp_path, small_pieces):
    (tmp_path / "out.partial").mkdir()
    partial = tmp_path / "out.partial"
    (partial / "lock").touch()

    def obstruct(now: PrepareProgress):
        if now.note.startswith("training"):
            (partial / "shard-00000.bin.tmp").mkdir()

    with pytest.raises(UsageError, match=r"shard-00000\.bin\.tmp: cannot be written: Is a directory"):
        prepare(texts, tmp_path / "out", {"text": "*.txt"}, {"bpe": 260}, num_workers=2, report_progress=obstruct)
