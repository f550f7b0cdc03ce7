"""Tokenizers: there and back, trained ones the same every time, stored ones verified."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import load_tokenizer, prepare_all_sources, sources
from phalanx.data.inspection import inspect_dataset
from phalanx.data.tokenizers import TOKENIZER_FILE, find_stop_tokens, load_run_tokenizer, train_bpe_tokenizer
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.recipe.data_schema import DataConfig, EvaluationConfig
from small_data import all_tokens, contents, manifest_of, prepare, write_texts

TEXT = "The quick brown fox jumps over the lazy dog. Ünïcödé, 漢字, 🦊!\n\tif x == 1:  return x\n" * 50


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "my-tokenizer.json"
    train_bpe_tokenizer(iter([TEXT]), 400, path)
    return path


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200))
@settings(max_examples=60, deadline=None)
def test_bytes_come_back(text):
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens.tolist()) == text


def test_bytes_that_are_no_text_become_replacement_characters_and_separators_nothing():
    assert load_tokenizer("bytes").decode([104, 255, 0, 105]) == "h\ufffdi"


@given(st.text(st.characters(codec="utf-8"), max_size=200))
@settings(max_examples=60, deadline=None)
def test_a_trained_bpe_encodes_every_text(bpe, text):
    tokenizer = load_tokenizer(bpe)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens.tolist()) == text
    assert tokens.dtype == np.uint16
    assert (tokens < tokenizer.vocab_size).all()
    assert tokenizer.separator_token == 0


def test_training_gives_the_same_tokenizer_every_time(bpe, tmp_path):
    train_bpe_tokenizer(iter([TEXT]), 400, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == bpe.read_bytes()
    assert 257 < load_tokenizer(bpe).vocab_size <= 400  # the text has no more pairs worth a token


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts", {f"{number}.txt": TEXT + str(number) for number in range(4)})


def warnings_of(folder, texts, source, tokenizer="bytes", **options):
    """What is noted while these texts are prepared below a folder."""
    write_texts(folder / "texts", texts)
    notes = []
    progress = {"report_progress": lambda now: notes.append(now.note)}
    prepare(folder / "texts", folder / "out", source, str(tokenizer), **progress, **options)
    return list(filter(None, notes))


def test_a_bpe_is_trained_on_the_data_and_kept_with_it(texts, tmp_path):
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"}, {"bpe": 300})
    tokenizer = load_tokenizer(out)
    described = manifest_of(out)["tokenizer"]
    assert (tokenizer.vocab_size, tokenizer.name, described["name"], described["separator"]) == (
        300,
        "bpe:300",
        "bpe:300",
        0,
    )
    tokens = all_tokens(out)
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens.tolist()) == "".join(path.read_text() for path in sorted(texts.iterdir()))
    assert (tokens == 0).sum() == 4
    moved = shutil.move(out, tmp_path / "moved")
    assert load_tokenizer(moved).encode("quick").tolist() == tokenizer.encode("quick").tolist()


def test_a_bpe_dataset_is_the_same_from_any_number_of_workers(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.prepare_plan.MIN_PIECE_BYTES", 5000)
    outs = [prepare(texts, tmp_path / f"out{n}", {"text": "*.txt"}, {"bpe": 300}, num_workers=n) for n in (1, 2)]
    assert len(manifest_of(outs[0])["shards"]) > 1
    assert contents(outs[0]) == contents(outs[1])


def test_a_hugging_face_tokenizer_is_copied_into_the_dataset(texts, bpe, tmp_path):
    shutil.copy(bpe, texts / "tok.json")
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"}, "tok.json")
    assert (out / TOKENIZER_FILE).read_bytes() == bpe.read_bytes()
    assert load_tokenizer(out).encode(TEXT).tolist() == load_tokenizer(bpe).encode(TEXT).tolist()


@pytest.mark.parametrize(
    ("asked", "made"), [({"bpe": 300}, "bytes"), ({"bpe": 301}, "bpe:300"), ("tok.json", "bpe:300")]
)
def test_prepared_tokens_of_another_tokenizer_than_the_recipe_names_are_refused(texts, bpe, tmp_path, asked, made):
    shutil.copy(bpe, texts / "tok.json")
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"}, {"bpe": 300} if made == "bpe:300" else made)
    data = DataConfig.model_validate({"source": {"prepared": str(out)}, "tokenizer": asked})
    named = "tok.json" if asked == "tok.json" else f"bpe:{asked['bpe']}"
    with pytest.raises(RecipeError, match=f"data.tokenizer: found {named}, but .*out was prepared with {made}; leave"):
        prepare_all_sources(data, EvaluationConfig(), texts)


@pytest.mark.parametrize("asked", ["bytes", {"bpe": 300}, "out/tokenizer.json", "out"])
def test_prepared_tokens_of_the_tokenizer_that_the_recipe_names_are_taken(texts, tmp_path, asked):
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"}, {"bpe": 300})
    data = DataConfig.model_validate({"source": {"prepared": str(out)}, "tokenizer": asked})
    assert prepare_all_sources(data, EvaluationConfig(), tmp_path)[0].source[0].prepared == str(out)


def test_a_tokenizer_without_a_separator_puts_none(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=50)
    words.save(str(tmp_path / "words.json"))
    write_texts(tmp_path, {"1.txt": "a b b a", "2.txt": "b c"})
    out = prepare(tmp_path, tmp_path / "out", {"text": "*.txt"}, "words.json")
    assert all_tokens(out).tolist() == [0, 7, 7, 0, 7, 3]
    assert manifest_of(out)["shards"][0]["documents"] == 2
    assert manifest_of(out)["vocab"] == 8


def made(kind, text):
    """A small tokenizer as families of models have them, trained on `text`."""
    normalizers, splits = tokenizers.normalizers, tokenizers.pre_tokenizers
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?", byte_fallback=kind == "llama"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["?"], show_progress=False)
    if kind == "prefix space":
        bpe.pre_tokenizer = splits.ByteLevel(add_prefix_space=True)
    elif kind == "indented code":
        bpe.pre_tokenizer = splits.ByteLevel(add_prefix_space=False)
    elif kind == "metaspace":
        bpe.pre_tokenizer = splits.Metaspace(prepend_scheme="always")
    elif kind == "llama":  # merges know no words
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
        bpe.train_from_iterator(text.splitlines(), trainer)
        return bpe
    elif kind == "unigram":
        bpe = tokenizers.Tokenizer(tokenizers.models.Unigram())
        bpe.normalizer, bpe.pre_tokenizer = normalizers.NFKC(), splits.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(vocab_size=300, special_tokens=["?"], unk_token="?")
    elif kind == "bert":
        bpe = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="?"))
        bpe.normalizer, bpe.pre_tokenizer = normalizers.BertNormalizer(), splits.BertPreTokenizer()
        trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=400, special_tokens=["?"], show_progress=False)
    bpe.train_from_iterator([text], trainer)
    return bpe


@pytest.mark.parametrize("kind", ["prefix space", "indented code", "metaspace", "llama", "unigram", "bert"])
@pytest.mark.parametrize("pieces", [1, 5])
def test_a_document_in_chunks_has_the_tokens_that_it_has_as_a_whole(tmp_path, monkeypatch, kind, pieces):
    text = "".join(
        f"{'    ' * (n % 5)}for word_{n} in café{n % 7}:{' ' * (n % 4)}\n{chr(10) * (n % 3)}" for n in range(600)
    )
    text += " ".join(f"no line-end {n * n}" for n in range(300)) + " ﬁn 漢字 e\u0301"
    whole = made(kind, text)
    whole.save(str(tmp_path / "tok.json"))
    write_texts(tmp_path, {"a.txt": text})
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(sources, "CONTEXT_BYTES", 400)
    monkeypatch.setattr("phalanx.data.prepare_plan._choose_piece_size", lambda total: len(text.encode()) // pieces)
    out = prepare(tmp_path, tmp_path / "out", {"text": "*.txt"}, "tok.json")
    assert len(manifest_of(out)["shards"]) == pieces
    assert all_tokens(out).tolist() == whole.encode(text, add_special_tokens=False).ids


SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mine|>"]


def with_special(folder, tokens):
    folder.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(tokens)
    return words


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "<|endoftext|>"),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|mine|>", "lstrip": False}}}, "<|mine|>"),
        (
            {"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {"eos_token_id": [4, 3]}},
            "<|im_end|>",
        ),
        ({"special_tokens_map.json": {"eos_token": "<|mine|>"}}, "<|mine|>"),
        ({"config.json": {"eos_token_id": 6}}, "<|mine|>"),
        ({"tokenizer_config.json": {"eos_token": "<|gone|>"}, "config.json": {"eos_token_id": 99}}, "<|endoftext|>"),
        ({"tokenizer_config.json": ["no", "mapping"]}, "<|endoftext|>"),
    ],
)
def test_documents_end_with_what_the_tokenizers_own_files_name(tmp_path, files, expected):
    words = with_special(tmp_path / "model", SPECIAL)
    words.save(str(tmp_path / "model" / TOKENIZER_FILE))
    for name, value in files.items():
        (tmp_path / "model" / name).write_text(json.dumps(value))
    write_texts(tmp_path / "texts", {"1.txt": "a", "2.txt": "a a"})
    number = words.token_to_id(expected)
    out = prepare(tmp_path / "texts", tmp_path / "out", {"text": "*.txt"}, str(tmp_path / "model"))
    assert all_tokens(out).tolist() == [0, number, 0, 0, number]
    assert load_tokenizer(out).separator_token == number
    again = prepare(tmp_path / "texts", tmp_path / "again", {"text": "*.txt"}, str(out / TOKENIZER_FILE))
    assert contents(again) == contents(out)  # a dataset's tokenizer ends documents as the dataset does


@pytest.mark.parametrize(
    "name", ["<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", "<|eot_id|>", "[EOS]", "<eos>"]
)
def test_an_end_of_text_is_known_by_its_name(tmp_path, name):
    words = with_special(tmp_path / "model", ["<s>", name, "<pad>"])
    words.save(str(tmp_path / "model" / "mine.json"))
    assert load_tokenizer(tmp_path / "model" / "mine.json").separator_token == words.token_to_id(name)


def test_an_end_of_text_is_known_by_where_the_tokenizer_puts_it(tmp_path):
    words = with_special(tmp_path / "model", ["<x>", "<y>"])
    template = tokenizers.processors.TemplateProcessing(single="<x> $A <y>", special_tokens=[("<x>", 2), ("<y>", 3)])
    words.post_processor = template
    words.save(str(tmp_path / "model" / TOKENIZER_FILE))
    assert load_tokenizer(tmp_path / "model" / TOKENIZER_FILE).separator_token == 3


def test_a_tokenizer_without_an_end_of_text_is_warned_of(tmp_path):
    words = with_special(tmp_path / "model", ["<s>"])
    words.save(str(tmp_path / "model" / TOKENIZER_FILE))
    (warning,) = warnings_of(tmp_path, {"1.txt": "a"}, {"text": "*.txt"}, tmp_path / "model")
    assert "has no token that ends a text, so nothing stands between documents; name one as eos_token" in warning


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_that_are_no_utf8_are_counted_and_named(tmp_path, bpe, monkeypatch, workers):
    monkeypatch.setattr("phalanx.data.prepare_plan.MIN_PIECE_BYTES", 10)
    texts = {
        "1.txt": b"caf\xe9 na\xefve, more of it",
        "2.txt": "fine \ufffd too, and long",
        "3.txt": b"\xff and long enough",
    }
    (warning,) = warnings_of(tmp_path, texts, {"text": "*.txt"}, bpe, num_workers=workers)
    expected = (
        r"warning: .*/1\.txt: bytes that are not UTF-8 became U\+FFFD in 2 places, and so in 1 more files; convert"
    )
    assert re.match(expected, warning)


def test_half_of_a_surrogate_pair_in_json_is_counted_as_what_is_no_text(tmp_path, bpe):
    (warning,) = warnings_of(tmp_path, {"1.jsonl": rb'{"text": "cut \ud83d"}'}, {"jsonl": "*.jsonl"}, bpe)
    assert re.match(r"warning: .*/1\.jsonl: bytes that are not UTF-8 became U\+FFFD in", warning)


def test_bytes_that_are_no_utf8_are_counted_over_an_interruption(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr("phalanx.data.prepare_plan.MIN_PIECE_BYTES", 10)
    texts = {"1.txt": b"caf\xe9 na\xefve, more of it", "2.txt": "fine, and long enough"}
    folder = write_texts(tmp_path / "texts", texts)
    counts = set()

    def interrupt(now):
        counts.add(now.count)
        if len(counts - {0}) == 2:  # in the second piece
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out", {"text": "*"}, str(bpe), report_progress=interrupt)
    assert (tmp_path / "out.partial" / "shard-00000.done").exists()
    (warning,) = warnings_of(tmp_path, {}, {"text": "*"}, bpe)
    assert "became U+FFFD in 2 places" in warning


def test_bytes_that_are_no_utf8_are_tokens_of_the_byte_tokenizer_of_which_zeros_are_counted(tmp_path):
    texts = {"0.txt": b"caf\xe9", "1.txt": "a\0b\0c", "2.txt": "none"}
    (warning,) = warnings_of(tmp_path, texts, {"text": "*"})
    assert re.match(r"warning: .*1.txt: byte 0, which ends a document .* in 2 places; remove it", warning)
    assert inspect_dataset(tmp_path / "out")["begins"].endswith("none\u27e6byte 0\u27e7")


def test_a_damaged_stored_tokenizer_is_found_out(texts, tmp_path):
    out = prepare(texts, tmp_path / "out", {"text": "*.txt"}, {"bpe": 300})
    with open(out / TOKENIZER_FILE, "a") as file:
        file.write(" ")
    with pytest.raises(DataError, match=r"tokenizer\.json: missing, or not the tokenizer that this dataset"):
        load_tokenizer(out)


@pytest.mark.parametrize(("beside", "cure"), [("vocab.txt", "transformers makes one of vocab.txt"), ("x", "name the")])
def test_a_directory_without_one_is_named_with_a_cure(texts, tmp_path, beside, cure):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / beside).write_text("")
    with pytest.raises(RecipeError, match=rf"data.tokenizer: .*model has no tokenizer.json; {cure}"):
        prepare(texts, tmp_path / "out", {"text": "*.txt"}, str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.json", r"no such tokenizer; .*`data.tokenizer=\{bpe: SIZE\}`.* `--tokenizer bpe:SIZE`"),
        ("bad.json", "not a tokenizer.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named_before_anything_is_written(texts, tmp_path, name, words):
    (texts / "bad.json").write_text("{}")
    with pytest.raises(RecipeError, match=rf"{name}: {words}"):
        prepare(texts, tmp_path / "out", {"text": "*.txt"}, name)
    assert list(tmp_path.iterdir()) == [texts]


def test_without_the_library_the_message_says_what_to_install(texts, tmp_path, bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[tokenizers\]'"):
        load_tokenizer(bpe)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"\xff\xfe", b"[" * 100_000, b"1" * 5000),
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',  # empty
        b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}',
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    (tmp_path / TOKENIZER_FILE).write_bytes(content)
    with pytest.raises(RecipeError, match=r"tokenizer.json: "):
        load_tokenizer(tmp_path / TOKENIZER_FILE)


def test_a_text_at_which_the_tokenizer_fails_is_told_with_its_name(tmp_path, bpe, capfd):
    described = json.loads(bpe.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tok.json").write_text(json.dumps({**described, "pre_tokenizer": pattern}))
    (tmp_path / "a.txt").write_text("a" * 5000 + "!")
    with pytest.raises(DataError, match=r"data.tokenizer: tokenizer.json fails on a text \(Onig: Regex search error"):
        prepare(tmp_path, tmp_path / "out", {"text": "a.txt"}, "tok.json")
    assert not (tmp_path / "out").exists()


def test_a_panic_of_the_library_is_told_as_any_other_error(tmp_path, monkeypatch):
    class PanicException(BaseException):
        pass

    class Library:
        class Tokenizer:
            @staticmethod
            def from_str(text):
                raise PanicException("regex")

    monkeypatch.setattr("phalanx.data.tokenizers._import_tokenizers", Library)
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    with pytest.raises(RecipeError, match=r"not a tokenizer.json that `tokenizers` can read \(regex\)"):
        load_tokenizer(tmp_path / TOKENIZER_FILE)


# --- names of control tokens, and what begins a text ------------------------------------------------------------------

CONTROL_TEXT = "a </s> <0x0A> <s><unk> b"


def with_control_tokens(kind):
    """A tokenizer of a kind whose control tokens are `<unk>`, `<s>` and `</s>`, which its model knows as pieces."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "word level":
        words = ["a", "b", "<", "/", "s", ">", "0", "x", "A", "unk"]
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(special + words)}, "<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    elif kind == "unigram":
        pieces = [(piece, 0.0) for piece in [*special, "<0x0A>"]] + [(c, -2.0) for c in "ab<>/sunk0xA\u2581"]
        made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, byte_fallback=True))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        made.decoder = tokenizers.decoders.Metaspace()
    else:
        chars = sorted({*"ab<>/sunk0xA \u0120", *tokenizers.pre_tokenizers.ByteLevel.alphabet()})
        vocab = {piece: n for n, piece in enumerate([*special, *chars, "</", "s>"])}
        # merges that make a control token, as conversions of sentencepiece have them
        merges = [("<", "/"), ("s", ">"), ("</", "s>")]
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    return made


