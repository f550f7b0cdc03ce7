"""Images: IDX files and folders become records, records become batches."""

import gzip
import os
import struct
import sys

import numpy as np
import PIL.Image
import pytest

from phalanx.data import inspect_dataset, load_tokenizer, open_data, prepare_all_sources, verify_dataset
from phalanx.errors import DataError, PhalanxError, RecipeError, UsageError
from phalanx.recipe.checks import check_task
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.recipe.schema import Recipe
from small_data import contents, manifest_of, opened, prepare, write_texts


def idx(values):
    """An array as an IDX file."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (200, 5, 7)).astype(np.uint8)


@pytest.fixture
def labels():
    return (np.arange(200) % 10).astype(np.uint8)


SOURCE = {"idx": {"images": "images", "labels": "labels"}}


def test_idx_images_come_back_with_their_labels(tmp_path, images, labels):
    write_texts(tmp_path, {"images": idx(images), "labels": idx(labels)})
    out = prepare(tmp_path, tmp_path / "out", SOURCE)
    verify_dataset(out)
    data = opened(out, share=0.1)
    assert (data.info.kind, data.info.num_classes, data.info.image_shape) == ("images", 10, (5, 7, 1))
    assert (data.num_train_samples, data.num_validation_samples) == (180, 20)
    batches = [data.read_training(0, 180), data.read_validation(0, 20)]
    got = np.concatenate([batch["images"] for batch in batches])
    assert got.dtype == np.uint8
    assert batches[0]["labels"].dtype == np.int64
    got_labels = np.concatenate([batch["labels"] for batch in batches])
    key = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    assert len(key) == 200
    assert [key.pop(image.tobytes()) for image in got] == got_labels.tolist()


def test_keys_of_text_are_refused_with_prepared_pictures(tmp_path, images, labels):
    write_texts(tmp_path, {"images": idx(images), "labels": idx(labels)})
    out = prepare(tmp_path, tmp_path / "out", SOURCE)
    data = {"source": {"prepared": str(out)}}
    with pytest.raises(RecipeError, match=r"data.tokenizer: is for text, and .*out has images: leave it out"):
        prepare_all_sources(
            DataConfig.model_validate({**data, "tokenizer": {"bpe": 300}}), EvaluationConfig(), tmp_path
        )
    recipe = Recipe.model_validate({"task": "classification", "data": {**data, "document_masking": True}})
    with pytest.raises(RecipeError, match=r"data.document_masking: is for text, and the data are images: leave it out"):
        check_task(recipe, "images")
    with pytest.raises(RecipeError, match="task: language-modeling is for tokens, and the data are images"):
        check_task(Recipe.model_validate({"data": data}), "images")


def test_packed_idx_files_give_the_same_dataset(tmp_path, images, labels):
    packed = {"images": gzip.compress(idx(images)), "labels": gzip.compress(idx(labels))}
    write_texts(tmp_path, {"images": idx(images), "labels": idx(labels)})
    write_texts(tmp_path, {f"{name}.gz": data for name, data in packed.items()})
    plain = prepare(tmp_path, tmp_path / "plain", SOURCE)
    source = {"idx": {"images": "images.gz", "labels": "labels.gz"}}
    assert contents(plain) == contents(prepare(tmp_path, tmp_path / "packed", source))


def test_idx_images_may_have_channels(tmp_path, labels):
    coloured = np.random.default_rng(0).integers(0, 256, (200, 4, 4, 3)).astype(np.uint8)
    write_texts(tmp_path, {"images": idx(coloured), "labels": idx(labels)})
    assert manifest_of(prepare(tmp_path, tmp_path / "out", SOURCE))["shape"] == [4, 4, 3]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda images, labels: (idx(images)[:-1], idx(labels)), "images: ends too early"),
        (lambda images, labels: (idx(images), idx(labels)[:-1]), "labels: ends too early"),
        (lambda images, labels: (b"P6 12 7", idx(labels)), "images: not an IDX file"),
        (lambda images, labels: (b"", idx(labels)), "images: ends too early"),
        (lambda images, labels: (idx(labels), idx(labels)), "images: not an IDX file of unsigned bytes with 3 or 4"),
        (lambda images, labels: (idx(images), idx(labels[:-1])), "labels: 199 labels for the 200 images"),
        (lambda images, labels: (gzip.compress(b"x") + b"junk", idx(labels)), "images: cannot be read to its end"),
    ],
)
def test_idx_files_that_are_not_whole_are_named(tmp_path, images, labels, harm, words):
    damaged = harm(images, labels)
    write_texts(tmp_path, {"images": damaged[0], "labels": damaged[1]})
    with pytest.raises(DataError, match=words):
        prepare(tmp_path, tmp_path / "out", SOURCE)
    assert not (tmp_path / "out").exists()


def test_idx_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(RecipeError, match="images: No such file"):
        prepare(tmp_path, tmp_path / "out", SOURCE)


@pytest.fixture
def folder(tmp_path):
    for number, (label, colour) in enumerate({"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}.items()):
        for mode, name in (("RGB", "a.png"), ("RGB", "deep/b.bmp"), ("P", "c.gif")):
            path = tmp_path / "images" / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.new("RGB", (8 + number, 6), colour).convert(mode).save(path)
    write_texts(tmp_path / "images", {"red/notes.txt": "no image", ".cache/x.png": "no class"})
    return tmp_path / "images"


def test_an_image_folder_has_a_class_for_every_sub_folder(folder, tmp_path):
    out = prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 5]})
    assert manifest_of(out)["labels"] == ["blue", "green", "red"]
    data = opened(out)
    batch = data.read_training(0, 9)
    assert (data.info.num_classes, data.info.image_shape) == (3, (4, 5, 3))
    assert sorted(batch["labels"].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    colours = np.eye(3, dtype=np.int64)[::-1] * 255  # blue, green, red
    for image, label in zip(batch["images"], batch["labels"], strict=True):
        assert (image == colours[label]).all()


def test_image_folders_are_the_same_from_any_number_of_workers(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.prepare_plan.MIN_PIECE_BYTES", 200)
    source = {"images": "images", "image_size": [4, 4]}
    outs = [prepare(tmp_path, tmp_path / f"out{n}", source, num_workers=n) for n in (1, 2)]
    assert len(manifest_of(outs[0])["shards"]) > 1
    assert contents(outs[0]) == contents(outs[1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("red/z.png", r"z\.png: not an image that Pillow can read"),
        ("__pycache__/notes.txt", r"__pycache__ holds no image, but every sub-folder of .* is a class"),
    ],
)
def test_a_file_that_is_no_image_and_a_folder_without_any_are_named(folder, tmp_path, name, words):
    write_texts(folder, {name: "not a picture"})
    with pytest.raises(PhalanxError, match=words):
        prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"images": "images"}, "need a common size"),
        ({"images": "nowhere", "image_size": [4, 4]}, "no such folder of images"),
        ({"images": "images/red/deep", "image_size": [4, 4]}, "matches no file"),
    ],
)
def test_image_folders_that_are_none_are_refused(folder, tmp_path, source, words):
    with pytest.raises(RecipeError, match=words):
        prepare(tmp_path, tmp_path / "out", source)


RAMP = np.linspace(0, 255, 64).reshape(8, 8).astype(np.uint8)


def one_image(tmp_path, name, save):
    """What is trained on of an 8 x 8 image that `save` writes: uint8 [8, 8, 3]."""
    path = tmp_path / "images" / "a" / name
    path.parent.mkdir(parents=True)
    save(path)
    batch = opened(prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [8, 8]})).read_training(0, 1)
    return batch["images"][0]


def in_sixteen_bits(path):
    PIL.Image.fromarray(RAMP.astype(np.uint16) * 257).save(path)


def see_through(path, mode="RGBA"):
    """Black everywhere, more or less of it."""
    PIL.Image.fromarray(np.dstack([np.zeros((8, 8, 3), np.uint8), 255 - RAMP])).convert(mode).save(path)


def in_a_palette(path):
    image = PIL.Image.fromarray(np.full((8, 8), 1, np.uint8)).convert("P")
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.putpixel((0, 0), 0)
    image.save(path, transparency=0)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("a.png", in_sixteen_bits),
        ("a.tiff", in_sixteen_bits),
        ("a.ppm", lambda path: PIL.Image.fromarray(RAMP.astype(np.uint16) * 257).save(path, format="PPM")),
        ("a.png", see_through),
        ("a.webp", lambda path: PIL.Image.fromarray(RAMP).convert("RGB").save(path, lossless=True)),
        ("a.png", lambda path: see_through(path, "LA")),
        ("a.png", lambda path: PIL.Image.fromarray(RAMP).save(path)),
        ("a.tiff", lambda path: PIL.Image.fromarray(RAMP).convert("CMYK").save(path)),
    ],
    ids=["16-bit", "16-bit tiff", "16-bit pgm", "alpha", "rgb", "gray alpha", "8-bit", "cmyk"],
)
def test_what_is_to_be_seen_in_an_image_is_what_is_trained_on(tmp_path, name, save):
    pixels = one_image(tmp_path, name, save).astype(int)
    assert np.abs(pixels - RAMP[:, :, None]).max() <= 1


def test_the_transparent_colour_of_a_palette_is_white(tmp_path):
    pixels = one_image(tmp_path, "a.png", in_a_palette)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[4, 4].tolist() == [10, 200, 30]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_upright(tmp_path, orientation):
    image = PIL.Image.fromarray(RAMP)
    exif = image.getexif()
    exif[0x0112] = orientation
    pixels = one_image(tmp_path, "a.png", lambda path: image.save(path, exif=exif))[:, :, 0]
    turned = {
        1: RAMP,
        2: RAMP[:, ::-1],
        3: RAMP[::-1, ::-1],
        4: RAMP[::-1],
        5: RAMP.T,
        6: RAMP.T[:, ::-1],
        7: RAMP[::-1, ::-1].T,
        8: RAMP.T[::-1],
    }
    assert (pixels == turned[orientation]).all()


@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "floats"), (np.int32, "32-bit integers")])
def test_pixels_without_a_known_range_are_refused(tmp_path, dtype, kind):
    with pytest.raises(DataError, match=rf"a\.tiff: its pixels are {kind}, .* save it with 8 or 16 bits"):
        one_image(tmp_path, "a.tiff", lambda path: PIL.Image.fromarray(RAMP.astype(dtype)).save(path))


def test_links_bring_an_image_into_a_class_once(folder, tmp_path):
    (tmp_path / "store").mkdir()
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "store" / "s.png")
    (folder / "red" / "up").symlink_to("..")
    (folder / "red" / "more").symlink_to(tmp_path / "store")
    (folder / "red" / "again.png").symlink_to(tmp_path / "store" / "s.png")
    (folder / "blue" / "too.png").symlink_to(tmp_path / "store" / "s.png")
    manifest = manifest_of(prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]}))
    assert manifest["labels"] == ["blue", "green", "red"]
    assert sum(shard["count"] for shard in manifest["shards"]) == 9 + 2


def test_classes_of_other_names_are_not_mixed_up(folder, tmp_path):
    first = prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})
    (folder / "green").rename(folder / "yellow")
    second = prepare(tmp_path, tmp_path / "out2", {"images": "images", "image_size": [4, 4]})
    sources = [DataSource(prepared=str(place)) for place in (first, second)]
    words = r"\({}\) cannot be mixed: labels is .'blue', 'green', 'red'. and .'blue', 'red', 'yellow'"
    with pytest.raises(RecipeError, match=words.format(r"data\.source\.1")):
        open_data(DataConfig(source=sources), EvaluationConfig(), 0)
    with pytest.raises(RecipeError, match=words.format(r"evaluation.source")):
        open_data(DataConfig(source=sources[0]), EvaluationConfig(source=sources[1]), 0)


def test_without_pillow_the_message_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[images\]'"):
        prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})


def test_images_have_no_tokenizer_but_can_be_inspected(folder, tmp_path):
    out = prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})
    content = inspect_dataset(out)
    assert content["first_labels"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (content["count"], content["classes"], content["shape"]) == (9, 3, (4, 4, 3))
    with pytest.raises(UsageError, match="images has no tokenizer"):
        load_tokenizer(out)


def test_a_pipe_among_pictures_is_refused_by_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "root" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "root" / name / "x.png")
    with pytest.raises(RecipeError, match=r"a/x\.png: not a regular file"):
        prepare(tmp_path, tmp_path / "out", {"images": "root", "image_size": [8, 8]})


@pytest.mark.parametrize("name", ["red\x1b[31m", "c\udce9", "a\u202eb", "bell\x07"])
def test_a_class_of_a_name_that_no_manifest_gives_back_is_refused(folder, tmp_path, name):
    (folder / "red").rename(folder / name)
    with pytest.raises(RecipeError, match=r"the name of a class has control characters; rename it"):
        prepare(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})
    assert not (tmp_path / "out").exists()
