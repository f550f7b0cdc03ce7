"""Tokenizers: bytes (built in), a Hugging Face tokenizer.json, and byte-level BPE trained on the data itself.

The last two need the `tokenizers` extra, which is imported only when such a tokenizer is used. A dataset directory
keeps its tokenizer.json, so that a run's data can be decoded wherever it is moved.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.data.manifest import (
    TOKENIZER_FILE,
    is_dataset,
    is_tokenizer_description,
    narrowest_token_dtype,
    read_manifest,
)
from phalanx.data.shard import ValueArray
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.recipe.data_schema import BpeTokenizerConfig, DataConfig
from phalanx.recipe.locations import localize_tokenizer
from phalanx.safe_files import read_bytes, read_json, read_text

MAX_TOKENIZER_BYTES = 1 << 28
"""Bytes of a tokenizer.json; the largest have some ten million."""
MAX_VOCAB_SIZE = 1 << 32
"""Maximum vocabulary: the library has no larger numbers."""
RUST_PANIC_NAME = "PanicException"
"""What Rust raises in Python where it gives up."""
END_OF_TEXT_TOKEN = "<|endoftext|>"
_OTHER_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Tokenizers that a Hugging Face directory may have instead."""
_SEPARATOR_TOKENS = (
    END_OF_TEXT_TOKEN,
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "[EOS]",
    "[SEP]",
)
"""What ends a text in well-known vocabularies."""
_BYTE_PIECES_REGEX = "(?<=<)(?=0x[0-9A-F]{2}>)"
"""Within the text of a byte's token, such as `<0x0A>`."""


@dataclass(frozen=True)
class TextEnds:
    """What is put around every document: `begin` before it, `separator` behind it; and further control tokens, which
    only the files next to a tokenizer.json call so."""

    separator: int | None = None
    begin: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


NO_ENDS = TextEnds()


