"""Tokenizers: bytes (built in), a Hugging Face tokenizer.json, and byte-level BPE trained on the data itself.

The last two need the `tokenizers` extra, which is imported only when such a tokenizer is used. A dataset directory
keeps its tokenizer.json, so that a run's data can be decoded wherever it is moved.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.bounded import read_text
from phalanx.data.manifest import is_dataset, read_manifest, token_dtype
from phalanx.data.shard import Values
from phalanx.errors import DataError, RecipeError, UsageError

TOKENIZER = "tokenizer.json"
LARGEST = 1 << 28
"""Bytes of a tokenizer.json; the largest have some ten million."""
PANIC = "PanicException"
"""What Rust raises in Python where it gives up."""
END_OF_TEXT = "<|endoftext|>"
_OTHER_KINDS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Tokenizers that a Hugging Face directory may have instead."""
_SEPARATORS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back. `separator` is put behind every document; None where the vocabulary has none."""

    name: str
    vocab: int
    separator: int | None

    def encode(self, text: str) -> Values:
        """Tokens of a text, without any special ones; unsigned, as narrow as the vocabulary allows."""

    def encode_bytes(self, data: bytes) -> Values:
        """Tokens of a file's bytes, which are UTF-8 as a rule but need not be."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without separators; what is not UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """One token a byte; byte 0 separates documents."""

    name = "bytes"
    vocab = 256
    separator: int | None = 0

    def encode(self, text: str) -> Values:
        return self.encode_bytes(text.encode(errors="replace"))

    def encode_bytes(self, data: bytes) -> Values:
        return np.frombuffer(data, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path, name: str = TOKENIZER):
        library = _library()
        try:
            self._tokenizer = library.Tokenizer.from_str(read_text(path, LARGEST))
            tokens = self._tokenizer.get_vocab(with_added_tokens=True).values()
        except FileNotFoundError:
            raise RecipeError(f"{path}: no such tokenizer; give `bytes`, `bpe:SIZE` or a tokenizer.json") from None
        except BaseException as error:  # the library raises nothing more special, and its panics are no Exception
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise RecipeError(f"{path}: not a tokenizer.json that `tokenizers` can read ({error})") from None
        # Truncation and padding are for models with fixed inputs; here they would lose or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = name
        if not tokens:
            raise RecipeError(f"{path}: a tokenizer without a token")
        self.vocab = max(tokens) + 1
        ids = map(self._tokenizer.token_to_id, _SEPARATORS)
        self.separator: int | None = next((number for number in ids if number is not None), None)
        self._dtype = token_dtype(self.vocab)

    def encode(self, text: str) -> Values:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self._dtype)

    def encode_bytes(self, data: bytes) -> Values:
        return self.encode(data.decode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        kept = [int(token) for token in tokens if token != self.separator]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


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
    if not stored.is_file() or xxh3_128_hexdigest(stored.read_bytes()) != described["xxh3"]:
        raise DataError(f"{stored}: missing, or not the tokenizer that this dataset was prepared with")
    return FileTokenizer(stored, described["name"])


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
