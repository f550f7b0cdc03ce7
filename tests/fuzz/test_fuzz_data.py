"""Datasets, tokenizers, images and IDX files in other bytes: the samples that were written, or a sentence. A manifest
whose fingerprint fits, as from a stranger, must say what can be, and lead to no file outside of its folder."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from mutations import attempt, flipped, hand, mutated, retyped, spliced, strange
from phalanx.data import inspect_dataset, verify_dataset
from phalanx.data.tokenizers import load_tokenizer
from small_data import contents, opened, prepare

TRIED = 60
TEXT = "fuzzing finds what nobody thinks of, twice as often as one would like\n" * 8
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of bytes, of a BPE, and of images."""
    folder = tmp_path_factory.mktemp("fuzz")
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"{number} {TEXT}")
    images, labels = idx_files(folder, 12, 4, 3)
    return {
        "bytes": prepare(folder, folder / "bytes", {"text": "*.txt"}),
        "bpe": prepare(folder, folder / "bpe", {"text": "*.txt"}, {"bpe": 270}),
        "images": prepare(folder, folder / "images", {"idx": {"images": images.name, "labels": labels.name}}),
    }


def idx_files(folder: Path, count: int, height: int, width: int) -> tuple[Path, Path]:
    pixels = bytes(number % 251 for number in range(count * height * width))
    images, labels = folder / "images.idx", folder / "labels.idx"
    images.write_bytes(struct.pack(">HBBIII", 0, 8, 3, count, height, width) + pixels)
    labels.write_bytes(struct.pack(">HBBI", 0, 8, 1, count) + bytes(number % 3 for number in range(count)))
    return images, labels


def samples(folder: Path) -> list[Any]:
    """Every sample of a dataset, and its beginning as text where it is text."""
    data = opened(folder)
    batch = data.read_training(0, data.num_train_samples)
    inspect_dataset(folder)
    return [np.asarray(batch[name]).tolist() for name in sorted(batch)]


def resealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """With the fingerprint that fits what it says, as far as it says what a manifest does."""
    body = {name: value for name, value in manifest.items() if name != "fingerprint"}
    return {**body, "fingerprint": xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())}


