"""Images as fixed-size records: IDX files (MNIST, Fashion-MNIST and their kin) and folders of image files.

A record is the label (uint32, little-endian) followed by the pixels (uint8, height x width x channels).
"""

import io
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from phalanx.data.file_format import check_file_format, open_unpacked
from phalanx.data.manifest import LABEL_BYTES
from phalanx.data.rows import BadRowError, BadRows
from phalanx.data.shard import ValueArray
from phalanx.data.source_files import SourceFile, list_source_objects, localize_source, stat_source_file, walk_files
from phalanx.data.sources import CHUNK_BYTES, FilePart, translate_read_errors
from phalanx.data.webdataset import is_packed, iterate_samples, read_label
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.std_streams import escape_control_chars
from phalanx.storage.store import open_location
from phalanx.storage.url import is_url

_IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_UNSIGNED_BYTE = 8
MAX_IMAGE_VALUES = 1 << 28
"""Values of an image in an IDX file."""
_MODES_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


class ImageSourceInfo(NamedTuple):
    """An image source as it was found: what to read, shape (height, width, channels), classes and their names."""

    files: list[SourceFile]
    parts: list[FilePart]
    image_shape: tuple[int, int, int]
    num_classes: int
    class_names: tuple[str, ...] | None


def find_idx_pair(images: str, labels: str, folder: Path) -> ImageSourceInfo:
    """The pair of IDX files of one image set; DataError unless they belong together."""
    files = [stat_source_file(localize_source(folder, name)) for name in (images, labels)]
    for file in files:
        check_file_format(file.path, "idx")
    with _open_idx(files[0].path) as stream:
        count, *shape = _read_idx_header(stream, files[0].path, (3, 4))
    with _open_idx(files[1].path) as stream:
        (label_count,) = _read_idx_header(stream, files[1].path, (1,))
        if label_count != count:
            raise DataError(f"{files[1].path}: {label_count} labels for the {count} images of {files[0].path}")
        classes = 1
        for start in range(0, count, CHUNK_BYTES):
            numbers = np.frombuffer(_read_exactly(stream, min(CHUNK_BYTES, count - start), files[1].path), np.uint8)
            classes = max(classes, int(numbers.max()) + 1)
    height, width, channels = (*shape, 1)[:3]
    if not 0 < height * width * channels <= MAX_IMAGE_VALUES:
        raise DataError(f"{files[0].path}: its header says that an image is {height} x {width} x {channels}")
    parts = [FilePart(file.path, 0, count, file.size) for file in files]
    return ImageSourceInfo(files, parts, (height, width, channels), classes, None)


