"""W&B's offline files are read up to where a killed process has left them."""

import struct
from pathlib import Path

from phalanx.observe.trackers.wandb_files import find_newest_step, find_offline_files, read_history_rows

BLOCK_BYTES = 32768


def encode_row(step: int, padding: int = 0) -> bytes:
    from wandb.proto.wandb_internal_pb2 import Record

    record = Record()
    record.history.item.add(key="_step", value_json=str(step))
    record.history.item.add(nested_key=["train/loss"], value_json="0.5")
    record.history.item.add(key="note", value_json=f'"{"x" * padding}"')
    content: bytes = record.SerializeToString()
    return content


def write_file(path: Path, records: list[bytes]) -> None:
    """Write records as LevelDB does: in blocks, a record that does not fit in parts."""
    content = b":W&B\xe1\xbe\x00"
    for record in records:
        is_first = True
        while record or is_first:
            left = BLOCK_BYTES - len(content) % BLOCK_BYTES
            if left < 7:
                content += bytes(left)
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if is_first else 4) if not record else (2 if is_first else 3)
            content += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_rows_are_read_also_across_blocks(tmp_path: Path) -> None:
    write_file(tmp_path / "a.wandb", [encode_row(step, padding=step * 9000) for step in range(1, 12)])
    assert [row["_step"] for row in read_history_rows(tmp_path / "a.wandb")] == list(range(1, 12))
    assert all(row["train/loss"] == 0.5 for row in read_history_rows(tmp_path / "a.wandb"))


def test_a_file_that_was_cut_has_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "a.wandb"
    write_file(path, [encode_row(step) for step in range(1, 5)])
    content = path.read_bytes()
    for cut in (len(content) - 1, len(content) - len(encode_row(4)) - 3):
        path.write_bytes(content[:cut])
        assert find_newest_step([path]) == 3
    path.write_bytes(b"")
    assert find_newest_step([path]) == -1


def test_the_newest_step_is_that_of_all_files_of_the_run(tmp_path: Path) -> None:
    for name, steps in (("offline-run-1-abc/run-abc", [1, 2]), ("offline-run-2-abc/run-abc", [])):
        write_file(tmp_path / "wandb" / f"{name}.wandb", [encode_row(step) for step in steps])
    write_file(tmp_path / "wandb" / "offline-run-3-other" / "run-other.wandb", [encode_row(9)])
    assert find_newest_step(find_offline_files(tmp_path, "abc")) == 2
