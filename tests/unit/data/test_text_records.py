"""Records of whole texts: their tokens are those of transformers, and what cannot be trained on is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_inputs import write_chat_inputs
from phalanx.data import open_data
from phalanx.data.prepare import prepare_source
from phalanx.data.rows import BadRowError
from phalanx.data.text_records import encode_texts, margin_to_number, numbers_to_margins
from phalanx.data.tokenizers import HuggingFaceTokenizer, load_tokenizer
from phalanx.errors import DataError, RecipeError
from phalanx.recipe import Recipe

BYTES = load_tokenizer("bytes")
CLASSES = ["cold", "warm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    write_chat_inputs(path, count=6)
    return path


def open_records(folder: Path, task: Any, records: list[Any], **data: Any) -> Any:
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"jsonl": "records.jsonl"}
    recipe = Recipe.model_validate({"task": task, "data": {"source": source, "seq_len": 64, **data}})
    out = folder / f"prepared-{len(list(folder.iterdir()))}"
    prepare_source(recipe.data.sources[0], recipe.data, folder, out, num_workers=1)
    prepared = recipe.data.model_copy(
        update={"source": recipe.data.sources[0].model_copy(update={"prepared": str(out), "jsonl": None})}
    )
    return open_data(prepared, recipe.evaluation.model_copy(update={"holdout_fraction": 0.0}), 0)


def texts_of(batch: Any) -> list[list[str]]:
    rows = zip(batch["tokens"], batch["sequences"], strict=True)
    return [
        [BYTES.decode(tokens[numbers == number].tolist()) for number in range(numbers.max() + 1)]
        for tokens, numbers in rows
    ]


def test_texts_come_back_with_the_numbers_of_their_labels(folder: Path) -> None:
    records = [{"text": "icy", "label": "cold"}, {"text": "hot", "label": 1}, {"text": "x" * 64, "label": "warm"}]
    data = open_records(folder, {"kind": "text-classification", "classes": CLASSES}, records)
    batch = data.read_training(0, 3)
    found = {texts[0]: int(label) for texts, label in zip(texts_of(batch), batch["labels"], strict=True)}
    assert found == {"icy": 0, "hot": 1, "x" * 64: 1}, "a text may have seq_len tokens"
    assert (data.info.num_classes, data.info.class_names) == (2, ("cold", "warm"))


def test_an_anchor_has_its_positive_and_any_number_of_negatives(folder: Path) -> None:
    records = [
        {"anchor": "a", "positive": "b"},
        {"anchor": "c", "positive": "d", "negative": "e"},
        {"anchor": "f", "positive": "g", "negative": ["h", "i"]},
    ]
    batch = open_records(folder, "embedding", records).read_training(0, 3)
    assert sorted(texts_of(batch)) == [["a", "b"], ["c", "d", "e"], ["f", "g", "h", "i"]]


def test_pairs_come_back_as_the_template_renders_them_with_their_margins(folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    records = [{**record, "margin": 0.1 * number} if number else record for number, record in enumerate(records)]
    batch = open_records(folder, "reward", records, tokenizer="base").read_training(0, len(records))
    found = {
        tuple(tokens[numbers == part].tolist()): float(margin)
        for tokens, numbers, margin in zip(batch["tokens"], batch["sequences"], batch["margins"], strict=True)
        for part in range(2)
    }
    for number, record in enumerate(records):
        for key in ("chosen", "rejected"):
            tokens = tokenizer.apply_chat_template(record["prompt"] + record[key], return_dict=False)
            assert found[tuple(tokens)] == pytest.approx(0.1 * number, rel=2e-6)


def test_a_margin_keeps_six_digits_and_its_sign() -> None:
    margins = [0.0, -0.25, 1.2345678, 1e-3, -7e5]
    numbers = np.concatenate([margin_to_number({"margin": margin}) for margin in margins])
    assert numbers.max() < 1 << 29
    np.testing.assert_allclose(numbers_to_margins(numbers), margins, rtol=1e-6)


def test_a_text_has_the_special_tokens_that_transformers_puts_around_it(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue"]
    transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)("red blue")["input_ids"]
    assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").encode_document("red blue") == expected == [2, 5, 6, 3]


@pytest.mark.parametrize(
    ("record", "classes", "named", "error"),
    [
        ({"label": "cold"}, CLASSES, "expected a text in `text`, found none", RecipeError),
        ({"text": 3, "label": "cold"}, CLASSES, "expected a text in `text`, found int", RecipeError),
        ({"text": " \n", "label": "cold"}, CLASSES, "`text` is empty", DataError),
        ({"text": "a"}, CLASSES, "`label` is missing, expected one of task.classes", DataError),
        ({"text": "a", "label": "hot"}, CLASSES, "'hot', expected one of task.classes \\('cold', 'warm'\\)", DataError),
        ({"text": "a", "label": 2}, CLASSES, "`label` is 2, .* from 0 to 1", DataError),
        ({"text": "a", "label": 0.5}, CLASSES, "`label` is 0.5", DataError),
        ({"anchor": "a"}, None, "expected a text in `positive`, found none", RecipeError),
        ({"anchor": "a", "positive": "b", "negative": [""]}, None, "`negative` is empty", DataError),
        (
            {"anchor": "a", "positive": "b", "negative": 7},
            None,
            "expected a text in `negative`, found int",
            RecipeError,
        ),
        (["a"], None, "expected a JSON object, found list", DataError),
    ],
)
def test_a_record_that_cannot_be_trained_on_is_named(record: Any, classes: Any, named: str, error: type) -> None:
    with pytest.raises(BadRowError, match=named) as raised:
        encode_texts(record, classes, BYTES)
    assert raised.value.error is error


@pytest.mark.parametrize("margin", ["1", float("nan"), float("inf"), [1], 10**400])
def test_a_margin_that_is_no_finite_number_is_refused(margin: Any) -> None:
    with pytest.raises(BadRowError, match="expected a finite number"):
        margin_to_number({"margin": margin})


def test_texts_of_one_class_only_are_refused_with_its_name(folder: Path) -> None:
    records = [{"text": f"{number}", "label": "warm"} for number in range(4)]
    data = open_records(folder, {"kind": "text-classification", "classes": CLASSES}, records)
    with pytest.raises(RecipeError, match="all texts have the label 'warm'"):
        data.check_classes()