class Tokenizer(Protocol):
    """Text to tokens and back. `begin_tokens` are put before every document, as the tokenizer does it itself, and
    `separator_token` behind it; None where the vocabulary has none."""

    name: str
    vocab_size: int
    begin_tokens: tuple[int, ...]
    separator_token: int | None
    control_tokens: Mapping[int, str]
    """Names of the tokens that are no text."""

    def encode(self, text: str) -> ValueArray:
        """Tokens of a document's text, without those around it; unsigned, as narrow as the vocabulary allows. The name
        of a control token in it is text."""

    def encode_bytes(self, data: bytes, before: bytes = b"", after: bytes = b"") -> ValueArray:
        """Tokens of a file's bytes, which are UTF-8 as a rule but need not be, as they come out where `before` and
        `after` surround them: those that begin in `data`."""

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a text that is to be continued: behind what begins a document, once. The name of a control token in
        it is that token."""

    def encode_document(self, text: str) -> list[int]:
        """Tokens of a text with what the tokenizer itself puts before and behind it. The name of a control token in it
        is text."""

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a text in which the name of a control token is that token, and the character where each begins.
        Nothing is put around them."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without those around documents; what is not UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """One token a byte; byte 0 separates documents."""

    name = "bytes"
    vocab_size = 256
    begin_tokens: tuple[int, ...] = ()
    separator_token: int | None = 0
    control_tokens: Mapping[int, str] = {0: "byte 0"}

    def encode(self, text: str) -> ValueArray:
        return self.encode_bytes(text.encode(errors="replace"))

    def encode_bytes(self, data: bytes, before: bytes = b"", after: bytes = b"") -> ValueArray:
        return np.frombuffer(data, np.uint8)

    def encode_prompt(self, text: str) -> list[int]:
        return [int(token) for token in self.encode(text)]

    def encode_document(self, text: str) -> list[int]:
        return self.encode_prompt(text)

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        encoded = [(byte, at) for at, character in enumerate(text) for byte in character.encode(errors="replace")]
        return [byte for byte, _ in encoded], [at for _, at in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path, name: str = TOKENIZER_FILE, ends: TextEnds | None = None):
        """`ends`: what is around a document, where that is known; else as the files that lie with it say."""
        library = _import_tokenizers()
        try:
            self._json = read_text(path, MAX_TOKENIZER_BYTES)
            self._tokenizer = library.Tokenizer.from_str(self._json)
            tokens = self._tokenizer.get_vocab(with_added_tokens=True).values()
        except FileNotFoundError:
            raise RecipeError(
                f"{path}: no such tokenizer; give `bytes`, a tokenizer.json, or for a new BPE "
                "`data.tokenizer={bpe: SIZE}` (of `phalanx data prepare`: `--tokenizer bpe:SIZE`)"
            ) from None
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
        self.vocab_size = max(tokens) + 1
        self.ends = find_text_ends(path, self._tokenizer) if ends is None else ends
        self.begin_tokens, self.separator_token = self.ends.begin, self.ends.separator
        around = (*self.begin_tokens, self.separator_token, *self.ends.others)
        special = (number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)
        numbers = sorted({*special, *(number for number in around if number is not None)})
        self.control_tokens: Mapping[int, str] = {number: self._tokenizer.id_to_token(number) for number in numbers}
        self._dtype = narrowest_token_dtype(self.vocab_size)

    def encode(self, text: str) -> ValueArray:
        return np.array(self._encoded(text).ids, self._dtype)

    def encode_prompt(self, text: str) -> list[int]:
        tokens, _ = self.encode_marked(text)
        begin = list(self.begin_tokens)
        return tokens if tokens[: len(begin)] == begin else begin + tokens

    def encode_document(self, text: str) -> list[int]:
        with self._working():
            pattern = self._tokenizer.encode("a", add_special_tokens=True)
        num_behind = next((at for at, is_added in enumerate(pattern.special_tokens_mask[::-1]) if not is_added), 0)
        behind = pattern.ids[len(pattern.ids) - num_behind :]
        return [*self.begin_tokens, *self.encode(text).tolist(), *behind]

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        with self._working():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids), [start for start, _ in encoding.offsets]

    def encode_bytes(self, data: bytes, before: bytes = b"", after: bytes = b"") -> ValueArray:
        text = data.decode(errors="replace")
        if not before and not after:
            return self.encode(text)
        before_text = before.decode(errors="replace")
        whole = self._encoded(before_text + text + after.decode(errors="replace"))
        start, stop = (len(before_text) if before else -1), len(before_text) + len(text)
        inside = [number for number, (at, _) in zip(whole.ids, whole.offsets, strict=True) if start <= at < stop]
        return np.array(inside, self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        around = (*self.begin_tokens, self.separator_token)
        kept = [int(token) for token in tokens if token not in around]
        with self._working():
            return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def _encoded(self, text: str) -> Any:
        with self._working():
            return self._text_tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _text_tokenizer(self) -> Any:
        """The same tokenizer, but no text becomes a control token."""
        described = hide_control_tokens(self._json, self.control_tokens)
        tokenizer = _import_tokenizers().Tokenizer.from_str(json.dumps(described))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """DataError where the library fails: at an expression that takes too long for this text, say."""
        try:
            yield
        except BaseException as error:
            if not _is_theirs(error):
                raise
            raise DataError(
                f"data.tokenizer: {self.name} fails on a text ({error}); use another one, or leave that text out"
            ) from None


def _is_theirs(error: BaseException) -> bool:
    """Whether the library may have raised it: its panics are no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == RUST_PANIC_NAME


def hide_control_tokens(tokenizer_json: str, control_tokens: Mapping[int, str]) -> dict[str, Any]:
    """The contents of a tokenizer.json in which these tokens have names that no text has. Numbers stay. The library's
    own `encode_special_tokens` only keeps added tokens from being looked for: models of whole words and of pieces find
    them nevertheless."""
    described: dict[str, Any] = json.loads(tokenizer_json)
    secret = os.urandom(8).hex()
    hidden = {name: f"\uffff{secret}-{number}" for number, name in control_tokens.items()}
    described |= {"truncation": None, "padding": None, "post_processor": None}
    for token in described.get("added_tokens") or []:
        token["content"] = hidden.get(token["content"], token["content"])
    model = described["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {hidden.get(piece, piece): number for piece, number in vocab.items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if merges := model.get("merges"):
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges)
        model["merges"] = [merge for merge, pair in pairs if hidden.keys().isdisjoint((*pair, "".join(pair)))]
    if isinstance(vocab, list) and model.get("byte_fallback"):  # else the text `<0x0A>` is a new line
        cut = {"type": "Split", "pattern": {"Regex": _BYTE_PIECES_REGEX}, "behavior": "Isolated", "invert": False}
        before = [described["pre_tokenizer"]] if described.get("pre_tokenizer") else []
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before, cut]}
    return described


