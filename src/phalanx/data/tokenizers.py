"""Tokenizers: bytes (built in), a Hugging Face tokenizer.json, and byte-level BPE trained on the data itself.

The last two need the `tokenizers` extra, which is imported only when such a tokenizer is used. A dataset directory
keeps its tokenizer.json, so that a run's data can be decoded wherever it is moved.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.bounded import read_bytes, read_json, read_text
from phalanx.data.manifest import TOKENIZER, is_dataset, read_manifest, token_dtype
from phalanx.data.shard import Values
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.recipe.schema import BpeTokenizerConfig, DataConfig

LARGEST = 1 << 28
"""Bytes of a tokenizer.json; the largest have some ten million."""
MOST_TOKENS = 1 << 32
"""Of a vocabulary: the library has no larger numbers."""
PANIC = "PanicException"
"""What Rust raises in Python where it gives up."""
END_OF_TEXT = "<|endoftext|>"
_OTHER_KINDS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Tokenizers that a Hugging Face directory may have instead."""
_SEPARATORS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
_ENDS = (
    "endoftext",
    "eos",
    "endofsentence",
    "endofdocument",
    "eod",
    "eot",
    "eotid",
    "imend",
    "endofturn",
    "end",
    "sep",
)
"""What ends a text is called, letters only: `<|im_end|>` of ChatML, `<|eot_id|>` of Llama 3, `[EOS]`."""


class Tokenizer(Protocol):
    """Text to tokens and back. `separator` is put behind every document; None where the vocabulary has none."""

    name: str
    vocab: int
    separator: int | None

    def encode(self, text: str) -> Values:
        """Tokens of a text, without any special ones; unsigned, as narrow as the vocabulary allows."""

    def encode_bytes(self, data: bytes, before: bytes = b"", behind: bytes = b"") -> Values:
        """Tokens of a file's bytes, which are UTF-8 as a rule but need not be, as they come out where `before` and
        `behind` surround them: those that begin in `data`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without separators; what is not UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """One token a byte; byte 0 separates documents."""

    name = "bytes"
    vocab = 256
    separator: int | None = 0

    def encode(self, text: str) -> Values:
        return self.encode_bytes(text.encode(errors="replace"))

    def encode_bytes(self, data: bytes, before: bytes = b"", behind: bytes = b"") -> Values:
        return np.frombuffer(data, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path, name: str = TOKENIZER, separator: int | Literal["found"] | None = "found"):
        """`separator`: its number where that is known, else what the files that lie with it say."""
        library = _library()
        try:
            self._tokenizer = library.Tokenizer.from_str(read_text(path, LARGEST))
            tokens = self._tokenizer.get_vocab(with_added_tokens=True).values()
        except FileNotFoundError:
            raise RecipeError(f"{path}: no such tokenizer; give `bytes`, `bpe:SIZE` or a tokenizer.json") from None
        except BaseException as error:  # the library raises nothing more special, and its panics are no Exception
            if not _is_theirs(error):
                raise
            raise RecipeError(f"{path}: not a tokenizer.json that `tokenizers` can read ({error})") from None
        # Truncation and padding are for models with fixed inputs; here they would lose or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = name
        if not tokens:
            raise RecipeError(f"{path}: its vocabulary is empty")
        self.vocab = max(tokens) + 1
        self.separator: int | None = end_of_text(path, self._tokenizer) if separator == "found" else separator
        self._dtype = token_dtype(self.vocab)

    def encode(self, text: str) -> Values:
        return np.array(self._encoded(text).ids, self._dtype)

    def encode_bytes(self, data: bytes, before: bytes = b"", behind: bytes = b"") -> Values:
        text = data.decode(errors="replace")
        if not before and not behind:
            return self.encode(text)
        left = before.decode(errors="replace")
        whole = self._encoded(left + text + behind.decode(errors="replace"))
        start, stop = (len(left) if before else -1), len(left) + len(text)
        inside = [number for number, (at, _) in zip(whole.ids, whole.offsets, strict=True) if start <= at < stop]
        return np.array(inside, self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        kept = [int(token) for token in tokens if token != self.separator]
        with self._working():
            return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def _encoded(self, text: str) -> Any:
        with self._working():
            return self._tokenizer.encode(text, add_special_tokens=False)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """DataError where the library fails: at an expression that takes too long for this text, say."""
        try:
            yield
        except BaseException as error:
            if not _is_theirs(error):
                raise
            raise DataError(
                f"data.tokenizer: {self.name} fails at a text ({error}); use another one, or leave that text out"
            ) from None


def _is_theirs(error: BaseException) -> bool:
    """Whether the library may have raised it: its panics are no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def train_bpe(texts: Iterator[str], vocab: int, path: Path) -> None:
    """Train a byte-level BPE with `vocab` tokens on `texts` and write it to `path`. The same texts give the same file.

    Token 0 is the separator `<|endoftext|>`; the 256 bytes are all in, so there is no text that it cannot encode.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")


def end_of_text(path: Path, tokenizer: Any) -> int | None:
    """The token that ends a text for the tokenizer.json at `path`: as the dataset or the Hugging Face files that lie
    with it say, else what the tokenizer itself puts behind a text, else a special token that is called so."""
    if path.name == TOKENIZER and is_dataset(path.parent):
        with suppress(DataError):  # a manifest of something else
            return (read_manifest(path.parent).tokenizer or {}).get("separator")
    found = [*_configured(path.parent), *_appended(tokenizer), *_SEPARATORS]
    ids = (each if isinstance(each, int) else tokenizer.token_to_id(each) for each in found)
    known = next((number for number in ids if number is not None and tokenizer.id_to_token(number) is not None), None)
    if known is not None:
        return known
    special = {
        re.sub(r"[^a-z]", "", token.content.lower()): number
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items(), reverse=True)
        if token.special
    }
    return next((special[name] for name in _ENDS if name in special), None)


def _configured(folder: Path) -> Iterator[str | int]:
    """Ends of text by a folder's Hugging Face files, by name or number."""
    for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        try:
            values = read_json(folder / file, LARGEST)
        except (OSError, DataError):
            continue
        for key in ("eos_token", "eos_token_id"):
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, str) or (type(value) is int and 0 <= value < MOST_TOKENS):
                yield value


