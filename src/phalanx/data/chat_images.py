"""Images in conversations: find them in records, keep their files in shards, and have the model's own processor make
inputs of them.

A conversation with images is two documents of a shard: its tokens, in which the processor has put those of each image,
and the files of its images as they are. Pixel values are made of the files when a batch is read: they follow from the
dataset alone, which holds the processor's settings, too.
"""

import base64
import io
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.manifest import TOKENIZER_FILE
from phalanx.data.rows import BadRowError
from phalanx.errors import RecipeError, UsageError
from phalanx.recipe.imports import HF_CONFIG_FILE, describe_exception
from phalanx.run.companions import IMAGE_PROCESSOR_FILES, TOKENIZER_CONFIG_FILE
from phalanx.safe_files import read_json, read_text
from phalanx.storage.store import open_location
from phalanx.storage.url import is_url

IMAGE_INPUT = "image:"
"""How the names of a batch's arrays begin that are keyword arguments of a vision-language model."""
_PROCESSOR_FILES = (*IMAGE_PROCESSOR_FILES, TOKENIZER_CONFIG_FILE, "special_tokens_map.json")
_MAX_FILE_BYTES = 1 << 24
_SOURCE_KEYS = ("image", "bytes", "path", "url", "image_url", "base64")
"""Where a part of a message, or a cell of a table, says which image it is."""
_TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns of the text, which has been encoded before."""


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the images of messages."""
    return sum(is_image(part) for message in messages for part in message["content"])


