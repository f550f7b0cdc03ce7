"""Streams: the order of samples while a source is being prepared, and after."""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.manifest import STREAM_FILE, DatasetManifest
from phalanx.data.prepare_plan import write_done_file
from phalanx.data.shard import ShardWriter
from phalanx.data.stream import (
    LOCK_FILE,
    StreamDescription,
    StreamedDataset,
    StreamOrder,
    is_being_prepared,
    piece_order,
    report_stream_error,
)
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError
from phalanx.recipe.data_schema import DataConfig
from small_data import opened

SEQUENCE = 10
PIECES = [(300 + 57 * number) for number in range(12)]


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """A stream of which nothing is prepared."""
    StreamDescription("identity", len(PIECES)).write(tmp_path)
    DatasetManifest("tokens", "<u2", (), vocab=1 << 16, tokenizer={"name": "bytes"}).write(tmp_path)
    return tmp_path


def prepare(stream: Path, *pieces: int, first_token: int = 0) -> None:
    for piece in pieces:
        with ShardWriter(stream, piece, np.dtype("<u2")) as writer:
            writer.start_document()
            writer.append_values(np.full(PIECES[piece], first_token + piece, "<u2"))
            write_done_file(stream, piece, writer.commit(), {}, {})


@contextmanager
def being_prepared(stream: Path) -> Iterator[None]:
    with open(stream / LOCK_FILE, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def order_of(stream: Path, seed: int = 0, window: int = 3, holdout: float = 0.1) -> StreamOrder:
    return StreamOrder(StreamedDataset(stream, SEQUENCE), window, holdout, seed)


def test_an_epoch_has_each_training_sample_once_and_no_validation_sample(stream: Path) -> None:
    prepare(stream, *range(12))
    order = order_of(stream)
    held, _ = piece_order(12, 0.1, 0, "identity")
    expected = [piece << 32 | n for piece in range(12) if piece not in held for n in range((PIECES[piece] - 1) // 10)]
    for epoch in range(2):
        index = np.arange(len(expected)) + epoch * len(expected)
        assert sorted(order.training_samples(index).tolist()) == expected
    validation = order.validation_samples(np.arange(order.num_validation))
    assert sorted(validation.tolist()) == [piece << 32 | n for piece in held for n in range((PIECES[piece] - 1) // 10)]


def test_another_seed_trains_in_another_order_and_is_scored_on_the_same_samples(stream: Path) -> None:
    prepare(stream, *range(12))
    first, second = order_of(stream, seed=0), order_of(stream, seed=1)
    index = np.arange(100)
    assert first.training_samples(index).tolist() != second.training_samples(index).tolist()
    assert first.validation_samples(np.arange(20)).tolist() == second.validation_samples(np.arange(20)).tolist()


def test_samples_are_the_same_while_preparing_and_afterwards(stream: Path) -> None:
    held, training = piece_order(12, 0.1, 0, "identity")
    prepare(stream, *held, *training[:3])
    with being_prepared(stream):
        early = order_of(stream).training_samples(np.arange(60))
        prepare(stream, *training[3:])
    assert order_of(stream).training_samples(np.arange(60)).tolist() == early.tolist()


def test_a_reader_waits_for_the_window_that_it_needs(stream: Path) -> None:
    held, training = piece_order(12, 0.1, 0, "identity")
    prepare(stream, *held, *training[:3])
    waited = threading.Event()

    def sleep(_: float) -> None:
        waited.set()
        prepare(stream, *training[3:6])

    with being_prepared(stream):
        order = StreamOrder(StreamedDataset(stream, SEQUENCE, sleep=sleep), 3, 0.1, 0)
        in_first = sum((PIECES[piece] - 1) // 10 for piece in training[:3])
        assert not waited.is_set()
        assert {int(each) >> 32 for each in order.training_samples(np.arange(in_first))} == set(training[:3])
        assert int(order.training_samples(np.array([in_first]))[0]) >> 32 in training[3:6]
        assert waited.is_set()


def test_a_reader_gets_the_error_of_the_preparation(stream: Path) -> None:
    report_stream_error(stream, DataError("corpus.jsonl, line 7: not JSON"))
    with being_prepared(stream), pytest.raises(DataError, match="line 7"):
        order_of(stream)


def test_a_stream_that_nothing_prepares_ends_the_run_as_unfinished(stream: Path) -> None:
    assert not is_being_prepared(stream)
    with pytest.raises(PhalanxError, match="nothing prepares this stream") as raised:
        order_of(stream)
    assert raised.value.code == ExitCode.UNFINISHED


def test_the_final_manifest_alone_gives_the_same_samples(stream: Path) -> None:
    """As `data prepare` leaves a data set."""
    prepare(stream, *range(12))
    with_done_files = order_of(stream).training_samples(np.arange(200)).tolist()
    from phalanx.data.prepare_plan import read_done_file

    shards = tuple(done[0] for piece in range(12) if (done := read_done_file(stream, piece)))
    DatasetManifest("tokens", "<u2", shards, vocab=1 << 16, tokenizer={"name": "bytes"}).write(stream)
    for path in stream.glob("*.done"):
        path.unlink()
    assert (stream / STREAM_FILE).is_file()
    assert order_of(stream).training_samples(np.arange(200)).tolist() == with_done_files


def test_a_source_of_one_piece_keeps_nothing_for_training() -> None:
    with pytest.raises(RecipeError, match="expected `first`"):
        piece_order(1, 0.01, 0, "identity")


def test_packing_and_streams_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="packing"):
        DataConfig.model_validate({"source": {"text": "a"}, "prepare": "stream", "packing": "whole"})


def test_every_worker_sees_each_stream_of_a_mixture(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        StreamDescription(f"identity {number}", len(PIECES)).write(folder)
        DatasetManifest("tokens", "<u2", (), vocab=1 << 16, tokenizer={"name": "bytes"}).write(folder)
        prepare(folder, *range(12), first_token=100 * number)
    options = {"prepare": "stream", "stream_window": 3, "weights": [2, 1], "share": 0.1, "global_size": 12}
    tokens = opened(*folders, sequence=SEQUENCE, **options).read_training(0, 24 * 12)["tokens"]
    source = tokens[:, 0].reshape(24, 4, 3) // 100
    assert [(source[:, worker] == 1).mean().round(2) for worker in range(4)] == pytest.approx([1 / 3] * 4, abs=0.05)