def show_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, with the names of control tokens in brackets."""
    names = tokenizer.control_tokens
    pieces: list[str] = []
    for is_control, group in groupby(tokens, lambda token: token in names):
        run = list(group)
        pieces += [show_control_token(names[token]) for token in run] if is_control else [tokenizer.decode(run)]
    return "".join(pieces)


def show_control_token(name: str) -> str:
    """The name of a control token as it is shown within text, which cannot be taken for it."""
    return f"\u27e6{name}\u27e7"


def train_bpe_tokenizer(texts: Iterator[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE with `vocab_size` tokens on `texts` and write it to `path`. The same texts give the same
    file.

    Token 0 is the separator `<|endoftext|>`; the 256 bytes are all in, so there is no text that it cannot encode.
    """
    library = _import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_TOKEN],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")


def find_text_ends(path: Path, tokenizer: Any) -> TextEnds:
    """What is around a document by the tokenizer.json at `path`: as the dataset or the Hugging Face files that lie with
    it say, else as the tokenizer itself puts it."""
    if path.name == TOKENIZER_FILE and is_dataset(path.parent):
        with suppress(DataError):  # a manifest of something else
            return ends_in_manifest(read_manifest(path.parent).tokenizer or {})
    others = _find_named_tokens(path.parent, tokenizer)
    return TextEnds(_find_end_of_text(path.parent, tokenizer), _find_begin_of_text(path.parent, tokenizer), others)


def ends_in_manifest(described: Mapping[str, Any]) -> TextEnds:
    """What is around the documents of a dataset, by its manifest."""
    return TextEnds(described.get("separator"), tuple(described.get("begin", ())))


