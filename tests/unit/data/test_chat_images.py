"""Conversations with images as tokens and image files: what is in the loss, and which records are refused."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.data import inspect_dataset, open_data, prepare_source
from phalanx.data.chat import ChatEncoder, ChatPlan
from phalanx.data.chat_images import ImageProcessor, pack_files, read_processor_files, unpack_files
from phalanx.data.chat_template import load_chat_template
from phalanx.data.manifest import LOSS_BIT, TOKEN_MASK
from phalanx.data.rows import BadRowError
from phalanx.data.tokenizers import HuggingFaceTokenizer
from phalanx.errors import DataError, RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.data_schema import ChatConfig, DataConfig, DataSource, EvaluationConfig
from vision_inputs import TOKENS_OF_IMAGE, save_processor, write_image_chats

transformers: Any = pytest.importorskip("transformers")
ANSWER = {"role": "assistant", "content": "it"}
CHAT = {"images": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_image_chats(folder, 4)
    save_processor(folder / "vision")
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    return ImageProcessor(read_processor_files(folder / "vision"), folder / "vision" / "tokenizer.json")


def encode(folder: Path, processor: ImageProcessor | None, *parts: Any, record: Any = None, **config: Any) -> Any:
    template = load_chat_template(None, folder / "vision")
    tokenizer = HuggingFaceTokenizer(folder / "vision" / "tokenizer.json")
    encoder = ChatEncoder(ChatPlan(ChatConfig(**config), template), tokenizer, processor)
    messages = [{"role": "user", "content": list(parts)}, ANSWER]
    return encoder.encode({"messages": messages, **(record or {})}, str(folder / "images.jsonl"))


def image(path: str = "img/0-0.png", key: str = "path") -> dict[str, Any]:
    return {"type": "image", key: path}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_tokens_are_those_of_the_processor_of_transformers(folder: Path, processor: ImageProcessor) -> None:
    tokens, files = encode(folder, processor, text("a"), image(), image("img/1-0.png"), text("b <image>?"))
    peer = transformers.AutoProcessor.from_pretrained(folder / "vision")
    content = [text("a"), *(image(str(folder / "img" / name)) for name in ("0-0.png", "1-0.png")), text("b <image>?")]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [text("it")]}]
    expected = peer.apply_chat_template(messages, tokenize=True, return_dict=True, sanitize_control_tokens=True)
    assert (tokens & TOKEN_MASK).tolist() == list(expected["input_ids"][0])
    assert unpack_files(files) == [(folder / "img" / name).read_bytes() for name in ("0-0.png", "1-0.png")]


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_tokens_of_images_are_never_in_the_loss(folder: Path, processor: ImageProcessor, train_on: str) -> None:
    tokens, _ = encode(folder, processor, image(), text("what"), train_on=train_on)
    number = HuggingFaceTokenizer(folder / "vision" / "tokenizer.json").encode_marked("<image>")[0][0]
    of_image = tokens & TOKEN_MASK == number
    assert of_image.sum() == TOKENS_OF_IMAGE
    assert not (tokens[of_image] & LOSS_BIT).any()
    assert (tokens[~of_image] & LOSS_BIT > 0).sum() == (3 if train_on == "assistant" else len(tokens) - TOKENS_OF_IMAGE)


@pytest.mark.parametrize("source", ["path", "image", "url", "cell", "base64", "data url", "column"])
def test_images_are_named_by_paths_or_given_as_bytes(folder: Path, processor: ImageProcessor, source: str) -> None:
    content = (folder / "img/0-0.png").read_bytes()
    encoded = base64.b64encode(content).decode()
    parts: dict[str, Any] = {
        "cell": {"type": "image", "image": {"bytes": f"data:;base64,{encoded}", "path": None}},
        "base64": {"type": "image", "base64": encoded},
        "data url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        "column": {"type": "image", "text": None},
    }
    column = {"images": ["img/0-0.png"]} if source == "column" else None
    _, files = encode(folder, processor, parts.get(source) or image(key=source), record=column)
    assert unpack_files(files) == [content]


@pytest.mark.parametrize(
    ("part", "column", "named"),
    [
        (image("img/none.png"), None, r"img/none\.png: No such file"),
        (image("images.jsonl"), None, "none that Pillow can read"),
        (image("https://example.org/a.png"), None, "not fetched from the network"),
        ({"type": "image", "base64": "A"}, None, "base64"),
        ({"type": "image"}, None, "`images` none left"),
        (image(), {"images": ["img/0-0.png"]}, "images: 1 more than messages have parts"),
        ({"type": "video", "path": "a"}, None, "part of type video"),
    ],
)
def test_an_image_that_is_not_there_is_named(
    folder: Path, processor: ImageProcessor, part: Any, column: Any, named: str
) -> None:
    with pytest.raises(BadRowError, match=named):
        encode(folder, processor, part, record=column)


def test_an_image_without_a_processor_names_the_key_that_reads_it(folder: Path) -> None:
    with pytest.raises(BadRowError, match=r"data\.chat\.images: true"):
        encode(folder, None, image())


def test_a_template_without_a_place_for_images_is_refused(folder: Path, processor: ImageProcessor) -> None:
    (folder / "blind.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}<|im_end|>")
    template = load_chat_template(folder / "blind.jinja", folder / "vision")
    encoder = ChatEncoder(
        ChatPlan(ChatConfig(), template), HuggingFaceTokenizer(folder / "vision/tokenizer.json"), processor
    )
    with pytest.raises(BadRowError, match="puts <image> 0 times for 1 images"):
        encoder.encode({"messages": [{"role": "user", "content": [image()]}, ANSWER]}, str(folder / "images.jsonl"))


def data_config(folder: Path, **source: str) -> DataConfig:
    values = {"source": source, "tokenizer": str(folder / "vision"), "seq_len": 64, "packing": "single", "chat": CHAT}
    return DataConfig.model_validate(values)


def test_pixel_values_follow_the_rows_however_they_are_read(folder: Path, tmp_path: Path) -> None:
    data = data_config(folder, jsonl="images.jsonl")
    dataset = prepare_source(data.sources[0], data, folder, tmp_path / "out", num_workers=1)
    opened = open_data(
        data.model_copy(update={"source": [DataSource(prepared=str(dataset))]}),
        EvaluationConfig(holdout_fraction=0.0),
        seed=0,
    )
    together, apart = opened.read_training(0, 4), [opened.read_training(number, 1) for number in range(4)]
    name = "image:pixel_values"
    assert together[name].shape == (5, 3, 16, 16)
    np.testing.assert_array_equal(together[name], np.concatenate([batch[name] for batch in apart]))
    shown = inspect_dataset(dataset)
    assert shown["num_documents"] == 4
    assert shown["count"] == opened.count_units(0, 4)
    assert "[image 1: " in shown["conversations"][0][0][0]
    assert "⟦<image>⟧ x " in shown["conversations"][0][1][0]


def test_images_in_parquet_are_read_as_their_bytes(folder: Path, tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    content = (folder / "img/0-0.png").read_bytes()
    user = {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "it"}]}
    row = {"messages": [user, answer], "images": [{"bytes": content, "path": "0.png"}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    data = data_config(folder, parquet=str(tmp_path / "rows.parquet"))
    dataset = prepare_source(data.sources[0], data, folder, tmp_path / "out", num_workers=1)
    assert f"[image 1: {len(content):,} bytes]" in inspect_dataset(dataset)["conversations"][0][0][0]


def test_a_missing_image_is_an_error_with_file_and_line(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "images.jsonl").read_text().splitlines(keepends=True)
    (folder / "broken.jsonl").write_text(lines[0] + lines[1].replace("img/1-0.png", "img/gone.png"))
    data = data_config(folder, jsonl="broken.jsonl")
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: .*img/gone\.png: No such file"):
        prepare_source(data.sources[0], data, folder, tmp_path / "out", num_workers=1)


def test_a_tokenizer_without_processor_is_refused(folder: Path, tmp_path: Path) -> None:
    text_only = tmp_path / "text"
    text_only.mkdir()
    (text_only / "tokenizer.json").write_bytes((folder / "vision/tokenizer.json").read_bytes())
    data = data_config(folder, jsonl="images.jsonl").model_copy(update={"tokenizer": str(text_only)})
    with pytest.raises(RecipeError, match="has no processor for images"):
        prepare_source(data.sources[0], data, folder, tmp_path / "out", num_workers=1)


@pytest.mark.parametrize(
    ("data", "named"),
    [({"packing": "whole"}, "expected packing: single"), ({"chat": {**CHAT, "too_long": "truncate"}}, "too_long")],
)
def test_packing_and_truncation_are_refused(data: dict[str, Any], named: str) -> None:
    source = {"source": {"jsonl": "a.jsonl"}, "chat": CHAT, **data}
    with pytest.raises(ValueError, match=named):
        Recipe.model_validate({"model": {"build": "hf:a"}, "task": "chat", "data": source})


def test_files_come_back_from_their_values() -> None:
    files = [b"abcde", b"", bytes(range(256))]
    assert unpack_files(pack_files(files)) == files
    assert len(pack_files([])) == 1
