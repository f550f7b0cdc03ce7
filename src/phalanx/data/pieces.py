"""How a source is divided into pieces, and how one piece becomes one shard.

The division depends on the files alone, so the shards are the same bytes however many workers write them, and a shard
that was finished before an interruption is a shard that need not be written again.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.data.finding import File, as_list, find_files
from phalanx.data.images import find_folder, find_idx, read_idx, read_image
from phalanx.data.manifest import FORMAT, LABEL_BYTES, TOKENIZER, ShardEntry, token_dtype
from phalanx.data.shard import ShardWriter
from phalanx.data.sources import CHUNK, Part, documents, split_file, split_parquet
from phalanx.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer, tokenizer_file
from phalanx.errors import RecipeError
from phalanx.recipe.schema import BpeTokenizerConfig, DataConfig, DataSource
from phalanx.run.directory import write_json

SMALLEST, LARGEST = 4 << 20, 256 << 20  # bytes of a piece; between them it is a 64th of the whole

READING = 3
"""What files become: another number where the same files become something else than before."""

Piece = tuple[Part, ...]
Report = Callable[[int, int], None]
"""Called with the bytes on disk and the tokens (or images) that were just done."""


@dataclass(frozen=True)
class Plan:
    """What there is to prepare. `tokenizer` is `bytes`, a tokenizer.json's path, or `bpe:SIZE`; images have none."""

    kind: Literal["text", "jsonl", "parquet", "idx", "images"]
    field: str
    files: tuple[File, ...]
    pieces: tuple[Piece, ...]
    tokenizer: str | None = None
    tokenizer_xxh3: str | None = None
    separator: int | None = None
    shape: tuple[int, int, int] | None = None
    classes: int | None = None
    labels: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """Names what would come out: it changes when a file's path, size or time does, or the tokenizer."""
        parts = {
            "format": FORMAT,
            "reading": READING,
            **asdict(replace(self, pieces=())),
            "weights": list(map(weigh, self.pieces)),
        }
        return xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())

    @property
    def total(self) -> int:
        """Bytes on disk."""
        return sum(map(weigh, self.pieces))


def weigh(piece: Piece) -> int:
    """Bytes on disk of a piece."""
    return sum(part.weight for part in piece)


def make_plan(source: DataSource, data: DataConfig, folder: Path) -> Plan:
    """Find the files of a source and divide them. RecipeError when something is not there."""
    if source.idx is not None:
        images = find_idx(source.idx.images, source.idx.labels, folder)
        pieces: list[Piece] = [tuple(images.parts)]
    elif source.images is not None:
        images = find_folder(folder / source.images, source.image_size)
        pieces = _group(images.parts)
    else:
        return _plan_text(source, data, folder)
    return Plan(
        "idx" if source.idx else "images",
        "",
        tuple(images.files),
        tuple(pieces),
        shape=images.shape,
        classes=images.classes,
        labels=images.labels,
    )


def _plan_text(source: DataSource, data: DataConfig, folder: Path) -> Plan:
    kinds = {"text": source.text, "jsonl": source.jsonl, "parquet": source.parquet}
    kind, globs = next((kind, globs) for kind, globs in kinds.items() if globs is not None)
    files = find_files(as_list(globs), source.exclude, folder)
    if kind == "parquet":
        parts = [part for file in files for part in split_parquet(file)]
    else:
        size = _piece_size(sum(file.size for file in files))
        parts = [part for file in files for part in split_file(file, size)]
    if not parts:
        raise RecipeError(f"data.source: the {len(files)} file(s) found hold no text at all")
    tokenizer, checksum, separator = "bytes", None, None
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        tokenizer = f"bpe:{data.tokenizer.bpe}"
    elif data.tokenizer != "bytes":
        tokenizer = str(tokenizer_file(folder / data.tokenizer))
        separator = load_tokenizer(tokenizer).separator  # it says what is wrong before anything is written
        checksum = xxh3_128_hexdigest(Path(tokenizer).read_bytes())
    pieces = tuple(_group(parts))
    return Plan(kind, source.text_field, tuple(files), pieces, tokenizer, checksum, separator)  # type: ignore[arg-type]


