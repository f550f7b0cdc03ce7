"""How a source is divided into pieces, and how one piece becomes one shard.

The division depends on the files alone, so the shards are the same bytes however many workers write them, and a shard
that was finished before an interruption is a shard that need not be written again.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.data.chat import ChatEncoder, ChatPlan
from phalanx.data.chat_images import ImageProcessor, read_processor_files
from phalanx.data.chat_template import NoChatTemplateError, join_contents, load_chat_template
from phalanx.data.images import find_idx_pair, find_image_dir, find_webdataset, read_idx_records, read_image_record
from phalanx.data.manifest import (
    DATASET_FORMAT,
    LABEL_BYTES,
    TOKEN_MASK,
    TOKENIZER_FILE,
    ShardEntry,
    narrowest_token_dtype,
)
from phalanx.data.rows import WHOLE_RECORD, BadRowError, BadRows, SkippedRows
from phalanx.data.shard import ShardWriter, ValueArray
from phalanx.data.source_files import SourceFile, find_files, localize_source, to_glob_list
from phalanx.data.sources import (
    CHUNK_BYTES,
    FilePart,
    find_arrow_files,
    iterate_documents,
    split_parquet_file,
    split_source_file,
)
from phalanx.data.token_files import TokenFile, find_token_parts, iterate_tokens, open_token_file
from phalanx.data.tokenizers import (
    NO_ENDS,
    HuggingFaceTokenizer,
    TextEnds,
    Tokenizer,
    find_tokenizer_file,
    load_tokenizer,
)
from phalanx.errors import RecipeError
from phalanx.recipe.data_schema import BpeTokenizerConfig, ChatConfig, DataConfig, DataSource
from phalanx.recipe.locations import localize_tokenizer
from phalanx.run.directory import write_json

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 4 << 20, 256 << 20  # bytes of a piece; between them it is a 64th of the whole

READER_VERSION = 3
"""What files become: another number where the same files become something else than before."""
TOKENIZING_VERSION = 2
"""What tokenizers other than `bytes` make of a text: another number where that changes."""

PreparePiece = tuple[FilePart, ...]
ReportProgress = Callable[[int, int], None]
"""Called with the bytes on disk and the tokens (or images) that were just done."""


@dataclass(frozen=True)
class PreparePlan:
    """What there is to prepare. `tokenizer` is `bytes`, a tokenizer.json's path, or `bpe:SIZE`; images have none."""

    kind: str
    text_field: str
    files: tuple[SourceFile, ...]
    pieces: tuple[PreparePiece, ...]
    tokenizer: str | None = None
    tokenizer_xxh3: str | None = None
    ends: TextEnds = NO_ENDS
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    token_format: str = "detect"
    on_bad_row: Literal["error", "skip"] = "error"
    skipped: SkippedRows = field(default_factory=dict, hash=False)  # what was left out when the files were listed
    chat: str | None = None  # a ChatPlan as JSON

    @property
    def cache_key(self) -> str:
        """Names what would come out: it changes when a file's path, size or time does, or the tokenizer."""
        tokenizing = {"tokenizing": TOKENIZING_VERSION, "ends": asdict(self.ends)}
        fields = asdict(replace(self, pieces=()))
        del fields["ends"]
        if self.chat is None:
            del fields["chat"]  # as the keys of plain text have always been
        parts = {
            "format": DATASET_FORMAT,
            "reading": READER_VERSION,
            **fields,
            "separator_token": self.ends.separator,
            "weights": list(map(piece_bytes, self.pieces)),
            **({} if self.tokenizer in (None, "bytes") else tokenizing),
        }
        return xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())

    @property
    def total_bytes(self) -> int:
        """Bytes on disk."""
        return sum(map(piece_bytes, self.pieces))


def piece_bytes(piece: PreparePiece) -> int:
    """Bytes on disk of a piece."""
    return sum(part.disk_bytes for part in piece)


