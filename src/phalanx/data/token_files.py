"""Tokens that other tools wrote: Megatron (`.bin` and `.idx`), nanoGPT (`.bin`), llm.c (`.bin`). They are copied.

Megatron's index says where documents begin. In the others the token that ends a text stands between them: nanoGPT puts
it behind a document, llm.c in front, where a document may also continue in the next file.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from phalanx.data.order import Int64Array
from phalanx.data.shard import ValueArray
from phalanx.data.source_files import SourceFile, stat_source_file
from phalanx.data.sources import CHUNK_BYTES, FilePart, translate_read_errors
from phalanx.data.tokenizers import Tokenizer
from phalanx.errors import DataError, RecipeError
from phalanx.storage.store import open_location

_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of the tokens, sequences, documents + 1
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLM_C_DTYPES = {20240520: "<u2", 20240801: "<u4"}
_LLM_C_HEADER_BYTES = 1024
_INDEX_SUFFIX = ".idx"


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens. `document_starts`: in tokens; None where a token separates documents."""

    path: str
    token_format: str
    dtype: np.dtype[np.integer]
    num_tokens: int
    header_bytes: int = 0
    document_starts: Int64Array | None = None


def find_token_parts(
    files: Sequence[SourceFile], token_format: str, tokenizer: Tokenizer, part_bytes: int
) -> tuple[list[SourceFile], list[FilePart]]:
    """The files of tokens among `files`, with their index files, and their parts, in tokens. DataError for one that is
    cut short or of another format."""
    found: list[SourceFile] = []
    parts: list[FilePart] = []
    for file in files:
        if file.path.endswith(_INDEX_SUFFIX):  # of a glob such as data/*
            continue
        tokens = open_token_file(file.path, token_format)
        found.append(file)
        if tokens.token_format == "megatron":
            found.append(stat_source_file(_index_path(file.path)))
        first, separator = next(_read_blocks(tokens, 0, min(tokens.num_tokens, 1)), None), tokenizer.separator_token
        begins_document = first is None or separator is None or first[0] == separator
        continues = tokens.token_format == "llm.c" and bool(parts) and not begins_document
        count = max(round(file.size / part_bytes), 1)
        for start, stop in pairwise(tokens.num_tokens * number // count for number in range(count + 1)):
            size = (stop - start) * tokens.dtype.itemsize
            parts.append(FilePart(file.path, start, stop, size, stop == tokens.num_tokens, continues=continues))
    if not parts:
        raise RecipeError("data.source.tokens: names index files (.idx) only; name the .bin files")
    return found, parts


def open_token_file(path: str, token_format: str) -> TokenFile:
    """What a file of tokens holds, by its header or index. `detect`: Megatron's with an index, llm.c's by its first
    bytes, else nanoGPT's."""
    with translate_read_errors(path), open_location(path) as file:
        head = file.read(_LLM_C_HEADER_BYTES)
        size = file.seek(0, 2)
    if token_format == "detect":
        is_llm_c = int.from_bytes(head[:4], "little") in _LLM_C_DTYPES
        token_format = "megatron" if _has_index(path) else "llm.c" if is_llm_c else "nanogpt"
    if token_format == "megatron":
        return _open_megatron(path, size)
    if token_format == "llm.c":
        magic, _, count = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
        if magic not in _LLM_C_DTYPES:
            raise DataError(f"{path}: not a token file of llm.c: begins with {magic}, not 20240520 or 20240801")
        tokens = TokenFile(path, token_format, np.dtype(_LLM_C_DTYPES[magic]), count, _LLM_C_HEADER_BYTES)
    else:
        tokens = TokenFile(path, token_format, np.dtype("<u2"), size // 2)
        first = np.frombuffer(head[: len(head) // 4 * 4], tokens.dtype)
        if size % 2 or (len(first) > 16 and not first[1::2].any()):
            why = f"its {size} bytes are no whole number of them" if size % 2 else "every second one is 0"
            raise DataError(f"{path}: not raw tokens of 16 bits, as nanoGPT writes them: {why}")
    _check_size(tokens, size)
    return tokens


def _check_size(tokens: TokenFile, size: int) -> None:
    expected = tokens.header_bytes + tokens.num_tokens * tokens.dtype.itemsize
    if size != expected:
        what = "cut short" if size < expected else "too long"
        raise DataError(f"{tokens.path}: is {what}: {size} bytes, {tokens.num_tokens} tokens have {expected}")


def _index_path(path: str) -> str:
    return path.removesuffix(".bin") + _INDEX_SUFFIX


def _has_index(path: str) -> bool:
    try:
        stat_source_file(_index_path(path))
    except RecipeError:
        return False
    return True


def _open_megatron(path: str, size: int) -> TokenFile:
    index_path = _index_path(path)
    with translate_read_errors(index_path), open_location(index_path) as file:
        header = file.read(_MEGATRON_HEADER.size).ljust(_MEGATRON_HEADER.size, b"\0")
        magic, version, code, num_sequences, num_edges = _MEGATRON_HEADER.unpack(header)
        if (magic, version) != (_MEGATRON_MAGIC, 1) or code not in _MEGATRON_DTYPES:
            raise DataError(f"{index_path}: not an index of Megatron, version 1, of tokens that are integers")
        index = file.read(12 * num_sequences + 8 * num_edges)
    if len(index) < 12 * num_sequences + 8 * num_edges:
        raise DataError(f"{index_path}: cut short: it has no {num_sequences} sequences and {num_edges - 1} documents")
    lengths = np.frombuffer(index, "<i4", num_sequences)
    pointers = np.frombuffer(index, "<i8", num_sequences, 4 * num_sequences)
    documents = np.frombuffer(index, "<i8", num_edges, 12 * num_sequences)
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_whole = num_edges > 0 and documents[0] == 0 and documents[-1] == num_sequences
    if not is_whole or (np.diff(documents) < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{index_path}: its documents are not its sequences, one after the other")
    tokens = TokenFile(path, "megatron", dtype, int(starts[-1]), 0, np.unique(starts[documents[:-1]]))
    _check_size(tokens, size)
    return tokens


def iterate_tokens(tokens: TokenFile, part: FilePart, tokenizer: Tokenizer) -> Iterator[tuple[ValueArray, Int64Array]]:
    """The tokens of a part in blocks, and where in each of them documents begin. DataError for a token that the
    vocabulary does not have."""
    at, separator = part.start, tokenizer.separator_token
    ended = at == 0 and not part.continues  # whether the next token begins a document
    if at > 0 and tokens.token_format == "nanogpt":
        ended = next(_read_blocks(tokens, at - 1, at))[0] == separator
    for block in _read_blocks(tokens, at, part.stop):
        _check_vocabulary(tokens, block, at, tokenizer)
        if tokens.document_starts is not None:
            inside = slice(*np.searchsorted(tokens.document_starts, [at, at + len(block)]))
            starts = tokens.document_starts[inside] - at
        else:
            is_separator = np.zeros(len(block), np.bool_) if separator is None else block == separator
            begins = is_separator if tokens.token_format == "llm.c" else np.concatenate([[False], is_separator[:-1]])
            begins[0] |= ended
            starts, ended = np.flatnonzero(begins), bool(is_separator[-1]) and tokens.token_format == "nanogpt"
        yield block, starts
        at += len(block)


def _read_blocks(tokens: TokenFile, start: int, stop: int) -> Iterator[npt.NDArray[np.integer]]:
    width = tokens.dtype.itemsize
    with translate_read_errors(tokens.path), open_location(tokens.path) as file:
        file.seek(tokens.header_bytes + start * width)
        while start < stop:
            data = file.read(min((stop - start) * width, CHUNK_BYTES))
            if not data or len(data) % width:
                raise DataError(f"{tokens.path}: ends at token {start}, and had {tokens.num_tokens} before")
            yield np.frombuffer(data, tokens.dtype)
            start += len(data) // width


def _check_vocabulary(tokens: TokenFile, block: npt.NDArray[np.integer], start: int, tokenizer: Tokenizer) -> None:
    is_outside = (block < 0) | (block >= tokenizer.vocab_size)
    if is_outside.any():
        at = int(is_outside.argmax())
        raise DataError(
            f"{tokens.path}: token {block[at]} at position {start + at} is not in the vocabulary of data.tokenizer "
            f"({tokenizer.name}: 0 to {tokenizer.vocab_size - 1}); name the tokenizer.json that made these tokens"
        )
