"""Saving: lazy, one at a time, whole or not there, whatever happens to the process or the disk."""

import errno
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import same_bits, save, state
from phalanx.errors import UsageError
from phalanx.train.checkpoint import durable as durable_module
from phalanx.train.checkpoint import shard_file
from phalanx.train.checkpoint.durable import DurableDirectory, clean_checkpoint_dir
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load import load_tensors, verify_checkpoint
from phalanx.train.checkpoint.save import CheckpointSaver, SaveStatus
from phalanx.train.checkpoint.shard_file import PIN_BLOCK_BYTES, PinnedBuffer, SharedStaging, StagingBuffer, TensorShard

MB = 1 << 20


def pieces(tensors: dict[str, torch.Tensor]) -> list[TensorShard]:
    return [TensorShard.full_tensor(*item) for item in tensors.items()]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The background copy waits for this event."""
    event, copy = threading.Event(), StagingBuffer.copy_from_cpu

    def held_back(self: StagingBuffer, *args: Any) -> None:
        assert event.wait(20)
        copy(self, *args)

    monkeypatch.setattr(StagingBuffer, "copy_from_cpu", held_back)
    yield event
    event.set()


def test_the_copy_is_taken_in_the_background_except_for_eager_tensors(tmp_path: Path, gate: threading.Event) -> None:
    tensors = {"lazy": torch.zeros(1000), "eager": torch.zeros(1000)}
    saver = CheckpointSaver(DurableDirectory(tmp_path, 0, 1))
    saver.start(1, pieces(tensors), {}, copy_now=["eager"])
    assert saver.poll().phase == "writing"
    for tensor in tensors.values():  # `start` has returned before anything lazy was copied
        tensor.fill_(1.0)
    gate.set()
    saver.wait_snapshot_copied()
    saver.poll_when_idle()
    path = saver.commit().path
    assert path is not None
    loaded = load_tensors(path)
    assert loaded["lazy"].eq(1.0).all()
    assert loaded["eager"].eq(0.0).all()


def test_what_changes_right_after_wait_copied_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    tensors = {f"layer{i}": torch.empty(500_000) for i in range(8)}
    saver = CheckpointSaver(DurableDirectory(tmp_path, 0, 1))
    for step in range(1, 6):
        for tensor in tensors.values():
            tensor.fill_(step)
        saver.start(step, pieces(tensors), {})
        saver.wait_snapshot_copied()
        assert saver.stall_s > 0.0
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        saver.poll_when_idle()
        path = saver.commit().path
        assert path is not None
        assert all(tensor.eq(step).all() for tensor in load_tensors(path).values())


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each staging buffer that is allocated."""
    made: list[int] = []
    init = StagingBuffer.__init__
    monkeypatch.setattr(
        StagingBuffer, "__init__", lambda self, nbytes, device: (made.append(nbytes), init(self, nbytes, device))[1]
    )
    return made


def test_savers_of_one_worker_share_a_buffer_that_grows_to_the_largest_save(
    tmp_path: Path, allocated: list[int]
) -> None:
    staging = SharedStaging()
    savers = [CheckpointSaver(DurableDirectory(tmp_path / str(number), 0, 1), staging) for number in range(2)]
    for step, (saver, elements) in enumerate([(savers[0], 10), (savers[1], 1000), (savers[0], 10)], 1):
        saver.start(step, pieces({"w": torch.full((elements,), float(step))}), {})
        saver.poll_when_idle()
        path = saver.commit().path
        assert path is not None
        assert load_tensors(path)["w"].eq(step).all()
    assert len(allocated) == 2
    assert allocated[0] < 1000 < allocated[1]


def test_a_save_that_is_given_up_is_not_written_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, written = threading.Event(), threading.Event(), list[int]()
    write = os.write

    def slow(fd: int, content: bytes) -> int:
        begun.set()
        assert go.wait(20)
        written.append(len(content))
        return write(fd, content)

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(shard_file, "_WRITE_BLOCK_BYTES", 1 << 20)
    saver = CheckpointSaver(DurableDirectory(tmp_path, 0, 1))
    saver.start(1, pieces({"w": torch.zeros(16 << 18)}), {})
    assert begun.wait(20)
    abandoning = threading.Thread(target=saver.cancel)
    abandoning.start()
    assert saver._cancelled.wait(20)
    go.set()
    abandoning.join(20)
    assert len(written) == 1
    assert names_in(tmp_path) == []


def test_when_one_rank_fails_and_all_abandon_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = CheckpointSaver(DurableDirectory(tmp_path, 0, 2)), CheckpointSaver(DurableDirectory(tmp_path, 1, 2))
    good.start(1, pieces({"a": torch.zeros(10)}), {})
    assert good.poll_when_idle().phase == "written"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        bad.start(1, pieces({"b": torch.zeros(10)}), {})
        assert bad.poll_when_idle().reason.endswith("rank-00001.safetensors: Input/output error")
    good.cancel()
    bad.cancel()
    assert names_in(tmp_path) == []