@pytest.mark.parametrize("kind", ["bytes", "bpe", "images"])
def test_a_changed_file_of_a_dataset_is_found_or_changes_no_sample(
    datasets: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    right, whole = samples(datasets[kind]), contents(datasets[kind])
    rng, folder = hand(f"dataset {kind}"), tmp_path / "data"
    for _ in range(TRIED):
        shutil.copytree(datasets[kind], folder)
        name = rng.choice(sorted(whole))
        bad = rng.choice([flipped, mutated, spliced])(whole[name], rng)
        (folder / name).write_bytes(bad)
        found, _ = attempt(lambda: samples(folder))
        assert found in (None, right), (name, bad)
        verified, _ = attempt(lambda: verify_dataset(folder))
        assert verified is None or found == right, (name, bad)
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "images"])
def test_a_strangers_manifest_is_read_or_refused(datasets: dict[str, Path], tmp_path: Path, kind: str) -> None:
    manifest = json.loads((datasets[kind] / "manifest.json").read_text())
    rng, folder = hand(f"manifest {kind}"), tmp_path / "data"
    shutil.copytree(datasets[kind], folder)
    for turn in range(4 * TRIED):
        bad = strange(manifest, rng)
        bad = strange(bad, rng) if turn % 2 else bad
        if not isinstance(bad, dict):
            continue
        (folder / "manifest.json").write_text(json.dumps(resealed(bad)))
        for read in (samples, inspect_dataset, verify_dataset, load_tokenizer):
            _, refused = attempt(lambda read=read: read(folder))
            assert "Error:" not in refused or "manifest" in refused, (bad, refused)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../0.txt", "xxh3": "1"},
        {"file": "/etc/passwd", "xxh3": "1"},
        {"file": "tokenizer.json"},
        {"file": 7, "xxh3": "1"},
        {"name": 7, "file": "tokenizer.json", "xxh3": "1"},
        {"separator": "x", "file": "tokenizer.json", "xxh3": "1"},
        {"separator": -1, "name": "bytes"},
    ],
)
def test_a_manifest_names_no_tokenizer_that_cannot_be_the_datasets(
    datasets: dict[str, Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    shutil.copytree(datasets["bpe"], tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    if "xxh3" in change and change["file"] == "tokenizer.json":
        change = {**change, "xxh3": manifest["tokenizer"]["xxh3"]}
    path.write_text(json.dumps(resealed({**manifest, "tokenizer": {"name": "x", **change}})))
    found, refused = attempt(lambda: load_tokenizer(tmp_path / "data"))
    assert found is None
    assert refused.startswith(f"{path}: not a dataset manifest (tokenizer "), refused


def test_a_changed_tokenizer_makes_a_dataset_that_can_be_read_or_is_refused(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    content = (datasets["bpe"] / "tokenizer.json").read_bytes()
    (tmp_path / "text.txt").write_text(TEXT)
    rng = hand("tokenizer")
    for turn in range(TRIED):
        bad = (retyped if turn % 2 else mutated)(content, rng)
        (tmp_path / "given.json").write_bytes(bad)
        out = tmp_path / "out"
        made, _ = attempt(lambda out=out: prepare(tmp_path, out, {"text": "text.txt"}, str(tmp_path / "given.json")))
        if made is not None:
            verify_dataset(out)
            inspect_dataset(out)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name("out.partial"), ignore_errors=True)


def test_strange_files_beside_a_tokenizer_name_no_separator_that_is_none(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(datasets["bpe"] / "tokenizer.json", tmp_path)
    rng = hand("eos")
    for _ in range(2 * TRIED):
        (tmp_path / "config.json").write_text(
            json.dumps(strange({"eos_token_id": [3], "eos_token": {"content": "a"}}, rng))
        )
        tokenizer, _ = attempt(lambda: load_tokenizer(tmp_path / "tokenizer.json"))
        if tokenizer is not None:
            assert tokenizer.separator_token is None or 0 <= tokenizer.separator_token < tokenizer.vocab_size


def test_changed_idx_files_are_images_or_refused(tmp_path: Path) -> None:
    images, labels = idx_files(tmp_path, 12, 4, 3)
    right = {path: path.read_bytes() for path in (images, labels)}
    rng = hand("idx")
    harms: list[Callable[[bytes, random.Random], bytes]] = [flipped, spliced, mutated, _another_header]
    for _ in range(2 * TRIED):
        path, out = rng.choice([images, labels]), tmp_path / "out"
        path.write_bytes(rng.choice(harms)(right[path], rng))
        source = {"idx": {"images": images.name, "labels": labels.name}}
        made, refused = attempt(lambda out=out, source=source: prepare(tmp_path, out, source))
        assert made is not None or str(tmp_path) in refused, refused
        if made is not None:
            verify_dataset(out)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name("out.partial"), ignore_errors=True)
        path.write_bytes(right[path])


def _another_header(content: bytes, rng: random.Random) -> bytes:
    """Other counts, sides and kinds, while the pixels are what they were."""
    at = rng.randrange(16)
    sizes = [b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x01", rng.randbytes(4)]
    return content[: at // 4 * 4] + rng.choice(sizes) + content[at // 4 * 4 + 4 :]


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "tiff", "webp", "ppm"])
def test_a_changed_image_is_an_image_or_refused_with_its_name(tmp_path: Path, suffix: str) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(20 * 16 * 3, dtype=np.uint32).astype(np.uint8).reshape(20, 16, 3)
    (tmp_path / "pictures" / "class").mkdir(parents=True)
    path = tmp_path / "pictures" / "class" / f"one.{suffix}"
    image.fromarray(pixels).save(path)
    content = path.read_bytes()
    rng = hand(f"image {suffix}")
    for _ in range(TRIED // 3):
        path.write_bytes(rng.choice([flipped, spliced, mutated])(content, rng))
        out = tmp_path / "out"
        made, refused = attempt(lambda out=out: prepare(tmp_path, out, {"images": "pictures", "image_size": [8, 8]}))
        assert made is not None or str(path) in refused, refused
        if made is not None:
            assert verify_dataset(out).num_shards == 1
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name("out.partial"), ignore_errors=True)