def read_idx_records(
    images: FilePart, labels: FilePart, shape: tuple[int, int, int]
) -> Iterator[tuple[ValueArray, int]]:
    """Records (uint8 [n, record]) of an IDX pair, and the bytes on disk read for them."""
    pixels = math.prod(shape)
    with _open_idx(images.path) as image_stream, _open_idx(labels.path) as label_stream:
        _read_idx_header(image_stream, images.path, (3, 4))
        _read_idx_header(label_stream, labels.path, (1,))
        step = max(CHUNK_BYTES // pixels, 1)
        for start in range(0, images.stop, step):
            count = min(step, images.stop - start)
            records = np.empty((count, LABEL_BYTES + pixels), np.uint8)
            numbers = np.frombuffer(_read_exactly(label_stream, count, labels.path), np.uint8)
            records[:, :LABEL_BYTES] = numbers.astype("<u4")[:, None].view(np.uint8)
            data = _read_exactly(image_stream, count * pixels, images.path)
            records[:, LABEL_BYTES:] = np.frombuffer(data, np.uint8).reshape(count, pixels)
            yield records, (images.disk_bytes + labels.disk_bytes) * count // images.stop


@contextmanager
def _open_idx(path: str) -> Iterator[BinaryIO]:
    with open_location(path) as raw:
        yield open_unpacked(raw, path)[0]


def _read_exactly(stream: BinaryIO, size: int, path: str) -> bytes:
    """Read exactly `size` bytes; takes no more memory than the file has, whatever its header promises."""
    parts, remaining = [], size
    while remaining:
        with translate_read_errors(path):
            part = stream.read(min(remaining, CHUNK_BYTES))
        if not part:
            raise DataError(f"{path}: ends too early; its header promises more")
        parts.append(part)
        remaining -= len(part)
    return b"".join(parts)


def _read_idx_header(stream: BinaryIO, path: str, allowed: tuple[int, ...]) -> tuple[int, ...]:
    """An IDX header: two zero bytes, type of the values, number of dimensions, then each as a big-endian int."""
    zero, kind, count = struct.unpack(">HBB", _read_exactly(stream, 4, path))
    if zero != 0 or kind != _UNSIGNED_BYTE or count not in allowed:
        allowed_text = " or ".join(map(str, allowed))
        raise DataError(f"{path}: not an IDX file of unsigned bytes with {allowed_text} dimensions")
    return struct.unpack(f">{count}I", _read_exactly(stream, 4 * count, path))


def find_image_dir(root: str, image_size: tuple[int, int] | None) -> ImageSourceInfo:
    """An image directory, or its URL: every sub-directory is a class, numbered by name; the images lie anywhere below
    it. Links are followed, and of links to one image in a class one counts."""
    if image_size is None:
        raise RecipeError(f"data.source: images of {root} need a common size, for instance `size: [224, 224]`")
    images = _find_image_objects(root) if is_url(root) else _find_image_files(Path(root))
    labels = tuple(sorted(images))
    for label in labels:
        if escape_control_chars(label) != label:  # a manifest is read with them written out, and not as these classes
            raise RecipeError(f"data.source: {root}/{label}: the name of a class has control characters; rename it")
    files, parts = [], []
    for number, label in enumerate(labels):
        for file in images[label]:
            files.append(file)
            parts.append(FilePart(file.path, 0, 1, file.size, class_label=number))
    empty = [f"{root}/{label}" for label in labels if not images[label]]
    if not files:
        raise RecipeError(f"data.source: {root} matches no file: it needs a sub-folder of images for each class")
    if empty:
        raise RecipeError(
            f"data.source: {empty[0]} holds no image, but every sub-folder of {root} is a class; remove it, or move it "
            "elsewhere"
        )
    return ImageSourceInfo(files, parts, (*image_size, 3), len(labels), labels)


def _find_image_files(root: Path) -> dict[str, list[SourceFile]]:
    """The images of each class in a directory."""
    if not root.is_dir():
        raise RecipeError(f"data.source: {root}: no such folder of images")
    images = {}
    for label in sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        paths = sorted(path for path in map(Path, walk_files(root / label)) if path.suffix.lower() in _IMAGE_SUFFIXES)
        found = {os.path.realpath(path): path for path in reversed(paths)}
        images[label] = [stat_source_file(path) for path in sorted(found.values())]
    return images


def _find_image_objects(url: str) -> dict[str, list[SourceFile]]:
    """The images of each class below a URL."""
    images: dict[str, list[SourceFile]] = {}
    for name, file in list_source_objects(url):
        label, slash, _ = name.partition("/")
        if slash and not label.startswith("."):
            of_class = images.setdefault(label, [])
            of_class += [file] if Path(name).suffix.lower() in _IMAGE_SUFFIXES else []
    return images


def find_webdataset(files: Sequence[SourceFile], image_size: tuple[int, int], bad_rows: BadRows) -> ImageSourceInfo:
    """The images in tar archives and their labels, which are numbers. Reads the archives' headers and labels only."""
    parts: list[FilePart] = []
    for file in files:
        with translate_read_errors(file.path), open_location(file.path) as raw:
            if is_packed(raw, file.path):
                raise DataError(f"{file.path}: images are read from an archive in any order; unpack it: gunzip")
            for key, members in iterate_samples(raw, file.path, ("cls", "json")):
                images = [member for suffix, member in members.items() if f".{suffix}" in _IMAGE_SUFFIXES]
                try:
                    if len(images) != 1:
                        raise BadRowError("without one image", f"has {len(images)} images, expected one")
                    label, (_, start, size, _) = read_label(members), images[0]
                except BadRowError as error:
                    bad_rows.add(error, file.path, f"sample {key!r}")
                else:
                    parts.append(FilePart(file.path, start, start + size, size, True, label, images[0].name))
    if not parts:
        raise RecipeError(f"data.source: the {len(files)} archive(s) found contain no images")
    num_classes = max(part.class_label for part in parts) + 1
    return ImageSourceInfo(list(files), parts, (*image_size, 3), num_classes, None)


def read_image_record(part: FilePart, shape: tuple[int, int, int]) -> ValueArray:
    """One image file as a record (uint8 [1, record]): upright, RGB (see `_to_rgb`), resized to height x width
    (bilinear, antialiased). Raises BadRowError for what is no image."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise UsageError("image sources need the `pillow` package: pip install 'phalanx[images]'") from None
    with translate_read_errors(part.path), open_location(part.path) as file:
        if part.member:
            file.seek(part.start)
        content = io.BytesIO(file.read(part.stop - part.start if part.member else -1))
    try:
        with PIL.Image.open(content) as image:
            image.load()
            file_format = image.format
            PIL.ImageOps.exif_transpose(image, in_place=True)
            resized = _to_rgb(image, file_format).resize((shape[1], shape[0]), PIL.Image.Resampling.BILINEAR)
    except BadRowError:
        raise
    except Exception as error:  # noqa: BLE001 - its parsers of broken files raise nearly anything
        why = f"not an image that Pillow can read ({error or type(error).__name__})"
        raise BadRowError("not images", why) from None
    label = np.array([part.class_label], "<u4").view(np.uint8)
    return np.concatenate([label, np.asarray(resized, np.uint8).ravel()])[None]


def _to_rgb(image: Any, file_format: str | None) -> Any:
    """A Pillow image in 8-bit RGB, with what is to be seen in it: 16 bits are scaled by 257, and what is transparent
    lies on white. Pillow's own conversion clips the first and drops the second. Raises BadRowError for pixels of which
    nothing says how large black and white are."""
    import PIL.Image

    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        bytes_of = (np.arange(1 << 16) / 257 + 0.5).astype(np.uint8)
        return PIL.Image.fromarray(bytes_of[np.asarray(image).astype(np.uint16, copy=False)]).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        why = f"its pixels are {kind}, with no known white level; save it with 8 or 16 bits"
        raise BadRowError("not images", why)
    if image.mode in _MODES_WITH_ALPHA or "transparency" in image.info:
        layers = image.convert("RGBA") if image.mode != "La" else image.convert("LA").convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), layers).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
