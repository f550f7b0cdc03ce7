"""Token files of other tools: what struct and numpy write is copied token by token, with its documents."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from phalanx.cli.main import main
from phalanx.data import prepare_plan, verify_dataset
from phalanx.data.manifest import read_manifest
from phalanx.data.packing import list_documents
from phalanx.data.shard import read_sidecar
from phalanx.errors import DataError, RecipeError
from small_data import all_tokens, contents, manifest_of, opened, prepare

END = 0
MEGATRON_CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A tokenizer.json of 300 tokens, of which 0 ends a text."""
    words = {"<|endoftext|>": END} | {f"w{number}": number for number in range(1, 300)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(1, 200, length) for length in (50, 1, 700, 3, 120, 2000, 33)]


def write_nanogpt(path: Path, documents: list[np.ndarray]) -> np.ndarray:
    tokens = np.concatenate([np.append(document, END) for document in documents])
    tokens.astype("<u2").tofile(path)
    return tokens


def write_llm_c(path: Path, documents: list[np.ndarray], magic: int = 20240520, dtype: str = "<u2") -> np.ndarray:
    tokens = np.concatenate([np.insert(document, 0, END) for document in documents])
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1 if magic == 20240520 else 7, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return tokens


def write_megatron(path: Path, documents: list[np.ndarray], dtype: str = "i4", sentences: int = 1) -> np.ndarray:
    """Write documents of several sequences each, and their index."""
    sequences = [part for document in documents for part in np.array_split(document, sentences)]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    edges = np.arange(0, len(sequences) + 1, sentences, dtype="<i8")
    tokens = np.concatenate(sequences).astype(dtype)
    tokens.tofile(path)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, MEGATRON_CODES[dtype], len(sequences), len(edges))
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + edges.tobytes())
    return tokens


def document_starts(folder: Path) -> list[int]:
    """Where documents begin, in tokens from the first of the dataset."""
    first, starts = 0, []
    for entry in read_manifest(folder).shards:
        starts += [first + start for start in read_sidecar(folder, entry).documents.tolist()]
        first += entry.count
    return starts


def starts_of(documents: list[np.ndarray], extra: int) -> list[int]:
    return np.cumsum([0, *(len(document) + extra for document in documents[:-1])]).tolist()


WRITERS: dict[str, tuple[str, Callable[[Path, list[np.ndarray]], np.ndarray], int]] = {
    "nanogpt": ("nanogpt", write_nanogpt, 1),
    "llm.c": ("llm.c", write_llm_c, 1),
    "llm.c-32": ("llm.c", lambda path, documents: write_llm_c(path, documents, 20240801, "<u4"), 1),
    **{
        f"megatron-{dtype}": (
            "megatron",
            lambda path, documents, dtype=dtype: write_megatron(path, documents, dtype),
            0,
        )
        for dtype in MEGATRON_CODES
    },
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "detected"])
@pytest.mark.parametrize("writer", WRITERS)
def test_tokens_and_documents_come_back_as_they_were_written(
    vocabulary, documents, tmp_path, monkeypatch, writer, named
):
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 500)
    token_format, write, extra = WRITERS[writer]
    tokens = write(tmp_path / "a.bin", documents)
    source = {"tokens": "*.bin", "format": token_format if named else "detect"}
    outs = [prepare(tmp_path, tmp_path / f"out{n}", source, "tokenizer.json", num_workers=n) for n in (1, 2)]
    assert contents(outs[0]) == contents(outs[1])
    assert len(manifest_of(outs[0])["shards"]) > 3
    assert all_tokens(outs[0]).tolist() == tokens.tolist()
    assert document_starts(outs[0]) == starts_of(documents, extra)
    assert manifest_of(outs[0])["vocab"] == 300
    verify_dataset(outs[0])


def test_a_document_of_megatron_is_all_of_its_sequences(vocabulary, documents, tmp_path):
    tokens = write_megatron(tmp_path / "a.bin", documents, "u2", sentences=3)
    out = prepare(tmp_path, tmp_path / "out", {"tokens": "a.*"}, "tokenizer.json")
    assert all_tokens(out).tolist() == tokens.tolist()
    assert document_starts(out) == starts_of(documents, 0)


def test_a_document_that_llm_c_continues_in_the_next_file_stays_one(vocabulary, documents, tmp_path):
    tokens = write_llm_c(tmp_path / "whole.bin", documents)
    for number, part in enumerate(np.split(tokens, [300])):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(part)
        (tmp_path / f"{number}.bin").write_bytes(header.tobytes() + part.astype("<u2").tobytes())
    whole = prepare(tmp_path, tmp_path / "out1", {"tokens": "whole.bin"}, "tokenizer.json")
    divided = prepare(tmp_path, tmp_path / "out2", {"tokens": "[01].bin"}, "tokenizer.json")
    assert contents(whole) == contents(divided)


