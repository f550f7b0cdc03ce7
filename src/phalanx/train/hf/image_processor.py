"""The image preprocessing that belongs to a Hugging Face model: what training follows of it, and what an export says.

Pixel values follow it: (x * scale - mean) / std. Images were resized when the data were prepared, to the recipe's
`image_size` (bilinear), so other steps of its own are named and not followed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from phalanx.data import DataInfo
from phalanx.errors import DataError, RecipeError
from phalanx.recipe import describe_exception
from phalanx.recipe.locations import huggingface_directory
from phalanx.run.companions import IMAGE_PROCESSOR_FILES
from phalanx.safe_files import read_json

PIL_BILINEAR = 2
"""The number of the way in which images are resized, as Pillow counts."""


@dataclass(frozen=True)
class ImageNormalization:
    """Pixel values of a model's inputs: (x * scale - mean) / std, by channel, of x from 0 to 255."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def apply_(self, images: Tensor) -> Tensor:
        """Normalize images [b, c, h, w] in place."""
        mean, std = (images.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return images.mul_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class ImageInputs:
    """What training makes of images, and what of the model's own preprocessing it does not follow."""

    normalization: ImageNormalization
    not_followed: tuple[str, ...]


def find_image_inputs(build: str, folder: Path | None, facts: DataInfo) -> ImageInputs | None:
    """Return how images become inputs of the model that `build` names; None for tokens and models that are no Hugging
    Face directory, or one without preprocessing of its own. Raises RecipeError where the data do not fit it."""
    directory = None if facts.image_shape is None else huggingface_directory(build, folder)
    file = None if directory is None else find_processor_file(directory)
    if file is None or facts.image_shape is None:
        return None
    processor = _load_processor(file)
    height, width, channels = facts.image_shape
    _check_size(processor, file, height, width)
    normalizes, rescales = processor.get("do_normalize", True), processor.get("do_rescale", True)
    mean, std = (
        _by_channel(processor, key, file, channels) if normalizes else default for key, default in _DEFAULT_MOMENTS
    )
    scale = float(processor.get("rescale_factor") or 1 / 255) if rescales else 1.0
    return ImageInputs(ImageNormalization(scale, mean, std), tuple(_list_not_followed(processor)))


_DEFAULT_MOMENTS: tuple[tuple[str, tuple[float, ...]], ...] = (("image_mean", (0.0,)), ("image_std", (1.0,)))


def find_processor_file(directory: Path) -> Path | None:
    """Return the file with the image preprocessing of a directory."""
    for name in IMAGE_PROCESSOR_FILES:
        file = directory / name
        if file.is_file() and (name == IMAGE_PROCESSOR_FILES[0] or "image_processor" in _read_processor_file(file)):
            return file
    return None


def describe_for_export(normalization: ImageNormalization, facts: DataInfo) -> dict[str, Any]:
    """Return preprocessor_config.json of what training does: transformers then gives the model the same inputs."""
    assert facts.image_shape is not None
    height, width, channels = facts.image_shape
    moments = {
        key: list(values) * (channels if len(values) == 1 else 1)
        for key, values in (("image_mean", normalization.mean), ("image_std", normalization.std))
    }
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": PIL_BILINEAR,
        "do_rescale": True,
        "rescale_factor": normalization.scale,
        "do_normalize": True,
        **moments,
    }


def from_meta(value: Any) -> ImageNormalization | None:
    """Return what a checkpoint holds; None for one that has none. Raises DataError if it is malformed."""
    try:
        return None if value is None else TypeAdapter(ImageNormalization).validate_python(value)
    except ValidationError as error:
        raise DataError(f"image_normalization of the checkpoint: {error.errors()[0]['msg']}") from None


def _read_processor_file(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except DataError as error:
        raise RecipeError(f"model.build: {error}") from None


def _load_processor(file: Path) -> dict[str, Any]:
    """Return the values of a file with the defaults of its class, which transformers knows."""
    _read_processor_file(file)
    try:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(str(file.parent), local_files_only=True, trust_remote_code=False)
        values: dict[str, Any] = processor.to_dict()
    except Exception as error:
        raise RecipeError(f"model.build: {file}: cannot be read ({describe_exception(error)})") from error
    return values


def _check_size(processor: Mapping[str, Any], file: Path, height: int, width: int) -> None:
    """Raise RecipeError unless images have the size that the model's own preprocessing gives them."""
    crops = bool(processor.get("do_center_crop"))
    if not (crops or processor.get("do_resize")):
        return
    key = "crop_size" if crops else "size"
    size = processor.get(key)
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if not isinstance(size, Mapping):
        return
    edge = size.get("shortest_edge")
    expected = (size.get("height", edge), size.get("width", edge))
    if None not in expected and expected != (height, width):
        raise RecipeError(
            f"data.source.image_size: images are {height} x {width}, but {file} says {expected[0]} x {expected[1]} "
            f"({key}); give the same size, or change it there"
        )


def _by_channel(processor: Mapping[str, Any], key: str, file: Path, channels: int) -> tuple[float, ...]:
    value = processor.get(key)
    values = tuple(map(float, value)) if isinstance(value, (list, tuple)) else (float(value or 0.0),)
    if len(values) not in (1, channels):
        raise RecipeError(
            f"data.source: images have {channels} channel{'s' if channels > 1 else ''}, but {key} of {file} has "
            f"{len(values)} values; use images that fit the model"
        )
    return values


def _list_not_followed(processor: Mapping[str, Any]) -> list[str]:
    """Return settings that would make other inputs of the files' images."""
    followed = {"do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_reduce_labels"}
    steps = [key for key, value in processor.items() if key.startswith("do_") and value and key not in followed]
    steps += [key for key in ("rescale_offset", "offset") if processor.get(key)]
    if processor.get("do_resize"):
        size = processor.get("size")
        steps += ["size.shortest_edge"] if isinstance(size, Mapping) and "shortest_edge" in size else []
        steps += [f"resample={int(way)}"] if (way := processor.get("resample")) not in (None, PIL_BILINEAR) else []
    return steps