def _appended(tokenizer: Any) -> Iterator[int]:
    """The token that a tokenizer puts behind every text, if it does."""
    ids = tokenizer.encode("a", add_special_tokens=True)
    if len(ids.ids) > 1 and ids.special_tokens_mask[-1]:
        yield ids.ids[-1]


def describe(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """What the manifest says of the tokenizer of a dataset that lies in `folder`."""
    if isinstance(tokenizer, ByteTokenizer):
        return {"name": tokenizer.name, "separator": 0}
    stored = folder / TOKENIZER
    return {
        "name": tokenizer.name,
        "separator": tokenizer.separator,
        "file": TOKENIZER,
        "xxh3": xxh3_128_hexdigest(stored.read_bytes()),
    }


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a dataset directory (verified against its manifest), of a tokenizer.json, or `bytes`."""
    if str(path) == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(path)
    if not is_dataset(path):
        return FileTokenizer(tokenizer_file(path))
    described = read_manifest(path).tokenizer
    if described is None:
        raise UsageError(f"{path}: a dataset of images has no tokenizer")
    if "file" not in described:
        return ByteTokenizer()
    stored = path / described["file"]
    if not stored.is_file() or xxh3_128_hexdigest(read_bytes(stored, LARGEST)) != described["xxh3"]:
        raise DataError(f"{stored}: missing, or not the tokenizer that this dataset was prepared with")
    return FileTokenizer(stored, described["name"], described.get("separator"))


def check_tokenizer(data: DataConfig, folder: Path, dataset: Path) -> None:
    """RecipeError where a dataset holds something else than tokens of `data.tokenizer` (its path relative to `folder`).
    `bytes` is the default, so it asks for nothing."""
    if data.tokenizer == ByteTokenizer.name:
        return
    described = read_manifest(dataset).tokenizer
    if described is None:
        raise RecipeError(f"data.tokenizer: is for text, and {dataset} holds pictures: leave it out")
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        asked = f"bpe:{data.tokenizer.bpe}"
        same = described["name"] == asked
    else:
        asked = data.tokenizer
        stored = tokenizer_file(folder / asked)
        if not stored.is_file():
            raise RecipeError(f"data.tokenizer: {stored}: no such tokenizer")
        same = described.get("xxh3") == xxh3_128_hexdigest(read_bytes(stored, LARGEST))
    if not same:
        raise RecipeError(
            f"data.tokenizer: found {asked}, but {dataset} was prepared with {described['name']}; leave it out, or "
            f"prepare the data again: phalanx data prepare --tokenizer {asked}"
        )


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json of a directory, such as a Hugging Face model's; a file is taken as it is. RecipeError when the
    directory has none."""
    if not path.is_dir():
        return path
    if not (path / TOKENIZER).is_file():
        others = [name for name in _OTHER_KINDS if (path / name).is_file()]
        cure = (
            f"transformers makes one of {others[0]}: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
            if others
            else "name the file of one, or a directory that has one"
        )
        raise RecipeError(f"data.tokenizer: {path} has no {TOKENIZER}; {cure}")
    return path / TOKENIZER


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise UsageError(
            "this tokenizer needs the `tokenizers` package: pip install 'phalanx[tokenizers]', or use `bytes`"
        ) from None
    return tokenizers