@pytest.mark.parametrize("kind", ["byte level", "unigram", "word level"])
def test_names_of_control_tokens_in_a_document_stay_text(tmp_path, kind):
    with_control_tokens(kind).save(str(tmp_path / "tok.json"))
    write_texts(tmp_path, {"1.txt": CONTROL_TEXT})
    out = prepare(tmp_path, tmp_path / "out", {"text": "1.txt"}, "tok.json")
    tokens, tokenizer = all_tokens(out).tolist(), load_tokenizer(out)
    assert tokens.count(2) == 1  # the separator behind the document
    assert tokens.count(1) == 0
    if kind != "word level":  # of which `</s>` as a word is unknown
        assert tokenizer.decode(tokens) == CONTROL_TEXT
    assert inspect_dataset(out)["begins"].endswith("\u27e6</s>\u27e7")


def test_a_token_that_only_a_config_calls_special_stays_text(tmp_path):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(
        [TEXT],
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    bpe.add_tokens(["<turn>", "<end>", "<fine>"])
    bpe.save(str(tmp_path / TOKENIZER_FILE))
    config = {"eos_token": "<end>", "additional_special_tokens": ["<turn>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    end, fine, turn = map(bpe.token_to_id, ("<end>", "<fine>", "<turn>"))
    write_texts(tmp_path, {"1.txt": "<turn> <end> <fine>"})
    tokens = all_tokens(prepare(tmp_path, tmp_path / "out", {"text": "1.txt"}, str(tmp_path))).tolist()
    assert (tokens.count(turn), tokens.count(end), tokens.count(fine)) == (0, 1, 1)


def gemma_like(folder, template=True, **config):
    """A tokenizer that begins every text with `<bos>`, as those of Gemma and Llama 3 do."""
    folder.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    if template:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
        )
    made.save(str(folder / TOKENIZER_FILE))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("template", "config", "begins"),
    [
        (True, {}, 1),
        (True, {"add_bos_token": True}, 1),
        (False, {"add_bos_token": True}, 1),
        (False, {}, 0),
    ],
)
def test_documents_and_prompts_begin_as_their_tokenizer_begins_a_text(tmp_path, monkeypatch, template, config, begins):
    folder = gemma_like(tmp_path / "model", template, **config)
    write_texts(tmp_path / "texts", {"1.txt": "The fox " * 300, "2.txt": "<bos>x", "3.txt": ""})
    monkeypatch.setattr(sources, "CHUNK_BYTES", 500)  # a document has several chunks, and one beginning
    out = prepare(tmp_path / "texts", tmp_path / "out", {"text": "*.txt"}, str(folder))
    tokens, tokenizer = all_tokens(out).tolist(), load_tokenizer(out)
    assert (tokens.count(2), tokens.count(1)) == (2 * begins, 2)
    assert ("begin" in manifest_of(out)["tokenizer"]) == bool(begins)
    assert tokenizer.decode(tokens) == "The fox " * 300 + "<bos>x"
    prompt = tokenizer.encode_prompt("The fox")
    assert prompt == [2] * begins + tokenizer.encode("The fox").tolist()
    assert tokenizer.encode_prompt("<bos>The fox").count(2) == 1
    run = load_run_tokenizer(out / TOKENIZER_FILE, manifest_of(out)["tokenizer"], out / "huggingface")
    assert run.encode_prompt("The fox") == prompt
    if template:
        transformers = pytest.importorskip("transformers")
        assert transformers.AutoTokenizer.from_pretrained(folder)("The fox")["input_ids"] == prompt


def test_generation_ends_at_every_end_of_a_generation_config(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert find_stop_tokens(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert find_stop_tokens(tmp_path) == [5, 6]