def find_images(messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> list[Any]:
    """Return what names each image of messages. A part without a source is the next of the record's `images` (or
    `image`). Raises BadRowError unless these are as many as such parts."""
    column = record.get("images", record.get("image"))
    if not isinstance(column, list):
        column = [] if column is None else [column]
    waiting = iter(column)
    parts = (part for message in messages for part in message["content"] if is_image(part))
    sources = [source if (source := _find_source(part)) is not None else next(waiting, None) for part in parts]
    if None in sources:
        raise BadRowError("with a part that has no image", "an image part has no path or bytes, and `images` none left")
    if num_left := sum(1 for _ in waiting):
        why = f"images: {num_left} more than messages have parts {{type: image}} for them"
        raise BadRowError("with more images than parts", why)
    return sources


def _find_source(values: Mapping[str, Any]) -> Any:
    key = next((key for key in _SOURCE_KEYS if values.get(key) is not None), None)
    source = None if key is None else values[key]
    if isinstance(source, Mapping):  # a cell of a table, or OpenAI's image_url
        return _find_source(source)
    return f"data:;base64,{source}" if key == "base64" else source


def read_image_file(source: Any, data_file: str) -> bytes:
    """Return the bytes of an image that a record of `data_file` names: a path relative to it, or a data URL. Raises
    BadRowError where there is none, and for other URLs."""
    source = _find_source({"image": source})
    if not isinstance(source, str):
        raise BadRowError("without their image", f"an image is {type(source).__name__}, expected a path or bytes")
    if "://" in source and not source.startswith("data:"):
        why = f"{source}: images are not fetched from the network; download it, and name its path"
        raise BadRowError("with an image at a URL", why, RecipeError)
    location = f"{data_file.rpartition('/')[0]}/{source}" if is_url(data_file) else str(Path(data_file).parent / source)
    try:
        if source.startswith("data:"):
            return base64.b64decode(source.partition(",")[2])
        with open_location(location) as file:
            return file.read()
    except (OSError, ValueError) as error:
        why = f"{location[:200]}: {getattr(error, 'strerror', None) or error}"
        raise BadRowError("without their image", why) from None


def _open_image(data: bytes) -> Any:
    """Return an image file as an RGB image of Pillow, upright, as transformers opens it."""
    import PIL.Image
    from transformers.image_utils import load_image

    try:
        return load_image(PIL.Image.open(io.BytesIO(data)))
    except Exception as error:  # noqa: BLE001 - its parsers of broken files raise nearly anything
        why = f"an image is none that Pillow can read ({error or type(error).__name__})"
        raise BadRowError("with a broken image", why) from None


def pack_files(files: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return files as values of a shard: how many there are, the bytes of each, and them, padded to whole values."""
    joined = b"".join(files)
    head = np.array([len(files), *map(len, files)], "<u4")
    return np.concatenate([head, np.frombuffer(joined + bytes(-len(joined) % 4), "<u4")])


def unpack_files(values: npt.NDArray[Any]) -> list[bytes]:
    """Return what `pack_files` packed."""
    start = int(values[0]) + 1
    edges, joined = np.cumsum([0, *values[1:start]]).tolist(), values[start:].tobytes()
    return [joined[begin:stop] for begin, stop in pairwise(edges)]


def select_image_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a vision-language model takes of a batch's images."""
    return {name.removeprefix(IMAGE_INPUT): x for name, x in batch.items() if name.startswith(IMAGE_INPUT)}


def put_images(text: str, token: str, images: Sequence[str]) -> str:
    """Put what stands for each image in the place of its token in a rendered text. Raises BadRowError unless there are
    as many."""
    pieces = text.split(token)
    if len(pieces) != len(images) + 1:
        why = f"the chat template puts {token} {len(pieces) - 1} times for {len(images)} images"
        raise BadRowError("without a place for each image", why, RecipeError)
    return "".join(piece + image for piece, image in zip(pieces, [*images, ""], strict=True))


def read_processor_files(directory: Path | None) -> dict[str, str]:
    """Return the settings of the processor in a model's directory, by file. Raises RecipeError if it has none."""
    names = [] if directory is None else [name for name in _PROCESSOR_FILES if (directory / name).is_file()]
    if directory is None or not any(name in IMAGE_PROCESSOR_FILES for name in names):
        raise RecipeError(
            f"data.chat.images: {directory or 'the built-in tokenizer'} has no processor for images "
            f"({' or '.join(IMAGE_PROCESSOR_FILES)}); name the directory of a vision-language model in data.tokenizer"
        )
    files = {name: read_text(directory / name, _MAX_FILE_BYTES) for name in names}
    if (directory / HF_CONFIG_FILE).is_file():  # by which classes are found that the settings do not name
        files[HF_CONFIG_FILE] = json.dumps({"model_type": read_json(directory / HF_CONFIG_FILE).get("model_type")})
    return files


class ImageProcessor:
    """The processor of a vision-language model, by its settings and its tokenizer.json. It is loaded when used."""

    def __init__(self, files: Mapping[str, str], tokenizer: Path):
        if not (find_spec("transformers") and find_spec("PIL")):
            raise UsageError("images in messages need packages: pip install 'phalanx[huggingface,images]'")
        self._files, self._tokenizer = files, tokenizer

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        with tempfile.TemporaryDirectory(prefix="phalanx-processor-") as folder:
            for name, text in self._files.items():
                Path(folder, name).write_text(text, encoding="utf-8")
            shutil.copyfile(self._tokenizer, Path(folder, TOKENIZER_FILE))
            try:
                processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            except Exception as error:
                why = describe_exception(error).replace(folder, "its directory")
                raise RecipeError(f"data.chat.images: the model's processor cannot be loaded: {why}") from error
        if getattr(processor, "image_token", None) is None:
            raise RecipeError(
                f"data.chat.images: {type(processor).__name__} has no token that stands for an image; train a model "
                "with a processor that puts image tokens into the text, such as LLaVA"
            )
        return processor

    @property
    def token(self) -> str:
        """The name of the token that stands for an image in a rendered conversation."""
        return str(self._processor.image_token)

    def expand(self, files: Sequence[bytes]) -> list[str]:
        """Return the text that stands for each image: as many image tokens as the model has embeddings of it, and what
        the processor puts around them. Raises BadRowError for what it refuses."""
        if not files:
            return []
        images, tokenizer = [[_open_image(data)] for data in files], self._processor.tokenizer
        try:
            encoded = self._processor(text=[self.token] * len(files), images=images, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - each processor refuses in its own way
            raise BadRowError("refused by the processor", f"an image is refused: {describe_exception(error)}") from None
        return [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in encoded["input_ids"]]

    def make_inputs(self, rows: Sequence[Sequence[bytes]], tokens: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Return what the model takes besides `tokens` [b, s], for the image files of each row: of all n images, one
        after the other, such as pixel_values [n, c, h, w]. Empty without images."""
        images = [[_open_image(data) for data in row] for row in rows if row]
        if not images:
            return {}
        text = [self.token * len(row) for row in images]
        outputs = self._processor(text=text, images=images, images_kwargs={"return_tensors": "pt"})
        inputs = {name: np.asarray(value) for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
        if "mm_token_type_ids" in outputs:
            inputs["mm_token_type_ids"] = np.array(self._processor.create_mm_token_type_ids(tokens.tolist()))
        return {f"{IMAGE_INPUT}{name}": value for name, value in inputs.items()}