def make_prepare_plan(source: DataSource, data: DataConfig, recipe_dir: Path) -> PreparePlan:
    """Find the files of a source and divide them. RecipeError when something is not there."""
    rows = BadRows(data.on_bad_row == "skip")
    if source.idx is not None:
        images = find_idx_pair(source.idx.images, source.idx.labels, recipe_dir)
        pieces: list[PreparePiece] = [tuple(images.parts)]
    elif source.images is not None:
        images = find_image_dir(localize_source(recipe_dir, source.images), source.image_size)
        pieces = _group_into_pieces(images.parts)
    elif source.webdataset is not None and source.image_size is not None:
        files = find_files(source.webdataset, source.exclude, recipe_dir)
        images = find_webdataset(files, source.image_size, rows)
        pieces = _group_into_pieces(images.parts)
    else:
        return _make_text_plan(source, data, recipe_dir)
    return PreparePlan(
        source.kind,
        "",
        tuple(images.files),
        tuple(pieces),
        image_shape=images.image_shape,
        num_classes=images.num_classes,
        class_names=images.class_names,
        on_bad_row=data.on_bad_row,
        skipped=rows.skipped,
    )


def _make_text_plan(source: DataSource, data: DataConfig, recipe_dir: Path) -> PreparePlan:
    kind, globs = source.kind, getattr(source, source.kind)
    if kind == "tokens" and isinstance(data.tokenizer, BpeTokenizerConfig):
        raise RecipeError("data.tokenizer: is trained on text, and the source has tokens; name the one that made them")
    tokenizer = "bytes"
    checksum = None
    ends = NO_ENDS
    loaded = load_tokenizer("bytes")
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        tokenizer = f"bpe:{data.tokenizer.bpe}"
    elif data.tokenizer != "bytes":
        tokenizer = str(find_tokenizer_file(localize_tokenizer(data.tokenizer, recipe_dir)))
        loaded = load_tokenizer(tokenizer)  # it says what is wrong before anything is written
        assert isinstance(loaded, HuggingFaceTokenizer)
        ends = loaded.ends
        checksum = xxh3_128_hexdigest(Path(tokenizer).read_bytes())
    chat = None if data.chat is None else _make_chat_plan(data, data.chat, kind, recipe_dir).to_json()
    files = (find_arrow_files if kind == "arrow" else find_files)(to_glob_list(globs), source.exclude, recipe_dir)
    size = _choose_piece_size(sum(file.size for file in files))
    if kind == "tokens":
        files, parts = find_token_parts(files, source.format, loaded, size)
    elif kind == "parquet":
        parts = [part for file in files for part in split_parquet_file(file)]
    elif kind in ("arrow", "webdataset"):
        parts = [FilePart(file.path, 0, file.size, file.size) for file in files]
    else:
        parts = [part for file in files for part in split_source_file(file, size)]
    if not parts:
        raise RecipeError(f"data.source: the {len(files)} file(s) found contain no text")
    return PreparePlan(
        kind,
        source.text_field if chat is None else WHOLE_RECORD,
        tuple(files),
        tuple(_group_into_pieces(parts)),
        tokenizer,
        checksum,
        ends,
        token_format=source.format,
        on_bad_row=data.on_bad_row,
        chat=chat,
    )


def _make_chat_plan(data: DataConfig, chat: ChatConfig, kind: str, recipe_dir: Path) -> ChatPlan:
    """How the conversations of a source become tokens. Records of plain `prompt` and `completion` need no template."""
    if kind not in _KINDS_WITH_RECORDS:
        raise RecipeError(f"data.source: found {kind}, and conversations are in {', '.join(_KINDS_WITH_RECORDS)}")
    own = None if chat.template is None else recipe_dir / chat.template
    directory = None
    if isinstance(data.tokenizer, str) and data.tokenizer != "bytes":
        path = localize_tokenizer(data.tokenizer, recipe_dir)
        directory = path if path.is_dir() else path.parent
    processor = read_processor_files(directory) if chat.images else None
    try:
        return ChatPlan(chat, load_chat_template(own, directory), processor)
    except NoChatTemplateError:
        return ChatPlan(chat, None, processor)


_KINDS_WITH_RECORDS = ("jsonl", "parquet", "arrow")