def test_token_files_are_packed_and_share_no_document_with_validation(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 500)
    documents = [np.full(5 + number % 7, number) for number in range(1, 200)]
    write_nanogpt(tmp_path / "a.bin", documents)
    out = prepare(tmp_path, tmp_path / "out", {"tokens": "a.bin"}, "tokenizer.json")
    data = opened(out, sequence=32, share=0.2, packing="whole", document_masking=True)
    train = set(data.read_training(0, data.num_train_samples)["tokens"].ravel().tolist()) - {END}
    validation = set(data.read_validation(0, data.num_validation_samples)["tokens"].ravel().tolist()) - {END}
    assert train | validation == set(range(1, 200))
    assert not train & validation
    ranges = list_documents(out, read_manifest(out), 0.2)
    assert sum(len(part.start) for part in ranges) >= 199


def test_a_token_outside_the_vocabulary_is_named_with_its_position(vocabulary, documents, tmp_path):
    tokens = np.concatenate(documents)
    tokens[333] = 300
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a\.bin: token 300 at position 333 is not in the vocabulary .* 0 to 299"):
        prepare(tmp_path, tmp_path / "out", {"tokens": "a.bin"}, "tokenizer.json")
    with pytest.raises(DataError, match=r"a\.bin: token 300 .* \(bytes: 0 to 255\); name the tokenizer\.json"):
        prepare(tmp_path, tmp_path / "out", {"tokens": "a.bin"})
    with pytest.raises(RecipeError, match="is trained on text, and the source has tokens"):
        prepare(tmp_path, tmp_path / "out", {"tokens": "a.bin"}, {"bpe": 300})


@pytest.mark.parametrize(
    ("writer", "file", "change", "words"),
    [
        ("megatron-i4", "a.idx", lambda data: b"MMIDIDY" + data[7:], r"a\.idx: not an index of Megatron"),
        ("megatron-i4", "a.idx", lambda data: data[:17] + b"\6" + data[18:], "of tokens that are integers"),
        ("megatron-i4", "a.idx", lambda data: data[:-8], r"a\.idx: cut short: it has no 7 sequences and 7"),
        ("megatron-i4", "a.idx", lambda data: data[:10], r"a\.idx: not an index of Megatron"),
        ("megatron-i4", "a.idx", lambda data: data[:-8] + b"\x63" + data[-7:], "its documents are not its sequences"),
        ("megatron-i4", "a.bin", lambda data: data[:-4], r"a\.bin: is cut short: 11624 bytes, 2907 tokens have 11628"),
        ("llm.c", "a.bin", lambda data: data[:-2], r"a\.bin: is cut short"),
        ("llm.c", "a.bin", lambda data: data + b"x", r"a\.bin: is too long"),
        ("llm.c", "a.bin", lambda data: data[:100], r"a\.bin: is cut short"),
        ("llm.c", "a.bin", lambda data: b"\1" + data[1:], "begins with .*, not 20240520 or 20240801"),
        ("llm.c", "a.bin", lambda data: b"", "begins with 0, not 20240520"),
        ("nanogpt", "a.bin", lambda data: data[:-1], r"a\.bin: not raw tokens of 16 bits, .*: its 5827 bytes are no"),
        (
            "nanogpt",
            "a.bin",
            lambda data: b"\0\0".join(data[at : at + 2] for at in range(0, 200, 2)),
            "every second one is 0",
        ),
    ],
)
def test_token_files_that_are_damaged_or_others_end_with_65(
    vocabulary, documents, tmp_path, monkeypatch, capsys, writer, file, change, words
):
    monkeypatch.chdir(tmp_path)
    token_format, write, _ = WRITERS[writer]
    write(tmp_path / "a.bin", documents)
    (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    with pytest.raises(DataError, match=words):
        prepare(tmp_path, tmp_path / "out", {"tokens": "a.bin", "format": token_format}, "tokenizer.json")
    options = ["--tokens", token_format, "--tokenizer", "tokenizer.json", "--out", "out"]
    assert main(["data", "prepare", "a.bin", *options]) == 65
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_index_without_its_tokens_is_no_source(vocabulary, documents, tmp_path):
    write_megatron(tmp_path / "a.bin", documents)
    with pytest.raises(RecipeError, match=r"names index files \(\.idx\) only"):
        prepare(tmp_path, tmp_path / "out", {"tokens": "*.idx"}, "tokenizer.json")