def _find_begin_of_text(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """What a tokenizer puts before every text: by its template, or by `add_bos_token` of its folder."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    if num_added := next((at for at, is_added in enumerate(encoding.special_tokens_mask) if not is_added), 0):
        return tuple(encoding.ids[:num_added])
    config = _read_config(folder / "tokenizer_config.json")
    if config.get("add_bos_token") is not True:
        return ()
    named = config.get("bos_token") or _read_config(folder / "special_tokens_map.json").get("bos_token")
    number = tokenizer.token_to_id(read_token_name(named) or "")
    return () if number is None else (number,)


def _find_end_of_text(folder: Path, tokenizer: Any) -> int | None:
    """The token that ends a text: as the Hugging Face files of a folder say, else what the tokenizer itself puts behind
    a text, else one of _SEPARATOR_TOKENS."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    appended = encoded.ids[-1:] if len(encoded.ids) > 1 and encoded.special_tokens_mask[-1] else []
    found = [*_iterate_configured_ends(folder), *appended, *_SEPARATOR_TOKENS]
    ids = (each if isinstance(each, int) else tokenizer.token_to_id(each) for each in found)
    return next((number for number in ids if number is not None and tokenizer.id_to_token(number) is not None), None)


def _find_named_tokens(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Control tokens by a folder's Hugging Face files."""
    numbers = map(tokenizer.token_to_id, _iterate_named_tokens(folder))
    return tuple(sorted({number for number in numbers if number is not None}))


def _iterate_named_tokens(folder: Path) -> Iterator[str]:
    """Names of control tokens by a folder's Hugging Face files."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _read_config(folder / file)
        for key, value in config.items():
            if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
                yield from filter(None, map(read_token_name, value if isinstance(value, list) else [value]))
        added = config.get("added_tokens_decoder")
        for token in added.values() if isinstance(added, dict) else ():
            if isinstance(token, dict) and token.get("special"):
                yield from filter(None, [read_token_name(token)])


def read_token_name(value: object) -> str | None:
    """The name of a token as Hugging Face's files write it: alone, or with its properties."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    """A JSON file of a Hugging Face directory; empty where there is none that can be read."""
    try:
        return read_json(path, MAX_TOKENIZER_BYTES)
    except (OSError, DataError):
        return {}


def _iterate_configured_ends(folder: Path) -> Iterator[str | int]:
    """Ends of text by a folder's Hugging Face files, by name or number."""
    for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        values = _read_config(folder / file)
        for key in ("eos_token", "eos_token_id"):
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, str) or (type(value) is int and 0 <= value < MAX_VOCAB_SIZE):
                yield value


def describe_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """What the manifest says of the tokenizer of a dataset that lies in `folder`."""
    if isinstance(tokenizer, ByteTokenizer):
        return {"name": tokenizer.name, "separator": 0}
    stored = folder / TOKENIZER_FILE
    return {
        "name": tokenizer.name,
        "separator": tokenizer.separator_token,
        **({"begin": list(tokenizer.begin_tokens)} if tokenizer.begin_tokens else {}),
        "file": TOKENIZER_FILE,
        "xxh3": xxh3_128_hexdigest(stored.read_bytes()),
    }


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a dataset directory (verified against its manifest), of a tokenizer.json, or `bytes`."""
    if str(path) == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(path)
    if not is_dataset(path):
        return HuggingFaceTokenizer(find_tokenizer_file(path))
    described = read_manifest(path).tokenizer
    if described is None:
        raise UsageError(f"{path}: a dataset of images has no tokenizer")
    if "file" not in described:
        return ByteTokenizer()
    stored = path / described["file"]
    if not stored.is_file() or xxh3_128_hexdigest(read_bytes(stored, MAX_TOKENIZER_BYTES)) != described["xxh3"]:
        raise DataError(f"{stored}: missing, or not the tokenizer that this dataset was prepared with")
    return HuggingFaceTokenizer(stored, described["name"], ends_in_manifest(described))


def load_run_tokenizer(path: Path, described: object, companions: Path) -> Tokenizer:
    """The tokenizer.json of a run, or `bytes`. `described`: what the run's plan says of it. `companions`: what came
    with it."""
    if not path.exists():
        return ByteTokenizer()
    tokenizer = HuggingFaceTokenizer(path)
    if isinstance(described, dict) and is_tokenizer_description(described, tokenizer.vocab_size):
        others = _find_named_tokens(companions, tokenizer._tokenizer)
        return HuggingFaceTokenizer(path, ends=replace(ends_in_manifest(described), others=others))
    return tokenizer


def find_stop_tokens(folder: Path) -> list[int]:
    """The tokens at which generation ends by a Hugging Face directory: there may be several."""
    for file in ("generation_config.json", "config.json"):
        value = _read_config(folder / file).get("eos_token_id")
        if numbers := [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]:
            return numbers
    return []


def check_tokenizer(data: DataConfig, folder: Path, dataset: Path) -> None:
    """RecipeError where a dataset holds something else than tokens of `data.tokenizer` (its path relative to `folder`).
    `bytes` is the default, so it asks for nothing."""
    if data.tokenizer == ByteTokenizer.name:
        return
    described = read_manifest(dataset).tokenizer
    if described is None:
        raise RecipeError(f"data.tokenizer: is for text, and {dataset} has images: leave it out")
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        asked = f"bpe:{data.tokenizer.bpe}"
        same = described["name"] == asked
    else:
        asked = data.tokenizer
        stored = find_tokenizer_file(localize_tokenizer(asked, folder))
        if not stored.is_file():
            raise RecipeError(f"data.tokenizer: {stored}: no such tokenizer")
        same = described.get("xxh3") == xxh3_128_hexdigest(read_bytes(stored, MAX_TOKENIZER_BYTES))
    if not same:
        raise RecipeError(
            f"data.tokenizer: found {asked}, but {dataset} was prepared with {described['name']}; leave it out, or "
            f"prepare the data again: phalanx data prepare --tokenizer {asked}"
        )


def find_tokenizer_file(path: Path) -> Path:
    """The tokenizer.json of a directory, such as a Hugging Face model's; a file is taken as it is. RecipeError when the
    directory has none."""
    if not path.is_dir():
        return path
    if not (path / TOKENIZER_FILE).is_file():
        others = [name for name in _OTHER_TOKENIZER_FILES if (path / name).is_file()]
        cure = "name the file of one, or a directory that has one"
        if others:
            cure = f"transformers makes one of {others[0]}: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
        raise RecipeError(f"data.tokenizer: {path} has no {TOKENIZER_FILE}; {cure}")
    return path / TOKENIZER_FILE


def _import_tokenizers() -> Any:
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