def _choose_piece_size(total_bytes: int) -> int:
    return min(max(total_bytes // 64, MIN_PIECE_BYTES), MAX_PIECE_BYTES)


def _group_into_pieces(parts: Iterable[FilePart]) -> list[PreparePiece]:
    """Group parts in order into pieces that reach the size of a piece."""
    parts = list(parts)
    size = _choose_piece_size(sum(part.disk_bytes for part in parts))
    pieces: list[PreparePiece] = []
    group: list[FilePart] = []
    group_bytes = 0
    for part in parts:
        if group and group_bytes + part.disk_bytes > size:
            pieces.append(tuple(group))
            group, group_bytes = [], 0
        group.append(part)
        group_bytes += part.disk_bytes
    return [*pieces, tuple(group)] if group else pieces


@dataclass(frozen=True)
class PrepareJob:
    """What a worker must know to write any piece of a plan into a directory. Travels to it as JSON."""

    dataset_dir: str
    plan: PreparePlan
    """Without its files and pieces; `tokenizer` is `bytes`, or the path of a tokenizer.json."""

    @classmethod
    def from_plan(cls, plan: PreparePlan, folder: Path) -> "PrepareJob":
        """Return the job of a plan. If it has a tokenizer of its own, that is already in `folder`."""
        tokenizer, ends = plan.tokenizer, NO_ENDS
        if tokenizer not in (None, "bytes"):
            tokenizer, ends = str(folder / TOKENIZER_FILE), load_plan_tokenizer(plan, folder).ends
        return cls(str(folder), replace(plan, files=(), pieces=(), skipped={}, tokenizer=tokenizer, ends=ends))


def load_plan_tokenizer(plan: PreparePlan, folder: Path) -> HuggingFaceTokenizer:
    """The tokenizer.json of a plan that lies in `folder`."""
    if plan.tokenizer is not None and plan.tokenizer.startswith("bpe:"):
        return HuggingFaceTokenizer(folder / TOKENIZER_FILE, plan.tokenizer)
    return HuggingFaceTokenizer(folder / TOKENIZER_FILE, TOKENIZER_FILE, plan.ends)


class PieceWriter:
    """Writes pieces of one job. `lost_bytes`: by file, how often in the last piece bytes were not what they are to the
    tokenizer: no UTF-8, which it sees as U+FFFD, or for `bytes` 0, which separates documents."""

    def __init__(self, job: PrepareJob):
        self._folder, self._plan = Path(job.dataset_dir), job.plan
        self.lost_bytes: Counter[str] = Counter()
        self.bad_rows = BadRows(self._plan.on_bad_row == "skip")
        self._token_file: TokenFile | None = None
        self._tokenizer: Tokenizer | None = None
        tokenizer_file = Path(self._plan.tokenizer or "")
        if self._plan.tokenizer == "bytes":
            self._tokenizer = load_tokenizer("bytes")
        elif self._plan.tokenizer is not None:
            self._tokenizer = HuggingFaceTokenizer(tokenizer_file, ends=self._plan.ends)
        self._chat_encoder = None
        if self._plan.chat is not None and self._tokenizer is not None:
            chat = ChatPlan.from_json(self._plan.chat)
            images = None if chat.processor is None else ImageProcessor(chat.processor, tokenizer_file)
            self._chat_encoder = ChatEncoder(chat, self._tokenizer, images)

    def write_piece(self, number: int, piece: PreparePiece, report: ReportProgress) -> None:
        """Write the piece as shard `number`, and an entry file next to it that marks it as finished."""
        folder = self._folder
        self.lost_bytes, self.bad_rows = Counter(), BadRows(self._plan.on_bad_row == "skip")
        if self._chat_encoder is not None:
            entry = self._write_conversations(folder, number, piece, report, self._chat_encoder)
        elif self._tokenizer is not None and self._plan.kind == "tokens":
            entry = self._copy_tokens(folder, number, piece, report, self._tokenizer)
        elif self._tokenizer is not None:
            entry = self._write_tokens(folder, number, piece, report, self._tokenizer)
        else:
            entry = self._write_images(folder, number, piece, report)
        write_done_file(folder, number, entry, self.lost_bytes, self.bad_rows.skipped)

    def _copy_tokens(
        self, folder: Path, number: int, piece: PreparePiece, report: ReportProgress, tokenizer: Tokenizer
    ) -> ShardEntry:
        with ShardWriter(folder, number, narrowest_token_dtype(tokenizer.vocab_size)) as writer:
            for part in piece:
                if self._token_file is None or self._token_file.path != part.path:
                    self._token_file = open_token_file(part.path, self._plan.token_format)
                for block, starts in iterate_tokens(self._token_file, part, tokenizer):
                    writer.append_values(block[: starts[0] if len(starts) else None])
                    for start, stop in pairwise([*starts, len(block)]):
                        writer.start_document()
                        writer.append_values(block[start:stop])
                    report(block.nbytes, len(block))
            return writer.commit()

    def _write_tokens(
        self, folder: Path, number: int, piece: PreparePiece, report: ReportProgress, tokenizer: Tokenizer
    ) -> ShardEntry:
        dtype = narrowest_token_dtype(tokenizer.vocab_size)
        separator = np.array([] if tokenizer.separator_token is None else [tokenizer.separator_token], dtype)
        begin = np.array(tokenizer.begin_tokens, dtype)
        is_bytes = tokenizer.name == "bytes"
        with ShardWriter(folder, number, dtype) as writer:
            bytes_read = reported = 0
            in_document = False  # a document that has given tokens is not over
            is_new = False  # a document that has begun and given no tokens
            for part in piece:
                for chunk in iterate_documents(part, self._plan.kind, self._plan.text_field, self.bad_rows):
                    tokens = tokenizer.encode_bytes(chunk.data, chunk.before, chunk.after)
                    if times := chunk.data.count(0) if is_bytes else count_undecodable(chunk.data):
                        self.lost_bytes[part.path] += times
                    is_new = is_new or chunk.starts_document
                    if tokens.size:
                        if is_new or not in_document:
                            writer.start_document()
                        if is_new:
                            writer.append_values(begin)
                        in_document, is_new = True, False
                        writer.append_values(tokens)
                    if chunk.ends_document and in_document:
                        writer.append_values(separator)
                        in_document = False
                    bytes_read += chunk.bytes_read
                    if bytes_read >= CHUNK_BYTES:
                        report(bytes_read, writer.num_written - reported)
                        bytes_read, reported = 0, writer.num_written
            report(bytes_read, writer.num_written - reported)
            return writer.commit()

    def _write_conversations(
        self, folder: Path, number: int, piece: PreparePiece, report: ReportProgress, encoder: ChatEncoder
    ) -> ShardEntry:
        with ShardWriter(folder, number, narrowest_token_dtype(TOKEN_MASK)) as writer:
            for part in piece:
                for record, place, num_bytes in iterate_records(part, self._plan.kind, self.bad_rows):
                    written = writer.num_written
                    try:
                        documents = encoder.encode(record, part.path)
                    except BadRowError as error:
                        self.bad_rows.add(error, part.path, place)
                        documents = []
                    for document in documents:
                        writer.start_document()
                        writer.append_values(document)
                    report(num_bytes, writer.num_written - written)
            return writer.commit()

    def _write_images(self, folder: Path, number: int, piece: PreparePiece, report: ReportProgress) -> ShardEntry:
        shape = self._plan.image_shape
        if shape is None:
            raise ValueError("a job without a tokenizer needs the shape of its images")
        if self._plan.kind == "idx":
            records = read_idx_records(piece[0], piece[1], shape)
        else:
            records = self._read_images(piece, shape)
        with ShardWriter(folder, number, np.dtype("u1"), LABEL_BYTES + math.prod(shape)) as writer:
            for record, consumed in records:
                writer.append_values(record)
                report(consumed, len(record))
            return writer.commit()

    def _read_images(self, piece: PreparePiece, shape: tuple[int, int, int]) -> Iterator[tuple[ValueArray, int]]:
        for part in piece:
            try:
                yield read_image_record(part, shape), part.disk_bytes
            except BadRowError as error:
                self.bad_rows.add(error, part.path, part.member)


def iterate_records(part: FilePart, kind: str, bad_rows: BadRows) -> Iterator[tuple[Any, int | str, int]]:
    """Yield the records that begin in a part of a file, each with its place and the bytes read from disk for it."""
    text, num_bytes = b"", 0
    for chunk in iterate_documents(part, kind, WHOLE_RECORD, bad_rows):
        text, num_bytes = text + chunk.data, num_bytes + chunk.bytes_read
        if chunk.ends_document and text:
            yield json.loads(text), chunk.place, num_bytes
            text, num_bytes = b"", 0


def count_undecodable(data: bytes) -> int:
    """How often decoding puts U+FFFD in the place of bytes that are no UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode(errors="replace").count("\ufffd") - data.count("\ufffd".encode())
    return 0


def iterate_sample_texts(plan: PreparePlan, max_bytes: int) -> Iterator[str]:
    """Text to train a tokenizer on: the beginning of every piece, `max_bytes` bytes in all."""
    share = max_bytes // len(plan.pieces)
    for piece in plan.pieces:
        left = share
        rows = BadRows(plan.on_bad_row == "skip")
        if plan.chat is not None:
            yield from _iterate_contents(piece, plan.kind, rows, left)
            continue
        for chunk in (chunk for part in piece for chunk in iterate_documents(part, plan.kind, plan.text_field, rows)):
            yield chunk.data[:left].decode(errors="replace")
            left -= len(chunk.data)
            if left <= 0:
                break


def _iterate_contents(piece: PreparePiece, kind: str, rows: BadRows, max_bytes: int) -> Iterator[str]:
    """The texts of conversations, without their templates."""
    for part in piece:
        for record, _, num_bytes in iterate_records(part, kind, rows):
            yield join_contents(record)
            max_bytes -= num_bytes
            if max_bytes <= 0:
                return


def write_done_file(
    folder: Path, number: int, entry: ShardEntry, lost_bytes: Mapping[str, int], skipped: SkippedRows
) -> None:
    """Record that a shard is finished; only then is it not written again."""
    values = {"entry": asdict(entry), "lost": lost_bytes, "skipped": skipped}
    write_json(_done_path(folder, number), values)


class DonePiece(NamedTuple):
    """A shard that was finished: its entry, what was no UTF-8 in it, by file, and what was skipped, by kind."""

    entry: ShardEntry
    lost_bytes: "Counter[str]"
    skipped: SkippedRows


def read_done_file(folder: Path, number: int) -> DonePiece | None:
    """What was said of a shard that was finished before; or None."""
    try:
        found: dict[str, Any] = json.loads(_done_path(folder, number).read_bytes())
    except FileNotFoundError:
        return None
    return DonePiece(ShardEntry(**found["entry"]), Counter(found["lost"]), found["skipped"])


def copy_piece(folder: Path, number: int, copy_file: Callable[[str, Path], bool]) -> bool:
    """Have the files of a piece that another node prepares copied to `folder`, unless the piece is there; the file that
    marks it as finished comes last. Returns False where `copy_file(name, target)` did so."""
    done_path = _done_path(folder, number)
    if done_path.exists():
        return True
    copied_done = done_path.with_suffix(".done-copy")
    if not copy_file(done_path.name, copied_done):
        return False
    entry = json.loads(copied_done.read_bytes())["entry"]
    for name in (entry["sidecar"], entry["file"]) if entry["count"] else ():
        copied = folder / f"{name}-copy"
        if not copy_file(name, copied):
            return False
        os.replace(copied, folder / name)
    os.replace(copied_done, done_path)
    return True


def write_piece_file(folder: Path, number: int, piece: PreparePiece) -> None:
    """Write down the parts of a piece for the process that writes its shard."""
    _piece_path(folder, number).write_text(json.dumps([asdict(part) for part in piece]))


def read_piece_file(folder: Path, number: int) -> PreparePiece:
    """Return what `write_piece_file` wrote down."""
    return tuple(FilePart(**part) for part in json.loads(_piece_path(folder, number).read_bytes()))


def _done_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.done"


def _piece_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.piece"


@dataclass(frozen=True)
class PrepareProgress:
    """How far preparing (or verifying) is. `bytes_done` and `bytes_total` are bytes; `count` is tokens or images
    written by now."""

    bytes_done: int
    bytes_total: int
    count: int
    elapsed_s: float
    note: str = ""


def ignore_progress(_: PrepareProgress) -> None:
    """A progress callback that says nothing."""


class ProgressReporter:
    """Adds up what workers report and passes it on."""

    def __init__(self, total: int, progress: Callable[[PrepareProgress], None], seconds: Callable[[], float]):
        self._total, self._report_progress, self._seconds = total, progress, seconds
        self._done = self._count = 0

    def add_progress(self, size: int, count: int) -> None:
        """Count `size` bytes and `count` tokens (or images) as done."""
        self._done += size
        self._count += count
        self.report_note("")

    def report_note(self, text: str) -> None:
        """Say something besides numbers."""
        self._report_progress(PrepareProgress(self._done, self._total, self._count, self._seconds(), text))
