"""The format on disk: what is written comes back, and whatever is not what was written is named."""

import json
import os
import shutil

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from phalanx.data import inspect_dataset, verify_dataset
from phalanx.data.manifest import narrowest_token_dtype, read_manifest
from phalanx.data.shard import BLOCK_BYTES, ShardWriter, read_sidecar
from phalanx.errors import DataError, ExitCode
from small_data import dataset, manifest_of, numbered, opened

TOKENS = 100_000  # 400 kB in four-byte tokens: six blocks and a bit


@pytest.fixture
def folder(tmp_path):
    return dataset(tmp_path / "dataset", [numbered(TOKENS), numbered(TOKENS) + TOKENS], vocab=2**32, documents=5)


def read_everything(folder):
    data = opened(folder, sequence=100)
    for start in range(0, data.num_train_samples, 50):
        data.read_training(start, 50)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(("vocab", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4")])
def test_tokens_are_as_wide_as_the_vocabulary_needs(vocab, dtype):
    assert narrowest_token_dtype(vocab) == np.dtype(f"<{dtype}")


@pytest.mark.parametrize(
    "sizes", [[1], [BLOCK_BYTES], [BLOCK_BYTES + 1], [10, BLOCK_BYTES - 10, BLOCK_BYTES * 2, 3], [7] * 1000]
)
def test_what_is_written_comes_back_however_it_was_cut(tmp_path, sizes):
    tokens = np.random.default_rng(0).integers(0, 256, sum(sizes)).astype(np.uint8)
    with ShardWriter(tmp_path, 3, np.dtype("u1")) as writer:
        for part in np.split(tokens, np.cumsum(sizes)[:-1]):
            writer.start_document()
            writer.append_values(part)
        entry = writer.commit()
    assert (entry.file, entry.bytes, entry.count, entry.documents) == (
        "shard-00003.bin",
        *[len(tokens)] * 2,
        len(sizes),
    )
    assert np.array_equal(np.fromfile(tmp_path / entry.file, np.uint8), tokens)
    sidecar = read_sidecar(tmp_path, entry)
    assert sidecar.documents.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
    assert len(sidecar.hashes) == -(-len(tokens) // BLOCK_BYTES)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_shard_that_was_not_finished_has_no_name(tmp_path):
    with ShardWriter(tmp_path, 0, np.dtype("u1")) as writer:
        writer.append_values(np.zeros(10, np.uint8))
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]


def test_a_whole_dataset_verifies(folder):
    verified = verify_dataset(folder)
    assert (verified.num_shards, verified.num_blocks, verified.size_bytes) == (2, 14, 8 * TOKENS)
    read_everything(folder)


@pytest.mark.parametrize("block", [0, 3, 6])
@pytest.mark.parametrize("check", [read_everything, verify_dataset])
def test_a_flipped_bit_is_found_and_its_block_is_named(folder, block, check):
    flip(folder / "shard-00001.bin", block * BLOCK_BYTES + 77)
    with pytest.raises(DataError, match=rf"shard-00001\.bin block {block} \(bytes {block * BLOCK_BYTES} to") as error:
        check(folder)
    assert error.value.code == ExitCode.DATA == 65


def test_a_flipped_bit_is_found_before_its_tokens_are_read(folder):
    flip(folder / "shard-00000.bin", 5 * BLOCK_BYTES)
    bad = set(range(5 * BLOCK_BYTES // 4, 6 * BLOCK_BYTES // 4))
    data, refused = opened(folder, sequence=100), 0
    for sample in range(data.num_train_samples):
        try:
            assert not bad & set(data.read_training(sample, 1)["tokens"].ravel().tolist())
        except DataError:
            refused += 1
    # a block of 16,384 tokens: all its windows were refused, each time they were asked for
    assert refused == len({token // 100 for token in bad} | {(token - 1) // 100 for token in bad})


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("check", [opened, verify_dataset])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            lambda path: os.truncate(path, 3 * BLOCK_BYTES + 5),
            f" block 3: the shard is cut short: {3 * BLOCK_BYTES + 5}",
        ),
        (grow, " block 6: the shard is too long"),
        (lambda path: path.unlink(), ": the shard is missing, from block 0 on"),
    ],
)
def test_a_shard_of_another_size_is_named_with_the_block_where_it_ends(folder, check, harm, words):
    harm(folder / "shard-00001.bin")
    with pytest.raises(DataError, match=rf"shard-00001\.bin{words}"):
        check(folder)


@pytest.mark.parametrize("harm", [lambda path: flip(path, 60), lambda path: path.unlink()])
@pytest.mark.parametrize("check", [read_everything, verify_dataset])
def test_a_damaged_or_missing_sidecar_is_named_with_the_blocks_it_was_for(folder, harm, check):
    harm(folder / "shard-00001.idx")
    with pytest.raises(DataError, match=r"shard-00001\.idx: blocks 0 to 6 of shard-00001\.bin cannot be checked"):
        check(folder)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("harm", [pipe, device, lambda path: os.truncate(path, 1 << 40)])
@pytest.mark.parametrize("check", [read_everything, verify_dataset])
def test_of_a_sidecar_only_the_bytes_of_a_file_are_read_that_it_may_have(folder, harm, check):
    harm(folder / "shard-00001.idx")
    with pytest.raises(DataError, match=r"shard-00001\.idx: (expected a file|has more than)"):
        check(folder)


@pytest.mark.parametrize("name", ["shard-00001.idx", "manifest.json"])
def test_what_storage_cannot_read_is_not_bad_data(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")  # whose beginning is not mapped: EIO
    with pytest.raises(OSError, match="Input/output error"):
        read_everything(folder)


def test_verify_counts_what_storage_cannot_read_as_bad(folder):
    (folder / "shard-00001.idx").unlink()
    (folder / "shard-00001.idx").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"Input/output error, in .*shard-00001\.bin or its \.idx file"):
        verify_dataset(folder)


@pytest.mark.parametrize("check", [read_everything, verify_dataset])
def test_the_manifest_of_another_dataset_is_found_out(folder, tmp_path, check):
    other = dataset(tmp_path / "other", [numbered(TOKENS) + 1, numbered(TOKENS)], vocab=2**32, documents=5)
    shutil.copy(other / "manifest.json", folder / "manifest.json")
    with pytest.raises(
        DataError, match=r"shard-0000\d\.idx: blocks 0 to 6 .* manifest\.json is that of another dataset"
    ):
        check(folder)


@pytest.mark.parametrize("check", [opened, verify_dataset, inspect_dataset])
def test_an_edited_manifest_is_found_out(folder, check):
    manifest = manifest_of(folder)
    manifest["shards"].pop()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json: was changed"):
        check(folder)


NOT_MANIFESTS = ["", "[]", "{", '{"format": 1}', '{"format": 1, "fingerprint": "", "shards": 3}', "[" * 100_000]


@pytest.mark.parametrize("text", NOT_MANIFESTS, ids=range(len(NOT_MANIFESTS)))
def test_a_file_that_is_no_manifest_is_named(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: not a dataset manifest"):
        read_manifest(folder)


def test_a_format_of_the_future_and_a_directory_without_a_manifest_are_refused(folder):
    manifest = manifest_of(folder)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(DataError, match="dataset format 2; this Phalanx reads format 1"):
        read_manifest(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match="no dataset here"):
        opened(folder)


def test_verify_counts_all_that_is_bad(folder):
    for block in (1, 2, 5):
        flip(folder / "shard-00000.bin", block * BLOCK_BYTES)
    with pytest.raises(DataError, match=r"block 1 .*\n2 more like it"):
        verify_dataset(folder)


def rewritten(folder, change):
    """Change a manifest and give it the fingerprint of what it says now, as one who means harm would."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    said = xxh3_128_hexdigest(
        json.dumps({k: v for k, v in body.items() if k != "fingerprint"}, sort_keys=True).encode()
    )
    path.write_text(json.dumps({**body, "fingerprint": said}))


@pytest.mark.parametrize("check", [read_everything, verify_dataset, inspect_dataset])
@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        *(("shard", "count", value) for value in (10**12, -5, 99_999, 1.5)),
        ("shard", "bytes", -1),
        ("shard", "documents", -1),
        ("shard", "file", "../../etc/hostname"),
        ("shard", "sidecar", "/etc/hostname"),
        *(("manifest", "dtype", value) for value in ("O", "<f4", "<u2")),
        *(("manifest", "vocab", value) for value in (0, 10**30, None, 256)),
        *(("manifest", "kind", value) for value in ("images", "other")),
        ("manifest", "shape", [1, 2, 3]),
    ],
)
def test_a_manifest_of_what_cannot_be_is_refused(folder, check, place, key, value):
    rewritten(folder, lambda body: (body["shards"][0] if place == "shard" else body).update({key: value}))
    with pytest.raises(DataError, match=r"manifest\.json: not a dataset manifest"):
        check(folder)
