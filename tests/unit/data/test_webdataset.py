"""Tar archives of samples: what tarfile (or webdataset itself) writes comes back as images with labels, or as texts."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from phalanx.cli.main import main
from phalanx.data.cache import expect_data_info
from phalanx.data.prepare_plan import make_prepare_plan
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.data_schema import DataConfig
from small_data import all_tokens, contents, manifest_of, opened, prepare


def picture(value: int, file_format: str = "PNG") -> bytes:
    """An image of 8 x 8 pixels of one value."""
    stream = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (value, value, value)).save(stream, file_format, lossless=True)
    return stream.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def photos(labels: list[int]) -> list[tuple[str, bytes]]:
    """Samples with one label each, in .cls and .json by turns."""
    return [
        member
        for number, label in enumerate(labels)
        for member in (
            (f"a/{number:03d}.png", picture(10 * label)),
            (f"a/{number:03d}.cls", str(label).encode())
            if number % 2
            else (f"a/{number:03d}.json", json.dumps({"label": label, "caption": "x"}).encode()),
        )
    ]


SOURCE = {"webdataset": "*.tar", "image_size": [4, 4]}


def test_images_of_archives_come_back_with_their_labels(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.prepare_plan.MIN_PIECE_BYTES", 200)
    labels = [number % 5 for number in range(20)]
    meta = ("__meta__/x.json", b"{}")
    write_tar(tmp_path / "0.tar", [meta, *photos(labels[:12])])
    write_tar(tmp_path / "1.tar", photos(labels[12:-1]))
    write_tar(tmp_path / "2.tar", [("b/x.webp", picture(40, "WEBP")), ("b/x.cls", b"4\n")])
    outs = [prepare(tmp_path, tmp_path / f"out{n}", SOURCE, num_workers=n) for n in (1, 2)]
    assert contents(outs[0]) == contents(outs[1])
    assert manifest_of(outs[0])["classes"] == 5
    batch = opened(outs[0]).read_training(0, 20)
    assert sorted(batch["labels"].tolist()) == sorted(labels)
    assert (batch["images"][:, 0, 0, 0] == 10 * batch["labels"]).all()
    info = expect_data_info(DataConfig.model_validate({"source": SOURCE}), tmp_path)
    assert (info.kind, info.num_classes, info.image_shape) == ("images", 5, (4, 4, 3))


TEXTS = [
    ("0.txt", "one ü".encode()),
    ("0.json", b'{"text": "of the caption, which goes after .txt"}'),
    ("1.json", b'{"text": "two", "page": {"lines": ["three", "four"]}}'),
    ("2.txt", b""),
]


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tar.xz", "w:xz")])
def test_texts_of_archives_are_documents(tmp_path, name, mode):
    write_tar(tmp_path / name, TEXTS, mode)
    out = prepare(tmp_path, tmp_path / "out", {"webdataset": "a.*"})
    assert all_tokens(out).tobytes() == "one ü\0two\0".encode()
    nested = prepare(tmp_path, tmp_path / "out2", {"webdataset": "a.*", "text_field": "page.lines"})
    assert all_tokens(nested).tobytes() == "one ü\0three\nfour\0".encode()


def test_progress_ends_with_all_bytes_of_an_archive(tmp_path):
    write_tar(tmp_path / "a.tar.gz", TEXTS, "w:gz")
    seen = []
    prepare(tmp_path, tmp_path / "out", {"webdataset": "a.*"}, report_progress=seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total == (tmp_path / "a.tar.gz").stat().st_size


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            [("a.png", picture(1)), ("a.cls", b"0"), ("b.png", picture(1)), ("b.cls", b"0"), ("a.json", b"0")],
            "sample 'a' is interleaved",
        ),
        ([("a.png", picture(1)), ("a.PNG", picture(1)), ("a.cls", b"0")], r"sample 'a' has a\.PNG twice"),
        ([("a.png", picture(1)), ("b.png", picture(1)), ("b.cls", b"0")], "sample 'a': needs its class next to it"),
        ([("a.png", picture(1)), ("a.cls", b"cat")], "sample 'a': needs its class next to it"),
        ([("a.png", picture(1)), ("a.json", b'{"label": -1}')], "sample 'a': needs its class next to it"),
        ([("a.png", picture(1)), ("a.json", b'{"label"')], "sample 'a': not JSON"),
        ([("a.cls", b"0")], "sample 'a': has 0 images, expected one"),
        ([("a.png", b"no picture"), ("a.cls", b"0")], r"a\.tar, a\.png: not an image that Pillow can read"),
        ([("a.jpg", picture(1))], r"sample 'a': has neither \.txt nor \.json, but \.jpg"),
        ([("a.txt", b"caf\xe9")], "sample 'a': text that is not UTF-8"),
        ([("a.json", b"[1]")], "sample 'a': expected a JSON object, found list"),
    ],
)
def test_a_sample_that_is_not_whole_is_named(tmp_path, members, words):
    write_tar(tmp_path / "a.tar", members)
    has_images = any(name.endswith((".png", ".cls")) for name, _ in members)
    with pytest.raises(DataError, match=words):
        prepare(tmp_path, tmp_path / "out", SOURCE if has_images else {"webdataset": "a.tar"})


def test_skipped_samples_are_counted_by_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = [("x.png", picture(1)), ("y.png", b"no picture"), ("y.cls", b"7")]
    write_tar(tmp_path / "a.tar", [*photos([0, 1, 2]), *bad])
    options = ["--webdataset", "--image-size", "4", "4", "--on-bad-row", "skip"]
    assert main(["data", "prepare", "a.tar", *options, "--out", "out"]) == 0
    out = tmp_path / "out"
    skipped = json.loads((out / "skipped.json").read_text())
    assert skipped == {
        "num_rows": 2,
        "kinds": {
            "not images": {"count": 1, "first": [f"{tmp_path}/a.tar, y.png"]},
            "without a label": {"count": 1, "first": [f"{tmp_path}/a.tar, sample 'x'"]},
        },
    }
    assert manifest_of(out)["shards"][0]["count"] == 3


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda data: data[:2000], "cut short"),
        (lambda data: data[:3072], "damaged or cut short at byte 3072"),
        (lambda data: data[:1536] + bytes([data[1536] ^ 1]) + data[1537:], "damaged or cut short at byte"),
        (lambda data: b"no archive" * 100, "not a tar archive"),
        (lambda data: b"", "not a tar archive"),
    ],
)
def test_archives_that_are_damaged_end_with_65(tmp_path, monkeypatch, capsys, text, harm, words):
    monkeypatch.chdir(tmp_path)
    members = [
        (f"{number}.{part}", b"7" * 600) for number in range(2) for part in (("txt",) if text else ("png", "cls"))
    ]
    path = write_tar(tmp_path / "a.tar", members)
    path.write_bytes(harm(path.read_bytes()))
    size = [] if text else ["--image-size", "4", "4", "--on-bad-row", "skip"]
    assert main(["data", "prepare", "a.tar", "--webdataset", *size, "--out", "out"]) == 65
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_packed_archive_cut_short_is_named(tmp_path):
    path = write_tar(tmp_path / "a.tar.gz", TEXTS, "w:gz")
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"a\.tar\.gz: cannot be read to its end"):
        prepare(tmp_path, tmp_path / "out", {"webdataset": "a.tar.gz"})


def test_images_in_packed_archives_are_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(gzip.compress(write_tar(tmp_path / "x", photos([0])).read_bytes()))
    with pytest.raises(DataError, match="unpack it: gunzip"):
        prepare(tmp_path, tmp_path / "out", SOURCE)


def test_an_archive_without_images_is_refused(tmp_path):
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(RecipeError, match="contain no images"):
        prepare(tmp_path, tmp_path / "out", SOURCE)


def test_what_webdataset_writes_is_read(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number, image in enumerate(pixels):
            writer.write({"__key__": f"sample{number:03d}", "png": PIL.Image.fromarray(image), "cls": number})
    out = prepare(tmp_path, tmp_path / "out", {"webdataset": "*.tar", "image_size": [8, 8]})
    batch = opened(out).read_training(0, 6)
    assert (batch["images"] == pixels[batch["labels"]]).all()


def test_the_plan_of_archives_reads_no_image(tmp_path):
    write_tar(tmp_path / "a.tar", [("0.png", b"not looked at"), ("0.cls", b"3")])
    data = DataConfig.model_validate({"source": SOURCE})
    plan = make_prepare_plan(data.source, data, tmp_path)
    (part,) = plan.pieces[0]
    assert (part.member, part.stop - part.start, part.class_label, plan.num_classes) == ("0.png", 13, 3, 4)