def _piece_size(total: int) -> int:
    return min(max(total // 64, SMALLEST), LARGEST)


def _group(parts: Iterable[Part]) -> list[Piece]:
    """Parts in their order, so many to a piece that it reaches the piece's size."""
    parts = list(parts)
    size = _piece_size(sum(part.weight for part in parts))
    pieces: list[Piece] = []
    group: list[Part] = []
    weight = 0
    for part in parts:
        if group and weight + part.weight > size:
            pieces.append(tuple(group))
            group, weight = [], 0
        group.append(part)
        weight += part.weight
    return [*pieces, tuple(group)] if group else pieces


@dataclass(frozen=True)
class Job:
    """What a worker must know to write any piece of a plan into `folder`. Travels to it as JSON."""

    folder: str
    kind: str
    field: str
    tokenizer: str | None  # `bytes`, or the path of a tokenizer.json
    shape: tuple[int, int, int] | None
    separator: int | None = None  # of a tokenizer.json

    @classmethod
    def of(cls, plan: Plan, folder: Path) -> "Job":
        """The job of a plan whose tokenizer, if it has one of its own, already lies in `folder`."""
        if plan.tokenizer in (None, "bytes"):
            return cls(str(folder), plan.kind, plan.field, plan.tokenizer, plan.shape)
        separator = stored_tokenizer(plan, folder).separator
        return cls(str(folder), plan.kind, plan.field, str(folder / TOKENIZER), plan.shape, separator)


def stored_tokenizer(plan: Plan, folder: Path) -> FileTokenizer:
    """The tokenizer.json of a plan that lies in `folder`."""
    if plan.tokenizer is not None and plan.tokenizer.startswith("bpe:"):
        return FileTokenizer(folder / TOKENIZER, plan.tokenizer)
    return FileTokenizer(folder / TOKENIZER, TOKENIZER, plan.separator)


class PieceWriter:
    """Writes pieces of one job. `lost`: by file, how often in the last piece bytes were no UTF-8, which the tokenizer
    sees as U+FFFD."""

    def __init__(self, job: Job):
        self._job = job
        self.lost: Counter[str] = Counter()
        self._tokenizer: Tokenizer | None = None
        if job.tokenizer is not None:
            path = Path(job.tokenizer)
            known = None if job.tokenizer == "bytes" else FileTokenizer(path, separator=job.separator)
            self._tokenizer = known or load_tokenizer("bytes")

    def write(self, number: int, piece: Piece, report: Report) -> ShardEntry:
        """Write the piece as shard `number`, and an entry beside it that says that it is finished."""
        folder = Path(self._job.folder)
        self.lost = Counter()
        if self._tokenizer is not None:
            entry = self._write_tokens(folder, number, piece, report, self._tokenizer)
        else:
            entry = self._write_images(folder, number, piece, report)
        write_done(folder, number, entry, self.lost)
        return entry

    def _write_tokens(
        self, folder: Path, number: int, piece: Piece, report: Report, tokenizer: Tokenizer
    ) -> ShardEntry:
        dtype = token_dtype(tokenizer.vocab)
        separator = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype)
        with ShardWriter(folder, number, dtype) as writer:
            consumed = reported = 0
            inside = False  # a document that has given tokens is not over
            for part in piece:
                for chunk in documents(part, self._job.kind, self._job.field):
                    tokens = tokenizer.encode_bytes(chunk.data, chunk.before, chunk.behind)
                    if tokenizer.name != "bytes" and (times := undecodable(chunk.data)):
                        self.lost[part.path] += times
                    if tokens.size:
                        if chunk.begins or not inside:
                            writer.start_document()
                        inside = True
                        writer.append(tokens)
                    if chunk.ends and inside:
                        writer.append(separator)
                        inside = False
                    consumed += chunk.consumed
                    if consumed >= CHUNK:
                        report(consumed, writer.count - reported)
                        consumed, reported = 0, writer.count
            report(consumed, writer.count - reported)
            return writer.finish()

    def _write_images(self, folder: Path, number: int, piece: Piece, report: Report) -> ShardEntry:
        shape = self._job.shape
        if shape is None:
            raise ValueError("a job without a tokenizer needs the shape of its images")
        if self._job.kind == "idx":
            records = read_idx(piece[0], piece[1], shape)
        else:
            records = ((read_image(part, shape), part.weight) for part in piece)
        with ShardWriter(folder, number, np.dtype("u1"), LABEL_BYTES + math.prod(shape)) as writer:
            for record, consumed in records:
                writer.append(record)
                report(consumed, len(record))
            return writer.finish()


def undecodable(data: bytes) -> int:
    """How often decoding puts U+FFFD in the place of bytes that are no UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode(errors="replace").count("\ufffd") - data.count("\ufffd".encode())
    return 0


def sample_texts(plan: Plan, budget: int) -> Iterator[str]:
    """Text to train a tokenizer on: the beginning of every piece, `budget` bytes in all."""
    share = budget // len(plan.pieces)
    for piece in plan.pieces:
        left = share
        for chunk in (chunk for part in piece for chunk in documents(part, plan.kind, plan.field)):
            yield chunk.data[:left].decode(errors="replace")
            left -= len(chunk.data)
            if left <= 0:
                break


def write_done(folder: Path, number: int, entry: ShardEntry, lost: Mapping[str, int]) -> None:
    """Record that a shard is finished; only then is it not written again."""
    write_json(_done(folder, number), {"entry": asdict(entry), "lost": lost})


def read_done(folder: Path, number: int) -> "tuple[ShardEntry, Counter[str]] | None":
    """The entry of a shard that was finished before and what was no UTF-8 in it, by file; or None."""
    try:
        found: dict[str, Any] = json.loads(_done(folder, number).read_bytes())
    except FileNotFoundError:
        return None
    return ShardEntry(**found["entry"]), Counter(found["lost"])


def _done(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.done"