def test_a_checkpoint_that_was_moved_aside_comes_back_if_its_successor_never_came(tmp_path: Path) -> None:
    path = save(tmp_path, 60, {"w": torch.zeros(3)})
    path.rename(tmp_path / "step-000000060.old")
    (tmp_path / "step-000000060.tmp-3").mkdir()
    assert list_checkpoints(tmp_path) == []
    clean_checkpoint_dir(tmp_path)
    assert names_in(tmp_path) == ["step-000000060"]
    verify_checkpoint(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system: {mounted.stderr.decode().strip()} (needs root)")
    yield place
    subprocess.run(["umount", place], check=True)


def failed_save(saver: CheckpointSaver, step: int, tensors: dict[str, torch.Tensor]) -> SaveStatus:
    saver.start(step, pieces(tensors), {"samples_consumed": 1})
    saver.wait_snapshot_copied()
    state = saver.poll_when_idle()
    return saver.commit() if state.phase == "written" else state


def test_a_full_disk_fails_the_save_and_leaves_the_old_checkpoint_whole(small_disk: Path) -> None:
    saver = CheckpointSaver(DurableDirectory(small_disk / "checkpoints", 0, 1))
    tensors = {"w": torch.ones(MB)}  # 4 MB
    assert failed_save(saver, 1, tensors).phase == "committed"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(10 * MB))
    state = failed_save(saver, 2, tensors)
    assert state.phase == "failed"
    assert state.reason.endswith("step-000000002.tmp-0/rank-00000.safetensors: No space left on device")
    assert names_in(small_disk / "checkpoints") == ["step-000000001"]
    verify_checkpoint(small_disk / "checkpoints" / "step-000000001")
    filler.unlink()
    assert failed_save(saver, 3, tensors).phase == "committed"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_any_refusal_of_the_disk_fails_the_save_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    save(tmp_path, 1, {"w": torch.zeros(3)})

    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    saver = CheckpointSaver(DurableDirectory(tmp_path, 0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        failed = failed_save(saver, 1, {"w": torch.ones(3)})
    assert failed.phase == "failed"
    assert os.strerror(code) in failed.reason
    assert names_in(tmp_path) == ["step-000000001"]
    assert load_tensors(tmp_path / "step-000000001")["w"].eq(0.0).all()
    assert failed_save(saver, 1, {"w": torch.ones(3)}).phase == "committed"


def test_a_bug_in_the_background_is_raised_in_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Sequence[str]:
        raise ZeroDivisionError

    monkeypatch.setattr(durable_module, "write_with_checksums", broken)
    saver = CheckpointSaver(DurableDirectory(tmp_path, 0, 1))
    saver.start(1, pieces({"w": torch.ones(3)}), {})
    saver.wait_snapshot_copied()
    with pytest.raises(ZeroDivisionError):
        saver.poll_when_idle()


def test_room_on_the_disk_is_checked_before_the_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    place = tmp_path / "not" / "there"
    saver = CheckpointSaver(DurableDirectory(place, 0, 1))
    with pytest.raises(UsageError, match=r"not/there: no space: a checkpoint takes 4\.00 MB, and each is"):
        saver.start(1, pieces({"w": torch.ones(1_000_000)}), {})
    assert not place.exists()
    saver.start(1, pieces({"w": torch.ones(500_000)}), {})
    assert saver.poll_when_idle().phase == "written"


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8 * MB, 8 * MB + 1, 9 * MB])
def test_files_of_any_length_are_written_whole(tmp_path: Path, nbytes: int) -> None:
    tensors = {"w": torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)}
    assert same_bits(load_tensors(save(tmp_path, 1, tensors))["w"], tensors["w"])
    verify_checkpoint(tmp_path / "step-000000001")


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: write(fd, content[: 1 + len(content) * 2 // 3]))
    tensors = state()
    loaded = load_tensors(save(tmp_path, 1, tensors))
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)


def test_copies_from_a_gpu_cross_no_border_of_blocks_and_leave_no_byte_out() -> None:
    memory = PinnedBuffer(10)
    for start, end in (
        (0, 3 * PIN_BLOCK_BYTES),
        (5, 7),
        (7, 7),
        (PIN_BLOCK_BYTES - 1, PIN_BLOCK_BYTES + 1),
        (PIN_BLOCK_BYTES, 2 * PIN_BLOCK_BYTES + 5),
    ):
        blocks = memory.blocks(start, end)
        assert [low for low, _ in blocks] + [end] == [start] + [high for _, high in blocks]
        assert all(low // PIN_BLOCK_BYTES == (high - 1) // PIN_BLOCK_BYTES for low, high in blocks if high > low)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("block", [PIN_BLOCK_BYTES, 1 << 20])
def test_tensors_on_a_gpu_are_snapshot_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("phalanx.train.checkpoint.shard_file.PIN_BLOCK_BYTES", block)
    tensors = {f"layer{i}": torch.full((8_000_000,), 1.0, device="cuda") for i in range(4)}
    saver = CheckpointSaver(DurableDirectory(tmp_path, 0, 1))
    saver.allocate_buffer(pieces(tensors))
    saver.start(1, pieces(tensors), {})
    assert not saver.blocks_training
    saver.wait_snapshot_copied()
    for tensor in tensors.values():
        tensor.fill_(2.0)
    saver.poll_when_idle()
    path = saver.commit().path
    assert path is not None
    assert all(tensor.eq(1.0).all() for tensor in load_tensors(path).values())


def begun(folder: Path) -> list[CheckpointSaver]:
    """Two ranks that have written their parts of step 1."""
    savers = [CheckpointSaver(DurableDirectory(folder, rank, 2)) for rank in range(2)]
    for saver in savers:
        saver.start(1, pieces({f"w{id(saver)}": torch.zeros(10)}), {"samples_consumed": 1})
        assert saver.poll_when_idle().phase == "written"
    return savers


@pytest.mark.parametrize("left", [None, b"", b'{"files":'])
def test_a_part_that_storage_did_not_keep_fails_the_save_and_nothing_is_left(
    tmp_path: Path, left: bytes | None
) -> None:
    saver, _ = begun(tmp_path)
    record = tmp_path / "step-000000001.tmp-0" / "rank-00001.json"
    if left is None:
        record.unlink()
    else:
        record.write_bytes(left)
    failed = saver.commit()
    assert failed.phase == "failed"
    assert failed.reason.endswith("rank-00001.json: a part that was written is missing or damaged")
    saver.cancel()
    assert names_in(tmp_path) == []
